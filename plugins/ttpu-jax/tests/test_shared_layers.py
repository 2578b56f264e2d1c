"""A decoder whose layers share blocks computes what one computes whose layers have copies of them, with their updates
added; gradients of the copies are summed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import (
    NO_ROPE,
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    SharedSpec,
)
from ttpu_core.spec.parameters import layer_paths
from ttpu_jax.model.cache import empty_cache
from ttpu_jax.model.causal_model import DecoderModel, causal_model
from ttpu_jax.model.layer_run import LayerRun
from ttpu_jax.model.modules import Runtime
from ttpu_jax.model.pipeline import check_stages
from ttpu_jax.params.placement import Placement
from ttpu_jax.under_test.model import stack

HIDDEN, RANK = 8, 3
ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=6, rope=NO_ROPE)
LAYER = LayerSpec(ATTENTION, MLPSpec(10), NormSpec(), BlockSpec(reads_embedding=True))
SHARED = tuple(
    replace(LAYER, block=replace(LAYER.block, shared=SharedSpec(block, qkv_rank=RANK, mlp_rank=RANK)))
    for block in (0, 1, 0, 1)
)
MODEL = ArchitectureSpec("any", EmbeddingSpec(12, HIDDEN), SHARED, NormSpec(), HeadSpec(), 64)
COPIES = replace(MODEL, layers=(LAYER,) * 4)
TOKENS = np.random.default_rng(1).integers(0, 12, (2, 7)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(7, dtype=np.int32), TOKENS.shape)
Arrays = dict[str, jax.Array]


def random_arrays() -> Arrays:
    random = np.random.default_rng(0)
    return {path: jnp.asarray(random.normal(size=p.shape), jnp.float32) for path, p in MODEL.parameters.items()}


def copied(arrays: Arrays) -> Arrays:
    """The parameters of `COPIES`: each layer's own copy of its block, its updates multiplied out and added."""
    found = {path: value for path, value in arrays.items() if not path.startswith(("shared.", "layers."))}
    for index, layer in enumerate(SHARED):
        own = {name: arrays[path] for name, path in layer_paths(layer, index, HIDDEN).items()}
        a, b = own.pop("attention.qkv.update.a"), own.pop("attention.qkv.update.b")
        slots = np.repeat(np.arange(3), (2, 1, 1))  # of two queries, a key and a value
        own["attention.qkv.kernel"] += jnp.einsum("ksdr,sri->ksdi", b, a[slots])
        a, b = own.pop("mlp.gate_up.update.a"), own.pop("mlp.gate_up.update.b")
        own["mlp.gate_up.kernel"] += jnp.einsum("por,ri->poi", b, a[0])
        found |= {f"layers.{index}.{name}": value for name, value in own.items()}
    return found


def decoder(spec: ArchitectureSpec, *, stacked: bool = False) -> DecoderModel:
    return causal_model(spec, Runtime(Placement()), stacked=stacked)


def logits(spec: ArchitectureSpec, arrays: Arrays, *, stacked: bool = False) -> jax.Array:
    params = stack(spec, arrays) if stacked else arrays
    return decoder(spec, stacked=stacked).forward(params, TOKENS, POSITIONS)[0]


@pytest.mark.parametrize("stacked", [False, True])
def test_logits_are_those_of_copies_with_their_updates_added(stacked: bool) -> None:
    arrays = random_arrays()
    expected = logits(COPIES, copied(arrays))
    np.testing.assert_allclose(logits(MODEL, arrays, stacked=stacked), expected, rtol=1e-4, atol=1e-4)


def test_gradients_of_what_is_shared_are_the_sums_of_those_of_copies() -> None:
    def loss(spec: ArchitectureSpec, arrays: Arrays, *, stacked: bool = False) -> jax.Array:
        return jnp.square(logits(spec, arrays, stacked=stacked)).mean()

    arrays = random_arrays()
    wanted = jax.grad(lambda arrays: loss(COPIES, copied(arrays)))(arrays)
    for stacked in (False, True):
        found = jax.grad(lambda arrays, stacked=stacked: loss(MODEL, arrays, stacked=stacked))(arrays)
        for path, gradient in found.items():
            scale = float(jnp.abs(wanted[path]).max())
            np.testing.assert_allclose(gradient, wanted[path], atol=2e-4 * scale, err_msg=path)


def test_each_layer_of_a_block_has_keys_of_its_own_in_the_cache() -> None:
    arrays, model = random_arrays(), decoder(MODEL)
    cache = empty_cache(MODEL, 2, 8, Placement(), np.dtype(np.float32))
    parts: list[jax.Array] = []
    for place in range(7):
        part, cache = model.forward(arrays, TOKENS[:, place : place + 1], cache=cache)
        parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), logits(MODEL, arrays), rtol=1e-4, atol=1e-4)
    keys: list[Any] = [held.key for held in cache.layers]
    assert len(keys) == 4
    assert float(jnp.abs(keys[0] - keys[2]).max()) > 0.1


def test_one_layer_at_a_time_computes_what_the_model_does() -> None:
    arrays = random_arrays()
    run = LayerRun(MODEL, Runtime(Placement()), arrays, TOKENS, np.dtype(np.float32))
    for index, layer in enumerate(SHARED):
        params = {name: arrays[path] for name, path in layer_paths(layer, index, HIDDEN).items()}
        seen = run.observe(index, params, ["attention.qkv.kernel", "mlp.down.kernel"])
        assert seen["attention.qkv.kernel"].products.shape == (2 * HIDDEN, 2 * HIDDEN)
        run.advance(index, params)
    module = decoder(MODEL).module(arrays)
    found = module.logits(module.finished(jnp.concatenate(run.streams)[:2]))
    np.testing.assert_allclose(found, logits(MODEL, arrays), rtol=1e-4, atol=1e-4)


def test_layers_that_read_the_embedding_are_in_no_stages() -> None:
    with pytest.raises(UnsupportedError, match="has an embedding that later layers read too, which would have"):
        check_stages(MODEL, 2)
