"""Latent attention gives the same logits from its cache, which holds latents, as from whole keys and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttpu_core.spec import ArchitectureSpec, EmbeddingSpec, HeadSpec, LayerSpec, MLPSpec, NormSpec, QueryTemperature
from ttpu_core.spec.latent_attention import latent_attention
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_core.spec.rope import NO_ROPE, RopeSpec
from ttpu_jax.model.cache import StateCache, empty_cache
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.decoder import Decoder
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.ops.attention import latent_decode
from ttpu_jax.params.placement import Placement, local_placement

FLOAT32 = np.dtype(np.float32)
TOLERANCE = 2e-5  # of the logits' scale
HIDDEN, VOCAB, LAYERS, RANK, ROTATED = 32, 64, 3, 12, 4
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 12)).astype(np.int32)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "query latent": {"q_lora_rank": 10},
    "no rope": {"rope": NO_ROPE},
    "query temperature": {"query_temperature": QueryTemperature(0.5, 4.0)},
    "biases": {"bias": True, "q_lora_rank": 10},
}


def architecture(**changes: Any) -> ArchitectureSpec:
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_heads": 4,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": ROTATED,
        "v_head_dim": 6,
        "rope": RopeSpec(rotary_dim=ROTATED, layout="interleaved"),
    }
    layer = LayerSpec(latent_attention(**(sizes | changes)), MLPSpec(48), NormSpec())
    return ArchitectureSpec("test", EmbeddingSpec(VOCAB, HIDDEN), (layer,) * LAYERS, NormSpec(), HeadSpec(), 64)


class Model:
    """A decoder with random parameters, equal on every mesh and however its layers are held."""

    def __init__(
        self, spec: ArchitectureSpec, mesh: str | None = None, *, stacked: bool = False, attention: str = "eager"
    ) -> None:
        self.spec, self.stacked, self.placement = spec, stacked, local_placement(mesh)
        self.attention = attention
        self.table = stacked_parameters(spec) if stacked else spec.parameters
        random = np.random.default_rng(1)
        whole = {
            path: 0.3 * random.standard_normal(parameter.shape, np.float32) + np.float32(parameter.init == "ones")
            for path, parameter in spec.parameters.items()
        }
        if stacked:
            first = "layers.0."
            for path in [path for path in whole if path.startswith(first)]:
                copies = [whole.pop(f"layers.{layer}.{path.removeprefix(first)}") for layer in range(LAYERS)]
                whole[f"groups.0.0.{path.removeprefix(first)}"] = np.stack(copies)
        self.params = {
            path: jax.device_put(array, self.placement.parameter(path, self.table[path]))
            for path, array in whole.items()
        }

    def decoder(self, params: Any) -> Decoder:
        runtime = Runtime(self.placement, self.attention, different_ropes(self.spec.layers))
        return causal_model(self.spec, runtime, stacked=self.stacked).module(params)

    def logits(self) -> np.ndarray:
        positions = np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), TOKENS.shape)
        run = jax.jit(lambda params, tokens, positions: self.decoder(params)(tokens, positions)[0])
        return np.asarray(run(self.params, TOKENS, positions))

    def logits_in_parts(self, lengths: list[int], *, fresh: bool = False, slots: int = 16) -> np.ndarray:
        cache = empty_cache(self.spec, len(TOKENS), slots, self.placement, FLOAT32, stacked=self.stacked)
        run = jax.jit(
            lambda params, tokens, cache, fresh: self.decoder(params)(tokens, None, cache, fresh=fresh),
            static_argnums=3,
        )
        parts, begin = [], 0
        for length in lengths:
            part, cache = run(self.params, TOKENS[:, begin : begin + length], cache, fresh and begin == 0)
            parts.append(np.asarray(part))
            begin += length
        return np.concatenate(parts, axis=1)


def assert_equal(ours: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(ours - wanted).max() <= TOLERANCE * np.abs(wanted).max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_absorbed_form_equals_the_expanded_one(variant: str) -> None:
    model = Model(architecture(**VARIANTS[variant]))
    assert_equal(model.logits_in_parts([12]), model.logits())


@pytest.mark.parametrize("lengths", [[5, 4, 3], [8, 1, 1, 1, 1]], ids=["chunks", "tokens"])
@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "stacked"])
def test_parts_written_one_after_the_other_equal_the_whole(lengths: list[int], stacked: bool) -> None:
    spec = architecture(q_lora_rank=10)
    assert_equal(Model(spec, stacked=stacked).logits_in_parts(lengths, fresh=True), Model(spec).logits())


def test_heads_cut_over_devices_read_the_cache_as_one_device_does() -> None:
    spec = architecture(q_lora_rank=10)
    model = Model(spec, "tensor=4")
    assert model.params["layers.0.mixer.key_up.kernel"].sharding.shard_shape((4, 8, RANK)) == (1, 8, RANK)
    assert_equal(model.logits_in_parts([10, 1, 1], fresh=True), Model(spec).logits())


@pytest.mark.parametrize("mesh", [None, "data=2,tensor=2"])
def test_the_kernel_for_decode_steps_reads_the_cache_as_the_absorbed_form_does(
    mesh: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttpu_jax.ops.attention.decode_kernel.BLOCK_BYTES", 1)
    steps: list[Any] = []
    attend = latent_decode.latent_decode
    monkeypatch.setattr(latent_decode, "latent_decode", lambda *given: steps.append(given) or attend(*given))
    spec = architecture(q_lora_rank=10)
    model = Model(spec, mesh, attention="decode_attention")
    assert_equal(model.logits_in_parts([9, 1, 1, 1], fresh=True, slots=256), Model(spec).logits())
    assert steps


def test_the_cache_holds_a_latent_and_one_rotated_key_per_token_and_nothing_per_head() -> None:
    spec = architecture()
    cache = empty_cache(spec, 2, 16, Placement(), FLOAT32)
    assert all(isinstance(layer, StateCache) for layer in cache.layers)
    shapes = [
        {name: array.shape for name, array in layer.arrays.items()}
        for layer in cache.layers
        if isinstance(layer, StateCache)
    ]
    assert shapes == [{"latent": (2, 16, RANK), "rope_key": (2, 16, ROTATED)}] * LAYERS
    assert spec.kv_bytes_per_token(2) == LAYERS * (RANK + ROTATED) * 2


def test_gradients_do_not_depend_on_the_form_that_computes_the_logits() -> None:
    model = Model(architecture(q_lora_rank=10))

    def loss(params: Any, *, cached: bool) -> jax.Array:
        if cached:
            cache = empty_cache(model.spec, len(TOKENS), 16, model.placement, FLOAT32)
            logits = model.decoder(params)(jnp.array(TOKENS), None, cache)[0]
        else:
            positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
            logits = model.decoder(params)(jnp.array(TOKENS), positions)[0]
        return -jax.nn.log_softmax(logits)[..., 0].mean()

    gradient_of = jax.jit(jax.grad(loss), static_argnames="cached")
    expanded, absorbed = (gradient_of(model.params, cached=cached) for cached in (False, True))
    for path, gradient in expanded.items():
        np.testing.assert_allclose(absorbed[path], gradient, atol=1e-4 * np.abs(gradient).max(), err_msg=path)
