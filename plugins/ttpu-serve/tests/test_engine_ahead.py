"""An engine's programs for slices that are not there: the paged kernels are in them, pages are written where they are,
and an engine that starts on such devices finds them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from ttpu import LLM
from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import open_config
from ttpu_core.config import ModelConfig
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.registry import default_registry
from ttpu_core.sharding.hardware import chip_named
from ttpu_jax.aot.topology import TpuTopology
from ttpu_jax.runner import ahead
from ttpu_jax.runner.ahead import Ahead, AheadProgram, compile_ahead
from ttpu_jax.runner.compilation import Program
from ttpu_jax.runner.compilation_cache import VARIABLE
from ttpu_serve.api.engine_config import EngineConfig

LLAMA_8B = Path(__file__).parents[3] / "examples" / "configs" / "llama-3.1-8b.json"
LAYERS, DEVICES, KV_HEADS, HEAD_DIM, BF16 = 2, 8, 8, 128, 2
SEQUENCES, TOKENS, PAGES, PAGE = 16, 32, 2048, 128  # small steps, which compile in a fifth of the time of large ones
POOL = PAGES * PAGE * 2 * (KV_HEADS // DEVICES) * HEAD_DIM * BF16
"""Bytes of one layer's keys and values on one device."""

SMALL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
}


def llama(layers: int = LAYERS) -> Architecture:
    """Llama-3.1-8B with fewer layers."""
    return default_registry().architecture(open_config(LLAMA_8B).with_values({"num_hidden_layers": layers}))


def small(**changes: int) -> Architecture:
    return default_registry().architecture(ModelConfig.from_dict({**SMALL, **changes}))


def is_step(program: Program) -> bool:
    return isinstance(program.key, tuple) and program.key[0] == "step"


def is_mixed_step(program: Program) -> bool:
    key: Any = program.key
    return is_step(program) and bool(key[1].max_queries > 1)


@pytest.mark.tpu_compile
@pytest.mark.slow
class TestLlama8B:
    """Each of the two steps that serve, on eight devices."""

    @pytest.fixture(scope="class", params=["v6e:2x4"])
    @staticmethod
    def engine(request: pytest.FixtureRequest) -> Ahead:
        pytest.importorskip("libtpu")
        config = EngineConfig(
            max_model_len=8192,
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=TOKENS,
            sequence_buckets=(SEQUENCES,),
            token_buckets=(TOKENS,),
            num_pages=PAGES,
        )
        return compile_ahead(llama(), request.param, config, only=is_step)

    def test_a_layer_has_kernels_for_prompts_for_single_tokens_and_to_write_pages(self, engine: Ahead) -> None:
        """A step of one token a sequence has none for prompts."""
        assert [program.figures.kernels for program in engine.programs] == [3 * LAYERS, 2 * LAYERS]

    def test_pages_are_written_where_they_are_and_never_copied(self, engine: Ahead) -> None:
        for program in engine.programs:
            assert program.cache_bytes == LAYERS * POOL
            assert program.cache_in_place
            assert program.figures.temp_bytes < POOL // 2
            assert copies_of_pages(program) == []

    def test_a_layer_is_reduced_twice_and_rows_of_the_table_are_gathered(self, engine: Ahead) -> None:
        for program, tokens in zip(engine.programs, (TOKENS, SEQUENCES), strict=True):
            count, stream = 2 * LAYERS, tokens * 4096 * BF16
            found = {op: (times, size) for op, times, size in program.figures.collectives}
            assert found == {"all-reduce": (count, count * stream), "all-gather": (1, stream)}

    def test_weights_are_cut_eight_ways(self, engine: Ahead) -> None:
        spec = engine.runner.spec
        norms = (2 * LAYERS + 1) * spec.hidden_size * BF16  # whole on every device
        assert engine.weight_bytes == (spec.num_parameters * BF16 - norms) // DEVICES + norms

    def test_reading_the_weights_is_the_least_that_a_step_takes(self, engine: Ahead) -> None:
        table = engine.runner.spec.vocab_size * 4096 * BF16 // DEVICES  # of the embedding, of which few rows are read
        roofline = (engine.weight_bytes - table) / engine.topology.chip.hbm_bytes_per_second
        mixed, decode = (program.figures.seconds for program in engine.programs)
        assert roofline < decode < mixed


def copies_of_pages(program: AheadProgram) -> list[str]:
    """Instructions that copy something as large as a pool."""
    assert program.compiled is not None
    found = re.findall(r"= \(?\w+\[([\d,]+)\]\S* (copy|copy-start)\(", program.compiled.hlo_text)
    elements = POOL // BF16
    return [shape for shape, _ in found if np.prod([int(size) for size in shape.split(",")]) >= elements]


@pytest.mark.tpu_compile
class TestMemory:
    def test_pages_fill_what_weights_and_the_largest_step_leave(self) -> None:
        pytest.importorskip("libtpu")
        most = 64
        config = EngineConfig(
            max_num_seqs=most,
            max_num_batched_tokens=most,
            sequence_buckets=(most,),
            token_buckets=(most,),
            sampling_level="greedy",
        )
        architecture = small(max_position_embeddings=65_536)  # so long that these few sequences could use more pages
        engine = compile_ahead(architecture, "v5e:1x1", config, only=is_mixed_step)
        (program,), hbm = engine.programs, engine.topology.chip.hbm_bytes
        assert 0.9 * hbm < program.figures.peak_bytes < hbm

    def test_a_model_that_is_too_large_is_refused_before_it_is_compiled(self) -> None:
        pytest.importorskip("libtpu")
        with pytest.raises(UnsupportedError, match=r"'v5e:1x1' .* GiB more than each device's 15\.75 GiB: use more"):
            compile_ahead(llama(40), "v5e:1x1", EngineConfig())

    def test_pages_for_which_there_is_no_memory_are_refused(self) -> None:
        pytest.importorskip("libtpu")
        config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=16, num_pages=100_000)
        with pytest.raises(UnsupportedError, match="of HBM on each device"):
            compile_ahead(small(), "v5e:1x1", config, only=is_step)


@pytest.mark.tpu_compile
class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"adapters": {"poet": "./poet"}}, "LoRA adapters were asked for 'v5e:1x1'"),
            ({"speculative": "./draft"}, "draft model './draft'"),
        ],
    )
    def test_what_needs_devices_that_are_there(self, settings: dict[str, object], sentence: str) -> None:
        pytest.importorskip("libtpu")
        with pytest.raises(UnsupportedError, match=sentence):
            compile_ahead(small(), "v5e:1x1", EngineConfig(**settings))  # type: ignore[arg-type]

    def test_devices_that_would_repeat_each_other(self) -> None:
        pytest.importorskip("libtpu")
        with pytest.raises(UnsupportedError, match="one server per replica"):
            compile_ahead(small(), "v5e:2x2", EngineConfig(), mesh={"data": 4})

    def test_more_tokens_than_the_context(self) -> None:
        pytest.importorskip("libtpu")
        with pytest.raises(RequestError, match="context holds 8,192"):
            compile_ahead(small(), "v5e:1x1", EngineConfig(max_model_len=8193))


@pytest.mark.tpu_compile
def test_the_quantization_of_a_slice_is_that_of_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libtpu")
    from ttpu_jax.runner import slices

    class Compiled(Exception):
        pass

    def compiled(architecture: Architecture, *arguments: Any, **options: Any) -> None:
        found = ahead.abstract_runner(
            architecture, ahead.tpu_topology("v5e:1x1"), EngineConfig(), "bfloat16", None,
            use_pallas=options["use_pallas"],
        )  # fmt: skip
        assert found.runtime.use_pallas is False
        assert found.params["layers.0.mlp.down.kernel"].values.dtype == "int4"
        raise Compiled

    monkeypatch.setattr(slices, "compile_ahead", compiled)
    asked = {"bits": 4, "group_size": 128, "use_pallas": False}
    with pytest.raises(Compiled):
        slices.compile_slice(small(), "v5e:1x1", EngineConfig(), dtype="bfloat16", quantization=asked)


def test_an_engine_finds_every_program_that_was_compiled_ahead_for_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With eight virtual devices in place of a slice: what is traced ahead is what an engine traces, to the letter."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "programs"))
    devices = TpuTopology("v5e:2x4", chip_named("v5e"), tuple(jax.devices()))
    monkeypatch.setattr(ahead, "tpu_topology", lambda _: devices)
    checkpoint = tiny.llama_checkpoint(
        tmp_path / "llama", num_attention_heads=8, num_key_value_heads=4, head_dim=8, num_hidden_layers=1
    )
    settings = {
        "max_model_len": 32,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
        "sequence_buckets": (2,),
        "token_buckets": (8,),
        "page_size": 4,
        "num_pages": 20,
        "sampling_level": "greedy",
    }
    architecture = default_registry().architecture(open_config(checkpoint))
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    first = compile_ahead(architecture, "v5e:2x4", config, dtype="float32", store=True)
    assert all(program.compiled is not None for program in first.programs)
    again = compile_ahead(architecture, "v5e:2x4", config, dtype="float32", store=True)
    assert all(program.compiled is None for program in again.programs)
    assert [program.figures for program in again.programs] == [program.figures for program in first.programs]
    with LLM(str(checkpoint), **settings, parallelism_strategy="tensor=8", progress=None) as llm:
        pool = llm.engine.runner.pool
        assert pool.loaded == len(pool.keys) == len(first.programs)
