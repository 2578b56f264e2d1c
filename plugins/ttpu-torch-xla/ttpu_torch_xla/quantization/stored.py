"""Puts the weights of a quantized checkpoint into quantized layers: as they are stored, one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint.header import TensorReader
from ttpu_core.errors import UnsupportedError
from ttpu_core.quantization.reading import read_parts, static_scale
from ttpu_core.quantization.report import format_words
from ttpu_core.quantization.schemes import QuantizedCheckpoint, QuantizedTensor
from ttpu_core.sharding.parallelism import Parallelism
from ttpu_torch_xla.quantization.linear import STORED, QuantizedLinear, split_blocks
from ttpu_torch_xla.quantization.swap import refuse_to_save
from ttpu_torch_xla.sharding.apply import devices_along_inputs
from ttpu_torch_xla.sharding.axes import memory_names

INSTEAD = "use backend='jax', or the original weights with quantization='w8a16'."


@dataclass
class StoredLayers:
    """The quantized layers of a model whose checkpoint is quantized.

    Args:
        held: the checkpoint's tensors.
        architecture: what the family says of the model, with a mapping that suits the checkpoint.
        parallelism: how the model is to be sharded; groups that devices would share are split for it.
    """

    held: QuantizedCheckpoint
    architecture: Architecture
    parallelism: Parallelism | None = None
    _layers: dict[str, tuple[QuantizedTensor, int | None]] = field(default_factory=dict, init=False)

    def swap(self, model: Any) -> None:
        """Replace the linear layers whose weights are stored quantized, in a model on the meta device.

        Raises:
            UnsupportedError: such a weight belongs to no linear layer, or has a format that none holds.
        """
        devices = devices_along_inputs(model, self.architecture, self.parallelism)
        for name, weight in self._by_layer(model):
            form = split_blocks(weight.format, weight.shape[-1], devices.get(name, 1))
            parent, _, last = name.rpartition(".")
            dense = model.get_submodule(name)
            layer = QuantizedLinear(
                dense.in_features,
                dense.out_features,
                dense.bias is not None,
                form,
                device="meta",
                dtype=dense.weight.dtype,
            )
            setattr(model.get_submodule(parent), last, layer.train(dense.training))
            self._layers[name] = weight, form.group_size

    def fill(self, model: Any) -> None:
        """Read the weights of the layers that `swap` replaced.

        Raises:
            CheckpointError: a file is truncated, or scales are NaN or infinite.
        """
        shared = self._with_one_input()
        with TensorReader() as reader:
            for name, (weight, size) in self._layers.items():
                step = static_scale(shared[weight.name], reader) if "input_scale" in weight.parts else None
                model.get_submodule(name).fill(read_parts(weight, reader, size), step)
        model.save_pretrained = refuse_to_save

    def _by_layer(self, model: Any) -> Iterator[tuple[str, QuantizedTensor]]:
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        in_memory, _ = memory_names(model, self.held.weights, names)
        for name, weight in self.held.weights.items():
            held_as, pattern = in_memory[name]
            layer, _, last = held_as.rpartition(".")
            module = model.get_submodule(layer) if pattern is None and held_as in names else None
            if type(module) is not nn.Linear or last != "weight":
                of_module = f"the {last} of a module {type(module).__name__}"
                what = "a tensor of stacked experts" if module is None else of_module
                raise UnsupportedError(
                    f"{self.held.source} holds {name!r} quantized ({self.held.scheme}), which transformers makes "
                    f"{what}, but this backend holds only the weights of plain linear layers quantized: {INSTEAD}"
                )
            if weight.dtype not in STORED:
                raise UnsupportedError(
                    f"{self.held.source} holds {name!r} as {format_words(weight.format)}, but this backend holds "
                    f"quantized weights as {', '.join(STORED)}: {INSTEAD}"
                )
            yield layer, weight

    def _with_one_input(self) -> dict[str, list[QuantizedTensor]]:
        """Weight → the weights of one kernel of the architecture, which have one input: queries, keys and values."""
        names = self.architecture.mapping.resolve(self.held.shapes, self.held.source)
        result: dict[str, list[QuantizedTensor]] = {}
        for _, rule in self.architecture.mapping.rules:
            found = [self.held.weights.get(names[leaf.name]) for leaf in rule.leaves()]
            together = [one for one in found if one is not None]
            result |= {one.name: together for one in together}
        return result
