"""A custom block that inherits from the shared layer may replace one of its steps and keep the others. Experts on a
shortcut are added behind the next layer."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.spec import NO_ROPE, AttentionSpec, BlockSpec, LayerSpec, MLPSpec, MoESpec, NormSpec
from ttpu_core.spec.parameters import layer_parameters
from ttpu_jax.model.layers import DecoderLayer, run_layer
from ttpu_jax.model.modules import LayerInputs, Parameters, Runtime, Step, WithShortcut
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


def test_experts_on_a_shortcut_are_added_behind_the_next_layer() -> None:
    moe = MoESpec(3, 2, 5, dense=MLPSpec(6))
    first, second = (LayerSpec(ATTENTION, mlp, NormSpec()) for mlp in (moe, MLPSpec(4)))
    table, random = layer_parameters(first, HIDDEN), np.random.default_rng(0)
    arrays = {path: jnp.asarray(random.normal(size=p.shape), jnp.float32) for path, p in table.items()}
    without = {path: array * 0 if "experts.down" in path else array for path, array in arrays.items()}
    others = layer_parameters(second, HIDDEN)
    after = {path: jnp.asarray(random.normal(size=p.shape), jnp.float32) for path, p in others.items()}
    x = jnp.asarray(random.normal(size=(2, 5, HIDDEN)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(5), (2, 5))
    runtime, cache = Runtime(Placement()), NoCache(positions)

    def first_layer(values: dict[str, jax.Array], mlp: MoESpec) -> DecoderLayer:
        return DecoderLayer(replace(first, mlp=mlp), Parameters(values, table), runtime)

    step, last = Step(positions, ()), Step(positions, (), last_only=True)
    plain = np.asarray(run_layer(first_layer(without, moe), x, step, cache)[0])
    experts = np.asarray(run_layer(first_layer(arrays, moe), x, step, cache)[0]) - plain
    between = run_layer(first_layer(arrays, replace(moe, shortcut=True)), x, step, cache)[0]
    assert isinstance(between, WithShortcut)
    np.testing.assert_allclose(between.stream, plain, atol=1e-5)
    np.testing.assert_allclose(between.shortcut, experts, atol=1e-5)
    last_layer = DecoderLayer(second, Parameters(after, others), runtime)
    expected = np.asarray(last_layer(between.stream, step, cache)[0]) + experts
    np.testing.assert_allclose(run_layer(last_layer, between, step, cache)[0], expected, atol=1e-5)
    np.testing.assert_allclose(run_layer(last_layer, between, last, cache)[0], expected[:, -1:], atol=1e-5)
    alone = run_layer(first_layer(arrays, replace(moe, shortcut=True, dense=None)), x, step, cache)[0]
    np.testing.assert_allclose(alone.shortcut, experts, atol=1e-5)  # which no dense MLP changes
    assert np.abs(np.asarray(alone.stream) - plain).max() > 0.1
