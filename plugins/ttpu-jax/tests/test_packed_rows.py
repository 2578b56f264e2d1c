"""Rows that hold several sequences give the losses and gradients of the sequences alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ttpu_core import ModelConfig, default_registry
from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import ArchitectureSpec
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.loss import TokenBatch, summed_loss
from ttpu_jax.model.modules import Runtime, Step, different_ropes
from ttpu_jax.model.step_cache import NoCache
from ttpu_jax.params.initialize import random_parameters
from ttpu_jax.params.padding import pad_for
from ttpu_jax.params.placement import local_placement
from ttpu_train.runner import LossSettings

SIZES = {
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    # Frequencies depend on the length of each sequence.
    "llama": {
        "model_type": "llama",
        **SIZES,
        "num_hidden_layers": 1,
        "max_position_embeddings": 4,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    },
    "gemma3": {"model_type": "gemma3_text", **SIZES, "sliding_window": 3, "sliding_window_pattern": 2},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {
        "model_type": "qwen3_next",
        **SIZES,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "mlp_only_layers": [0, 1],
    },
    "mistral4": {
        "model_type": "mistral4",
        **SIZES,
        "num_hidden_layers": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
}
LENGTHS = (7, 5, 4), (9, 6)  # of the sequences in each row
SEQ = 20
LOSS = LossSettings(label_smoothing=0.1, z_loss=1e-2, tokens_at_once=8)
ROUTED = LossSettings(label_smoothing=0.1, z_loss=1e-2, router_aux_loss=0.1, tokens_at_once=8)


def packed_and_alone() -> tuple[TokenBatch, TokenBatch]:
    """Two rows of several sequences, and the same sequences in rows of their own."""
    rng = np.random.default_rng(0)
    longest, number = max(map(max, LENGTHS)), sum(map(len, LENGTHS))
    names = "tokens", "weights", "positions", "segments"
    packed = {name: np.full((len(LENGTHS), SEQ), -(name == "positions"), np.float32) for name in names}
    alone = {name: np.full((number, longest), -(name == "positions"), np.float32) for name in names}
    row_alone = 0
    for row, lengths in enumerate(LENGTHS):
        begin = 0
        for segment, length in enumerate(lengths, start=1):
            weights = rng.uniform(0.5, 2, length)
            weights[0] = 0
            values = rng.integers(0, SIZES["vocab_size"], length), weights, np.arange(length), segment
            for name, value in zip(names, values, strict=True):
                packed[name][row, begin : begin + length] = value
                alone[name][row_alone, :length] = value
            begin, row_alone = begin + length, row_alone + 1
    del alone["segments"]

    def batch(arrays: dict[str, np.ndarray]) -> TokenBatch:
        return TokenBatch(
            **{name: jnp.asarray(a, jnp.float32 if name == "weights" else jnp.int32) for name, a in arrays.items()}
        )

    return batch(packed), batch(alone)


PACKED, ALONE = packed_and_alone()


@lru_cache
def architecture(family: str) -> ArchitectureSpec:
    return default_registry().architecture(ModelConfig.from_dict(CONFIGS[family])).spec


def losses_and_gradients(
    family: str, batch: TokenBatch, mesh: str | None = None, attention: str = "eager", *, stacked: bool = False
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The loss of each token that has a weight, in order, and the gradients of the parameters."""
    placement = local_placement(mesh)
    spec, paddings = pad_for(architecture(family), placement)
    runtime = Runtime(placement, attention, different_ropes(spec.layers))
    model = causal_model(spec, runtime, stacked=stacked, remat=stacked)
    settings = ROUTED if family == "mixtral" else LOSS
    whole = random_parameters(
        causal_model(architecture(family), Runtime(local_placement()), stacked=stacked).parameters,
        local_placement(),
        np.dtype(np.float32),
        standard_deviation=0.3,
    )
    padded = {path: paddings[path].pad(np.asarray(a)) if path in paddings else a for path, a in whole.items()}
    params = {path: jax.device_put(value, model.placements[path]) for path, value in padded.items()}

    def total(params: Any, weights: jax.Array) -> jax.Array:
        given = TokenBatch(batch.tokens, weights, batch.positions, batch.segments)
        sums = summed_loss(model, params, given, settings)
        return sums.total

    gradients, of_tokens = jax.jit(jax.grad(total, argnums=(0, 1)))(params, batch.weights)
    found = {path: np.asarray(value) for path, value in gradients.items()}
    found = {path: paddings[path].unpad(value) if path in paddings else value for path, value in found.items()}
    return np.asarray(of_tokens)[np.asarray(batch.weights) != 0], found


@lru_cache
def expected(family: str, *, stacked: bool = False) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    return losses_and_gradients(family, ALONE, stacked=stacked)


def assert_as_alone(family: str, *args: Any, stacked: bool = False) -> None:
    losses, gradients = losses_and_gradients(family, PACKED, *args, stacked=stacked)
    alone, gradients_alone = expected(family, stacked=stacked)
    np.testing.assert_allclose(losses, alone, rtol=2e-5)
    for path, gradient in gradients.items():
        scale = np.abs(gradients_alone[path]).max()
        np.testing.assert_allclose(gradient, gradients_alone[path], atol=3e-5 * scale + 1e-7, err_msg=path)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_sequence_in_a_row_of_several_is_as_alone(family: str) -> None:
    assert_as_alone(family, stacked=family == "mixtral")


@pytest.mark.parametrize(
    ("family", "mesh", "attention"),
    [
        ("llama", None, "xla_flash_attention"),
        ("gemma3", None, "splash_attention"),
        ("llama", "fsdp=2,sequence=4", "ring_attention"),
    ],
)
def test_so_it_is_with_every_attention(family: str, mesh: str | None, attention: str) -> None:
    assert_as_alone(family, mesh, attention)


def test_so_it_is_on_a_mesh_that_cuts_experts_and_pads_the_vocabulary() -> None:
    assert_as_alone("mixtral", "fsdp=2,tensor=4", stacked=True)


def test_a_mixer_that_does_not_reset_its_state_is_refused() -> None:
    def mixer(x: jax.Array, step: Step, state: None) -> tuple[jax.Array, None]:
        return x, None

    x = jnp.zeros((*PACKED.tokens.shape, 4))
    cache = NoCache(PACKED.positions, segments=PACKED.segments)
    with pytest.raises(UnsupportedError, match="packing=False"):
        cache.recur(mixer, x, Step(PACKED.positions, (), segments=PACKED.segments))
    assert cache.recur(mixer, x, Step(PACKED.positions, ()))[0] is x
