"""The slice that a program is compiled for is the smallest one that holds it, and its mesh suits the model."""

from __future__ import annotations

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
from ttpu_jax.aot.slices import fitting_report, inference_slices, training_slices
from ttpu_jax.aot.topology import chip_named

LLAMA_8B = Path(__file__).parents[3] / "examples" / "configs" / "llama-3.1-8b.json"
CACHE = 32 * 2048 * 2 * 32 * 8 * 128 * 2  # 32 rows of 2048 tokens, bfloat16


def llama_8b() -> Architecture:
    return default_registry().architecture(open_config(LLAMA_8B))


def mixture(experts: int, kv_heads: int) -> ArchitectureSpec:
    layer = LayerSpec(AttentionSpec(32, kv_heads, 128), MoESpec(experts, 2, 14336), NormSpec())
    return ArchitectureSpec("moe", EmbeddingSpec(32000, 4096), (layer,) * 32, NormSpec(), HeadSpec(), 4096)


@pytest.mark.parametrize(
    ("chip", "place"),
    [
        ("v5e", ("v5e:2x2", {"tensor": 4})),
        ("v5p", ("v5p:2x2x1", {"tensor": 4})),
        ("tpu7x", ("tpu7x:2x2x1", {"tensor": 8})),
    ],
)
def test_inference_takes_the_smallest_slice_that_holds_weights_and_cache(chip: str, place: Any) -> None:
    assert next(inference_slices(llama_8b().spec, chip_named(chip), CACHE)) == place


def test_what_kv_heads_cannot_share_goes_along_data() -> None:
    meshes = dict(inference_slices(llama_8b().spec, chip_named("v5e"), CACHE))
    assert meshes["v5e:2x4"] == {"tensor": 8} and meshes["v5e:4x4"] == {"data": 2, "tensor": 8}


def test_experts_take_the_devices_that_heads_leave() -> None:
    meshes = dict(inference_slices(mixture(8, 4), chip_named("v5e"), 0))
    assert meshes["v5e:4x4"] == {"expert": 4, "tensor": 4}
    assert meshes["v5e:8x8"] == {"data": 2, "expert": 8, "tensor": 4}


def test_training_shards_weights_and_optimizer_over_all_devices() -> None:
    assert next(training_slices(llama_8b().spec, chip_named("v5e"))) == ("v5e:4x4", {"fsdp": 16})


class TestFittingReport:
    """Of several places, the first on which the compiler does not refuse."""

    @pytest.fixture
    def tried(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
        tried: list[tuple[str, int]] = []

        def compile_report(architecture: Architecture, topology: str, *, batch: int, **_: Any) -> str:
            tried.append((topology, batch))
            if topology != "v5e:8x8":
                raise UnsupportedError("it needs 20.00 GiB of HBM on each device where 15.75 GiB are available")
            return topology

        monkeypatch.setattr(slices, "compile_report", compile_report)
        return tried

    def test_what_the_compiler_refuses_is_tried_on_the_next_slice(self, tried: list[tuple[str, int]]) -> None:
        architecture = llama_8b()
        found: Any = fitting_report(architecture, training_slices(architecture.spec, chip_named("v5e")), task="train")
        assert found == "v5e:8x8"
        assert tried == [("v5e:4x4", 16), ("v5e:4x8", 32), ("v5e:8x8", 64)]  # a row for each device

    def test_a_program_that_fits_on_none_is_refused_as_the_compiler_says(self, tried: list[tuple[str, int]]) -> None:
        with pytest.raises(UnsupportedError, match=r"needs 20\.00 GiB of HBM"):
            fitting_report(llama_8b(), [("v5e:1x1", {"tensor": 1})], task="decode", batch=1)
        assert tried == [("v5e:1x1", 1)]

    def test_without_a_place_there_is_no_report(self, tried: list[tuple[str, int]]) -> None:
        assert fitting_report(llama_8b(), [], task="train") is None and not tried


@pytest.mark.tpu_compile
def test_a_training_step_holds_weights_and_moments_once_and_cut_over_all_devices() -> None:
    pytest.importorskip("libtpu")
    small = {"model_type": "llama", "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512}  # fmt: skip
    architecture = default_registry().architecture(ModelConfig.from_dict(small))
    report = slices.compile_report(architecture, "v5e:2x4", task="train", batch=8, context=128, layers="scan")
    assert report.mesh == (("fsdp", 8),) and report.cache_in_place
    norms = 3 * 4 * 2 * 2 * 256  # whole on every device
    assert report.cache_bytes == pytest.approx(3 * 4 * report.num_parameters / 8 + norms, rel=0.05)
