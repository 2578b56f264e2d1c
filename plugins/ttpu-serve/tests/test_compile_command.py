"""`ttpu compile` fills the caches with what `ttpu serve` needs, and says what it takes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import jax
import pytest
import tiny
import typer
from jax.experimental.compilation_cache import compilation_cache
from typer.testing import CliRunner, Result

from ttpu_core.errors import MissingDependencyError, RequestError, TTPUError, UnsupportedError
from ttpu_core.sharding.parallelism import strategy_with
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, Strategy
from ttpu_jax.backend import JaxBackend
from ttpu_jax.runner.compilation_cache import JAX_DIRECTORY, JAX_SECONDS, VARIABLE
from ttpu_serve.cli import engine_options
from ttpu_serve.cli.compile import compile_programs
from ttpu_serve.cli.serve import serve

pytestmark = pytest.mark.slow  # together they take long; the lane of the newest jax does without

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
FEW = ("--max-num-seqs", 1, "--max-num-batched-tokens", 16)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A checkpoint whose weights are not there."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where programs are kept, by this command and by JAX."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "programs"))
    monkeypatch.setenv(JAX_SECONDS.upper(), "0")
    before = {name: getattr(jax.config, name) for name in (JAX_DIRECTORY, JAX_SECONDS)}
    jax.config.update(JAX_DIRECTORY, None)
    jax.config.update(JAX_SECONDS, 0)
    compilation_cache.reset_cache()
    yield tmp_path / "programs"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def run(*arguments: object, of: Any = compile_programs) -> Result:
    app = typer.Typer()
    app.command()(of)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> TTPUError:
    error = run(*arguments).exception
    assert isinstance(error, TTPUError), error
    return error


@pytest.mark.tpu_compile
class TestSlices:
    def test_programs_are_compiled_once_and_told_of_each_time(self, config: Path, folder: Path) -> None:
        pytest.importorskip("libtpu")
        first = run(config, "--topology", "v5e:2x4", *FEW)
        assert first.exit_code == 0, first.exception
        table = " ".join(first.stdout.split())
        assert "nothing ran on a TPU" in table
        assert "decode 1 tokens × 1 sequences" in table
        assert "beside them fit 5 pages of 128 tokens" in table
        command = f"ttpu serve {config} --parallelism-strategy tensor=8 --max-num-seqs 1 --max-num-batched-tokens 16"
        assert command in first.stdout
        stored = sorted(folder.glob("executables/tpu-v5-lite-8/*.program"))
        document = json.loads(run(config, "--topology", "v5e:2x4", *FEW, "--json").stdout)
        assert sorted(folder.glob("executables/tpu-v5-lite-8/*.program")) == stored
        (found,) = document["slices"]
        assert all(one["compiled_before"] for one in found["programs"])
        assert (found["mesh"], found["num_pages"], found["page_size"]) == ({"tensor": 8}, [5], 128)
        steps = [one for one in found["programs"] if one["cache_in_place"] is not None]
        assert [one["name"] for one in steps] == ["mixed 16 tokens × 1 sequences", "decode 1 tokens × 1 sequences"]
        # Of the one layer, attention and the writing of pages.
        assert all(one["cache_in_place"] and one["kernels"] == 2 for one in steps)
        # The step that says how much memory there is was compiled with other pages, and is kept as well.
        assert len(stored) == len(found["programs"]) + 1

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("v5e:3x7",), "3x7"),
            (("v9:2x2",), "the chips are"),
            (("v5e:4x4",), "4 machines, but the engine serves from one"),
            (("v5e:2x2", "--parallelism-strategy", "tensor=3"), "'v5e:2x2' has 4"),
            (("v5e:2x2", "--parallelism-strategy", "dp"), "one server per replica"),
            (("v5e:2x2", "--max-model-len", 1024), "context holds 512"),
            (("v5e:2x2", "--speculative", "./draft"), "use ngram"),
            (("v5e:2x2", "--enable-lora", "poet=./poet"), "LoRA"),
            (("v5e:2x2", "--kv-cache-dtype", "int3"), "kv_cache_dtype"),
            (("v5e:2x2", "--kv-cache-memory", 0), "GiB above 0"),
            (("v5e:2x2", "--dtype", "int3"), "weights are held in"),
        ],
    )
    def test_what_cannot_be_compiled_is_an_error_in_one_sentence(
        self, config: Path, arguments: tuple[object, ...], said: str
    ) -> None:
        pytest.importorskip("libtpu")
        error = refused(config, "--topology", *arguments)
        assert isinstance(error, UnsupportedError | RequestError)
        assert said in str(error)

    def test_without_libtpu_it_says_what_to_install(self, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        error = refused(config, "--topology", "v5e:2x2")
        assert isinstance(error, MissingDependencyError)
        assert "pip install" in str(error)


class TestThisMachine:
    def test_a_second_run_finds_everything(self, tmp_path: Path) -> None:
        checkpoint = tiny.llama_checkpoint(tmp_path / "llama", num_hidden_layers=1)
        arguments = (checkpoint, "--max-model-len", 32, *FEW, "--json")
        first = json.loads(run(*arguments).stdout)
        assert first["from_cache"] == 0
        names = {one["name"] for one in first["programs"]}
        assert {"decode 1 tokens × 1 sequences", "mixed 16 tokens × 1 sequences", "sample 1 all"} < names
        jax.clear_caches()
        again = json.loads(run(*arguments).stdout)
        assert {one["name"] for one in again["programs"]} == names
        assert again["from_cache"] >= len(names)

    def test_weights_that_are_not_there_are_an_error(self, config: Path) -> None:
        assert "put model.safetensors there" in str(refused(config))


def test_a_cache_that_is_off_is_an_error(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    for arguments in ((config,), (config, "--topology", "v5e:2x2")):
        assert f"let {VARIABLE} name one" in str(refused(*arguments))


def test_it_takes_the_engine_options_of_the_server() -> None:
    for command in (compile_programs, serve):
        options = signature(command).parameters
        for field in fields(engine_options.EngineOptions):
            assert options[field.name].default == field.default


def test_options_are_written_as_they_are_typed() -> None:
    given: dict[str, Any] = {
        "max_model_len": 8192,
        "kv_cache_dtype": "auto",
        "kv_cache_memory": 3 * 2**29,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "speculative": "ngram:4",
        "dtype": "bfloat16",
        "sharding_rules": {"expert": ("data", "tensor"), "embed": None},
        "plan": "my plan.json",
        "patch_packs": ["a", "b"],
        "adapters": {"poet": "./poet lora", "cook": "cook"},
    }
    assert " ".join(engine_options.words(given)) == (
        "--max-model-len 8192 --kv-cache-memory 1.5 --no-prefix-caching --speculative ngram:4 --dtype bfloat16 "
        "--sharding-rules expert=data+tensor,embed=none "
        "--plan 'my plan.json' --patch-pack a --patch-pack b --enable-lora 'poet=./poet lora' "
        "--enable-lora cook=cook"
    )


@pytest.mark.parametrize(
    ("words", "strategy", "mesh"),
    [
        ((), DEFAULT_STRATEGY, {"tensor": 8}),
        (("--sharding-rules", "expert=tensor"), strategy_with({"expert": "tensor"}), {"tensor": 8}),
        (("--mesh", "tensor=8", "--sharding-rules", "expert=none"), strategy_with({"expert": None}), {"tensor": 8}),
    ],
)
def test_sharding_rules_reach_the_compiler(
    config: Path, words: tuple[str, ...], strategy: Strategy, mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("libtpu")
    found: list[Any] = []

    def compile_ahead(*arguments: Any, mesh: Any, strategy: Strategy, **options: Any) -> None:
        found.extend((mesh, strategy))
        raise RequestError("enough")

    monkeypatch.setattr("ttpu_jax.runner.slices.compile_ahead", compile_ahead)
    assert "enough" in str(refused(config, "--topology", "v5e:2x4", *words))
    assert found == [mesh, strategy]


def test_a_plan_has_its_own_rules(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    words = "--plan", tmp_path / "plan.json", "--sharding-rules", "expert=tensor"
    assert "a plan has its own rules" in str(refused(config, "--topology", "v5e:2x4", *words))


def test_the_form_of_the_residual_stream_reaches_the_compiler(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def compile_slice(*arguments: Any, residual_stream: str, **options: Any) -> None:
        found.append(residual_stream)
        raise RequestError("enough")

    monkeypatch.setattr("ttpu_jax.runner.slices.compile_slice", compile_slice)
    refused(config, "--topology", "v5e:1x1")
    refused(config, "--topology", "v5e:1x1", "--residual-stream", "whole")
    assert found == ["auto", "whole"]
    error = refused(config, "--topology", "v5e:1x1", "--residual-stream", "half")
    assert "residual_stream='half'" in str(error) and "whole" in str(error)


def test_the_quantization_of_a_config_and_that_asked_for_reach_the_compiler(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, Any]] = []

    def compile_ahead(self: Any, architecture: Any, *arguments: Any, quantization: Any, **options: Any) -> None:
        found.append((len(architecture.spec.kernel_formats), quantization))
        raise RequestError("enough")

    monkeypatch.setattr(JaxBackend, "compile_ahead", compile_ahead)
    refused(config, "--topology", "v5e:1x1", "--quantization", "w4a16-g128")
    written = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    (config / "config.json").write_text(json.dumps(SMALL | {"quantization_config": written}))
    refused(config, "--topology", "v5e:1x1")
    assert found == [(0, "w4a16-g128"), (4, None)]
