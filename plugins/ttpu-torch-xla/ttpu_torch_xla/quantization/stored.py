"""Puts the weights of a quantized checkpoint into quantized layers: as they are stored, one layer at a time."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint.header import TensorReader
from ttpu_core.errors import UnsupportedError
from ttpu_core.quantization.reading import read_parts, static_scale
from ttpu_core.quantization.report import format_words
from ttpu_core.quantization.schemes import QuantizedCheckpoint, QuantizedTensor
from ttpu_core.sharding.parallelism import Parallelism
from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_torch_xla.quantization.experts import QuantizedStack, hold, stack_of, stacks_in, why_dense
from ttpu_torch_xla.quantization.linear import STORED, QuantizedLinear, split_blocks
from ttpu_torch_xla.quantization.swap import refuse_to_save
from ttpu_torch_xla.sharding.apply import devices_along_inputs
from ttpu_torch_xla.sharding.axes import memory_names

INSTEAD = "use backend='jax', or the original weights with quantization='w8a16'."


@dataclass(frozen=True)
class _Part:
    """A weight of one expert: which of the weights that transformers joins to one (gate and up), of which expert."""

    weight: QuantizedTensor
    place: int
    expert: int

    @property
    def rows(self) -> slice:
        """Its outputs among those of the joined weights."""
        height = self.weight.shape[0]
        return slice(self.place * height, (self.place + 1) * height)


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
    _stacks: dict[str, list[_Part]] = field(default_factory=dict, init=False)

    def swap(self, model: Any) -> None:
        """Replace the linear layers and the stacked experts whose weights are stored quantized, in a model on the meta
        device.

        Raises:
            UnsupportedError: such a weight belongs to neither, or has a format that none holds.
        """
        devices = devices_along_inputs(model, self.architecture, self.parallelism)
        stacks = {name: (module, projection) for name, module, projection in stacks_in(model)}
        layers, joined = self._by_layer(model, stacks)
        for name, weight in layers.items():
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
        self._share(model)
        for name, parts in joined.items():
            experts, projection = stacks[name]
            dense = getattr(experts, projection)
            form = self._format_of(name, experts, tuple(dense.shape), parts)
            form = split_blocks(form, dense.shape[-1], devices.get(name, 1))
            hold(experts, projection, QuantizedStack(tuple(dense.shape), form, dense.dtype, device="meta"))
            self._stacks[name] = parts

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
            for name, parts in self._stacks.items():
                path, _, projection = name.rpartition(".")
                stack = stack_of(model.get_submodule(path), projection)
                assert stack is not None
                stack.allocate()
                for one in parts:
                    stack.fill(one.expert, one.rows, read_parts(one.weight, reader, stack.format.group_size))
        model.save_pretrained = refuse_to_save

    def _share(self, model: Any) -> None:
        """Replace the layers that are tied to a replaced one by the same layer, and leave transformers nothing of them
        to tie."""
        for other, weight in dict(model.all_tied_weights_keys).items():
            layer, _, last = weight.rpartition(".")
            if last == "weight" and layer in self._layers:
                parent, _, name = other.removesuffix(".weight").rpartition(".")
                setattr(model.get_submodule(parent), name, model.get_submodule(layer))
                del model.all_tied_weights_keys[other]

    def _by_layer(
        self, model: Any, stacks: dict[str, Any]
    ) -> tuple[dict[str, QuantizedTensor], dict[str, list[_Part]]]:
        """The stored weights by linear layer, and by tensor of stacked experts."""
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        in_memory, converters = memory_names(model, self.held.weights, names)
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        layers: dict[str, QuantizedTensor] = {}
        joined: defaultdict[str, list[_Part]] = defaultdict(list)
        for name, weight in self.held.weights.items():
            held_as, pattern = in_memory[name]
            if weight.dtype not in STORED:
                raise UnsupportedError(
                    f"{self.held.source} holds {name!r} as {format_words(weight.format)}, but this backend holds "
                    f"quantized weights as {', '.join(STORED)}: {INSTEAD}"
                )
            if held_as in stacks and pattern is not None:
                part = _part(weight, pattern, by_pattern[pattern])
                if part is not None:
                    joined[held_as].append(part)
                    continue
            layer, _, last = held_as.rpartition(".")
            module = model.get_submodule(layer) if pattern is None and held_as in names else None
            if type(module) is not nn.Linear or last != "weight":
                of_module = f"the {last} of a module {type(module).__name__}"
                what = "a part of another tensor" if module is None else of_module
                raise UnsupportedError(
                    f"{self.held.source} holds {name!r} quantized ({self.held.scheme}), which transformers makes "
                    f"{what}, but this backend holds only the weights of plain linear layers and of stacked experts "
                    f"quantized: {INSTEAD}"
                )
            layers[layer] = weight
        return layers, dict(joined)

    def _format_of(self, name: str, experts: Any, shape: tuple[int, ...], parts: list[_Part]) -> KernelFormat:
        """The one format of the weights [experts, out, in] of a stack.

        Raises:
            UnsupportedError: there is none, or no stack holds it.
        """
        forms = {replace(one.weight.format, input_order=False, scale_dtype="float32") for one in parts}
        orders: dict[int, set[bytes]] = {}
        for one in parts:
            order = one.weight.order
            orders.setdefault(one.expert, set()).add(b"" if order is None else order.tobytes())
        rows = sum(one.weight.shape[0] for one in parts)
        why = why_dense(experts, next(iter(forms)).activation)
        if rows != shape[0] * shape[1] or len(forms) > 1:
            why = "experts that are not all quantized in one way"
        elif any(len(found) > 1 for found in orders.values()):
            why = "experts whose gate and up store their inputs in different orders"
        if why is not None:
            raise UnsupportedError(
                f"{self.held.source} holds {name!r} quantized ({self.held.scheme}), but this backend does not hold "
                f"{why}: {INSTEAD}"
            )
        return replace(next(iter(forms)), input_order=any(one.weight.order is not None for one in parts))

    def _with_one_input(self) -> dict[str, list[QuantizedTensor]]:
        """Weight → the weights of one kernel of the architecture, which have one input: queries, keys and values."""
        names = self.architecture.mapping.resolve(self.held.shapes, self.held.source)
        result: dict[str, list[QuantizedTensor]] = {}
        for _, rule in self.architecture.mapping.rules:
            found = [self.held.weights.get(names[leaf.name]) for leaf in rule.leaves()]
            together = [one for one in found if one is not None]
            result |= {one.name: together for one in together}
        return result


def _part(weight: QuantizedTensor, pattern: str, converter: Any) -> _Part | None:
    """Where a conversion of transformers puts the weight [out, in] of an expert; None for one that does more than stack
    experts and join their outputs."""
    done = [(type(one).__name__, getattr(one, "dim", None)) for one in converter.operations]
    number = re.search(r"\.(\d+)" + re.escape(pattern.rpartition("*")[2]) + "$", weight.name)
    if number is None or len(weight.shape) != 2 or done not in ([_STACKED], [_STACKED, _JOINED]):
        return None
    return _Part(weight, converter.source_patterns.index(pattern), int(number[1]))


_STACKED, _JOINED = ("MergeModulelist", 0), ("Concatenate", 1)
