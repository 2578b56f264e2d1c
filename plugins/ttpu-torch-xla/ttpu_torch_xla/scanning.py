"""Traces and compiles equal layers once. The loop over the decoder layers of a stock model becomes one loop of the
compiled program, wherever no cache is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ttpu_core.architecture import Architecture
from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.parallelism import Parallelism
from ttpu_torch_xla.runtime import current
from ttpu_torch_xla.sharding.apply import decoder_layers


def refuse_scan(parallelism: Parallelism | None) -> None:
    """Refuse a scan that cannot work, before the model is loaded.

    Raises:
        UnsupportedError: the model is to be sharded over devices, where torch_xla's loop disables the partitioner that
            JAX uses in the same process.
    """
    if parallelism is not None:
        raise UnsupportedError(
            f"scan_layers=True was asked for on the mesh {parallelism}, but layers are scanned on one device only: "
            "leave scan_layers or the mesh out."
        )


def scan_layers(model: Any, architecture: Architecture) -> None:
    """Run the layers as one loop while the model trains; generation, which caches, goes through them one by one.

    The program then has one layer, however deep the model, so that deep ones compile faster; it holds the parameters
    of all layers stacked beside the parameters themselves, and so needs more memory. Where activations are
    checkpointed, torch's min-cut partition chooses what a turn of the loop keeps. `refuse_scan` says where it serves.

    Raises:
        UnsupportedError: layers that differ, or dropout, here or in a training step: torch_xla's loop cannot draw
            random numbers.
    """
    layers = decoder_layers(model, architecture)
    if layers is None or len(set(architecture.spec.layers)) > 1:
        raise UnsupportedError(
            f"scan_layers=True was asked for, but {architecture.spec.model_type} has "
            f"{len(set(architecture.spec.layers))} kinds of layers, and a loop needs one: leave it out."
        )
    _refuse_dropout(layers)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if child is layers:
                scanned = ScannedLayers(layers)
                setattr(module, name, scanned)
                module.register_forward_pre_hook(scanned._enter)
                module.register_forward_hook(scanned._leave, always_call=True)


class ScannedLayers(torch.nn.ModuleList):
    """The layers, which the loop of the model that holds them meets as one; all others meet them one by one."""

    _entered = False

    def _enter(self, *_: Any) -> None:
        self._entered = True

    def _leave(self, *_: Any) -> None:
        self._entered = False

    def __getstate__(self) -> dict[str, Any]:
        """Without the steps that were traced: a copy traces its own, and a file cannot hold them."""
        return {name: value for name, value in vars(self).items() if name != "_steps"}

    def __iter__(self) -> Iterator[Any]:
        return iter([self._run]) if self._entered else super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        """As of a `ModuleList`; to the model's loop, a slice of all layers is this."""
        if self._entered and isinstance(index, slice) and len(range(len(self))[index]) == len(self):
            return self
        return super().__getitem__(index)

    def _run(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        layers = list(self._modules.values())
        if kwargs.get("past_key_values") is not None or not torch.is_grad_enabled():
            for layer in layers:
                assert layer is not None
                hidden = layer(hidden, *args, **kwargs)
            return hidden
        return self._scan(layers, hidden, args, kwargs)

    def _scan(
        self, layers: list[Any], hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        first = layers[0]
        if first.training:
            _refuse_dropout(layers)
        held = _held(layers)
        recompute = bool(getattr(first, "gradient_checkpointing", False)) and first.training
        flat, structure = tree_flatten((args, kwargs))
        tensors = [one for one in flat if isinstance(one, torch.Tensor)]
        fixed = tuple(_TENSOR if isinstance(one, torch.Tensor) else one for one in flat)
        stacked = {name: torch.stack([one[name] for one in held]) for name in held[0]}
        gradients = tuple((name, one.requires_grad) for name, one in stacked.items())
        kinds = tuple(one.dtype for one in tensors)
        key = (first.training, recompute, repr(first), gradients, str(structure), repr(fixed), kinds)
        steps: dict[Any, Any] = self.__dict__.setdefault("_steps", {})
        if key not in steps:  # a step that was traced before is not traced again
            steps[key] = _step(first, structure, fixed, kinds)
        carry = [hidden, *(_as_float(one.detach()) for one in tensors)]
        return current().scan(steps[key], carry, stacked, recompute=recompute)[0]


_TENSOR = object()


def _step(first: Any, structure: TreeSpec, fixed: tuple[Any, ...], kinds: tuple[torch.dtype, ...]) -> Any:
    """One layer as the runtime's scan traces it: every tensor comes in by an argument, and each that is carried must be
    able to have a gradient, so that masks and positions travel as floats."""
    with torch.no_grad():
        example = deepcopy(first)
    if hasattr(example, "gradient_checkpointing"):
        example.gradient_checkpointing = False  # what is kept is chosen by the partition instead

    def step(carry: list[torch.Tensor], weights: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], None]:
        state, *others = carry
        there = (one.to(kind) for one, kind in zip(others, kinds, strict=True))
        args, kwargs = tree_unflatten([next(there) if one is _TENSOR else one for one in fixed], structure)
        output = torch.func.functional_call(example, weights, (state, *args), kwargs, strict=True)
        return [output, *others], None

    return step


def _held(layers: list[Any]) -> list[dict[str, torch.Tensor]]:
    """Parameters and buffers of each layer by name.

    Raises:
        UnsupportedError: one has others than the first, as after an adapter was put into some of them.
    """
    held = [dict(layer.named_parameters()) | dict(layer.named_buffers()) for layer in layers]
    kinds = [{name: (one.shape, one.dtype) for name, one in of_layer.items()} for of_layer in held]
    for number, of_layer in enumerate(kinds):
        if of_layer != kinds[0]:
            others = sorted(dict(of_layer.items() ^ kinds[0].items()))
            raise UnsupportedError(
                f"layer {number} was to be run in one loop with layer 0, but they differ in {others[0]}: change all "
                "layers alike, or load the model without scan_layers."
            )
    return held


def _refuse_dropout(layers: Iterable[torch.nn.Module]) -> None:
    """Raises UnsupportedError where a layer drops anything in training."""
    for number, layer in enumerate(layers):
        for path, module in layer.named_modules():
            rates = {name: rate for name, rate in vars(module).items() if "dropout" in name}
            if isinstance(module, _DropoutNd):
                rates["p"] = module.p
            for name, rate in rates.items():
                if isinstance(rate, float) and rate > 0:
                    raise UnsupportedError(
                        f"scan_layers=True was asked for, but layer {number} has {name}={rate} in "
                        f"{path or 'itself'}, and torch_xla's loop cannot draw random numbers: set it to 0, or load "
                        "the model without scan_layers."
                    )


def _as_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_floating_point() else tensor.to(torch.float32)
