"""Chooses which kernels of a model are quantized, and gives them their format: `quantize_spec`. No weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any

from ttpu_core.errors import RequestError
from ttpu_core.quantization.config import QuantizationConfig, is_named
from ttpu_core.spec import ArchitectureSpec, Parameter, axes
from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_core.spec.latent_attention import LatentAttentionSpec
from ttpu_core.spec.parameters import LAYERS, SHARED

if TYPE_CHECKING:
    from ttpu_core.architecture import Architecture
    from ttpu_core.mapping import FlaxMapping

EMBEDDING, HEAD = "embed.embedding", "head.kernel"
ROWS = KernelFormat("int8")
"""The format of a quantized embedding table, whatever that of the layers is: a scale per row, so that a token's row is
read with one number beside it."""
SMALLEST_GROUP = 8
"""The fewest inputs of a group that was made finer so that it divides a kernel's inputs."""
_INPUT_AXES = (axes.EMBED, axes.KV_HEADS, axes.Q_HEADS, axes.LATENT, axes.MLP)


@dataclass(frozen=True)
class Choice:
    """The decision about one matrix: its format, or None and the reason why it stays as it is. Groups that are finer
    than those asked for have a reason too."""

    path: str
    format: KernelFormat | None
    reason: str = ""


def choices(
    spec: ArchitectureSpec, config: QuantizationConfig, mapping: FlaxMapping | None = None
) -> tuple[Choice, ...]:
    """The decision about each matrix of the model, in model order.

    Args:
        spec: the architecture.
        config: what is asked for.
        mapping: the checkpoint's rules, by whose tensor names `config.skip` may name kernels too.

    Raises:
        RequestError: no group size suits a kernel's inputs (see `fitting`), an entry of `skip` names no kernel, or the
            head is asked for but shares the embedding table.
    """
    if config.lm_head and spec.head.tied and not config.embeddings:
        raise RequestError(
            "the output head was to be quantized, but this model's head shares the embedding table: leave lm_head out, "
            "or in Python pass embeddings=True, which quantizes the table for both."
        )
    unused, wanted = set(config.skip), config.kernel_format
    found = []
    for path, parameter in spec.parameters.items():
        if not is_matrix(path):
            continue
        names = (path.removesuffix(".kernel"), *_tensor_names(path, mapping))
        skipped = [pattern for pattern in config.skip if any(is_named(name, pattern) for name in names)]
        unused.difference_update(skipped)
        reason = f"skipped by {skipped[0]!r}" if skipped else why_dense(path, parameter, spec, config)
        if reason:
            found.append(Choice(path, None, reason))
        else:
            own = fitting(wanted, parameter.shape[-1], path.removesuffix(".kernel")) if path != EMBEDDING else ROWS
            found.append(Choice(path, own, "" if own is ROWS else why_finer(own, wanted, parameter.shape[-1])))
    if unused:
        some = [one.path.removesuffix(".kernel") for one in found if one.path.startswith(LAYERS)][:3]
        raise RequestError(
            f"skip names {', '.join(repr(name) for name in sorted(unused))}, but no matrix of this model is called "
            f"that: take names such as {', '.join(some)}, or a run of their parts."
        )
    return tuple(found)


def quantize_spec(
    spec: ArchitectureSpec, config: QuantizationConfig, mapping: FlaxMapping | None = None
) -> ArchitectureSpec:
    """The architecture with the format of each quantized kernel; see `choices`.

    Raises:
        RequestError: nothing is quantized, or as for `choices`.
    """
    formats = tuple((one.path, one.format) for one in choices(spec, config, mapping) if one.format is not None)
    if not formats:
        raise RequestError(
            f"a {spec.model_type} model was to be quantized to {config}, but every kernel is skipped: skip fewer."
        )
    return replace(spec, kernel_formats=formats)


def quantize_architecture(architecture: Architecture, asked: Any) -> Architecture:
    """The architecture whose kernels are quantized while a dense checkpoint is loaded; unchanged for None.

    Args:
        architecture: with the mapping of the checkpoint (`FlaxMapping.suited_to`).
        asked: what `QuantizationConfig.read` reads, or None.

    Raises:
        RequestError: the weights are quantized already, or as for `quantize_spec`.
    """
    if asked is None:
        return architecture
    config = QuantizationConfig.read(asked)
    if architecture.spec.kernel_formats:
        raise RequestError(
            f"quantization={str(config)!r} was asked for, but the weights of this {architecture.spec.model_type} are "
            "quantized already: leave it out, or take the original weights."
        )
    return replace(architecture, spec=quantize_spec(architecture.spec, config, architecture.mapping))


@lru_cache(maxsize=64)
def planned_spec(spec: ArchitectureSpec, text: str | None) -> ArchitectureSpec:
    """The architecture quantized by a shorthand, for plans; unchanged without one, or if it has formats already.

    Raises:
        RequestError: no shorthand, or as for `quantize_spec`.
    """
    if text is None or spec.kernel_formats:
        return spec
    return quantize_spec(spec, QuantizationConfig.parse(text))


def fitting(form: KernelFormat, inputs: int, name: str) -> KernelFormat:
    """The format with groups that divide a kernel's inputs: of the size asked for, or else of the largest divisor of
    that size which divides the inputs, such as 16 instead of 32 for 496 inputs. Powers of two stay powers of
    two.

    Raises:
        RequestError: it is less than `SMALLEST_GROUP`, or the format has groups of one size only.
    """
    if form.group_size is None or inputs % form.group_size == 0:
        return form
    size = gcd(form.group_size, inputs)
    if form.dtype == "float4_e2m1fn":
        raise RequestError(
            f"mxfp4 was asked for, whose groups have {form.group_size} inputs, but {name} has {inputs}: take another "
            f"format, or skip {name!r}."
        )
    if size < SMALLEST_GROUP:
        raise RequestError(
            f"groups of {form.group_size} inputs were asked for, but {name} has {inputs} inputs, and the largest part "
            f"of a group that divides them is {size}, where {SMALLEST_GROUP} is the least: use a divisor of {inputs}, "
            f"one scale per output channel, or skip {name!r}."
        )
    return replace(form, group_size=size)


def why_finer(own: KernelFormat, wanted: KernelFormat, inputs: int) -> str:
    """The size of a kernel's groups and why it is not the one asked for; empty if it is."""
    if own.group_size == wanted.group_size:
        return ""
    return f"groups of {own.group_size}, because {wanted.group_size} does not divide {inputs} inputs"


def described(found: tuple[Choice, ...]) -> Iterator[str]:
    """One line per reason why matrices stay as they are: the reason and the paths, without numbers of layers."""
    for reason, paths in by_reason(one for one in found if one.format is None).items():
        yield f"{reason}: {', '.join(paths)}"


def by_reason(found: Iterable[Choice]) -> dict[str, tuple[str, ...]]:
    """Reason → paths, without numbers of layers, of the matrices that have a reason."""
    reasons: dict[str, dict[str, None]] = {}
    for one in found:
        if one.reason:
            reasons.setdefault(one.reason, {})[without_layer(one.path)] = None
    return {reason: tuple(paths) for reason, paths in reasons.items()}


def without_layer(path: str) -> str:
    """The path with * for the number of its layer or shared block."""
    if not path.startswith((LAYERS, SHARED)):
        return path
    kind, _, rest = path.split(".", 2)
    return f"{kind}.*.{rest}"


def is_matrix(path: str) -> bool:
    """Whether a parameter is a kernel or the embedding table."""
    return path.endswith(".kernel") or path == EMBEDDING


def why_dense(path: str, parameter: Parameter, spec: ArchitectureSpec, config: QuantizationConfig) -> str | None:
    """Why a matrix stays as it is, whatever the configuration skips; None if it is quantized."""
    if path == EMBEDDING:
        reason = "the embedding table, read by row (in Python embeddings=True quantizes it)"
        return None if config.embeddings else reason
    if path == HEAD:
        return None if config.lm_head else "the output head (lm_head quantizes it)"
    layers = spec.layers_of(path)
    if not layers:
        return "a part of this family alone"
    _, _, rest = path.split(".", 2)
    part, _, name = rest.partition(".")
    if part == "moe" and name in ("router.kernel", "shared_gate.kernel"):
        return "a router: rounding it sends tokens to other experts"
    if part in ("attention", "mlp", "moe"):
        return None
    mixers = layers[0].mixers
    if part != "mixer" or not mixers:
        return "a part of this family alone"
    mixer = mixers[0]
    if isinstance(mixer, LatentAttentionSpec) and not mixer.implementations:
        return None
    if parameter.axes[-1] in _INPUT_AXES and None not in parameter.axes:
        return None
    return "a small kernel of a recurrent or custom mixer"


def _tensor_names(path: str, mapping: FlaxMapping | None) -> Iterator[str]:
    if mapping is not None:
        for leaf in mapping[path].leaves():
            yield leaf.name.removesuffix(".weight")
