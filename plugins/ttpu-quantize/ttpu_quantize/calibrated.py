"""Methods that look at the inputs of the products: a layer's weights and statistics of the inputs of its matrices come
in, quantized tensors go out, and the next layer sees what the quantized one returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.architecture import Architecture
from ttpu_core.backend import Calibrates, LayerRun
from ttpu_core.calibration import InputStatistics
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.errors import RequestError
from ttpu_core.loading import LoadOptions
from ttpu_core.mapping import FlaxMapping, Tensor, gather, scatter
from ttpu_core.quantization.rounding import dequantize, round_kernel
from ttpu_core.spec.kernel_format import KernelFormat, PartName
from ttpu_core.spec.parameters import LAYERS, SHARED, layer_paths
from ttpu_quantize import compressed_tensors as layout
from ttpu_quantize.clipping import round_clipped
from ttpu_quantize.folding import apply, folds, scaled
from ttpu_quantize.gptq import GPTQ
from ttpu_quantize.linears import Linear, Selection
from ttpu_quantize.scaling import AWQ, ObservedLayer, Scaling, squared_error
from ttpu_quantize.tensors import read_tensor, read_weights

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class LayerErrors:
    """Relative errors of a layer's products over the calibration text, by matrix: the root of the ratio of the squared
    errors to the squared outputs.

    Attributes:
        layer: its number.
        rounding: of rounding to nearest.
        method: of what was written.
    """

    layer: int
    rounding: dict[str, float]
    method: dict[str, float]


class Calibration:
    """A method, and the text that it looks at.

    Args:
        method: GPTQ, or a scaling after which weights are rounded to nearest.
        backend: runs the layers.
        options: where it runs them.
        tokens: int32 [texts, seq].
    """

    def __init__(self, method: GPTQ | Scaling, backend: Calibrates, options: LoadOptions, tokens: Array) -> None:
        self.method, self.backend, self.options, self.tokens = method, backend, options, tokens

    def described(self) -> dict[str, Any]:
        """Method and text as plain JSON values, which tell one request from another."""
        method: Any = self.method
        digest = sha256(self.tokens.tobytes()).hexdigest()
        return {"name": type(method).__name__, **asdict(method), "tokens": list(self.tokens.shape), "digest": digest}

    def formatted(self, selection: Selection) -> Selection:
        """The selection with the formats that the method writes: with an input order where it makes one."""
        if not isinstance(self.method, GPTQ) or self.method.order != "group":
            return selection

        def ordered(linear: Linear) -> Linear:
            grouped = linear.form.group_size is not None
            return replace(linear, form=replace(linear.form, input_order=True)) if grouped else linear

        linears = {layer: tuple(map(ordered, group)) if layer is not None else group
                   for layer, group in selection.linears.items()}
        return replace(selection, linears=linears)

    def begin(
        self, checkpoint: Checkpoint, architecture: Architecture, mapping: FlaxMapping, selection: Selection
    ) -> None:
        """Embed the text. The layers are then given to `quantize` or `skip` in order."""
        self._checkpoint, self._architecture, self._mapping, self._selection = (
            checkpoint,
            architecture,
            mapping,
            selection,
        )
        self._stored = mapping.canonical(checkpoint.tensors)
        self._shared = {
            linear.name: self._rounded(linear) for linear in selection.linears.get(None, ()) if _is_shared(linear)
        }
        outside = [path for path, _ in mapping.rules if path.startswith("embed.")]
        params = self._arrays({path: path for path in outside}, {})
        self._run: LayerRun = self.backend.layer_run(
            architecture, params, self.tokens, self.options, checkpoint.dtype
        )

    def skip(self, layer: int, tensors: Mapping[str, Array]) -> None:
        """Run a layer that was quantized before, from the tensors in its file."""
        linears = {linear.name: linear for linear in self._selection.linears.get(layer, ())}
        values = dict(self._shared)
        for name, stored in self._stored.items():
            if name in linears and f"{linears[name].module}.weight_scale" in tensors:
                linear = linears[name]
                values[name] = dequantize(layout.read_parts(linear, tensors), linear.form)
            elif stored in tensors:
                values[name] = tensors[stored].astype(np.float32)
        self._run.advance(layer, self._arrays(self._paths(layer), values))

    def quantize(self, layer: int, names: list[str]) -> tuple[dict[str, Array], LayerErrors]:
        """Quantize a layer, and run it as it is then.

        Args:
            layer: its number.
            names: of its tensors in the checkpoint's files.

        Returns:
            The tensors of its file, and the errors of its products.
        """
        linears = {linear.name: linear for linear in self._selection.linears.get(layer, ())}
        paths = self._paths(layer)
        originals: dict[str, Array] = {}
        arrays = self._arrays(paths, originals)
        prefix = f"{LAYERS}{layer}."
        forms = {
            use.path.removeprefix(prefix): replace(linear.form, input_order=False)
            for linear in linears.values()
            for use in linear.uses
        }
        statistics = dict(self._run.observe(layer, arrays, sorted(forms)))
        before = {name: (_moments(linear, statistics, prefix), originals[name]) for name, linear in linears.items()}
        if not isinstance(self.method, GPTQ):
            self._scale(layer, ObservedLayer(arrays, statistics, forms))
        changed = self._scattered(paths, arrays)
        stored = {actual: name for name, actual in self._stored.items()}
        tensors: dict[str, Array] = {}
        errors = LayerErrors(layer, {}, {})
        for actual in names:
            name = stored.get(actual, "")
            info = self._checkpoint.tensors[actual]
            if name not in linears:
                tensor = read_tensor(info)
                if name in changed and not np.array_equal(changed[name], originals[name]):
                    tensor = changed[name].astype(tensor.dtype)
                    changed[name] = tensor.astype(np.float32)
                tensors[actual] = tensor
                continue
            linear = linears[name]
            moments = _moments(linear, statistics, prefix)
            parts = self._round(changed[name], moments, linear.form)
            tensors |= layout.stored_tensors(linear, parts)
            rounded = dequantize(parts, linear.form)
            plain = replace(linear.form, input_order=False)
            first_moments, first = before[name]
            nearest = dequantize(round_kernel(first, plain), plain)
            errors.rounding[name] = _relative(nearest - first, first, first_moments)
            errors.method[name] = _relative(rounded - changed[name], changed[name], moments)
            changed[name] = rounded
        self._run.advance(layer, self._arrays(paths, changed | self._shared))
        return tensors, errors

    def _round(self, weights: Array, moments: Array | None, form: KernelFormat) -> dict[PartName, Array]:
        if isinstance(self.method, GPTQ):
            none = np.zeros((weights.shape[1],) * 2, np.float32)
            return self.method.round(weights, none if moments is None else moments, form)
        parts = round_kernel(weights, form)
        if moments is None or not isinstance(self.method, AWQ):
            return parts
        clipped = round_clipped(weights, np.diagonal(moments), form)
        errors = [squared_error(dequantize(each, form) - weights, moments) for each in (parts, clipped)]
        return clipped if errors[1] < errors[0] else parts

    def _scale(self, layer: int, observed: ObservedLayer) -> None:
        """Apply the scales of every fold of a layer, to its arrays and to the statistics."""
        assert not isinstance(self.method, GPTQ)
        spec = self._architecture.spec
        for fold in folds(spec.layers[layer], observed.arrays, is_source=layer in spec.kv_sources):
            found = self.method.scales(fold, observed)
            if found is None:
                continue
            applied = apply(fold, found, observed.arrays, self._checkpoint.dtype)
            for path in fold.consumers:
                if path in observed.statistics:
                    observed.statistics[path] = scaled(observed.statistics[path], applied)

    def _paths(self, layer: int) -> dict[str, str]:
        """Path within the layer → path in the model."""
        spec = self._architecture.spec
        return layer_paths(spec.layers[layer], layer, spec.hidden_size)

    def _rounded(self, linear: Linear) -> Array:
        """A matrix that several layers share, float32, as it is written: rounded to nearest."""
        weights = read_weights(self._checkpoint.tensors[linear.stored])
        return dequantize(round_kernel(weights, linear.form), linear.form)

    def _arrays(self, paths: Mapping[str, str], values: dict[str, Array]) -> dict[str, Array]:
        """Parameters float32 by the given names, made of tensors in `values`, which is filled with those that are
        read."""

        def read(name: str) -> Array:
            if name not in values:
                values[name] = read_weights(self._checkpoint.tensors[self._stored[name]])
            return values[name]

        arrays: dict[str, Array] = {}
        for name, path in paths.items():
            rule = self._mapping[path]
            arrays[name] = np.empty(rule.result_shape, np.float32)
            gather(rule, read, arrays[name])
        return arrays

    def _scattered(self, paths: Mapping[str, str], arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The tensors of a layer, float32, by the mapping's names."""
        tensors: dict[str, Array] = {}

        def buffer(leaf: Tensor) -> Array:
            return tensors.setdefault(leaf.name, np.empty(leaf.shape, np.float32))

        for name, path in paths.items():
            scatter(self._mapping[path], arrays[name], buffer)
        return tensors


def calibration_tokens(ids: tuple[int, ...], samples: int, length: int) -> Array:
    """Texts of equal length from all over a text: int32 [texts, length], as many as there are, at most `samples`.

    Raises:
        RequestError: the text is shorter than one of them.
    """
    count = min(samples, len(ids) // length)
    if count < 1:
        raise RequestError(
            f"texts of {length:,} tokens were asked for, but the calibration file has {len(ids):,}: lower --seq-len, "
            "or name a longer file."
        )
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    text = np.asarray(ids, np.int32)
    return np.stack([text[start : start + length] for start in starts])


def _is_shared(linear: Linear) -> bool:
    return linear.uses[0].path.startswith(SHARED)


def _moments(linear: Linear, statistics: Mapping[str, InputStatistics], prefix: str) -> Array | None:
    """The sum of x xᵀ over the inputs of a matrix, or None if none was observed."""
    for use in linear.uses:
        found = statistics.get(use.path.removeprefix(prefix))
        if found is not None:
            products = found.products if use.expert is None else found.products[use.expert]
            return products if np.any(products) else None
    return None


def _relative(difference: Array, weights: Array, moments: Array | None) -> float:
    """Relative error of the products; that of the weights where no input was observed."""
    if moments is None:
        moments = np.eye(weights.shape[1], dtype=np.float32)
    whole = squared_error(weights, moments)
    return float(np.sqrt(max(squared_error(difference, moments), 0.0) / whole)) if whole > 0 else 0.0


