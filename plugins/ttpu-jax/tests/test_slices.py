"""The slice that a program is compiled for is the smallest one that holds it, and its mesh suits the model."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from ttpu_core import default_registry
from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import open_config
from ttpu_core.config import ModelConfig
from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, EmbeddingSpec, HeadSpec, LayerSpec, MoESpec, NormSpec
from ttpu_jax.aot import slices
from ttpu_jax.aot.slices import candidates, fitting_report

LLAMA_8B = Path(__file__).parents[3] / "examples" / "configs" / "llama-3.1-8b.json"
GENERATIONS = ("v5e", "v5p", "v6e", "tpu7x")


def llama_8b() -> Architecture:
    return default_registry().architecture(open_config(LLAMA_8B))


def mixture(experts: int, kv_heads: int) -> ArchitectureSpec:
    layer = LayerSpec(AttentionSpec(32, kv_heads, 128), MoESpec(experts, 2, 14336), NormSpec())
    return ArchitectureSpec("moe", EmbeddingSpec(32000, 4096), (layer,) * 32, NormSpec(), HeadSpec(), 4096)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_an_8b_model_is_served_on_fewer_chips_than_it_is_trained_on(generation: str) -> None:
    spec = llama_8b().spec
    _, serving = next(candidates(spec, generation, task="decode"))
    _, training = next(candidates(spec, generation, task="train"))
    assert prod(serving.values()) <= prod(training.values())
    assert set(training) == {"fsdp"}


def test_slices_grow_and_weights_and_cache_fit_by_their_sizes() -> None:
    found = list(candidates(llama_8b().spec, "v5e", task="decode", batch=32, context=2048))
    # 15 GiB of weights and 8 GiB of cache, in 15.75 GiB a chip
    assert found[0] == ("v5e:1x2", {"data": 1, "tensor": 2})
    assert [name for name, _ in found[:4]] == ["v5e:1x2", "v5e:2x2", "v5e:2x4", "v5e:4x4"]
    assert found[3][1] == {"data": 2, "tensor": 8}  # eight KV heads


def test_experts_take_the_devices_that_heads_leave() -> None:
    meshes = dict(candidates(mixture(8, 4), "v5e", task="decode"))
    assert meshes["v5e:2x4"] == {"data": 1, "expert": 2, "tensor": 4}
    assert meshes["v5e:8x8"] == {"data": 2, "expert": 8, "tensor": 4}


def test_what_the_compiler_refuses_is_tried_on_the_next_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, Any]] = []

    def compile_report(architecture: Architecture, topology: str, **options: Any) -> str:
        tried.append((topology, options["batch"]))
        if len(tried) < 3:
            raise UnsupportedError("it needs 20.00 GiB of HBM on each device where 15.75 GiB are available")
        return topology

    monkeypatch.setattr(slices, "compile_report", compile_report)
    assert fitting_report(llama_8b(), "v5e", task="train") == "v5e:8x8"  # type: ignore[comparison-overlap]
    assert tried == [("v5e:4x4", 16), ("v5e:4x8", 32), ("v5e:8x8", 64)]  # a row for each device


def test_a_model_that_fits_nowhere_is_refused() -> None:
    config = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 65536, "num_hidden_layers": 200,
              "num_attention_heads": 512, "num_key_value_heads": 8, "intermediate_size": 262144}  # fmt: skip
    huge = default_registry().architecture(ModelConfig.from_dict(config))
    with pytest.raises(UnsupportedError, match="train of this llama model fits on no slice of up to 256 v5e chips"):
        fitting_report(huge, "v5e", task="train")


@pytest.mark.tpu_compile
def test_a_training_step_holds_weights_and_moments_once_and_cut_over_all_devices() -> None:
    pytest.importorskip("libtpu")
    small = {"model_type": "llama", "vocab_size": 1024, "hidden_size": 512, "num_hidden_layers": 2,
             "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1024}  # fmt: skip
    architecture = default_registry().architecture(ModelConfig.from_dict(small))
    report = slices.compile_report(architecture, "v5e:2x4", task="train", batch=8, context=256, layers="scan")
    assert report.mesh == (("fsdp", 8),) and report.cache_in_place
    norms = 3 * 4 * 2 * 2 * 512  # whole on every device
    assert report.cache_bytes == pytest.approx(3 * 4 * report.num_parameters / 8 + norms, rel=0.05)
