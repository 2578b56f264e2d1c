"""Shards a stock model over a mesh. It moves every parameter to the XLA device, sharded as the strategy says, and adds
hooks that keep activations sharded along the batch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ttpu_core.architecture import Architecture
from ttpu_core.sharding.parallelism import Parallelism
from ttpu_core.sharding.strategy import MeshAxes
from ttpu_core.spec import axes
from ttpu_torch_xla.moving import move
from ttpu_torch_xla.runtime import TorchRuntime
from ttpu_torch_xla.sharding.axes import is_stack, parameter_axes
from ttpu_torch_xla.sharding.resolve import partition_spec_of


@dataclass(frozen=True)
class Sharding:
    """A mesh of the runtime, and the strategy that shards a model over it."""

    parallelism: Parallelism
    mesh: Any
    runtime: TorchRuntime

    def partition_spec(self, logical: tuple[str | None, ...], shape: tuple[int, ...]) -> tuple[MeshAxes, ...]:
        """Return the mesh axes that shard each dimension of an activation or a cache; axes that do not divide a
        dimension are left out."""
        table, sizes = dict(self.parallelism.strategy.rules), dict(self.parallelism.mesh)
        result: list[MeshAxes] = []
        taken: set[str] = set()
        for axis, size in zip(logical, shape, strict=True):
            wanted = tuple(a for a in table.get(axis or "", ()) if sizes.get(a, 1) > 1 and a not in taken)
            result.append(wanted if size % prod(sizes[a] for a in wanted) == 0 else ())
            taken.update(result[-1])
        return tuple(result)

    def constrain(self, tensor: torch.Tensor, *logical: str | None) -> torch.Tensor:
        """Shard an activation, a tensor of any shape with logical axes `logical`, and its gradient alike; returns the
        tensor."""
        return self._hold(tensor, self.partition_spec(logical, tuple(tensor.shape)))

    def constrain_sums(self, sums: torch.Tensor) -> torch.Tensor:
        """Make the compiler sum a product over devices at once, sharded by batch and sequence; returns it.

        Without this, GSPMD computes wrong numbers where such a product takes a sharding of its features from a later
        operation (seen with XLA of torch_xla 2.9, along three mesh axes).

        Args:
            sums: [..., batch, seq, hidden] or [tokens, hidden].
        """
        return self._hold(sums, self._of_sums(sums), whole=True)

    def constrain_gradient_sums(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor with a hook that constrains its gradient as `constrain_sums` does.

        Args:
            tensor: [..., batch, seq, hidden] or [tokens, hidden]; the result has the same shape.
        """
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        partition_spec = self._of_sums(tensor)
        own = tensor.view_as(tensor)  # a gradient of its own, before it is added to others
        own.register_hook(lambda gradient: self.runtime.shard(gradient, self.mesh, partition_spec))
        return own

    def constrain_looked_up(self, rows: torch.Tensor) -> torch.Tensor:
        """Shard rows of a table [batch, seq, hidden], and return them.

        Where features are sharded over some of the devices that share the batch, that sharding is set first, so that
        the devices exchange rows and not the table."""
        (features,) = self.partition_spec((axes.EMBED,), (rows.shape[-1],))
        batch, sequence = self.partition_spec((axes.BATCH, axes.SEQUENCE), tuple(rows.shape[:2]))
        rest = tuple(axis for axis in batch if axis not in features)
        if features and rest:
            self._hold(rows, (rest, tuple(axis for axis in sequence if axis not in features), features))
            rows = rows * 1  # a tensor has one sharding: the next needs a tensor of its own
        return self._hold(rows, (batch, sequence, ()))

    def _of_sums(self, sums: torch.Tensor) -> tuple[MeshAxes, ...]:
        of_rows = (axes.BATCH, axes.SEQUENCE) if sums.ndim > 2 else (axes.BATCH,)
        return self.partition_spec((*((None,) * (sums.ndim - len(of_rows) - 1)), *of_rows, None), tuple(sums.shape))

    def _hold(self, tensor: torch.Tensor, partition_spec: tuple[MeshAxes, ...], whole: bool = False) -> torch.Tensor:
        def hold_gradient(gradient: torch.Tensor) -> None:
            self.runtime.shard(gradient, self.mesh, partition_spec)

        if any(partition_spec) or whole:
            self.runtime.shard(tensor, self.mesh, partition_spec)
            if tensor.requires_grad:
                tensor.register_hook(hold_gradient)
        return tensor


def shard_model(
    model: torch.nn.Module, architecture: Architecture, parallelism: Parallelism, runtime: TorchRuntime
) -> Any:
    """Move a model to the device and shard it. Returns the runtime's mesh, which is also the global one.

    Args:
        model: the stock model, on the host.
        parallelism: the mesh of all devices, and the axes that shard each dimension.

    Raises:
        UnsupportedError: a parameter that the mesh does not divide; nothing has been moved then.
    """
    partition_specs = parameter_partition_specs(model, architecture, parallelism)
    layers = decoder_layers(model, architecture)
    mesh = runtime.mesh(dict(parallelism.mesh), dict(parallelism.dcn))
    sharding = Sharding(parallelism, mesh, runtime)

    def put(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Sharded before its values travel, so that no device ever holds it whole."""
        there = runtime.put(tensor)
        runtime.shard(there, mesh, partition_specs.get(name, ((),) * there.ndim))
        return there

    move(model, put)
    _constrain_sums(model, partition_specs, sharding)
    _constrain_activations(model, layers, sharding)
    return mesh


def shard_by_size(model: torch.nn.Module, parallelism: Parallelism, runtime: TorchRuntime) -> Any:
    """Move a model that no architecture describes to the device, each parameter of several dimensions sharded along the
    largest one that the axis "fsdp" divides. Returns the runtime's mesh, which is also the global one.

    Args:
        model: the stock model, on the host.
        parallelism: the mesh of all devices, of the axes "data" and "fsdp".
    """
    mesh = runtime.mesh(dict(parallelism.mesh), dict(parallelism.dcn))
    devices = dict(parallelism.mesh).get("fsdp", 1)

    def put(name: str, tensor: torch.Tensor) -> torch.Tensor:
        there = runtime.put(tensor)
        divided = [place for place, size in enumerate(tensor.shape) if size % devices == 0]
        along = max(divided, key=lambda place: tensor.shape[place]) if divided and tensor.ndim > 1 else None
        runtime.shard(there, mesh, tuple(("fsdp",) if place == along else () for place in range(tensor.ndim)))
        return there

    move(model, put)
    _constrain_activations(model, None, Sharding(parallelism, mesh, runtime))
    return mesh


def parameter_partition_specs(
    model: torch.nn.Module, architecture: Architecture, parallelism: Parallelism
) -> dict[str, tuple[MeshAxes, ...]]:
    """Return the mesh axes that shard each dimension of each parameter, by name, and of the buffers of quantized
    weights. Parameters without a description are left out."""
    sizes = dict(parallelism.mesh)
    shapes = {name: one.shape for name, one in model.named_buffers()}
    partition_specs: dict[str, tuple[MeshAxes, ...]] = {}
    for name, dimensions in parameter_axes(architecture, model).items():
        partition_specs[name] = partition_spec_of(dimensions, sizes, parallelism.strategy, name)
        if name in shapes:  # of a quantized weight, whose blocks may be fewer than the devices
            partition_specs[name] = tuple(
                by if size % prod(sizes[axis] for axis in by) == 0 else ()
                for by, size in zip(partition_specs[name], shapes[name], strict=True)
            )
    return partition_specs


def devices_along_inputs(
    model: torch.nn.Module, architecture: Architecture, parallelism: Parallelism | None
) -> dict[str, int]:
    """Linear layer, or projection of stacked experts → number of devices that share its inputs; none for one device."""
    if parallelism is None:
        return {}
    sizes = dict(parallelism.mesh)
    specs = parameter_partition_specs(model, architecture, parallelism)
    return {
        name.removesuffix(".weight"): prod(sizes[axis] for axis in one[-1])
        for name, one in specs.items()
        if one
    }


def decoder_layers(model: torch.nn.Module, architecture: Architecture) -> torch.nn.ModuleList | None:
    """Return the list of the decoder's layers: the module list with described parameters and as many entries as the
    architecture has layers."""
    for name in parameter_axes(architecture, model):
        match = re.match(r"(.*?)\.0\.", name)
        found = model.get_submodule(match[1]) if match else None
        if isinstance(found, torch.nn.ModuleList) and len(found) == architecture.spec.num_layers:
            return found
    return None


def linears_sharded_along(
    dimension: str,
    model: torch.nn.Module,
    partition_specs: Mapping[str, tuple[MeshAxes, ...]],
    parallelism: Parallelism,
) -> list[torch.nn.Module]:
    """Return the linear layers whose inputs ("in") or outputs ("out") are sharded along an axis that does not shard the
    batch. Each device then has a part of every sum of the product, or of its gradient's (arXiv 1909.08053, section 3).
    """
    of_batch = set(dict(parallelism.strategy.rules).get(axes.BATCH, ()))
    found: list[torch.nn.Module] = []
    for path, module in model.named_modules():
        runs = getattr(module, "dimensions", None)  # of a quantized layer
        if not isinstance(runs, Mapping) or is_stack(runs):
            runs = {"weight": ("out", "in")} if isinstance(module, torch.nn.Linear) else {}
        pairs = ((name, partition_specs.get(f"{path}.{name}")) for name in runs)
        sharded_by = {
            axis
            for name, partition_spec in pairs
            if partition_spec
            for along, by in zip(runs[name], partition_spec, strict=True)
            if along == dimension
            for axis in by
        }
        if sharded_by - of_batch:
            found.append(module)
    return found


def _constrain_sums(
    model: torch.nn.Module, partition_specs: Mapping[str, tuple[MeshAxes, ...]], sharding: Sharding
) -> None:
    """Sum what several devices have parts of where it is computed, in the forward pass and in the backward one."""

    def summed(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        sharding.constrain_sums(output)

    def summed_backwards(module: torch.nn.Module, args: Any) -> Any:
        return (sharding.constrain_gradient_sums(args[0]), *args[1:]) if args else None

    for linear in linears_sharded_along("in", model, partition_specs, sharding.parallelism):
        linear.register_forward_hook(summed)
    for linear in linears_sharded_along("out", model, partition_specs, sharding.parallelism):
        linear.register_forward_pre_hook(summed_backwards)


def _constrain_activations(model: Any, layers: torch.nn.ModuleList | None, sharding: Sharding) -> None:
    """Hold hidden states and logits to the batch's sharding: left to itself, the compiler may follow that of the
    parameters instead, and compute every row on every device."""

    def looked_up(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return sharding.constrain_looked_up(output) if output.ndim == 3 else output

    def hidden(module: torch.nn.Module, args: Any, output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        if isinstance(state, torch.Tensor) and state.ndim >= 3:
            # gemma3n stacks several predictions of the residual stream before the batch.
            sharding.constrain(state, *((None,) * (state.ndim - 3)), axes.BATCH, axes.SEQUENCE, None)

    def logits(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.ndim == 3:
            sharding.constrain(output, axes.BATCH, axes.SEQUENCE, axes.VOCAB)

    model.get_input_embeddings().register_forward_hook(looked_up)
    for layer in layers or ():
        layer.register_forward_hook(hidden)
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_hook(logits)
