"""Scales that can be moved from the inputs of products into what makes these inputs, without changing what a layer
computes: into a norm before them, the rows of values before the output projection, or those of `up` before `down`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np

from ttpu_core.calibration import InputStatistics
from ttpu_core.spec import AttentionSpec, LayerSpec, MLPSpec, MoESpec, NormSpec
from ttpu_core.spec.latent_attention import LatentAttentionSpec

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

Arrays = dict[str, "Array"]
Kind = Literal["norm", "value", "up"]


@dataclass(frozen=True)
class Fold:
    """A place where inputs can be scaled.

    Attributes:
        kind: what is divided by the scales.
        producer: path of the norm, or of the kernel whose rows are divided.
        consumers: paths of all kernels that read these inputs; their columns are multiplied.
        norm: of the kind "norm".
        heads: (KV heads, query heads of one, features) of the kind "value".
    """

    kind: Kind
    producer: str
    consumers: tuple[str, ...]
    norm: NormSpec | None = None
    heads: tuple[int, int, int] | None = None


def folds(layer: LayerSpec, arrays: Mapping[str, Array], *, is_source: bool) -> Iterator[Fold]:
    """The folds of a layer that are exact.

    Args:
        layer: the layer.
        arrays: path → array, its parameters.
        is_source: other layers read this layer's keys and values, whose rows must then stay as they are.
    """
    if layer.block.custom is not None or layer.block.shared is not None:
        return
    placement = layer.block.placement
    before_mixer = _present(arrays, *_mixer_inputs(layer))
    before_mlp = _present(arrays, *_mlp_inputs(layer))
    if placement == "parallel":
        if before_mixer and before_mlp:
            yield from _after_norm("input_norm", layer.norm, (*before_mixer, *before_mlp), arrays)
    else:
        if before_mixer:
            yield from _after_norm("input_norm", layer.norm, before_mixer, arrays)
        if before_mlp:
            yield from _after_norm("mlp_norm", layer.norm, before_mlp, arrays)
    mixer = layer.mixer
    if isinstance(mixer, LatentAttentionSpec) and not mixer.implementations:
        yield from _after_norm("mixer.query_norm", mixer.norm, _present(arrays, "mixer.query_up.kernel"), arrays)
        both = _present(arrays, "mixer.key_up.kernel", "mixer.value_up.kernel")
        yield from _after_norm("mixer.kv_norm", mixer.norm, both, arrays)
    elif isinstance(mixer, AttentionSpec) and not is_source and _values_are_linear(mixer):
        heads = mixer.num_kv_heads, mixer.q_per_kv, mixer.value_dim
        own = "attention.value" if "attention.value.kernel" in arrays else "attention.qkv"
        yield Fold("value", own, ("attention.output.kernel",), heads=heads)
    for path in ("mlp", "moe.experts", "moe.shared", "moe.dense"):
        spec = _mlp_at(layer, path)
        if spec is not None and spec.gated and spec.inner_norm is None and spec.activation.name != "clamped_swiglu":
            yield Fold("up", f"{path}.gate_up", (f"{path}.down.kernel",))


def apply(fold: Fold, scales: Array, arrays: Arrays, dtype: str) -> Array:
    """Divide what makes the inputs by the scales and multiply what reads them, in place.

    Args:
        fold: where.
        scales: positive, [in], or [experts, in].
        arrays: path → float32 array, which are replaced.
        dtype: in which the checkpoint stores norms; the scales are changed so that the norm's new weights are exact.

    Returns:
        The scales that were applied, in the shape of `scales`.
    """
    if fold.kind == "norm":
        scales = _into_norm(fold, scales, arrays, dtype)
    elif fold.kind == "value":
        scales = _into_values(fold, scales, arrays)
    else:
        arrays[f"{fold.producer}.kernel"] = _into_up(arrays[f"{fold.producer}.kernel"], scales[..., None])
        if f"{fold.producer}.bias" in arrays:
            arrays[f"{fold.producer}.bias"] = _into_up(arrays[f"{fold.producer}.bias"], scales, axis=-2)
    for path in fold.consumers:
        arrays[path] = arrays[path] * _beside(scales, arrays[path])
    return scales


def symmetric(fold: Fold, scales: Array) -> Array:
    """The scales as this fold can have them: those of query heads that read the same value are made equal."""
    if fold.heads is None:
        return scales
    kv, group, features = fold.heads
    mean = np.exp(np.log(scales.reshape(kv, group, features)).mean(1, keepdims=True))
    return np.broadcast_to(mean, (kv, group, features)).reshape(-1)


def scaled(statistics: InputStatistics, scales: Array) -> InputStatistics:
    """The statistics of inputs that were divided by scales [in], or [experts, in]."""
    inverse = (1.0 / scales).astype(np.float32)
    return replace(
        statistics,
        products=statistics.products * inverse[..., :, None] * inverse[..., None, :],
        magnitude=statistics.magnitude * inverse,
        largest=statistics.largest * inverse,
    )


def _mixer_inputs(layer: LayerSpec) -> tuple[str, ...]:
    mixer = layer.mixer
    if isinstance(mixer, AttentionSpec):
        return "attention.qkv.kernel", "attention.value.kernel", "attention.gate.kernel"
    if isinstance(mixer, LatentAttentionSpec) and not mixer.implementations:
        first = "mixer.query.kernel" if mixer.q_lora_rank is None else "mixer.query_down.kernel"
        return first, "mixer.kv_down.kernel"
    return ()


def _mlp_inputs(layer: LayerSpec) -> tuple[str, ...]:
    if isinstance(layer.mlp, MLPSpec):
        return "mlp.gate_up.kernel", "mlp.up.kernel"
    if not isinstance(layer.mlp, MoESpec) or layer.mlp.router.norm is not None or layer.mlp.identity_experts:
        return ()  # a router's own norm would not see a scale, and experts that return their input would return it
    parts = ("experts", "shared", "dense")
    kernels = [f"moe.{part}.{name}.kernel" for part in parts for name in ("gate_up", "up")]
    return ("moe.router.kernel", "moe.shared_gate.kernel", *kernels)


def _mlp_at(layer: LayerSpec, path: str) -> MLPSpec | None:
    mlp = layer.mlp
    if isinstance(mlp, MoESpec):
        expert = MLPSpec(mlp.intermediate_size, mlp.activation, mlp.gated, mlp.expert_bias)
        return {"moe.experts": expert, "moe.shared": mlp.shared, "moe.dense": mlp.dense}.get(path)
    return mlp if path == "mlp" else None


def _values_are_linear(mixer: AttentionSpec) -> bool:
    """Whether a scale of value features comes out of the attention unchanged."""
    plain = mixer.v_norm is None and mixer.output_norm is None and mixer.clip_qkv is None and mixer.differential is None
    return plain and not mixer.value_is_key and mixer.kv_from_layer is None


def _present(arrays: Mapping[str, Array], *paths: str) -> tuple[str, ...]:
    return tuple(path for path in paths if path in arrays)


def _after_norm(
    path: str, norm: NormSpec | None, consumers: tuple[str, ...], arrays: Mapping[str, Array]
) -> Iterator[Fold]:
    if consumers and norm is not None and f"{path}.scale" in arrays:
        yield Fold("norm", path, consumers, norm)


def _into_norm(fold: Fold, scales: Array, arrays: Arrays, dtype: str) -> Array:
    assert fold.norm is not None
    path = f"{fold.producer}.scale"
    offset = np.float32(fold.norm.offset)
    before = arrays[path] + offset
    held = np.dtype(getattr(ml_dtypes, dtype, dtype))
    after = (before / scales - offset).astype(held).astype(np.float32) + offset
    exact = (before != 0) & (after != 0) & (np.sign(before) == np.sign(after))
    after = np.where(exact, after, before)
    scales = np.where(exact, before / np.where(exact, after, 1), 1).astype(np.float32)
    arrays[path] = after - offset
    bias = f"{fold.producer}.bias"
    if bias in arrays:
        arrays[bias] = arrays[bias] / scales
    return scales


def _into_values(fold: Fold, scales: Array, arrays: Arrays) -> Array:
    assert fold.heads is not None
    kv, group, features = fold.heads
    own = scales.reshape(kv, group, features)[:, 0]
    for name, of_row in (("kernel", own[..., None]), ("bias", own)):
        path = f"{fold.producer}.{name}"
        if path not in arrays:
            continue
        array = arrays[path].copy()
        if fold.producer.endswith("qkv"):
            array[:, -1] /= of_row
        else:
            array /= of_row
        arrays[path] = array
    return scales


def _into_up(array: Array, scales: Array, axis: int = -3) -> Array:
    """The second half along `axis`, which is `up`, divided by scales."""
    array = array.copy()
    index: tuple[Any, ...] = (Ellipsis, 1, *(slice(None),) * (-axis - 1))
    array[index] = array[index] / scales
    return array


def _beside(scales: Array, array: Array) -> Array:
    """scales [in] or [experts, in] so that they multiply the columns of array [*out, in] or [experts, *out, in]."""
    *lead, inputs = scales.shape
    return scales.reshape(*lead, *(1,) * (array.ndim - len(lead) - 1), inputs)
