"""The arguments that say how a model is sharded: refusals, the planner's input, and the order of devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from strategies import FAMILIES, checkpoint
from tiny import llama_checkpoint

from ttpu import AutoModelForTPU
from ttpu_core import default_registry, open_checkpoint
from ttpu_core.errors import PlanError, RequestError, UnsupportedError
from ttpu_core.loading import Purpose, planned_architecture
from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.sharding.parallelism import resolve_parallelism, strategy_with
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, TRAINING_STRATEGY, Strategy
from ttpu_jax import parallel
from ttpu_jax.parallel import placement_for, planned
from ttpu_jax.params.mesh import arrange
from ttpu_jax.runner.build import refuse_idle_devices
from ttpu_plan.plan_file import save_plan
from ttpu_plan.planner import Request, best_plan, plans


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("parallel") / "llama")


@pytest.fixture(scope="module")
def spec(path: Path) -> Any:
    return architecture_of(path)


def architecture_of(path: Path, **other: Any) -> Any:
    return default_registry().architecture(open_checkpoint(path).config.with_values(other)).spec


def test_two_ways_of_saying_it_are_refused(path: Path) -> None:
    with pytest.raises(RequestError, match="parallelism_strategy and mesh were given"):
        AutoModelForTPU.from_pretrained(path, parallelism_strategy="fsdp", mesh="tensor=2")


def test_rules_without_anything_that_cuts_are_refused(path: Path) -> None:
    with pytest.raises(RequestError, match=r"sharding_rules for mlp .* nothing says that the model is sharded"):
        AutoModelForTPU.from_pretrained(path, sharding_rules={"mlp": None})


def test_sharding_strategy_and_mesh_are_other_names_of_it(spec: Any) -> None:
    one, two, three = (
        placement_for(spec, **{name: "2x4"}) for name in ("parallelism_strategy", "sharding_strategy", "mesh")
    )
    assert one == two == three and one.mesh is not None and dict(one.mesh.shape) == {"data": 2, "tensor": 4}


def test_an_axis_along_which_nothing_is_cut_is_refused(spec: Any) -> None:
    with pytest.raises(UnsupportedError, match="8 devices along 'expert', but nothing of this llama is sharded"):
        placement_for(spec, parallelism_strategy="expert=8")
    placement_for(spec, parallelism_strategy="data=8")
    placement_for(spec, parallelism_strategy="sequence=8")
    with pytest.raises(UnsupportedError, match="2 devices along 'expert', but nothing of this llama is sharded"):
        placement_for(spec, parallelism_strategy="fsdp=4,expert=2", purpose="train")


def test_auto_plans_for_the_dtype_that_is_loaded(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Strategy, str]] = []

    def plan(spec: Any, devices: Any, strategy: Strategy, dtype: str, purpose: Purpose) -> Any:
        asked.append((strategy, dtype))
        return planned(spec, devices, strategy, dtype, purpose)

    monkeypatch.setattr(parallel, "planned", plan)
    placement_for(spec, parallelism_strategy="auto", dtype="float32", sharding_rules={"mlp": None})
    assert asked[0][1] == "float32" and dict(asked[0][0].rules)["mlp"] == ()


def test_auto_plans_for_what_the_model_is_opened_for(path: Path) -> None:
    eight_heads = architecture_of(path, num_attention_heads=8, num_key_value_heads=8, head_dim=8)
    served = placement_for(eight_heads, parallelism_strategy="auto", purpose="serve")
    assert served.mesh is not None and dict(served.mesh.shape) == {"tensor": 8}
    refuse_idle_devices(served)
    trained = placement_for(eight_heads, parallelism_strategy="auto", purpose="train")
    assert trained.mesh is not None and trained.mesh.size == 8
    with pytest.raises(UnsupportedError, match="does not shard requests over"):
        refuse_idle_devices(trained)


def test_an_unknown_purpose_is_refused(path: Path) -> None:
    with pytest.raises(RequestError, match=r"purpose='dream' was asked for, but .* one of generate, serve, train"):
        AutoModelForTPU.from_pretrained(path, purpose="dream")


def test_a_plan_is_followed(path: Path, spec: Any, tmp_path: Path) -> None:
    plan = best_plan(spec, parse_topology("v5e:2x4"), Request(dtype="float32"))
    save_plan(plan, tmp_path / "plan.json")
    model = AutoModelForTPU.from_pretrained(path, plan=tmp_path / "plan.json")
    assert dict(model.programs.runtime.placement.mesh.shape) == dict(plan.mesh)


def test_a_plan_for_quantized_weights_is_refused(spec: Any) -> None:
    plan = best_plan(spec, parse_topology("v5e:2x4"), Request(quantization="int8"))
    with pytest.raises(PlanError, match="the plan is for int8 weights, but the JAX backend loads them in bfloat16"):
        placement_for(spec, plan=plan)


def test_a_plan_for_smaller_weights_warns(spec: Any) -> None:
    plan = best_plan(spec, parse_topology("v5e:2x4"), Request(dtype="bfloat16"))
    with pytest.warns(UserWarning, match="made for weights in bfloat16, but they are held in float32"):
        placement_for(spec, plan=plan, dtype="float32")


@pytest.mark.parametrize("plan", [3, {"mesh": {}}])
def test_what_is_no_plan_is_refused(spec: Any, plan: Any) -> None:
    with pytest.raises(RequestError, match=r"plan is the .* but a ttpu_plan.plan.Plan or the path of a file"):
        placement_for(spec, plan=plan)


@dataclass(frozen=True)
class Chip:
    """A TPU device as meshes are made of: eight to a slice of 2x4."""

    id: int
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"
    core_on_chip: int = 0

    @property
    def slice_index(self) -> int:
        return self.id // 8

    @property
    def coords(self) -> tuple[int, int, int]:
        return self.id % 8 % 2, self.id % 8 // 2, 0


CHIPS: Any = [Chip(number) for number in range(16)]


def slices_along(placed: np.ndarray, axis: int) -> bool:
    """Whether slices change along this axis only."""
    indices = np.vectorize(lambda chip: chip.slice_index)(placed)
    return bool((np.diff(indices, axis=axis) != 0).any()) and all(
        (np.diff(indices, axis=other) == 0).all() for other in range(indices.ndim) if other != axis
    )


def test_slices_lie_along_the_axis_that_says_so() -> None:
    placed = arrange(CHIPS, {"data": 2, "fsdp": 4, "tensor": 2}, {"data": 2})
    assert placed.shape == (2, 4, 2) and slices_along(placed, 0)


def test_slices_that_nobody_named_lie_along_the_first_axes() -> None:
    placed = arrange(CHIPS, {"fsdp": 8, "tensor": 2}, {})
    assert sorted(chip.id for chip in placed.flat) == list(range(16)) and slices_along(placed, 0)
    assert sorted(chip.id for chip in arrange(CHIPS, {"fsdp": 16}, {}).flat) == list(range(16))


def test_other_numbers_of_slices_than_there_are_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="a mesh over 4 slices was asked for, but the 16 devices are in 2"):
        arrange(CHIPS, {"data": 4, "fsdp": 4}, {"data": 4})


@pytest.mark.parametrize("count", [3, 5, 6])
def test_a_part_of_a_slice_may_have_holes(count: int) -> None:
    assert arrange(CHIPS[:count], {"tensor": count}, {}).shape == (count,)


def test_auto_knows_slices_and_single_cores(spec: Any) -> None:
    two = planned(spec, CHIPS, DEFAULT_STRATEGY, "bfloat16", "generate")
    assert (two.num_devices, two.num_slices) == (16, 2)
    core: Any = [replace(Chip(0), device_kind="TPU7x")]
    assert planned(spec, core, DEFAULT_STRATEGY, "bfloat16", "generate").num_devices == 1
    assert jax.device_count() == 8


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of a mixture of eight experts with one KV head, which many devices would have several times."""
    config = {**FAMILIES["mistral"], "num_local_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 1}
    return checkpoint(tmp_path_factory.mktemp("mixture") / "mixtral", config)


def test_a_plan_that_shards_experts_along_the_rows_is_followed(mixture: Path, tmp_path: Path) -> None:
    found = plans(architecture_of(mixture), parse_topology("v5e:2x4"), Request("generation", dtype="float32"))
    plan = next(one for one in found if one.layout == "data=2,tensor=4; expert=data+tensor")
    save_plan(plan, tmp_path / "plan.json")
    model = AutoModelForTPU.from_pretrained(mixture, plan=tmp_path / "plan.json")
    assert model.programs.runtime.placement.strategy == strategy_with({"expert": ("data", "tensor")})
    kernel = model.params["layers.0.moe.experts.down.kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (1, *kernel.shape[1:])
    prompts = np.array([[5, 6, 7], [8, 9, 10]])
    asked = {"max_new_tokens": 4, "do_sample": False}
    alone = AutoModelForTPU.from_pretrained(mixture)
    assert np.array_equal(model.generate(prompts, **asked), alone.generate(prompts, **asked))


def test_to_train_rows_and_features_are_divided_along_the_experts_axis_too(mixture: Path) -> None:
    spec = architecture_of(mixture)
    one, two = (
        placement_for(spec, mesh=mesh, purpose="train")
        for mesh in ("fsdp=2,expert=4", resolve_parallelism("fsdp=2,expert=4", 8))
    )
    assert one == two and one.strategy == TRAINING_STRATEGY
    assert one.axes_of("batch") == one.axes_of("embed") == ("fsdp", "expert")
    assert placement_for(spec, mesh="expert=8").axes_of("batch") == ()
    own = placement_for(spec, parallelism_strategy="expert=8", sharding_rules={"batch": "data"}, purpose="train")
    assert own.axes_of("batch") == () and own.axes_of("embed") == ("expert",)
    assert one.axes_across_slices == frozenset()


def test_a_model_that_is_opened_to_train_generates_as_any_other(mixture: Path) -> None:
    model = AutoModelForTPU.from_pretrained(mixture, mesh="fsdp=2,expert=4", purpose="train", dtype="float32")
    alone = AutoModelForTPU.from_pretrained(mixture, dtype="float32")
    for rows in (8, 3):  # which the devices divide, and do not
        prompts = np.random.default_rng(0).integers(1, 60, (rows, 4))
        asked = {"max_new_tokens": 4, "do_sample": False}
        assert np.array_equal(model.generate(prompts, **asked), alone.generate(prompts, **asked))


def test_auto_generates_with_the_rules_of_the_fastest_plan() -> None:
    ttpu_qwen = pytest.importorskip("ttpu_qwen")
    config = Path(ttpu_qwen.__file__).parent / "configs" / "qwen3-30b-a3b.json"
    spec = planned_architecture(str(config)).spec
    by_rule = placement_for(spec, parallelism_strategy="auto")
    assert by_rule.mesh is not None and dict(by_rule.mesh.shape) == {"data": 2, "tensor": 4}
    assert by_rule.strategy == strategy_with({"expert": ("data", "tensor")})
    served = placement_for(spec, parallelism_strategy="auto", purpose="serve")
    assert served.strategy == strategy_with({"expert": ("tensor",)})
