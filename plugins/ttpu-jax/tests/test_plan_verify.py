"""A plan is proven by the TPU compiler, once: what it said is remembered on disk, also that it refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ttpu_core.architecture import Architecture
from ttpu_core.config import ModelConfig
from ttpu_core.errors import MissingDependencyError, PlanError, UnsupportedError
from ttpu_core.quantization import quantize_architecture
from ttpu_core.registry import default_registry
from ttpu_core.sharding import serving
from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.sharding.strategy import Strategy
from ttpu_core.sharding.training_state import Recomputation, UpdateSettings
from ttpu_jax.aot import topology as topology_module
from ttpu_jax.backend import JaxBackend
from ttpu_jax.runner import verify
from ttpu_jax.runner.ahead import ProgramFigures
from ttpu_plan.plan import Plan
from ttpu_plan.planner import Request, best_plan, plans
from ttpu_plan.workload import Workload

SMALL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 1024,
}
NARROW = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(verify.CACHE_VARIABLE, str(tmp_path))
    return tmp_path / "ttpu" / "plans"


@pytest.fixture
def architecture() -> Architecture:
    return default_registry().architecture(ModelConfig.from_dict(SMALL))


@pytest.fixture(params=["inference", "generation"])
def plan(architecture: Architecture, request: pytest.FixtureRequest) -> Plan:
    return best_plan(architecture.spec, parse_topology("v5e:2x2"), Request(request.param, batch=8, context=512))


class Compiler:
    """Counts what it is asked to compile, and says that it takes a megabyte, or that it does not fit."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.refuses = ""

    def __call__(self, architecture: Architecture, topology: str, **options: Any) -> Any:
        self._note({"topology": topology, "formats": architecture.spec.kernel_formats, **options})
        one = type("One", (), {"op": "all-reduce", "count": 5, "result_bytes": 640})()
        report = {"task": options["task"], "peak_bytes": 2**20, "total_seconds": 0.5, "compile_seconds": 2.0}
        return type("Report", (), {**report, "collectives": (one,), "predicted_seconds": 0.25})()

    def step(
        self, architecture: Architecture, topology: str, mesh: dict[str, int], strategy: Strategy, workload: Workload
    ) -> ProgramFigures:
        asked: dict[str, Any] = {"batch": workload.batch, "context": workload.context, "step": workload.step}
        asked["formats"] = architecture.spec.kernel_formats
        self._note({"topology": topology, "mesh": mesh, "strategy": strategy, **asked})
        return ProgramFigures(2**20, 0, 0, 0, 0.25, 2.0, (("all-reduce", 5, 640),), 1, 0, 0.125, total_seconds=0.5)

    def _note(self, asked: dict[str, Any]) -> None:
        self.asked.append(asked)
        if self.refuses:
            raise UnsupportedError(self.refuses)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    pytest.importorskip("libtpu")  # whose version is part of what is remembered
    stand_in = Compiler()
    monkeypatch.setattr(verify, "compile_report", stand_in)
    monkeypatch.setattr(verify, "compile_planned_step", stand_in.step)
    yield stand_in


def test_each_program_is_compiled_as_the_plan_has_it(
    architecture: Architecture, plan: Plan, compiler: Compiler
) -> None:
    seen: list[str] = []
    decode, other = verify.verify_plan(architecture, plan, progress=seen.append)
    assert seen == [decode.task, other.task] == ["decode", "mixed" if plan.is_served else "prefill"]
    assert (decode.peak_bytes, decode.seconds, decode.collectives) == (2**20, 0.5, (("all-reduce", 5, 640),))
    first = compiler.asked[0]
    assert (first["topology"], first["batch"], first["context"]) == ("v5e:2x2", 8, 512)
    assert first["mesh"] == dict(plan.mesh)
    assert first["strategy"] == plan.strategy
    assert first.get("step") == plan.programs[0].workload.step


@pytest.mark.parametrize("remat", ["full", "mlp"])
def test_an_update_is_compiled_with_what_it_computes_again(
    architecture: Architecture, compiler: Compiler, remat: Recomputation
) -> None:
    asked = Request("training", batch=4, context=512, update=UpdateSettings(remat=remat))
    verify.verify_plan(architecture, best_plan(architecture.spec, parse_topology("v5e:2x2"), asked))
    assert [one["remat"] for one in compiler.asked] == [remat]


def test_of_replicas_one_is_compiled_for_devices_as_many_as_it_has(
    architecture: Architecture, compiler: Compiler, cache: Path
) -> None:
    found = plans(architecture.spec, parse_topology("v5e:2x4"), Request(batch=8, context=512))
    two = next(one for one in found if one.replicas == 2)
    verify.verify_plan(architecture, two)
    assert (compiler.asked[0]["topology"], compiler.asked[0]["mesh"]) == ("v5e:2x2", {"tensor": 4})
    assert compiler.asked[0]["batch"] == 4


@pytest.mark.parametrize("purpose", ["inference", "generation"])
def test_a_quantized_plan_is_compiled_with_quantized_kernels(
    architecture: Architecture, compiler: Compiler, purpose: Any, cache: Path
) -> None:
    asked = "w4a16-g128"
    dense, quantized = (
        best_plan(architecture.spec, parse_topology("v5e:2x2"), Request(purpose, 8, 512, quantization=one))
        for one in (None, asked)
    )
    stored = quantize_architecture(architecture, asked)
    its_own = best_plan(stored.spec, parse_topology("v5e:2x2"), Request(purpose, 8, 512))
    assert [one.memory for one in its_own.programs] == [one.memory for one in quantized.programs]
    for model, plan in ((architecture, dense), (architecture, quantized), (stored, its_own)):
        assert not any(one.cached for one in verify.verify_plan(model, plan))
    formats = [dict(one["formats"]) for one in compiler.asked]
    assert formats == [{}] * 2 + [dict(stored.spec.kernel_formats)] * 4
    assert {one.group_size for one in formats[-1].values()} == {128}


def test_what_was_compiled_is_not_compiled_again(
    architecture: Architecture, plan: Plan, compiler: Compiler, cache: Path
) -> None:
    fresh = verify.verify_plan(architecture, plan)
    again = verify.verify_plan(architecture, plan)
    assert len(compiler.asked) == len(plan.programs) == len(list(cache.iterdir()))
    assert not any(one.cached for one in fresh)
    assert again == tuple(replace(one, cached=True) for one in fresh)


def test_another_workload_mesh_or_model_is_another_answer(
    architecture: Architecture, plan: Plan, compiler: Compiler
) -> None:
    program = plan.programs[0]
    larger = replace(program, workload=program.workload.with_batch(16))
    other = default_registry().architecture(ModelConfig.from_dict({**SMALL, "rms_norm_eps": 1e-3}))
    files = {
        verify.cache_file(architecture, plan, program),
        verify.cache_file(architecture, plan, larger),
        verify.cache_file(architecture, replace(plan, mesh=(("tensor", 2), ("expert", 2))), program),
        verify.cache_file(other, plan, program),
    }
    assert len(files) == 4


def test_another_version_flag_or_source_is_another_answer(
    architecture: Architecture, plan: Plan, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, versions = plan.programs[0], verify.metadata.version
    files = [verify.cache_file(architecture, plan, program)]
    for name in verify.FLAGS:
        with monkeypatch.context() as patch:
            patch.setenv(name, "--some_flag=1")
            files.append(verify.cache_file(architecture, plan, program))
    for changed in verify.OURS:
        with monkeypatch.context() as patch:
            patch.setattr(verify.metadata, "version", lambda name, of=changed: versions(name) + "+" * (name == of))
            files.append(verify.cache_file(architecture, plan, program))
    with monkeypatch.context() as patch:
        patch.setattr(verify, "_sources", lambda packages: "others")
        files.append(verify.cache_file(architecture, plan, program))
    assert len(set(files)) == 6
    assert verify.cache_file(architecture, plan, program) == files[0]


def test_sources_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    for name, text in (("a.py", "one"), ("b.py", "two")):
        (tmp_path / name).write_text(text)
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    before = verify.sources_hash(files)
    assert verify.sources_hash(reversed(files)) == before
    (tmp_path / "a.py").write_text("six")
    assert verify.sources_hash(files) != before


def test_a_refusal_for_memory_is_an_answer_and_another_error_is_not(
    architecture: Architecture, plan: Plan, compiler: Compiler, cache: Path
) -> None:
    compiler.refuses = "it needs 20 GiB of HBM"
    decode, _ = verify.verify_plan(architecture, plan)
    assert (decode.peak_bytes, decode.refused) == (None, "it needs 20 GiB of HBM")
    assert verify.verify_plan(architecture, plan)[0].cached
    for file in cache.iterdir():
        file.unlink()
    compiler.refuses = "no such kernel"
    with pytest.raises(UnsupportedError, match="no such kernel"):
        verify.verify_plan(architecture, plan)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("content", ["{", "null", "3", "[]", "{}", '{"collectives": 1}'])
def test_a_damaged_answer_is_asked_for_again(
    architecture: Architecture, plan: Plan, compiler: Compiler, cache: Path, content: str
) -> None:
    verify.verify_plan(architecture, plan)
    for file in cache.iterdir():
        file.write_text(content)
    assert not any(one.cached for one in verify.verify_plan(architecture, plan))


def test_what_cannot_be_proven_is_refused(
    architecture: Architecture, plan: Plan, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = default_registry().architecture(ModelConfig.from_dict({**SMALL, "vocab_size": 2048}))
    with pytest.raises(PlanError, match="a plan serves one model"):
        verify.verify_plan(other, plan)
    monkeypatch.setattr(topology_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r'pip install "ttpu-jax\[tpu\]"'):
        verify.verify_plan(architecture, plan)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("name", "purpose", "quantization"),
    [
        ("v5e:2x2", "inference", None),
        ("v5e:2x2", "inference", "w4a16-g128"),
        ("v5e:2x2", "generation", None),
        ("2*v5e:2x2", "generation", None),
        pytest.param("2*v5e:2x2", "training", None, marks=pytest.mark.slow),
    ],
)
def test_the_compiler_agrees_with_a_plan_of_a_small_model(
    name: str, purpose: Any, quantization: str | None, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("libtpu")
    # One layer and few tokens, and for training few heads, compile in a small part of the time, and say the same of
    # memory.
    monkeypatch.setattr(serving, "BATCHED_TOKENS", 128)
    small = {**SMALL, "num_hidden_layers": 1, **(NARROW if purpose == "training" else {})}
    architecture = default_registry().architecture(ModelConfig.from_dict(small))
    request = Request(purpose, batch=8, context=128, quantization=quantization)
    plan = best_plan(architecture.spec, parse_topology(name), request)
    found = JaxBackend().verify_plan(architecture, plan)
    for program, one in zip(plan.programs, found, strict=True):
        assert one.peak_bytes is not None
        # Small programs are mostly what every program keeps beside its arrays.
        assert abs(program.memory.of_program - one.peak_bytes) < 64 * 2**20
        assert one.seconds > 0
    assert len(list(cache.iterdir())) == len(found)
