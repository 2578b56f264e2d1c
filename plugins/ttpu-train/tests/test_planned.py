"""Runs that follow a plan: its mesh and its stage of ZeRO, and what contradicts it."""

import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ttpu_core.config import ModelConfig
from ttpu_core.errors import PlanError, RequestError
from ttpu_core.registry import default_registry
from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.sharding.training_state import UpdateSettings
from ttpu_core.spec import ArchitectureSpec
from ttpu_plan.plan_file import save_plan
from ttpu_plan.planner import Request, plans
from ttpu_train.arguments import TrainingArguments
from ttpu_train.planned import following_plan, planned_mesh, planned_slice, predicted_memory

SLICE = "v5e:2x2"


@pytest.fixture(scope="module")
def spec() -> ArchitectureSpec:
    found = find_spec("ttpu_llama")
    assert found is not None and found.origin is not None
    config = ModelConfig.from_file(Path(found.origin).parent / "configs" / "llama-3.1-8b.json")
    whole = default_registry().architecture(config).spec
    return replace(whole, layers=whole.layers[:2])


@pytest.fixture(scope="module")
def saved(spec: ArchitectureSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The first plan of each purpose, with two parts and stage 2 to train."""
    update = UpdateSettings(zero_stage=2, gradient_accumulation_steps=2)
    requests = {"training": Request("training", update=update), "generation": Request("generation")}
    folder, found = tmp_path_factory.mktemp("plans"), {}
    for name, request in requests.items():
        found[name] = str(folder / f"{name}.json")
        save_plan(plans(spec, parse_topology(SLICE), request)[0], found[name])
    return found


def arguments(**given: Any) -> TrainingArguments:
    usual = {"per_device_train_batch_size": 1, "max_length": 2048, "gradient_accumulation_steps": 2}
    return TrainingArguments(**{**usual, **given})


def test_a_run_has_the_stage_of_its_plan(saved: dict[str, str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert following_plan(arguments(plan=saved["training"]), "model", {}).zero_stage == 2
        assert following_plan(arguments(zero_stage=2, plan=saved["training"]), "model", {}).zero_stage == 2
        asked = following_plan(arguments(), "model", {"plan": saved["training"]})
        assert (asked.plan, asked.zero_stage) == (saved["training"], 2)
        assert following_plan(arguments(), "model", {}) == arguments()
    assert planned_mesh(asked) == str(planned_slice(asked, SLICE))
    assert planned_mesh(arguments(parallelism_strategy="fsdp")) == "fsdp"


def test_what_a_plan_does_not_count_is_warned_of(saved: dict[str, str]) -> None:
    asked = arguments(plan=saved["training"], optim="muon", max_length=4096, gradient_accumulation_steps=4)
    with pytest.warns(UserWarning, match=r"has optim='muon' and not 'adamw', gradient_accumulation_steps=4 and not 2"):
        following_plan(asked, "model", {})
    with pytest.warns(UserWarning, match=r"4,096 tokens of a row and not 2,048 as its plan for v5e:2x2"):
        following_plan(asked, "model", {})


def test_a_plan_that_contradicts_the_run_is_refused(saved: dict[str, str]) -> None:
    plan = saved["training"]
    with pytest.raises(RequestError, match=r"zero_stage=3 was given with a plan of .* for stage 2: leave"):
        following_plan(arguments(plan=plan, zero_stage=3), "model", {})
    with pytest.raises(RequestError, match="a plan was given with a loaded object"):
        following_plan(arguments(plan=plan), object(), {})
    with pytest.raises(RequestError, match="both name a mesh"):
        arguments(plan=plan, parallelism_strategy="fsdp")
    with pytest.raises(PlanError, match="this one for v5e:2x2 is to generate: make one with `ttpu plan"):
        following_plan(arguments(plan=saved["generation"]), "model", {})
    with pytest.raises(RequestError, match="compiled for v5e:4x4 with a plan for v5e:2x2: pass --topology v5e:2x2"):
        planned_slice(arguments(plan=plan), "v5e:4x4")


def test_the_planner_predicts_what_a_run_holds(spec: ArchitectureSpec, saved: dict[str, str]) -> None:
    asked = following_plan(arguments(plan=saved["training"]), "model", {})
    mesh = planned_slice(asked, SLICE)
    assert mesh is not None
    found = predicted_memory(asked, spec, SLICE, mesh, 8)
    assert found["plan_held_bytes"] == pytest.approx(12 * spec.num_parameters / 4, rel=0.01)
    lion = predicted_memory(replace(asked, optim="lion"), spec, SLICE, mesh, 8)
    assert lion["plan_held_bytes"] == pytest.approx(8 * spec.num_parameters / 4, rel=0.01)
    assert predicted_memory(replace(asked, trainable=["layers.*"]), spec, SLICE, mesh, 8) == {
        "plan_bytes": None, "plan_held_bytes": None, "plan_note": "the planner does not know trainable",
    }  # fmt: skip
