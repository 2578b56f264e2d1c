"""Programs of stock models compiled for TPUs that are not there, with kernels inside, cut over a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch

pytest.importorskip("torch_xla")
pytest.importorskip("ttpu_jax")

from ttpu_core import ModelConfig, default_registry
from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.parallelism import resolve_parallelism
from ttpu_torch_xla.aot.compile import compile_graph
from ttpu_torch_xla.aot.model import abstract_model
from ttpu_torch_xla.aot.slice import SliceMesh, TpuSlice, sharding_text
from ttpu_torch_xla.aot.steps import compile_step
from ttpu_torch_xla.patches.patch import active

pytestmark = pytest.mark.torch

SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 4096,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES, "tie_word_embeddings": False},
    "gemma2": {"model_type": "gemma2", **SIZES, "sliding_window": 64, "attn_logit_softcapping": 50.0},
    "falcon_h1": {"model_type": "falcon_h1", **SIZES, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_state": 16},
}
BATCH, CONTEXT, MESH = 8, 128, "fsdp=4,tensor=2"


@contextmanager
def on_slice(family: str, topology: str) -> Iterator[Any]:
    """The model of that family without weights; its patches are taken back at the end."""
    tpu = TpuSlice(topology)
    architecture = default_registry().architecture(ModelConfig.from_dict(CONFIGS[family]))
    model = abstract_model(architecture, CONFIGS[family], tpu, resolve_parallelism(MESH, tpu.num_devices()))
    try:
        yield model
    finally:
        model.ttpu.close()


def bytes_of(tensors: list[torch.Tensor], tpu: TpuSlice) -> int:
    """On one device, by the cuts that were noted."""
    total = 0
    for one in tensors:
        text = tpu.sharding_of(one)
        tiles = [int(size) for size in text.partition("[")[2].partition("]")[0].split(",")] if "[" in text else []
        if "last_tile" in text:
            tiles = tiles[:-1]
        total += one.numel() * one.element_size() // prod(tiles)
    return total


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "topology", "step", "kernels"),
    [
        ("llama", "v5e:2x4", "train", 6),  # forward, gradients of queries, of keys and values; two layers
        ("gemma2", "v6e:2x4", "prefill", 2),
        ("gemma2", "v5e:2x4", "decode", 0),  # which the reference serves
    ],
)
def test_a_stock_model_compiles_for_a_tpu_with_its_kernels(
    family: str, topology: str, step: Any, kernels: int
) -> None:
    with on_slice(family, topology) as model:
        tpu = model.ttpu.runtime
        weights = bytes_of(list(model.parameters()), tpu)
        whole = sum(one.numel() * one.element_size() for one in model.parameters())
        compiled = compile_step(model, step, BATCH, CONTEXT)
    assert compiled.num_devices == 8 and compiled.kernels == kernels
    assert weights < whole / 4  # what norms keep whole is little
    cache = 2 * 2 * BATCH // 4 * 1 * CONTEXT * 128 * 2  # of two layers: keys and values of own rows and KV heads
    held = {"prefill": weights, "decode": weights + cache, "train": 3 * weights}[step]
    assert held <= compiled.argument_bytes < 1.1 * held
    updated = {"prefill": 0, "decode": cache, "train": 3 * weights}[step]
    assert updated <= compiled.alias_bytes <= 1.1 * updated
    assert compiled.argument_bytes < compiled.peak_bytes < 2**30


def test_a_model_without_weights_takes_no_memory_and_leaves_no_patch() -> None:
    before = active()
    with on_slice("gemma2", "v5e:2x4") as model:
        assert {one.device.type for one in model.parameters()} == {"xla"}
        assert model.lm_head.weight is model.model.embed_tokens.weight
        with pytest.raises(RuntimeError):  # there is nothing to read
            model.lm_head.weight.cpu()
        sharding = model.ttpu.runtime.sharding_of(model.model.layers[0].self_attn.q_proj.weight)
        assert sharding.startswith("{devices=[2,4]")
        assert "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS._global_mapping[splash_attention]" in active()
    assert active() == before


def test_cuts_are_written_as_jax_writes_them() -> None:
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    sizes = {"data": 2, "fsdp": 4, "tensor": 2}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    for entries in (("tensor", None), (None, ("data", "fsdp")), ("fsdp", ("tensor", "data")), (("fsdp", "data"), None)):
        theirs = NamedSharding(mesh, PartitionSpec(*entries))._to_xla_hlo_sharding(2)
        devices = ",".join(map(str, theirs.tile_assignment_devices()))
        tiles = ",".join(map(str, theirs.tile_assignment_dimensions()))
        copies = " last_tile_dim_replicate" if len(theirs.tile_assignment_dimensions()) > 2 else ""
        assert sharding_text(SliceMesh(tuple(sizes.items())), entries) == f"{{devices=[{tiles}]{devices}{copies}}}"
    assert sharding_text(SliceMesh(tuple(sizes.items())), (None, None)) == "{replicated}"


@pytest.mark.tpu_compile
def test_arguments_are_told_apart_and_updated_where_they_are() -> None:
    tpu = TpuSlice("v5e:2x4")
    tpu.mesh({"x": 8})
    weight = tpu.placeholder((64, 128), torch.float32, ("x", None))
    bias = tpu.placeholder((128,), torch.float32)
    rows = tpu.placeholder((256, 64), torch.float32, (None, "x"))
    state = tpu.state([bias, weight])
    result = (rows @ weight + bias).sum()
    weight.mul_(2)
    bias.add_(1)
    compiled = compile_graph([result], tpu, state)
    main = compiled.executable.hlo_modules()[0].to_string()
    assert compiled.alias_bytes >= 8 * 128 * 4 + 128 * 4
    assert "f32[8,128]" in main and "f32[256,8]" in main and "f32[64,128]" not in main


@pytest.mark.tpu_compile
def test_a_graph_that_does_not_fit_is_refused_in_words() -> None:
    tpu = TpuSlice("v5e:2x4")
    large = tpu.placeholder((2**16, 2**16), torch.float32)
    with pytest.raises(UnsupportedError, match=r"the recorded graph was compiled for 'v5e:2x4', but it needs .* GiB"):
        compile_graph([large @ large], tpu)


def test_decoding_with_states_beside_keys_is_refused() -> None:
    with (
        on_slice("falcon_h1", "v5e:2x4") as model,
        pytest.raises(UnsupportedError, match="decoding of a falcon_h1 was to be compiled, but its state_space keeps"),
    ):
        compile_step(model, "decode", BATCH, CONTEXT)


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"data=4 was asked for, but 'v5e:2x4' is one slice of 8 devices"):
        TpuSlice("v5e:2x4").mesh({"data": 4})
