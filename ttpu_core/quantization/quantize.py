"""Chooses which kernels of a model are quantized, and gives them their format: `quantize_spec`. No weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ttpu_core.errors import RequestError
from ttpu_core.quantization.config import QuantizationConfig, is_named
from ttpu_core.spec import ArchitectureSpec, MixerSpec, Parameter, axes
from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_core.spec.latent_attention import LatentAttentionSpec
from ttpu_core.spec.parameters import LAYERS

if TYPE_CHECKING:
    from ttpu_core.architecture import Architecture
    from ttpu_core.mapping import FlaxMapping

EMBEDDING, HEAD = "embed.embedding", "head.kernel"
_INPUT_AXES = (axes.EMBED, axes.KV_HEADS, axes.Q_HEADS, axes.LATENT)


@dataclass(frozen=True)
class Choice:
    """The decision about one matrix: its format, or None and the reason why it stays as it is."""

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
        RequestError: a group size does not divide a kernel's inputs, an entry of `skip` names no kernel, or the head is
            asked for but shares the embedding table.
    """
    if config.lm_head and spec.head.tied and not config.embeddings:
        raise RequestError(
            "the output head was to be quantized, but this model's head shares the embedding table: pass "
            "embeddings=True, which quantizes the table for both."
        )
    unused = set(config.skip)
    found = []
    for path, parameter in spec.parameters.items():
        if not is_matrix(path):
            continue
        names = (path.removesuffix(".kernel"), *_tensor_names(path, mapping))
        skipped = [pattern for pattern in config.skip if any(is_named(name, pattern) for name in names)]
        unused.difference_update(skipped)
        reason = f"skipped by {skipped[0]!r}" if skipped else _reason(path, parameter, spec, config)
        found.append(Choice(path, None, reason) if reason else Choice(path, _fitting(path, parameter, config)))
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
        RequestError: as for `quantize_spec`.
    """
    if asked is None:
        return architecture
    config = QuantizationConfig.read(asked)
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


def described(found: tuple[Choice, ...]) -> Iterator[str]:
    """One line per reason why matrices stay as they are: the reason and the paths, without numbers of layers."""
    reasons: dict[str, dict[str, None]] = {}
    for one in found:
        if one.format is None:
            reasons.setdefault(one.reason, {})[without_layer(one.path)] = None
    for reason, paths in reasons.items():
        yield f"{reason}: {', '.join(paths)}"


def without_layer(path: str) -> str:
    """The path with * for the number of its layer."""
    if not path.startswith(LAYERS):
        return path
    _, _, rest = path.split(".", 2)
    return f"{LAYERS}*.{rest}"


def is_matrix(path: str) -> bool:
    """Whether a parameter is a kernel or the embedding table."""
    return path.endswith(".kernel") or path == EMBEDDING


def _reason(path: str, parameter: Parameter, spec: ArchitectureSpec, config: QuantizationConfig) -> str | None:
    """Why a matrix stays as it is, None if it is quantized."""
    if path == EMBEDDING:
        return None if config.embeddings else "the embedding table, read by row (embeddings=True quantizes it)"
    if path == HEAD:
        return None if config.lm_head else "the output head (lm_head=True quantizes it)"
    if not path.startswith(LAYERS):
        return "a part of this family alone"
    _, index, rest = path.split(".", 2)
    part, _, name = rest.partition(".")
    if part == "moe" and name in ("router.kernel", "shared_gate.kernel"):
        return "a router: rounding it sends tokens to other experts"
    if part in ("attention", "mlp", "moe"):
        return None
    mixer = spec.layers[int(index)].mixer
    if part != "mixer" or not isinstance(mixer, MixerSpec):
        return "a part of this family alone"
    if isinstance(mixer, LatentAttentionSpec) and not mixer.implementations:
        return None
    if parameter.axes[-1] in _INPUT_AXES and None not in parameter.axes:
        return None
    return "a small kernel of a recurrent or custom mixer"


def _fitting(path: str, parameter: Parameter, config: QuantizationConfig) -> KernelFormat:
    form = config.kernel_format
    inputs = parameter.shape[-1]
    if form.group_size is not None and inputs % form.group_size:
        raise RequestError(
            f"groups of {form.group_size} inputs were asked for, but {path} has {inputs} inputs: use a divisor of "
            f"that, one scale per output channel, or skip {path.removesuffix('.kernel')!r}."
        )
    return form


def _tensor_names(path: str, mapping: FlaxMapping | None) -> Iterator[str]:
    if mapping is not None:
        for leaf in mapping[path].leaves():
            yield leaf.name.removesuffix(".weight")
