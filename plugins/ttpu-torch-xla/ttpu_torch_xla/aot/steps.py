"""Records and compiles the programs of a stock model on a `TpuSlice`: prefill, one decode step with a cache of fixed
length, and one training step with AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import AttentionSpec, axes
from ttpu_torch_xla.aot.compile import CompiledGraph, compile_graph
from ttpu_torch_xla.aot.slice import TpuSlice
from ttpu_torch_xla.generation.cache import FixedCache, FixedLayer
from ttpu_torch_xla.sharding.apply import Sharding
from ttpu_torch_xla.xla.graph import argument_of

Step = Literal["prefill", "decode", "train"]


def compile_step(model: Any, step: Step, batch: int, context: int) -> CompiledGraph:
    """Compile one program of an `abstract_model`.

    Args:
        step: prefill reads `context` tokens a row into an empty cache and gives the last token's logits; decode reads
            one token a row with a cache of `context` slots; train is loss, gradients and AdamW on `context` tokens a
            row. Cache, weights and optimizer are updated in place.
        batch: rows in all.

    Raises:
        UnsupportedError: it does not fit the slice's memory.
    """
    compiled: dict[str, Callable[[Any, int, int], CompiledGraph]] = {
        "prefill": prefill,
        "decode": decode,
        "train": train,
    }
    with model.ttpu.runtime.recording():
        return compiled[step](model, batch, context)


def prefill(model: Any, batch: int, context: int) -> CompiledGraph:
    """Logits of the last tokens and the filled cache."""
    tpu: TpuSlice = model.ttpu.runtime
    cache = FixedCache(model.config, context, torch.tensor(0))
    with torch.no_grad():
        logits = model(_tokens(model, batch, context), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    sharding = Sharding(model.ttpu.parallelism, model.ttpu.mesh, tpu)
    filled = [sharding.constrain(one, axes.BATCH, axes.KV_HEADS, None, None) for one in _held(cache)]
    return compile_graph([logits, *filled], tpu)


def decode(model: Any, batch: int, context: int) -> CompiledGraph:
    """Logits of one new token a row, and the cache with its keys and values."""
    tpu: TpuSlice = model.ttpu.runtime
    sharding = Sharding(model.ttpu.parallelism, model.ttpu.mesh, tpu)
    cache = FixedCache(model.config, context, torch.tensor(0))
    shapes = _cache_shapes(model, batch, context)
    for layer, shape in zip(cache.layers, shapes, strict=True):
        assert isinstance(layer, FixedLayer)
        partition_spec = sharding.partition_spec((axes.BATCH, axes.KV_HEADS, None, None), shape)
        layer.keys, layer.values = (tpu.placeholder(shape, model.dtype, partition_spec) for _ in range(2))
        layer.is_initialized = True
    slot = tpu.placeholder((1,), torch.int64)
    cache.clock.begin_decode(slot, tpu.put(torch.tensor(0)))
    mask = tpu.placeholder((batch, context), torch.bool, sharding.partition_spec((axes.BATCH, None), (batch, context)))
    state = tpu.state(_held(cache))
    with torch.no_grad():
        logits = model(
            _tokens(model, batch, 1),
            attention_mask=mask,
            position_ids=slot.expand(batch, 1),
            past_key_values=cache,
            use_cache=True,
        ).logits
    return compile_graph([logits], tpu, state)


def train(model: Any, batch: int, context: int) -> CompiledGraph:
    """The loss, and weights and optimizer after one step in the middle of a training."""
    tpu: TpuSlice = model.ttpu.runtime
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=False)
    moments = []
    for one in parameters:
        _, partition_spec = tpu.partition_specs[argument_of(one)]
        mean, square = (tpu.placeholder(tuple(one.shape), one.dtype, partition_spec) for _ in range(2))
        # A step that is a number of the host would be another constant, and another program, each time.
        optimizer.state[one] = {"step": tpu.put(torch.tensor(1.0)), "exp_avg": mean, "exp_avg_sq": square}
        moments += [mean, square]
    for group in optimizer.param_groups:
        group["capturable"] = True
    state = tpu.state([*parameters, *moments])
    model.train()
    ids = _tokens(model, batch, context)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    return compile_graph([loss.detach()], tpu, state)


def _tokens(model: Any, batch: int, length: int) -> torch.Tensor:
    tpu: TpuSlice = model.ttpu.runtime
    sharding = Sharding(model.ttpu.parallelism, model.ttpu.mesh, tpu)
    return tpu.placeholder(
        (batch, length), torch.int64, sharding.partition_spec((axes.BATCH, None), (batch, length))
    )


def _held(cache: FixedCache) -> list[torch.Tensor]:
    layers = [layer for layer in cache.layers if isinstance(layer, FixedLayer)]
    return [one for layer in layers for one in (layer.keys, layer.values) if one is not None]


def _cache_shapes(model: Any, batch: int, context: int) -> list[tuple[int, int, int, int]]:
    shapes, spec = [], model.ttpu.architecture.spec
    for layer in spec.layers:
        if layer.mixers or not isinstance(layer.mixer, AttentionSpec):
            raise UnsupportedError(
                f"decoding of a {spec.model_type} was to be compiled, but its {layer.mixers[0].kind} keeps another "
                "cache than keys and values of each head: compile prefill or train."
            )
        shapes.append((batch, layer.mixer.num_kv_heads, context, layer.mixer.head_dim))
    return shapes
