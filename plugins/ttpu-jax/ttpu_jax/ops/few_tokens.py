"""A mixture of experts for few tokens, see `ttpu_jax.ops.few_tokens_tpu`. Gradients are those of `ttpu_jax.ops.moe`."""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import jax

from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.experts import FEW
from ttpu_core.spec import MoESpec
from ttpu_jax.ops.moe import ExpertKernels, choose_experts, run_experts

ExpertsForm = Literal["auto", "grouped", "few", "exchanged"]
BLOCK_BYTES = 5 << 20
"""Of a block of an expert's kernels."""
VMEM_BYTES = 15 << 20
"""That the kernel may take: nearly all of the 16 MiB that the compiler leaves to kernels on v5e."""
LANES = 128


class Router(NamedTuple):
    """Parameters of a router beside its kernel, float32 [choices] or None: see `choose_experts`."""

    correction_bias: jax.Array | None = None
    expert_scale: jax.Array | None = None


def why_not_few(spec: MoESpec, kernels: ExpertKernels, tokens: int, platform: str, form: ExpertsForm) -> str | None:
    """Why the form for few tokens does not serve, or None.

    Args:
        spec: the mixture.
        kernels: of the experts.
        tokens: that a device multiplies by its experts.
        platform: of the devices, see `grouped_linear`.
        form: the one that was asked for; "few" takes it for as many tokens as fit on the chip, and on a CPU
            interpreted.

    Raises:
        UnsupportedError: "few" was asked for, and for no number of tokens it serves.
    """
    if form in ("grouped", "exchanged"):
        return "another form was asked for"
    why = _unserved(spec, kernels, platform, form)
    if form == "few" and why is not None:
        raise UnsupportedError(f"experts='few' was asked for, but {why}: use 'auto' or 'grouped'.")
    if why is None and form == "auto" and tokens > FEW:
        why = f"{tokens} tokens are more than {FEW}"
    if why is None and _vmem_bytes(spec, kernels, tokens) > VMEM_BYTES:
        why = f"{tokens} tokens do not fit into VMEM beside blocks of kernels"
    return why


def _unserved(spec: MoESpec, kernels: ExpertKernels, platform: str, form: ExpertsForm) -> str | None:
    """Why the form serves no number of tokens."""
    if platform == "gpu" or (platform == "cpu" and form == "auto"):
        return "it is a kernel for TPUs"
    if not (isinstance(kernels.up, jax.Array) and isinstance(kernels.down, jax.Array)):
        return "it takes neither quantized kernels nor adapters"
    if spec.activation.name == "gelu":
        return "no kernel for TPUs computes the error function"
    if spec.identity_experts:
        return "it has no experts that return their input"
    return None


def _vmem_bytes(spec: MoESpec, kernels: ExpertKernels, tokens: int) -> int:
    """Of two blocks of kernels, tokens and results in flight, and of one block's results."""
    down = kernels.down
    assert isinstance(down, jax.Array)
    itemsize, hidden = down.dtype.itemsize, down.shape[-2]
    block_bytes = inner_block(spec, down) * _row_bytes(spec, down)
    return 2 * block_bytes + tokens * hidden * (2 * itemsize + 3 * 4)


def _row_bytes(spec: MoESpec, down: jax.Array) -> int:
    """Of an expert's kernels, the bytes of one inner feature."""
    return (3 if spec.gated else 2) * down.shape[-2] * down.dtype.itemsize


def inner_block(spec: MoESpec, down: jax.Array) -> int:
    """How many of an expert's inner features a block has: all, or a multiple of 128 that divides them, of at most
    BLOCK_BYTES where one does.

    Args:
        spec: the mixture.
        down: [experts, hidden, inner].
    """
    inner = down.shape[-1]
    limit = max(BLOCK_BYTES // _row_bytes(spec, down) // LANES * LANES, LANES)
    if inner <= limit or inner % LANES:
        return inner
    return next(block for block in range(limit, 0, -LANES) if inner % block == 0)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def run_few(
    x: jax.Array,
    logits: jax.Array,
    kernels: ExpertKernels,
    first: jax.Array | int,
    router: Router,
    spec: MoESpec,
    platform: str,
) -> jax.Array:
    """`choose_experts` and `run_experts` for few tokens.

    Args:
        x: [tokens, hidden].
        logits: [tokens, choices].
        kernels: arrays of the experts from index `first` on.
        first: scalar, the index of the first expert in `kernels`.
        router: its parameters.
        spec: the mixture.
        platform: of the devices. Where it is no TPU, the kernels are interpreted.

    Returns:
        float32 [tokens, hidden]. If the experts are sharded, the shards' results must be added.
    """
    from ttpu_jax.ops import few_tokens_tpu  # Pallas takes 0.4 s to import

    interpret, held = platform != "tpu", kernels.up.shape[0]
    routing = few_tokens_tpu.route(logits, spec, first, held, *router, interpret=interpret)
    kernels = jax.tree.map(lambda array: array.astype(x.dtype), kernels)
    assert isinstance(kernels.down, jax.Array)
    block = inner_block(spec, kernels.down)
    return few_tokens_tpu.run_visited(x, routing, kernels, spec, first, block, interpret=interpret)


def _plain(
    x: jax.Array,
    logits: jax.Array,
    kernels: ExpertKernels,
    first: jax.Array | int,
    router: Router,
    spec: MoESpec,
    platform: str,
) -> jax.Array:
    chosen, weights = choose_experts(logits, spec.router, spec.experts_per_token, *router)
    return run_experts(x, chosen, weights, kernels, spec, platform, first)


Operands = tuple[jax.Array, jax.Array, ExpertKernels, jax.Array | int, Router]


def _with_residuals(
    x: jax.Array,
    logits: jax.Array,
    kernels: ExpertKernels,
    first: jax.Array | int,
    router: Router,
    spec: MoESpec,
    platform: str,
) -> tuple[jax.Array, Operands]:
    return run_few(x, logits, kernels, first, router, spec, platform), (x, logits, kernels, first, router)


def _gradients(spec: MoESpec, platform: str, operands: Operands, gradient: jax.Array) -> tuple[object, ...]:
    x, logits, kernels, first, router = operands
    _, back = jax.vjp(
        lambda x, logits, kernels, router: _plain(x, logits, kernels, first, router, spec, platform),
        x,
        logits,
        kernels,
        router,
    )
    to_x, to_logits, to_kernels, to_router = back(gradient)
    return to_x, to_logits, to_kernels, None, to_router


run_few.defvjp(_with_residuals, _gradients)
