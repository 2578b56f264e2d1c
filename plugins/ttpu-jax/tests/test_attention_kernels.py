"""Each attention kernel is held against the reference, forward and gradient. On a CPU it is interpreted: the same path
as on a TPU, but for the compiler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention import IMPLEMENTATIONS, AttentionContext, attend

BLOCKS = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
SMALL_BLOCKS = tuple((f"sa_block_{name}", 128) for name in BLOCKS)  # several of them in a sequence of 256
FAST_COMPILE: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
}

MHA = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=64)
GQA = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64)
MQA = AttentionSpec(num_heads=3, num_kv_heads=1, head_dim=128)


@dataclass(frozen=True)
class Case:
    """A layer, and rows of tokens of which some are padding or belong to several packed sequences."""

    spec: AttentionSpec
    seq: int = 256
    left: tuple[int, ...] = (0,)  # padding tokens before each row's first token
    right: tuple[int, ...] = (0,)  # and after its last
    packed: tuple[int, ...] = ()  # lengths of the sequences in each row
    options: tuple[tuple[str, Any], ...] = SMALL_BLOCKS

    def positions(self) -> tuple[jax.Array, jax.Array | None]:
        """Positions [batch, seq], and segments [batch, seq] of packed rows."""
        if self.packed:
            places = np.concatenate([np.arange(length) for length in self.packed])
            segments = np.concatenate([np.full(length, number) for number, length in enumerate(self.packed)])
            return jnp.asarray(places)[None], jnp.asarray(segments)[None]
        places = np.arange(self.seq)[None] - np.array(self.left)[:, None]
        return jnp.asarray(np.where(np.arange(self.seq) < self.seq - np.array(self.right)[:, None], places, -1)), None

    def arrays(self, dtype: Any) -> dict[str, jax.Array]:
        """What is differentiated: queries, keys, values and perhaps sinks."""
        spec, batch = self.spec, len(self.positions()[0])
        shapes = {
            "query": (batch, self.seq, spec.num_kv_heads, spec.q_per_kv, spec.head_dim),
            "key": (batch, spec.num_kv_heads, self.seq, spec.head_dim),
            "value": (batch, spec.num_kv_heads, self.seq, spec.value_dim),
        }
        keys = jax.random.split(jax.random.key(0), len(shapes))
        arrays = {  # numbers that bfloat16 has too
            name: jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)
            for (name, shape), key in zip(shapes.items(), keys, strict=True)
        }
        if spec.sinks:
            arrays["sinks"] = jax.random.normal(jax.random.key(1), (spec.num_kv_heads, spec.q_per_kv)) + 2
        return arrays


SPLASH_CASES = {
    "groups of query heads, left padding": Case(replace(GQA, head_dim=80), left=(0, 37, 200), seq=200),
    "a window within a block, left padding": Case(replace(GQA, window=40), left=(0, 37), seq=200),
    "a window over several blocks": Case(replace(GQA, window=150)),
    "a KV head for each query head, chunks, left padding": Case(replace(MHA, chunk=48), left=(0, 37), seq=200),
    "softcap, sinks, narrow values": Case(
        replace(GQA, head_dim=192, v_head_dim=128, logit_softcap=3.0, sinks=True), left=(0, 5), seq=140
    ),
    "packed sequences and a window": Case(replace(GQA, window=40), packed=(90, 60, 106)),
    "packed sequences and chunks": Case(replace(GQA, chunk=48), packed=(90, 60, 106)),
    "both directions, wide heads": Case(replace(GQA, head_dim=256, causal=False), left=(0, 37), seq=200),
    "one KV head, both directions, a window, right padding": Case(replace(MQA, window=40, causal=False), right=(0, 70)),
    "sequence-minor layouts, fused backward": Case(
        replace(GQA, window=150, scale=0.3),
        options=(
            *SMALL_BLOCKS,
            ("sa_use_fused_bwd_kernel", True),
            *((f"sa_{name}_layout", "SEQ_MINOR") for name in "qkv"),
        ),
    ),
    "default blocks": Case(replace(GQA, window=40, sinks=True), left=(0, 5), seq=70, options=()),
}
FLASH_CASES = {
    "groups of query heads, narrow values, left padding": Case(
        replace(GQA, head_dim=80, v_head_dim=48, scale=0.2), left=(0, 37), seq=140, options=()
    ),
    "one KV head, packed sequences and chunks": Case(replace(MQA, chunk=48), packed=(90, 60, 106), options=()),
    "a KV head for each query head, both directions": Case(
        replace(MHA, causal=False), right=(0, 70), seq=140, options=()
    ),
}
CASES = [
    *(pytest.param("splash_attention", case, id=f"splash: {name}") for name, case in SPLASH_CASES.items()),
    *(pytest.param("xla_flash_attention", case, id=f"flash: {name}") for name, case in FLASH_CASES.items()),
]


def output_and_gradients(
    name: str, case: Case, context: AttentionContext, dtype: Any = jnp.float32
) -> dict[str, np.ndarray]:
    """What attention gives for real tokens, and the gradients of a sum over them."""
    positions, segments = case.positions()
    real = (positions >= 0)[:, :, None, None, None]

    def loss(arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        mixed = attend(
            name,
            arrays["query"],
            arrays["key"],
            arrays["value"],
            positions,
            positions,
            case.spec,
            sinks=arrays.get("sinks"),
            segment_ids=None if segments is None else (segments, segments),
            context=context,
        )
        weights = jnp.cos(jnp.arange(mixed.size)).reshape(mixed.shape)
        return jnp.sum(jnp.where(real, mixed.astype(jnp.float32) * weights, 0)), mixed

    arrays = case.arrays(dtype)
    program = jax.jit(jax.grad(loss, has_aux=True)).lower(arrays).compile(compiler_options=FAST_COMPILE)
    gradients, mixed = program(arrays)
    assert np.isfinite(np.asarray(mixed, np.float32)).all()  # for padding queries too
    assert all(gradients[key].dtype == arrays[key].dtype for key in arrays)
    output = np.asarray(jnp.where(real, mixed, 0), np.float32)
    return {"output": output, **{k: np.asarray(v, np.float32) for k, v in gradients.items()}}


@cache
def reference(case: Case) -> dict[str, np.ndarray]:
    """`output_and_gradients` of the reference on one device."""
    return output_and_gradients("eager", case, AttentionContext())


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """Each array within `tolerance` of its largest element."""
    for name, array in expected.items():
        error, scale = np.abs(found[name] - array).max(), np.abs(array).max()
        assert error <= tolerance * scale, f"{name}: {error} of {scale}"


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_kernel_equals_the_reference_in_output_and_gradients(name: str, case: Case) -> None:
    context = AttentionContext(options=case.options)
    assert IMPLEMENTATIONS[name].serves(case.spec, context, case.seq, case.seq) is None
    assert_close(output_and_gradients(name, case, context), reference(case), 1e-5)


def test_a_kernel_in_bfloat16_is_as_near_as_bfloat16_is() -> None:
    case = SPLASH_CASES["default blocks"]
    found = output_and_gradients("splash_attention", case, AttentionContext(options=case.options), jnp.bfloat16)
    assert_close(found, reference(case), 2**-6)  # scaled queries, results and their gradients are rounded to 2**-8


@pytest.mark.parametrize("name", ["splash_attention", "xla_flash_attention"])
def test_a_kernel_on_eight_devices_equals_the_reference_on_one(name: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tensor"))
    spec = AttentionSpec(num_heads=8, num_kv_heads=4, head_dim=64)
    if name == "splash_attention":
        spec = replace(spec, window=40, sinks=True)
    case = Case(spec, left=(0, 37), seq=140, options=())
    context = AttentionContext(mesh=mesh, batch_axes=("data",), head_axes=("tensor",))
    assert_close(output_and_gradients(name, case, context), reference(case), 1e-5)
