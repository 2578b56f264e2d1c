"""Low-rank adapters as trained parameters beside a frozen model (LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353).

A run holds the matrices A and B of each module as peft's files do, stacked over equal layers and without the mesh's
padding. Inside an update the mapping's rule makes an `AdaptedKernel` of a base kernel and the adapters of its modules,
so that the gradients of what a mesh repeats or pads need no rule of their own.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.errors import CheckpointError, UnsupportedError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.sharding.padding import Paddings
from ttpu_core.spec import ArchitectureSpec, Parameter, axes
from ttpu_jax.model.causal_model import DecoderModel, Params
from ttpu_jax.model.decoder import Decoder
from ttpu_jax.ops.kernels import AdaptedKernel
from ttpu_jax.ops.linear import adapted_norms
from ttpu_jax.params.placement import Placement
from ttpu_jax.train.adapter_targets import Block, Target, find_targets, whole_paths
from ttpu_jax.train.zero import without_batch

if TYPE_CHECKING:
    from ttpu_train.adapters import AdapterSettings

A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
PREFIX = "base_model.model."
"""What peft's files put before the base model's names."""
DROPOUT = "adapters.dropout"
"""Where the parameters of an update hold what its dropped inputs are drawn from: uint32 [2]."""


@dataclass(frozen=True, eq=False)
class Adapters:
    """The adapters of a run.

    Attributes:
        settings: of the run.
        targets: the kernels that have them.
        whole: the stacked paths of the base model's parameters that are trained too.
    """

    settings: AdapterSettings
    targets: tuple[Target, ...]
    whole: frozenset[str]

    @cached_property
    def names(self) -> Mapping[str, tuple[Target, Block, str]]:
        """Each trained array by name, with the kernel, the module, and which of its arrays it is."""
        kinds = (A, B, MAGNITUDE) if self.settings.use_dora else (A, B)
        return {f"{b.name}.{kind}": (t, b, kind) for t in self.targets for b in t.blocks for kind in kinds}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array: A [layers, rank, in], B [layers, out, rank], the magnitude [layers, out]."""
        _, block, kind = self.names[name]
        layers, rank = len(block.layers), self.settings.r
        return {
            A: (layers, rank, block.inputs),
            B: (layers, block.outputs, rank),
            MAGNITUDE: (layers, block.outputs),
        }[kind]

    def table(self, placement: Placement | None = None) -> dict[str, Parameter]:
        """Name → shape and logical axes, those of them that the placement's mesh divides."""

        def parameter(name: str) -> Parameter:
            shape = self.shape(name)
            logical: tuple[str | None, ...] = {
                A: (axes.LAYERS, None, axes.EMBED),
                B: (axes.LAYERS, axes.EMBED, None),
                MAGNITUDE: (axes.LAYERS, axes.EMBED),
            }[self.names[name][2]]
            if placement is not None:
                logical = placement.divisible(logical, shape)
            return Parameter(shape, logical, "zeros", "float32" if name.endswith(MAGNITUDE) else None)

        return {name: parameter(name) for name in self.names}

    def first(self, params: Params, seed: int, placement: Placement) -> dict[str, jax.Array]:
        """The arrays that a run begins with, as `init_lora_weights` says, in float32; the same on every mesh. For use
        inside jit.

        Args:
            params: stacked path → base parameter.
            seed: of the run.
            placement: of the weights.
        """
        settings, key = self.settings, jax.random.key(seed)
        arrays: dict[str, jax.Array] = {}
        for name, (_, block, kind) in self.names.items():
            shape, own = self.shape(name), jax.random.fold_in(key, zlib.crc32(name.encode()))
            if kind == A and settings.init_lora_weights == "gaussian":
                arrays[name] = jax.random.normal(own, shape) / settings.r
            elif kind == A or (kind == B and settings.init_lora_weights is False):
                bound = (block.inputs if kind == A else settings.r) ** -0.5  # torch.nn.Linear's
                arrays[name] = jax.random.uniform(own, shape, minval=-bound, maxval=bound)
            elif kind == B:
                arrays[name] = jnp.zeros(shape, jnp.float32)
        return arrays | self._magnitudes(params, arrays, placement)

    def bound(self, params: Params, placement: Placement) -> dict[str, Any]:
        """The parameters of the base model, in which kernels with adapters are `AdaptedKernel`s. For use inside jit.

        Args:
            params: the base model's parameters by stacked path, and the adapters' arrays by name.
            placement: of the weights.
        """
        found = {path: value for path, value in params.items() if path not in self.names and path != DROPOUT}
        return {**found, **{target.path: self._kernel(target, params, placement) for target in self.targets}}

    def served(self, params: Params, placement: Placement, dtype: np.dtype[Any]) -> dict[str, AdaptedKernel]:
        """The adapters of each kernel in the dtype of an engine, without the kernel. For use inside jit.

        Args:
            params: as for `bound`.
            placement: of the weights.
            dtype: that the engine computes in.
        """
        cast = {name: params[name].astype(dtype) for name in self.names if not name.endswith(MAGNITUDE)}
        bound = self.bound({**params, **cast}, placement)
        return {target.path: replace(bound[target.path], base=None) for target in self.targets}

    def layer_shardings(
        self, params: Params, placements: Mapping[str, Any], placement: Placement
    ) -> dict[str, AdaptedKernel]:
        """The shardings of adapted kernels of single layers, by the paths of layers.

        Args:
            params: what `bound` returned.
            placements: the shardings of the base model's kernels, by the paths of layers.
            placement: of the model that these are for.
        """
        found = {}
        for target in self.targets:
            kernel, logical = params[target.path], target.parameter.axes[1:]
            a = placement.sharding((None, None, logical[-1]), kernel.a.shape[1:], target.path)
            b = placement.sharding((*logical[:-1], None), kernel.b.shape[1:], target.path)
            magnitude = None
            if kernel.magnitude is not None:
                magnitude = placement.sharding(logical[:-1], kernel.magnitude.shape[1:], target.path)
            for copy in target.copies:
                found[copy] = replace(kernel, base=placements[copy], a=a, b=b, magnitude=magnitude)
        return found

    def modules(self) -> Iterator[tuple[str, int, str]]:
        """The name of each trained array, a place in it, and the name of that part in peft's files."""
        for name, (_, block, kind) in self.names.items():
            for place, module in enumerate(block.modules):
                yield name, place, f"{PREFIX}{module}.{kind}{'' if kind == MAGNITUDE else '.weight'}"

    def from_files(self, tensors: Mapping[str, np.ndarray], source: str) -> dict[str, np.ndarray]:
        """The arrays of an adapter in peft's format, float32.

        Args:
            tensors: name → tensor of the file.
            source: its folder, for errors.

        Raises:
            CheckpointError: it has not the tensors of these adapters.
        """
        arrays = {name: np.empty(self.shape(name), np.float32) for name in self.names}
        for name, place, stored in self.modules():
            wanted = arrays[name][place].shape
            if stored not in tensors or tensors[stored].shape != wanted:
                has = f"of shape {tensors[stored].shape}" if stored in tensors else "not there"
                raise CheckpointError(
                    f"the adapter {source} was to be trained on, but its {stored} is {has} where peft_config and the "
                    f"model need {wanted}: use its own adapter_config.json, or an adapter of this model."
                )
            arrays[name][place] = tensors[stored]
        return arrays

    def noise(self, seed: int, number: jax.Array | int, part: jax.Array | int) -> dict[str, jax.Array]:
        """What part `part` [] of update `number` [] draws its dropped inputs from; nothing without dropout."""
        if not self.settings.lora_dropout:
            return {}
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), part)
        return {DROPOUT: jax.random.key_data(key)}

    def _kernel(self, target: Target, params: Params, placement: Placement, *, plain: bool = False) -> AdaptedKernel:
        """The stacked kernel of a target; `plain` leaves out magnitudes and dropout."""
        rank, blocks, settings = self.settings.r, target.blocks, self.settings
        layers, ranks = len(target.copies), rank * len(blocks)
        each = [_of_all_layers(block, params[f"{block.name}.{A}"], layers) for block in blocks]
        a = target.inputs(jnp.concatenate(each, axis=1)).reshape(layers, len(blocks), rank, -1)
        columns = {
            block.role: jnp.pad(
                _of_all_layers(block, params[f"{block.name}.{B}"], layers),
                ((0, 0), (0, 0), (place * rank, ranks - (place + 1) * rank)),
            )
            for place, block in enumerate(blocks)
        }
        b = target.outputs(columns, ranks)
        magnitude = key = None
        if settings.use_dora and not plain:
            rows = {
                block.role: _of_all_layers(block, params[f"{block.name}.{MAGNITUDE}"], layers)[..., None]
                for block in blocks
            }
            magnitude = target.outputs(rows, 1)[..., 0]
        if DROPOUT in params and not plain:
            own = jax.random.fold_in(jax.random.wrap_key_data(params[DROPOUT]), zlib.crc32(target.path.encode()))
            key = jax.random.key_data(jax.random.split(own, layers))
        base, narrow = params[target.path], without_batch(placement)
        logical = target.parameter.axes[1:]
        kernel = AdaptedKernel(base, a, b, magnitude, key, settings.scaling, settings.lora_dropout)
        if placement.mesh is None:
            return kernel

        def laid(array: jax.Array, *by: str | None) -> jax.Array:
            return jax.lax.with_sharding_constraint(array, narrow.sharding((None, *by), array.shape, target.path))

        return AdaptedKernel(
            base,
            laid(a, None, None, logical[-1]),
            laid(b, *logical[:-1], None),
            None if magnitude is None else laid(magnitude, *logical[:-1]),
            key,
            settings.scaling,
            settings.lora_dropout,
        )

    def _magnitudes(
        self, params: Params, arrays: Mapping[str, jax.Array], placement: Placement
    ) -> dict[str, jax.Array]:
        """DoRA's magnitudes, the norms of the rows of each adapted module: [layers, out]."""
        if not self.settings.use_dora:
            return {}
        norms_of, copies_of = defaultdict[str, Any](float), defaultdict[str, Any](float)
        for target in self.targets:
            layers = len(target.copies)
            norms = jax.vmap(adapted_norms)(self._kernel(target, {**params, **arrays}, placement, plain=True))
            zeros = {block.role: jnp.zeros((layers, block.outputs, 1)) for block in target.blocks}
            # The transpose of what makes a kernel's outputs sums the copies that a mesh makes of them.
            sums = jax.vjp(lambda values, target=target: target.outputs(values, 1), zeros)[1]
            (total,), (count,) = sums(norms[..., None]), sums(jnp.ones_like(norms)[..., None])
            for block in target.blocks:
                name, layers_of = f"{block.name}.{MAGNITUDE}", np.asarray(block.layers)
                norms_of[name] += total[block.role][layers_of, :, 0]
                copies_of[name] += count[block.role][layers_of, :, 0]
        return {name: norms / copies_of[name] for name, norms in norms_of.items()}


@dataclass(frozen=True)
class AdaptedModel(DecoderModel):
    """A model whose parameters hold adapters beside its own. `reference` is the model without them, over the same
    parameters.

    Attributes:
        adapters: of the run.
    """

    adapters: Adapters = field(kw_only=True)

    @cached_property
    def reference(self) -> DecoderModel:
        """The base model: it reads the base weights alone of the same parameters."""
        return DecoderModel(self.spec, self.runtime, self.stacked, self.remat)

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """The base model's parameters by Flax path, and the adapters' arrays by name."""
        return {**self.reference.parameters, **self.adapters.table(self.runtime.placement)}

    @property
    def takes_masters(self) -> bool:
        """No: adapters are bound to whole kernels."""
        return False

    def module(self, params: Params) -> Decoder:
        """Build the decoder over the base parameters with the adapters bound to them."""
        return self.reference.module(self.adapters.bound(params, self.runtime.placement))


def find_adapters(
    settings: AdapterSettings, mapping: FlaxMapping, padded: ArchitectureSpec, paddings: Paddings
) -> Adapters:
    """The adapters that a run's settings describe.

    Args:
        settings: of the adapters.
        mapping: of the checkpoint, without padding.
        padded: the architecture as the mesh needs it.
        paddings: of the parameters of single layers.

    Raises:
        RequestError: a module that the model does not have.
        UnsupportedError: a module that adapters do not reach, or dropout on a mesh that pads inputs.
    """
    targets = find_targets(settings, mapping, padded, paddings)
    uneven = [target for target in targets if target.pads_inputs]
    if settings.lora_dropout and uneven:
        raise UnsupportedError(
            f"lora_dropout={settings.lora_dropout} was given on a mesh that pads the inputs of {uneven[0].path}, but "
            "other inputs would then be dropped than on one device: use a mesh whose tensor axis divides the model's "
            "heads and sizes, or lora_dropout: 0."
        )
    return Adapters(settings, targets, whole_paths(settings, targets, mapping, padded))


def _of_all_layers(block: Block, array: jax.Array, layers: int) -> jax.Array:
    """[layers of the stack, ...], zeros for layers without the adapter, from [adapted layers, ...]."""
    if len(block.layers) == layers:
        return array
    return jnp.zeros((layers, *array.shape[1:]), array.dtype).at[np.asarray(block.layers)].set(array)
