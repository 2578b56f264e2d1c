"""A custom block that inherits from the shared layer may replace one of its steps and keep the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.spec import NO_ROPE, AttentionSpec, BlockSpec, LayerSpec, MLPSpec, NormSpec
from ttpu_core.spec.parameters import layer_parameters
from ttpu_jax.model.layers import DecoderLayer
from ttpu_jax.model.modules import LayerInputs, Parameters, Runtime, Step
from ttpu_jax.model.step_cache import NoCache
from ttpu_jax.params.placement import Placement

HIDDEN = 8
ATTENTION = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4, rope=NO_ROPE)
SPEC = LayerSpec(ATTENTION, MLPSpec(12), NormSpec(), BlockSpec("sandwich", layer_scalar=True))


class NoFeedForward(DecoderLayer):
    def feed_forward(self, x: jax.Array) -> jax.Array:
        return jnp.zeros_like(x)


class GivesWhatIsBeside(DecoderLayer):
    def leave(self, x: jax.Array, inputs: LayerInputs | None) -> jax.Array:
        assert inputs is not None
        assert inputs.beside is not None
        return super().leave(x + inputs.beside[:, -x.shape[1] :], inputs)


def run(kind: type[DecoderLayer], *, last_only: bool = False, zero: str = "") -> np.ndarray:
    table = layer_parameters(SPEC, HIDDEN)
    random = np.random.default_rng(0)
    arrays = {path: jnp.asarray(random.normal(size=p.shape), jnp.float32) for path, p in table.items()}
    arrays = {path: array * 0 if zero and path.startswith(zero) else array for path, array in arrays.items()}
    x, beside = (jnp.asarray(random.normal(size=(2, 5, HIDDEN)), jnp.float32) for _ in range(2))
    positions = jnp.broadcast_to(jnp.arange(5), (2, 5))
    layer = kind(SPEC, Parameters(arrays, table), Runtime(Placement()))
    step = Step(positions, (), last_only=last_only)
    return np.asarray(layer(x, step, NoCache(positions), LayerInputs(None, beside))[0])


def test_what_the_mlp_adds_can_be_replaced() -> None:
    np.testing.assert_allclose(run(NoFeedForward), run(DecoderLayer, zero="mlp.down"), rtol=1e-6)
    assert np.abs(run(NoFeedForward) - run(DecoderLayer)).max() > 0.1


def test_what_leaves_a_layer_can_be_replaced_and_is_scaled_after_it() -> None:
    table = layer_parameters(SPEC, HIDDEN)
    random = np.random.default_rng(0)
    scalar = {path: random.normal(size=p.shape) for path, p in table.items()}["layer_scalar"]
    random.normal(size=(2, 5, HIDDEN))
    beside = random.normal(size=(2, 5, HIDDEN))
    np.testing.assert_allclose(run(GivesWhatIsBeside) - run(DecoderLayer), beside * scalar, rtol=1e-4, atol=1e-5)


def test_the_last_token_alone_is_given_what_it_is_given_among_all() -> None:
    whole, last = run(GivesWhatIsBeside), run(GivesWhatIsBeside, last_only=True)
    np.testing.assert_allclose(last, whole[:, -1:], rtol=1e-5, atol=1e-6)
