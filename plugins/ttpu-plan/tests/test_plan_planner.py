"""Plans: which meshes are considered, in which order they come, what is said when nothing fits, and plan files."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from test_plan_memory import LLAMA, published

from ttpu_core.errors import MissingDependencyError, PlanError, RequestError, UnsupportedError
from ttpu_core.registry import Registry
from ttpu_core.sharding.hardware import CHIPS, parse_topology
from ttpu_core.sharding.serving import StepSize
from ttpu_core.sharding.strategy import MESH_AXES
from ttpu_core.sharding.training_state import UpdateSettings
from ttpu_core.spec import MixerSpec, MLPSpec, StateSpec, axes
from ttpu_core.spec.context import check_context, usual_context
from ttpu_core.spec.kernel_format import ActivationFormat, KernelFormat
from ttpu_plan.plan import HEADROOM, Plan, fingerprint_of
from ttpu_plan.plan_file import load_plan, plan_json, read_plan, save_plan
from ttpu_plan.planner import (
    Request,
    best_plan,
    meshes,
    plans,
    smallest_slices,
    why_nothing_fits,
    why_nothing_serves,
)
from ttpu_plan.service import PLANNER
from ttpu_plan.zero import batch_axes

MIXTRAL = "ttpu_mistral/configs/mixtral-8x7b.json"
TRAINING, GENERATION = Request("training"), Request("generation")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return best_plan(published(LLAMA), parse_topology("v5e:2x4"))


@pytest.mark.parametrize("name", ["v5e:2x4", "tpu7x:2x2x1", "v5p:4x4x4", "2*v5e:4x4"])
@pytest.mark.parametrize("request_", [Request(), GENERATION, TRAINING], ids=["serve", "generate", "train"])
def test_every_mesh_takes_all_devices_in_the_usual_order_of_axes(name: str, request_: Request) -> None:
    topology = parse_topology(name)
    found = list(meshes(published(LLAMA), topology, request_))
    assert found or request_.rows(topology.num_devices) < topology.num_hosts  # each host's replica has a row
    for mesh in found:
        assert prod(mesh.values()) == topology.num_devices
        assert list(mesh) == [axis for axis in MESH_AXES if axis in mesh]
        assert request_.rows(topology.num_devices) % prod(mesh[a] for a in batch_axes(mesh, request_.sharding)) == 0


def test_weights_are_not_gathered_to_serve_and_experts_have_an_axis() -> None:
    for request, experts in ((GENERATION, {1, 2, 4, 8}), (Request(), {1, 2, 4})):  # of 8 experts; of a host's devices
        serving = list(meshes(published(MIXTRAL), parse_topology("v5e:4x4"), request))
        assert not any("fsdp" in mesh for mesh in serving)
        assert {mesh.get("expert", 1) for mesh in serving} == experts
        assert not any("expert" in mesh for mesh in meshes(published(LLAMA), parse_topology("v5e:4x4"), request))


@pytest.mark.parametrize("name", ["v5e:2x4", "v5e:4x4", "tpu7x:2x2x1", "tpu7x:2x2x2", "2*v5e:2x4"])
def test_a_replica_is_one_process_that_shards_along_axes_which_the_engine_takes(name: str) -> None:
    topology = parse_topology(name)
    found = plans(published(MIXTRAL), topology, Request(batch=64))
    for one in found:
        assert set(dict(one.mesh)) <= {"data", "expert", "tensor"}
        replica = prod(dict(one.replica.mesh).values())
        assert "data" not in dict(one.replica.mesh)
        assert one.replicas * replica == topology.num_devices
        assert replica <= topology.num_devices // topology.num_hosts
        assert replica % topology.chip.devices_per_chip == 0
        for program in one.programs:
            assert program.workload.batch * one.replicas == 64


def test_replicas_are_said_and_counted(plan: Plan) -> None:
    assert (plan.layout, plan.replicas) == ("tensor=8", 1)
    two = next(one for one in plans(published(LLAMA), parse_topology("v5e:2x4")) if one.replicas == 2)
    assert two.layout == "2 replicas × tensor=4"
    assert str(two.replica) == "tensor=4"
    decode, mixed = two.programs
    share = mixed.time.seconds * decode.workload.batch / mixed.workload.tokens
    assert two.tokens_per_second == pytest.approx(2 * decode.workload.batch / (decode.time.seconds + share))


def test_one_engine_over_all_devices_has_no_replicas() -> None:
    found = plans(published(LLAMA), parse_topology("v5e:2x4"), Request(one_replica=True))
    assert [dict(one.mesh) for one in found] == [{"tensor": 8}]


def test_a_plan_to_serve_has_the_engines_steps(plan: Plan) -> None:
    decode, mixed = (one.workload for one in plan.programs)
    assert (decode.task, decode.step) == ("decode", StepSize(32, 32, 32))
    assert (mixed.task, mixed.step) == ("mixed", StepSize(2048, 32, 32))
    many = Request(batch=4096, context=128, one_replica=True)
    larger = best_plan(published(LLAMA), parse_topology("v5p:2x2x1"), many)
    assert larger.programs[1].workload.tokens == 4096  # each running sequence has a token in a step


def test_without_a_backend_that_tells_its_steps_nothing_is_planned_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttpu_plan.served.default_registry", lambda: Registry([]))
    with pytest.raises(MissingDependencyError, match="--task generation"):
        plans(published(LLAMA), parse_topology("v5e:2x4"))
    assert plans(published(LLAMA), parse_topology("v5e:2x4"), GENERATION)


def test_slices_are_joined_along_data_or_fsdp_only() -> None:
    for one in plans(published(LLAMA), parse_topology("2*v5e:4x4"), replace(TRAINING, batch=64)):
        assert set(dict(one.dcn)) <= {"data", "fsdp"}
        assert one.parallelism.num_slices == 2


def test_a_long_context_may_be_cut_to_train() -> None:
    request = Request("training", batch=8, context=131072)
    found = list(meshes(published(LLAMA), parse_topology("v5p:4x4x4"), request))
    assert {"fsdp": 8, "sequence": 8} in found


def test_what_fits_comes_first_and_the_fastest_of_it_before_the_others() -> None:
    found = plans(published(LLAMA), parse_topology("v5e:2x4"))
    fitting = [one for one in found if one.fits]
    assert 0 < len(fitting) < len(found)
    assert found[: len(fitting)] == fitting
    assert fitting == sorted(fitting, key=lambda one: one.seconds)
    for one in found:
        assert one.fits == (one.memory.total <= HEADROOM * one.hbm_bytes)


def test_the_smallest_slices_of_an_8b_model_are_those_that_hold_it() -> None:
    """16 GiB of weights and 8 GiB of cache: one v6e chip, and four where a chip has 16 GB or comes in fours."""
    found = smallest_slices(published(LLAMA))
    names = {chip: one and one.topology for chip, one in found.items()}
    assert names == {
        "v4": "v4:2x2x1",
        "v5e": "v5e:2x2",
        "v5p": "v5p:2x2x1",
        "v6e": "v6e:1x1",
        "tpu7x": "tpu7x:2x2x1",
    }


def test_no_generation_is_named_for_what_256_chips_do_not_hold() -> None:
    huge = Request(batch=4096, context=131072)
    assert smallest_slices(published(LLAMA), huge, (CHIPS["v5e"],)) == {"v5e": None}


def test_where_no_generation_serves_the_roomiest_says_by_how_much_and_what_would() -> None:
    found = why_nothing_serves(published(LLAMA), Request(batch=4096, context=131072))
    assert found.closest.topology == "tpu7x:4x8x8"
    assert found.missing_bytes > 0
    assert found.remedies
    assert all(remedy.plan.fits for remedy in found.remedies)


def test_slices_whose_devices_cannot_share_the_rows_are_passed_over_for_the_roomiest_that_can() -> None:
    """One row is sharded along heads alone, of which there are 8."""
    spec = published("ttpu_gemma/configs/gemma-3-4b-it.json")
    found = why_nothing_serves(spec, Request("generation", batch=1, context=2**27))
    assert (found.closest.topology, dict(found.closest.mesh)) == ("v5p:2x2x2", {"tensor": 8})
    assert found.missing_bytes > 0


def test_a_context_that_is_longer_than_the_models_is_refused_unless_it_has_no_positions() -> None:
    topology, beyond = parse_topology("v5p:2x2x2"), Request("generation", batch=8, context=2**18)
    with pytest.raises(RequestError, match=r"context is 262,144, but this model's context holds 131,072: lower it\.$"):
        best_plan(published(LLAMA), topology, beyond)
    warned = pytest.warns(UserWarning, match="context=262,144 was given, but .* config names 131,072 positions")
    with warned, pytest.raises(UnsupportedError, match="needs"):  # after that
        best_plan(published(LLAMA), parse_topology("v5p:2x2x1"), replace(TRAINING, batch=4, context=2**18))
    state = MixerSpec("scan", state=(StateSpec("state", (1,), (axes.MLP,)),))
    layers = tuple(replace(one, mixer=state) for one in published(LLAMA).layers)
    endless = replace(published(LLAMA), layers=layers)
    assert endless.longest is None and usual_context(endless) == 2048
    check_context(endless, 2**18, trains=False)


@pytest.mark.parametrize("purpose", ["inference", "generation", "training"])
def test_a_context_that_is_named_is_refused_also_where_it_is_the_usual_one(purpose: Any) -> None:
    """Positions that are learned end there in training too. Where none is named a plan has what the model has."""
    spec = published(LLAMA)
    short = replace(spec, max_position_embeddings=1024, embedding=replace(spec.embedding, positions=1024))
    short = replace(short, layers=tuple(replace(one, mixer=replace(one.mixer, rope=None)) for one in spec.layers))
    topology = parse_topology("v5p:2x2x2")
    assert best_plan(short, topology, Request(purpose, 8)).programs[0].workload.context == 1024
    assert {one.programs[0].workload.context for one in plans(short, topology, Request(purpose, 8))} == {1024}
    with pytest.raises(RequestError, match=r"^context is 2,048, but this model.* 1,024.*: lower it\.$"):
        best_plan(short, topology, Request(purpose, 8, context=2048))


def test_the_first_prefill_reads_one_prompt_for_each_group_of_devices() -> None:
    found = meshes(published(LLAMA), parse_topology("v5e:2x4"), GENERATION)
    (mesh,) = [mesh for mesh in found if mesh.get("data") == 2]
    _, prefill = GENERATION.workloads(8, mesh)
    assert prefill.batch == 2
    plan = best_plan(published(LLAMA), parse_topology("v5e:2x4"), GENERATION)
    assert {one.workload.task for one in plan.programs} == {"decode", "prefill"}
    assert not plan.is_served and plan.replica == plan.parallelism


def test_when_nothing_fits_it_says_by_how_much_and_what_would() -> None:
    spec, topology = published(LLAMA), parse_topology("v5e:1x1")
    found = why_nothing_fits(spec, topology, Request(batch=64))
    assert found.missing_bytes == round(found.closest.memory.total - HEADROOM * found.closest.hbm_bytes) > 0
    assert all(remedy.plan.fits for remedy in found.remedies)
    text = str(found)
    assert "needs 31.4 GiB on each device of v5e:1x1 at best" in text
    assert "4 chips (v5e:2x2) would fit" in text


def test_each_remedy_alone_makes_it_fit() -> None:
    spec, topology = published(LLAMA), parse_topology("v5e:2x2")
    found = why_nothing_fits(spec, topology, Request(batch=256))
    changes = [remedy.change for remedy in found.remedies]
    assert "a batch of 128 instead of 256 would fit" in changes
    assert "a context of 1024 instead of 2048 would fit" in changes
    with pytest.raises(UnsupportedError, match="a batch of 128 instead of 256 would fit"):
        best_plan(spec, topology, Request(batch=256))


def test_rows_that_no_mesh_can_cut_are_refused_with_what_can_be_done() -> None:
    spec, topology = published("ttpu_gemma/configs/gemma-3-4b-it.json"), parse_topology("v5e:16x16")
    with pytest.raises(UnsupportedError, match="a batch that is a multiple of the devices"):
        plans(spec, topology, Request("generation", batch=1))
    with pytest.raises(UnsupportedError, match="each replica has the devices of one host"):
        plans(spec, topology, Request(batch=1))


def test_an_unknown_purpose_is_refused() -> None:
    with pytest.raises(RequestError, match="there is only inference, generation, training"):
        Request("chatting")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:16x16", "v5p:4x4x4", "v5p:4x8x8"])
def test_an_8b_model_on_8_to_256_chips_has_few_meshes(name: str) -> None:
    """A plan takes 1 to 3 ms (benchmarks/planning.py): the number of meshes bounds the time of `ttpu plan`."""
    counts = [
        sum(1 for _ in meshes(published(LLAMA), parse_topology(name), request))
        for request in (Request(batch=256), GENERATION, replace(TRAINING, batch=256))
    ]
    assert all(0 < count <= most for count, most in zip(counts, (8, 8, 128), strict=True)), counts


def test_a_saved_plan_is_read_back_as_it_was(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    assert load_plan(path) == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]  # and nothing half-written beside it
    written = json.loads(path.read_text())
    assert written["version"] == 3
    assert written["mesh"] == {"tensor": 8}
    assert written["total_bytes"] == plan.memory.total


def test_a_plan_for_several_slices_is_read_back_too(tmp_path: Path) -> None:
    plan = best_plan(published(LLAMA), parse_topology("2*v5e:4x4"), replace(TRAINING, batch=32))
    assert read_plan(json.loads(json.dumps(plan_json(plan)))) == plan


def test_a_plan_to_train_computes_no_more_again_than_it_must(tmp_path: Path) -> None:
    update = UpdateSettings("lion", remat="auto", zero_stage=2, gradient_accumulation_steps=2)
    found = {
        name: best_plan(published(LLAMA), parse_topology(name), replace(TRAINING, update=update))
        for name in ("v5e:4x4", "v5p:2x4x4")
    }
    settings = {name: one.programs[0].workload.settings for name, one in found.items()}
    assert [one.remat for one in settings.values()] == ["full", "none"]
    assert settings["v5e:4x4"] == replace(update, remat="full")
    # With weights divided too there is room for more, and with twice the rows for less.
    whole = replace(update, zero_stage=None)
    for rows, remat in ((32, "mlp"), (64, "attention"), (128, "full")):
        request = replace(TRAINING, update=whole, batch=rows)
        chosen = next(
            one for one in plans(published(LLAMA), parse_topology("v5e:4x4"), request) if one.mesh == (("fsdp", 16),)
        )
        assert chosen.programs[0].workload.settings.remat == remat
    assert found["v5e:4x4"].programs[0].workload.batch == 2 * 16  # a row a device in each part
    save_plan(found["v5e:4x4"], tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == found["v5e:4x4"]
    told = PLANNER.planned_update(tmp_path / "plan.json")
    assert (told.rows, told.length, told.settings.zero_stage) == (32, 2048, 2)


def test_optimizers_of_whole_matrices_get_no_mesh_that_pads_the_model() -> None:
    """Llama-3.1-8B has 8 KV heads: on tensor=16 they are held twice."""
    tensor = {
        name: {mesh.get("tensor", 1) for mesh in meshes(published(LLAMA), parse_topology("v5e:4x4"), request)}
        for name in ("adamw", "muon")
        for request in [replace(TRAINING, update=UpdateSettings(name))]
    }
    assert tensor == {"adamw": {1, 2, 4, 8, 16}, "muon": {1, 2, 4, 8}}


def test_layers_of_two_sizes_are_not_trained_on_a_mesh_that_makes_them_equal() -> None:
    """Training refuses such a mesh: 14,332 features of an MLP are as many as the others' 14,336 on eight devices."""
    spec = published(LLAMA)
    last = spec.layers[-1]
    assert isinstance(last.mlp, MLPSpec) and last.mlp.intermediate_size == 14_336
    narrow = replace(last, mlp=replace(last.mlp, intermediate_size=14_332))
    mixed, topology = replace(spec, layers=(*spec.layers[:-1], narrow)), parse_topology("v5e:4x4")
    tensor = {
        task: {mesh.get("tensor", 1) for mesh in meshes(mixed, topology, Request(task, batch=16))}
        for task in ("training", "generation")
    }
    assert tensor == {"training": {1, 2, 4}, "generation": {1, 2, 4, 8, 16}}


def test_a_plan_serves_the_model_that_it_was_made_for(plan: Plan) -> None:
    plan.check(published(LLAMA))
    with pytest.raises(PlanError, match="made for a llama with other parameters"):
        plan.check(published(MIXTRAL))


def test_plans_tell_formats_of_quantized_checkpoints_apart() -> None:
    spec, path, form = published(LLAMA), "layers.0.mlp.down.kernel", KernelFormat("int4", 128)

    def fingerprint(**changes: Any) -> str:
        return fingerprint_of(replace(spec, kernel_formats=((path, replace(form, **changes)),)))

    other: list[dict[str, Any]] = [
        {"dtype": "int8"},
        {"group_size": 64},
        {"symmetric": False},
        {"activation": ActivationFormat("int8")},
        {"activation": ActivationFormat("int8", static=True)},
    ]
    found = [fingerprint(**changes) for changes in ({}, *other)]
    assert len({fingerprint_of(spec), *found}) == len(found) + 1
    # A config.json alone does not say these for sure.
    assert fingerprint(scale_dtype="bfloat16") == fingerprint(input_order=True) == found[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "is a plan of version 2, but this ttpu reads version 3"),
        ({"mesh": {"tensor": 4}}, "a mesh of 4 devices and 2 programs for v5e:2x4, which has 8"),
        ({"mesh": {"rows": 8}}, "are no sizes of stage, data, fsdp, expert, sequence, tensor"),
        ({"topology": "v9:2x2"}, "'v9' was asked for"),
        ({"programs": []}, "0 programs"),
        ({"mesh": {"tensor": True}}, "are no sizes of"),
        ({"mesh": [["tensor", 8]]}, "are no sizes of"),
        ({"rules": None}, "the rules None are no table of logical axes"),
        ({"rules": {"vocab": "tensor"}}, "the rule of 'vocab' is 'tensor', but it has to be a list"),
        ({"rules": {"vocab": None}}, "the rule of 'vocab' is None, but it has to be a list"),
        ({"rules": {"vocab": ["tensor", "tensor"]}}, "a list of different mesh axes"),
        ({"rules": {"words": ["tensor"]}}, "name the logical axis 'words', but there is none of that name"),
        ({"rules": {"vocab": ["rows"]}}, "name the mesh axis 'rows', but there is none of that name"),
        ({"dcn": {"rows": 1}}, "are no sizes of"),
        ({"dcn": {"tensor": 2}}, "joins 2 slices by dcn {'tensor': 2}, but v5e:2x4 is 1"),
        ({"topology": "2*v5e:2x2"}, "joins 1 slices by dcn {}, but 2[*]v5e:2x2 is 2"),
        ({"topology": "8*v5e:1x1", "dcn": {"data": 8}}, "lays 8 slices along data, but its mesh has 1 devices there"),
        ({"programs": [{}]}, "cannot be read as a plan"),
    ],
)
def test_a_damaged_plan_is_refused_in_one_sentence(plan: Plan, change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message) as refusal:
        read_plan({**plan_json(plan), **change})
    assert "ttpu plan CHECKPOINT --save PLAN.json" in str(refusal.value)
    assert ". " not in str(refusal.value)  # one sentence


def test_a_plan_that_lacks_something_says_what(plan: Plan) -> None:
    value = plan_json(plan)
    del value["rules"], value["dcn"]
    with pytest.raises(PlanError, match="because it lacks dcn, rules"):
        read_plan(value)


def test_rules_that_cut_less_than_the_usual_ones_are_read_as_they_are(plan: Plan) -> None:
    read = read_plan({**plan_json(plan), "rules": {"vocab": ["tensor"], "mlp": []}})
    assert read.strategy.rules == (("vocab", ("tensor",)), ("mlp", ()))


def test_a_size_that_is_not_sold_is_planned_with_a_note(plan: Plan) -> None:
    odd = plans(published(LLAMA), parse_topology("v5e:2x3"), Request(batch=12))[0]
    assert odd.note == plan_json(odd)["note"] == "v5e:2x3 is not a size that v5e comes in"
    assert plan.note is None


def test_a_plan_that_cannot_be_saved_leaves_nothing_behind(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(PlanError, match=r"cannot be written \(No space left on device\)"):
        save_plan(plan, tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_the_documented_headroom_is_the_one_that_is_taken() -> None:
    documented = (Path(__file__).parents[3] / "docs" / "planner.md").read_text()
    assert f"A plan may use {HEADROOM:.0%}".replace("%", " %") in documented


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, plan: Plan) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        load_plan(tmp_path / "missing.json")
    (tmp_path / "text.json").write_text("not json")
    with pytest.raises(PlanError, match="is not valid JSON"):
        load_plan(tmp_path / "text.json")
    for text, why in (
        ("[]", "holds the list \\[\\] where a JSON object is needed"),
        ("{}", "has no version"),
        ("[" * 100_000, "is nested too deeply to be read"),
        ('{"version": 3, "version": 3}', 'writes the key "version" twice'),
        (json.dumps(plan_json(plan)).replace('"weights": ', '"weights": 1e999, "w": '), "OverflowError"),
    ):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(PlanError, match=why):
            load_plan(tmp_path / "other.json")
    with pytest.raises(PlanError, match="cannot be written"):
        save_plan(plan, tmp_path / "nowhere" / "plan.json")
