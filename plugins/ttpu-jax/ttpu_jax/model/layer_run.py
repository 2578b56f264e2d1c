"""Runs a model one layer at a time over the same tokens, with parameters that the caller gives for each layer, and
observes the inputs of the layer's products. Memory holds one layer and the residual streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.calibration import InputStatistics
from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import ArchitectureSpec, LayerSpec, MoESpec, Parameter, axes
from ttpu_core.spec.parameters import layer_paths
from ttpu_jax.model.custom import custom_block, custom_embedding
from ttpu_jax.model.embedding import Embedding
from ttpu_jax.model.layers import DecoderLayer, run_layer
from ttpu_jax.model.modules import LayerInputs, Parameters, Runtime, Step, Stream
from ttpu_jax.model.step_cache import NoCache
from ttpu_jax.ops.observed import Gauge, ObservedKernel, added, empty_gauge
from ttpu_jax.ops.rope import rope_angles
from ttpu_jax.params.placement import Placement

ROWS = 4
"""Texts that go through a layer together."""


class LayerRun:
    """The layers of a model over some texts; see `ttpu_core.backend.LayerRun`.

    Args:
        spec: the architecture.
        runtime: the placement of arrays and the attention implementation.
        params: path → array, the parameters outside of layers.
        tokens: int32 [texts, seq].
        dtype: of weights and activations.

    Attributes:
        streams: the residual streams [rows, seq, hidden] after the last layer that advanced, one per batch.
    """

    def __init__(
        self,
        spec: ArchitectureSpec,
        runtime: Runtime,
        params: Mapping[str, np.ndarray],
        tokens: np.ndarray,
        dtype: np.dtype[Any],
    ) -> None:
        self.spec, self.runtime, self.dtype = spec, runtime, dtype
        self._programs: dict[Any, Any] = {}
        placement = runtime.placement
        table = {path: parameter for path, parameter in spec.parameters.items() if path.startswith("embed.")}
        arrays = self._placed({path: params[path] for path in table}, table)
        embedding = custom_embedding if spec.embedding.custom else Embedding
        devices = 1 if placement.mesh is None else placement.mesh.size
        # Where a batch cannot be divided, each device would count all of it, so some texts are taken twice instead.
        tokens = np.resize(tokens, (-(-len(tokens) // devices) * devices, tokens.shape[1]))
        rows = -(-ROWS // devices) * devices
        texts = [tokens[start : start + rows] for start in range(0, len(tokens), rows)]

        @jax.jit
        def embed(arrays: Any, tokens: jax.Array) -> Any:
            values = Parameters(arrays, table).at("embed")
            return embedding(spec.embedding, values, runtime)(tokens, _positions(tokens))

        self.streams: list[Stream] = []
        self._beside: list[jax.Array | None] = []
        self._embedded: list[jax.Array] = []
        for each in texts:
            stream, beside = embed(arrays, jnp.asarray(each, jnp.int32))
            self.streams.append(stream)
            self._beside.append(beside)
            if any(layer.block.reads_embedding for layer in spec.layers):
                self._embedded.append(stream)
        self._shared: list[dict[int, Any]] = [{} for _ in texts]

    def observe(
        self, layer: int, params: Mapping[str, np.ndarray], kernels: Sequence[str]
    ) -> Mapping[str, InputStatistics]:
        """Run a layer on what the layers before it returned, and keep nothing.

        Args:
            layer: the number of the next layer.
            params: path within the layer → array, all parameters of the layer.
            kernels: the paths of the kernels whose inputs are wanted.

        Returns:
            Path → statistics; a kernel that the layer does not multiply by is left out.
        """
        table = self._table(layer)
        arrays = self._placed(params, table)
        gauges = {path: _gauge_for(table[path]) for path in kernels}
        zeros, total = gauges, gauges
        run = self._program(layer, observes=True)
        for number, stream in enumerate(self.streams):
            found = run(zeros, arrays, stream, self._inputs(layer, number))
            total = {path: _added(total[path], found[path]) for path in kernels}
        held = jax.device_get(total)
        return {
            path: InputStatistics(gauge.tokens.astype(np.int64), *gauge[1:])
            for path, gauge in held.items()
            if gauge.tokens.any()
        }

    def advance(self, layer: int, params: Mapping[str, np.ndarray]) -> None:
        """Run a layer, and keep what it returns for the next one."""
        arrays = self._placed(params, self._table(layer))
        run = self._program(layer, observes=False)
        for number, stream in enumerate(self.streams):
            self.streams[number], keys = run(arrays, stream, self._inputs(layer, number))
            if layer in self.spec.kv_sources:
                self._shared[number][layer] = keys

    def _table(self, layer: int) -> dict[str, Parameter]:
        paths = layer_paths(self.spec.layers[layer], layer, self.spec.hidden_size)
        return {name: self.spec.parameters[path] for name, path in paths.items()}

    def _placed(self, params: Mapping[str, np.ndarray], table: Mapping[str, Parameter]) -> dict[str, jax.Array]:
        placement = self.runtime.placement
        return {
            path: jax.device_put(
                np.asarray(params[path], np.dtype(parameter.dtype) if parameter.dtype else self.dtype),
                placement.parameter(path, parameter),
            )
            for path, parameter in table.items()
        }

    def _inputs(self, layer: int, number: int) -> LayerInputs:
        mixer: Any = self.spec.layers[layer].mixer
        source = getattr(mixer, "kv_from_layer", None)
        beside = self._beside[number]
        keys = None if source is None else self._shared[number][source]
        embedding = self._embedded[number] if self.spec.layers[layer].block.reads_embedding else None
        return LayerInputs(keys, None if beside is None else beside[layer], embedding)

    def _program(self, layer: int, *, observes: bool) -> Any:
        """The compiled program of a layer; layers that are equal share one."""
        spec, is_source = self.spec.layers[layer], layer in self.spec.kv_sources
        key = (spec, is_source, observes)
        if key not in self._programs:
            run = partial(_run, spec, self._table(layer), self.runtime)
            program = jax.grad(partial(_sum, run)) if observes else partial(_kept, run, is_source)
            self._programs[key] = jax.jit(program)
        return self._programs[key]


def _run(
    spec: LayerSpec,
    table: Mapping[str, Parameter],
    runtime: Runtime,
    arrays: Mapping[str, Any],
    stream: Stream,
    inputs: LayerInputs,
) -> tuple[Stream, Any]:
    """One layer: stream [batch, seq, ...] → the same shape, and the keys and values that it attended to."""
    make = custom_block if spec.block.custom else DecoderLayer
    layer = make(spec, Parameters(arrays, table), runtime)
    positions = _positions(jax.tree.leaves(stream)[0])
    lengths = positions.max(axis=1) + 1
    by_feature = runtime.rotates_by_product
    angles = tuple(rope_angles(rope, positions, lengths, by_feature=by_feature) for rope in runtime.ropes)
    stream, _, keys = run_layer(layer, stream, Step(positions, angles), NoCache(positions), inputs)
    return stream, keys


def _kept(run: Any, is_source: bool, arrays: Any, stream: Stream, inputs: LayerInputs) -> tuple[Stream, Any]:
    stream, keys = run(arrays, stream, inputs)
    return stream, keys if is_source else None


def _sum(run: Any, gauges: Mapping[str, Gauge], arrays: Any, stream: Stream, inputs: LayerInputs) -> jax.Array:
    """A number that depends on every product of the layer."""
    bound = {path: ObservedKernel(array, gauges[path]) if path in gauges else array for path, array in arrays.items()}
    parts = jax.tree.leaves(run(bound, stream, inputs)[0])
    return jnp.stack([part.astype(jnp.float32).sum() for part in parts]).sum()


def _positions(x: jax.Array) -> jax.Array:
    """int32 [batch, seq] for x [batch, seq, ...] without padding."""
    return jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])


def _gauge_for(parameter: Parameter) -> Gauge:
    experts = parameter.shape[0] if axes.EXPERT in parameter.axes[:1] else None
    return empty_gauge(parameter.shape[-1], experts)


_added = jax.jit(added)


def check_layer_run(spec: ArchitectureSpec, padded: ArchitectureSpec, placement: Placement) -> None:
    """Refuse what cannot run layer by layer.

    Args:
        spec: the architecture.
        padded: the architecture as the mesh needs it.
        placement: the devices.

    Raises:
        UnsupportedError: the mesh pads the model, or shards the inputs of experts.
    """
    if padded != spec:
        raise UnsupportedError(
            f"a {spec.model_type} model was to be observed layer by layer on a mesh that pads its heads or its "
            "vocabulary, but statistics of padding mean nothing: use a mesh whose tensor axis divides them."
        )
    for layer in spec.layers:
        if not isinstance(layer.mlp, MoESpec) or placement.mesh is None:
            continue
        sizes = dict(placement.mesh.shape)
        shape = layer.mlp.num_experts, layer.mlp.intermediate_size
        if placement.strategy.mesh_axes((axes.EXPERT, axes.MLP), shape, sizes, "a layer of experts")[1]:
            raise UnsupportedError(
                f"a {spec.model_type} model was to be observed layer by layer on a mesh that shards each expert, but "
                "the statistics of an expert need all of its inputs: use an expert axis, or a data axis."
            )
