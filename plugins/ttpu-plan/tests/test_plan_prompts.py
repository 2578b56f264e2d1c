"""Plans for prompts with short answers consider meshes that shard the tokens of a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_plan_memory import LLAMA, published

from ttpu_core.errors import RequestError
from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.spec import ArchitectureSpec
from ttpu_plan.cost import estimate_time
from ttpu_plan.plan_file import load_plan, save_plan
from ttpu_plan.planner import Request, best_plan, plans
from ttpu_plan.workload import Workload


@pytest.fixture(scope="module")
def llama() -> ArchitectureSpec:
    """Llama-3.1-8B."""
    return published(LLAMA)


@pytest.mark.parametrize("name", ["v5e:2x4", "v6e:2x4"])
def test_a_prompt_alone_is_read_fastest_where_its_tokens_are_sharded(llama: ArchitectureSpec, name: str) -> None:
    """By the compiler 28.9 ms on v5e and 10.1 on v6e, where tensor=8 takes 34.5 and 14.6."""
    plan = best_plan(llama, parse_topology(name), Request("generation", 1, new_tokens=1))
    assert dict(plan.mesh) == {"sequence": 4, "tensor": 2}
    prefill = plan.program("prefill")
    assert prefill is not None and plan.seconds == prefill.time.seconds, "its token is the prefill's"


@pytest.mark.parametrize("tokens", [64, None])
def test_longer_answers_are_written_where_weights_are_read_once(llama: ArchitectureSpec, tokens: int | None) -> None:
    plan = best_plan(llama, parse_topology("v5e:2x4"), Request("generation", 1, new_tokens=tokens))
    assert dict(plan.mesh) == {"tensor": 8}


def test_nothing_is_sharded_along_the_sequence_unless_asked(llama: ArchitectureSpec) -> None:
    found = plans(llama, parse_topology("v5e:2x4"), Request("generation", 1))
    assert found and not any("sequence" in dict(plan.mesh) for plan in found)


def test_time_per_token_is_the_mean_of_an_answer(llama: ArchitectureSpec) -> None:
    request = Request("generation", 8, new_tokens=10)
    plan = next(one for one in plans(llama, parse_topology("v5e:2x4"), request) if dict(one.mesh) == {"tensor": 8})
    decode, prefill = plan.program("decode"), plan.program("prefill")
    assert decode is not None and prefill is not None
    assert plan.seconds == pytest.approx((9 * decode.time.seconds + 8 * prefill.time.seconds) / 10)


def test_the_file_of_a_plan_keeps_it(llama: ArchitectureSpec, tmp_path: Path) -> None:
    plan = best_plan(llama, parse_topology("v5e:2x4"), Request("generation", 1, new_tokens=7))
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    older = json.loads((tmp_path / "plan.json").read_text())
    del older["new_tokens"]
    (tmp_path / "plan.json").write_text(json.dumps(older))
    assert load_plan(tmp_path / "plan.json").new_tokens is None


@pytest.mark.parametrize(("purpose", "tokens"), [("inference", 5), ("training", 5), ("generation", 0)])
def test_it_is_refused_where_it_means_nothing(purpose: str, tokens: int) -> None:
    with pytest.raises(RequestError, match="tokens of an answer"):
        Request(purpose, new_tokens=tokens)  # type: ignore[arg-type]


def test_the_last_part_of_a_causal_sequence_decides(llama: ArchitectureSpec) -> None:
    """Of four parts it has 7 / 4 of the mean."""
    topology, mesh = parse_topology("v5e:2x4"), {"sequence": 4, "tensor": 2}
    short, long = (
        estimate_time(llama, mesh, topology, Workload("prefill", 1, context)).compute for context in (32768, 65536)
    )
    linear = 2 * llama.num_parameters * 32768 / 8
    attention = 32 * 32 / 2 * 4 * 128 * 32768 / 4 * 32768 * (1 - 1 / 8)
    assert long / short == pytest.approx((2 * linear + 4 * attention) / (linear + attention), rel=0.05)
