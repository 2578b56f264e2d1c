"""The compile level: where published models are compiled, what their programs may exchange, and one real program."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from broken import LLAMA, cases, declaration

from ttpu_conformance.case import CompileCase, cases_of
from ttpu_conformance.errors import CheckFailure
from ttpu_conformance.runner import run_one
from ttpu_conformance.selection import checks_for
from ttpu_core.architecture import Architecture
from ttpu_core.config import ModelConfig
from ttpu_core.registry import Registry

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
SMALL = LLAMA_8B | {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 4}


def registry(folder: Path) -> Registry:
    return cases(folder, "llama", LLAMA, "compile")[0].registry


def described(folder: Path, config: dict[str, Any]) -> Architecture:
    return registry(folder).architecture(ModelConfig.from_dict(config))


def compile_cases(folder: Path, config: dict[str, Any], **section: Any) -> list[CompileCase]:
    (folder / "config.json").write_text(json.dumps(config))
    published = {"Small": {"config": str(folder / "config.json"), **section.pop("slices", {})}}
    declared = declaration("llama", published=published, **section)
    made = cases_of("llama", registry=registry(folder), declaration=declared, compile_for=["v5e"])
    return [case for case in made if isinstance(case, CompileCase)]


def test_compile_checks_run_for_published_models_only(tmp_path: Path) -> None:
    (case,) = compile_cases(tmp_path, SMALL)
    assert case.name == "llama-Small@v5e"
    assert [item.check.id for item in checks_for([case])] == ["compiled_decode", "compiled_prefill", "compiled_train"]
    assert not any(item.check.level == "compile" for item in checks_for(cases(tmp_path, "llama", LLAMA)))


def test_a_type_that_publishes_no_model_says_so_when_compiling_is_asked_for(tmp_path: Path) -> None:
    made = cases_of("llama", registry=registry(tmp_path), declaration=declaration("llama"), compile_for=["v5e"])
    results = [run_one(item) for item in checks_for(made, levels=["compile"])]
    assert [(found.variant, found.status) for found in results] == [("unpublished@v5e", "skipped")] * 3
    assert "declares no published model of type 'llama', so that nothing was compiled for v5e" in results[0].reason


@pytest.mark.parametrize("variant", [None, "Small", "Small@v5e"])
def test_a_published_model_may_be_expected_to_fail(tmp_path: Path, variant: str | None) -> None:
    expected = {"check": "compiled_train", "reason": "too large"} | ({"variant": variant} if variant else {})
    (case,) = compile_cases(tmp_path, SMALL, expected_failures=[expected])
    marked = {item.check.id: item.expected for item in checks_for([case])}
    assert marked["compiled_train"] is not None and marked["compiled_decode"] is None


def exchanging(op: str, count: int, result_bytes: int, task: str = "decode", **mesh: int) -> Any:
    """A report of a program that runs one kind of collective."""
    one = SimpleNamespace(op=op, count=count, result_bytes=result_bytes)
    return SimpleNamespace(
        task=task,
        topology="v5e:2x4",
        mesh=tuple(mesh.items()),
        batch=32,
        tokens=1,
        num_parameters=10**6,
        collectives=[one],
    )


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (exchanging("all-reduce", 65, 65 * 32 * 512 * 4), None),
        (exchanging("all-gather", 2, 2 * 512 * 1024 * 2), "a weight, an expert or the cache is gathered"),
        (exchanging("all-to-all", 1, 8), None),
        (exchanging("ragged-all-to-all", 1, 8), "1 × ragged-all-to-all, which nothing in it should need"),
        (exchanging("ragged-all-to-all", 1, 8, expert=4), None),
        (exchanging("all-gather", 8, 8 * 10**6, "train"), None),
        (exchanging("all-gather", 8, 32 * 10**6, "train"), "gathered again and again"),
    ],
)
def test_exchanges_that_move_weights_are_found(tmp_path: Path, report: Any, message: str | None) -> None:
    from ttpu_conformance.checks.compilation import check_collectives

    spec = described(tmp_path, SMALL).spec
    if message is None:
        check_collectives(spec, report)
    else:
        with pytest.raises(CheckFailure, match=message):
            check_collectives(spec, report)


def test_rows_of_a_table_that_is_the_heads_too_are_not_exchanged(tmp_path: Path) -> None:
    from ttpu_conformance.checks.compilation import check_collectives

    spec = described(tmp_path, {**SMALL, "tie_word_embeddings": True}).spec
    with pytest.raises(CheckFailure, match="1 × all-to-all, which nothing in it should need"):
        check_collectives(spec, exchanging("all-to-all", 1, 8))


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_a_small_model_compiles_for_a_tpu_that_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    (case,) = compile_cases(tmp_path, SMALL, slices={"v5e": {"slice": "v5e:2x2", "mesh": "tensor=4"}})
    decode = next(iter(checks_for([case], only=["compiled_decode"])))
    result = run_one(decode)
    assert (result.status, result.level) == ("passed", "compile"), result.reason
    assert result.details["slice"] == "v5e:2x2" and result.details["mesh"] == {"tensor": 4}
    assert 0 < result.details["peak_bytes"] < result.details["hbm_bytes"]
