"""Plans that shard a mixture's experts over the devices of `data` and `tensor`: where they are proposed, what they are
predicted to take, against the TPU compiler's figures (jax 0.10.2, libtpu 0.0.42.1), and how they are written."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from test_plan_memory import LLAMA, published
from test_plan_planner import GENERATION, MIXTRAL, TRAINING
from typer.testing import CliRunner

from ttpu_core.cli.main import app
from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.sharding.parallelism import parse_rules, strategy_with
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, TRAINING_STRATEGY, Strategy
from ttpu_core.sharding.training_state import UpdateSettings
from ttpu_core.spec import MoESpec
from ttpu_plan.cost import estimate_time
from ttpu_plan.links import links_of
from ttpu_plan.memory import estimate_memory
from ttpu_plan.plan import Plan
from ttpu_plan.plan_file import load_plan, plan_json, save_plan
from ttpu_plan.planner import Request, best_plan, plans, strategies
from ttpu_plan.shards import shard_model
from ttpu_plan.tokens import Exchange, busiest_share, exchange_for, expert_rows, expert_tokens
from ttpu_plan.workload import Workload

QWEN = "ttpu_qwen/configs/qwen3-30b-a3b.json"
MESH = {"data": 2, "tensor": 4}
OVER_ROWS = strategy_with({"expert": ("data", "tensor")})
DECODE, PREFILL = Workload("decode", 32, 2048), Workload("prefill", 2, 2048)


def with_rules(found: list[Plan]) -> list[Plan]:
    return [one for one in found if one.rules]


@pytest.mark.parametrize("name", ["v6e:2x4", "v5e:2x4"])
def test_few_kv_heads_make_experts_over_the_rows_devices_the_fastest(name: str) -> None:
    """By the compiler a decode step takes 6.69 ms on v6e where tensor=8 takes 7.15, and on v5e 12.36 where tensor=8
    takes 13.11."""
    found = plans(published(QWEN), parse_topology(name), GENERATION)
    assert found[0].layout == "data=2,tensor=4; expert=data+tensor"
    assert found[0].strategy == OVER_ROWS
    assert "tensor=8" in [one.layout for one in found[1:4]]


def test_as_many_kv_heads_as_devices_leave_nothing_to_gain() -> None:
    found = plans(published(MIXTRAL), parse_topology("v6e:2x4"), GENERATION)
    assert found[0].layout == "tensor=8"
    assert "data=2,tensor=4; expert=data+tensor" in [one.layout for one in found]


def test_a_rule_names_the_axes_of_its_mesh() -> None:
    found = with_rules(plans(published(QWEN), parse_topology("v6e:2x4"), GENERATION))
    assert {one.layout for one in found} == {
        "data=2,tensor=4; expert=data+tensor",
        "data=4,tensor=2; expert=data+tensor",
        "data=8; expert=data",
        "tensor=8; expert=tensor",
    }


@pytest.mark.parametrize("name", ["v6e:2x4", "v5e:2x4"])
def test_an_engine_whose_devices_have_whole_experts_is_the_fastest_where_these_are_many(name: str) -> None:
    """By the compiler a prompt takes 19.2 ms on v6e where tensor=8 takes 31.4, and on v5e 39.1 where tensor=8 takes
    61.8. Replicas share no experts."""
    found = plans(published(QWEN), parse_topology(name), Request())
    assert found[0].layout == "tensor=8; expert=tensor"
    assert {one.rules for one in with_rules(found)} == {"expert=tensor"}
    assert list(strategies(published(QWEN), parse_topology(name), {"data": 8}, Request())) == [DEFAULT_STRATEGY]


def test_an_engine_cuts_few_wide_experts() -> None:
    """The busiest of eight devices with an expert each has the longer step."""
    found = plans(published(MIXTRAL), parse_topology("v5e:2x4"), Request())
    assert found[0].layout == "tensor=8"
    assert "tensor=8; expert=tensor" in [one.layout for one in found]


@pytest.mark.parametrize(
    ("config", "topology", "request_"),
    [
        (LLAMA, "v6e:2x4", GENERATION),  # no experts
        (QWEN, "v6e:8x8", TRAINING),
        (QWEN, "2*v6e:2x4", GENERATION),  # a layer's tokens would cross slices
        (QWEN, "v6e:2x4", replace(GENERATION, strategy=strategy_with({"expert": "tensor"}))),  # the user's own
    ],
    ids=["dense", "trained", "slices", "own rule"],
)
def test_it_is_not_proposed_where_it_does_not_serve(config: str, topology: str, request_: Request) -> None:
    found = plans(published(config), parse_topology(topology), request_)
    assert {one.strategy for one in found} == {request_.sharding}


def test_it_is_not_proposed_where_devices_do_not_divide_the_experts() -> None:
    spec, sixteen = published(MIXTRAL), parse_topology("v6e:4x4")  # of 8 experts
    assert list(strategies(spec, sixteen, {"data": 2, "tensor": 8}, GENERATION)) == [DEFAULT_STRATEGY]
    assert list(strategies(spec, parse_topology("v6e:2x4"), MESH, GENERATION)) == [DEFAULT_STRATEGY, OVER_ROWS]
    assert not with_rules(plans(spec, sixteen, GENERATION))


@pytest.mark.parametrize(
    ("mesh", "workload", "peak_bytes"),
    [
        (MESH, DECODE, 8_940_022_176),
        (MESH, PREFILL, 8_172_188_064),
        ({"tensor": 8}, replace(PREFILL, batch=1), 7_820_112_288),
        ({"data": 4, "tensor": 2}, DECODE, 9_699_859_360),
        ({"data": 4, "tensor": 2}, replace(PREFILL, batch=4), 9_718_365_600),
    ],
    ids=["decode", "prefill", "prefill of eighths", "decode of quarters", "prefill of quarters"],
)
def test_memory_is_the_compilers_within_five_percent(
    mesh: dict[str, int], workload: Workload, peak_bytes: int
) -> None:
    found = estimate_memory(published(QWEN), mesh, workload, OVER_ROWS, parse_topology("v6e:2x4").chip)
    assert found.total == pytest.approx(peak_bytes, rel=0.05)


def test_a_device_has_whole_experts_and_multiplies_all_rows_by_them() -> None:
    model = shard_model(published(QWEN), MESH, OVER_ROWS)
    (kind,) = model.layers
    kernels = {one.path: one for one in kind.used if one.is_matrix and one.of_experts}
    assert {one.local[0] for one in kernels.values()} == {128 // 8}
    assert all(one.local == one.gathered for one in kernels.values())
    assert expert_tokens(model, kind.used, DECODE) == 32
    usual = shard_model(published(QWEN), MESH)
    assert expert_tokens(usual, usual.layers[0].used, DECODE) == 16
    # A prompt that the rows' devices cannot share is on all of them already.
    assert expert_tokens(model, kind.used, replace(PREFILL, batch=1)) == 2048


def test_a_step_reads_an_eighth_of_the_experts_and_its_own_rows_cache() -> None:
    spec, topology = published(QWEN), parse_topology("v6e:2x4")
    by_rule = estimate_time(spec, MESH, topology, DECODE, OVER_ROWS)
    experts = 2 * sum(prod(one.shape) for path, one in spec.parameters.items() if ".experts." in path)
    usual = estimate_time(spec, MESH, topology, DECODE)
    rate = topology.chip.hbm_bytes_per_second * 0.8
    assert usual.hbm - by_rule.hbm == pytest.approx((experts / 4 - experts / 8) / rate, rel=0.02)  # and some rows
    in_heads = estimate_time(spec, {"tensor": 8}, topology, DECODE)
    assert by_rule.hbm < 0.96 * in_heads.hbm  # four KV heads are held twice by eight devices


def test_tokens_are_gathered_and_the_experts_sums_are_of_all_of_them() -> None:
    spec, topology = published(QWEN), parse_topology("v6e:2x4")
    links = links_of(MESH, topology)
    features = spec.hidden_size
    of_layer = [
        links.seconds("all-reduce", 16 * features * 2, ("tensor",)),  # attention's sums
        links.seconds("all-gather", 32 * features * 2, ("data",)),
        links.seconds("all-reduce", 32 * features * 4, ("data", "tensor")),
    ]
    embedded, _ = links.seconds("all-gather", 16 * features * 2, ("tensor",))
    estimate = estimate_time(spec, MESH, topology, DECODE, OVER_ROWS)
    assert estimate.ici == pytest.approx(spec.num_layers * sum(ici for ici, _ in of_layer) + embedded, rel=1e-6)


def test_rows_of_many_tokens_are_sent_to_their_experts_and_back() -> None:
    spec, topology, workload = published(QWEN), parse_topology("v6e:2x4"), replace(PREFILL, batch=4)
    mesh = {"data": 4, "tensor": 2}
    features = spec.hidden_size
    links = links_of(mesh, topology)
    of_layer = [
        links.seconds("all-reduce", 2048 * features * 2, ("tensor",)),  # attention's sums
        *[links.seconds("ragged-all-to-all", 2048 * 8 / 2 * features * 2, ("data",))] * 2,
        links.seconds("all-reduce", 2048 * features * 4, ("tensor",)),
    ]
    embedded, _ = links.seconds("all-gather", 2048 * features * 2, ("tensor",))
    estimate = estimate_time(spec, mesh, topology, workload, OVER_ROWS)
    assert estimate.ici == pytest.approx(spec.num_layers * sum(ici for ici, _ in of_layer) + embedded, rel=1e-6)
    model = shard_model(spec, mesh, OVER_ROWS)
    mixture, used = spec.layers[0].mlp, model.layers[0].used
    assert isinstance(mixture, MoESpec)
    assert exchange_for(model, used, workload) == Exchange(("data",), 4, 2)
    assert expert_rows(model, used, workload, mixture) == 1.5 * 2048 * 8 / 2
    assert exchange_for(model, used, DECODE) is None and expert_rows(model, used, DECODE, mixture) == 32 * 8
    assert exchange_for(model, used, replace(PREFILL, batch=1)) is None  # its tokens are on all devices already
    of_two = shard_model(spec, MESH, OVER_ROWS)
    assert exchange_for(of_two, of_two.layers[0].used, replace(PREFILL, batch=2)) is None


def test_of_many_tokens_a_device_has_the_rows_of_its_own_experts() -> None:
    spec, prompt = published(QWEN), replace(PREFILL, batch=1)
    mixture = spec.layers[0].mlp
    assert isinstance(mixture, MoESpec)

    def rows(mesh: dict[str, int], workload: Workload, strategy: Strategy = OVER_ROWS) -> int:
        model = shard_model(spec, mesh, strategy)
        return expert_rows(model, model.layers[0].used, workload, mixture)

    assert rows({"tensor": 8}, prompt) == rows(MESH, prompt) == 1.5 * 2048
    assert rows({"tensor": 8}, prompt, DEFAULT_STRATEGY) == 8 * 2048  # parts of all experts
    assert rows({"tensor": 2}, prompt) == 8 * 2048
    assert rows({"tensor": 8}, replace(prompt, context=256)) == 8 * 256
    assert rows({"tensor": 8}, replace(prompt, dtype="float32")) == 8 * 2048
    assert rows({"tensor": 8}, replace(prompt, task="train")) == 8 * 2048


def test_a_training_step_sends_rows_again_for_its_gradient() -> None:
    spec, topology = published(QWEN), parse_topology("v5p:2x2x4")
    step, mesh = Workload("train", 16, 4096, layers="scan", update=UpdateSettings()), {"fsdp": 4, "expert": 4}
    links, sent = links_of(mesh, topology), 4096 * 8 * spec.hidden_size * 2
    once, twice = (links.seconds("ragged-all-to-all", times * sent, ("expert",))[0] for times in (1, 2))
    model = shard_model(spec, mesh, TRAINING_STRATEGY)
    assert exchange_for(model, model.layers[0].used, step) == Exchange(("expert",), 4, 1)
    found, of_double = (
        estimate_time(spec, mesh, topology, replace(step, batch=batch), TRAINING_STRATEGY) for batch in (16, 32)
    )
    assert of_double.ici - found.ici == pytest.approx(5 * spec.num_layers * (twice - once), rel=1e-6)


def test_training_plans_divide_rows_and_features_along_the_experts_axis_too() -> None:
    found = plans(published(QWEN), parse_topology("v5p:2x2x4"), replace(TRAINING, batch=16, context=4096))
    assert {one.strategy for one in found} == {TRAINING_STRATEGY}
    assert found[0].rules == ""
    by_layout = {one.layout: one for one in found}
    assert by_layout["expert=16"].fits and by_layout["fsdp=4,expert=4"].seconds < by_layout["fsdp=16"].seconds
    # No two devices hold the same weights.
    for layout in ("expert=16", "fsdp=4,expert=4"):
        assert by_layout[layout].memory.optimizer == pytest.approx(by_layout["fsdp=16"].memory.optimizer, rel=0.01)
    # Rows that these devices do not divide have no such mesh.
    few = plans(published(QWEN), parse_topology("v5p:2x2x4"), replace(TRAINING, batch=2, context=4096))
    assert all(dict(one.mesh).get("fsdp", 1) * dict(one.mesh).get("expert", 1) <= 2 for one in few)


def test_memory_of_training_is_the_compilers_within_five_percent() -> None:
    """Peaks of `benchmarks/training_programs.py`, in bytes; 16 rows of 4,096 tokens."""
    step = Workload("train", 16, 4096, layers="scan", update=UpdateSettings())
    chip = parse_topology("v5p:2x2x4").chip
    for mesh, peak in (({"expert": 16}, 27.32), ({"fsdp": 4, "expert": 4}, 27.74), ({"fsdp": 8, "expert": 2}, 27.5)):
        found = estimate_memory(published(QWEN), mesh, step, TRAINING_STRATEGY, chip)
        assert found.total == pytest.approx(peak * 2**30, rel=0.05)


def test_the_busiest_device_has_more_choices_the_fewer_there_are() -> None:
    mixture = next(layer.mlp for layer in published(QWEN).layers)
    assert isinstance(mixture, MoESpec)
    assert busiest_share(mixture, 1, 1) == 1.0
    generator = np.random.default_rng(0)
    for tokens in (1, 4, 32, 2048):
        logits = generator.random((200, tokens, mixture.num_experts))
        chosen = np.argsort(logits, axis=-1)[..., : mixture.experts_per_token] // (mixture.num_experts // 8)
        drawn = np.mean([np.bincount(one.ravel(), minlength=8).max() for one in chosen])
        mean = tokens * mixture.experts_per_token / 8
        assert drawn / mean <= busiest_share(mixture, tokens, 8) <= 1.4 * drawn / mean
    assert busiest_share(replace(mixture, experts_per_token=1), 1, 8) <= 8  # one device has them all


def test_few_rows_read_and_multiply_as_much_as_the_busiest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row's eight choices the busiest of eight devices has three, and not one."""
    spec, topology, one_row = published(QWEN), parse_topology("v6e:2x4"), Workload("decode", 1, 128)
    found = estimate_time(spec, {"expert": 8}, topology, one_row)
    even = []
    for share in (1.0, 2.0):
        monkeypatch.setattr("ttpu_plan.cost.busiest_share", lambda *_, share=share: share)
        even.append(estimate_time(spec, {"expert": 8}, topology, one_row))
    monkeypatch.undo()
    mixture = spec.layers[0].mlp
    assert isinstance(mixture, MoESpec)
    most = busiest_share(mixture, 1, 8)
    assert 2.5 < most < 3.5
    for resource in ("hbm", "compute"):
        mean, twice = (getattr(one, resource) for one in even)
        assert twice > mean
        assert getattr(found, resource) == pytest.approx(mean + (most - 1) * (twice - mean))


def test_a_plan_with_rules_is_read_back_as_it_was(tmp_path: Path) -> None:
    plan = best_plan(published(QWEN), parse_topology("v6e:2x4"), GENERATION)
    assert strategy_with(parse_rules(plan.rules)) == plan.strategy
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert plan_json(plan)["rules"]["expert"] == ["data", "tensor"]
    assert plan.parallelism.strategy == OVER_ROWS


def test_the_command_prints_the_rule_and_how_to_run_it(tmp_path: Path) -> None:
    published(QWEN)  # skips without the family
    import ttpu_qwen

    assert ttpu_qwen.__file__ is not None
    config, saved = Path(ttpu_qwen.__file__).parent / "configs" / "qwen3-30b-a3b.json", tmp_path / "plan.json"
    asked = ["plan", str(config), "--topology", "v6e:2x4", "--task", "generation", "--save", str(saved)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "data=2,tensor=4; expert=data+tensor" in result.stdout
    assert f"generate with `ttpu generate {config} --plan {saved}`" in " ".join(result.stderr.split())
    first = json.loads(CliRunner().invoke(app, [*asked[:-2], "--json"]).stdout)["plans"][0]
    assert (first["parallelism"], first["layout"]) == ("data=2,tensor=4", "data=2,tensor=4; expert=data+tensor")
