"""Optimizer state in the memory of the host. An update brings the moments of one layer at a time to the devices, and
takes them back before it goes on to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.training_state import ELEMENTWISE
from ttpu_core.spec import Parameter, axes
from ttpu_jax.train.optimizers import optimizer_for
from ttpu_jax.train.zero import ZeroPlacements

if TYPE_CHECKING:
    from ttpu_train.runner import StepSettings

HOST = "pinned_host"
"""JAX's name of the host's memory that devices read directly."""

Updated = tuple[dict[str, jax.Array], Any]
Update = Callable[[optax.GradientTransformation, Any, Any, Any], Updated]
"""An optimizer, weights, state and gradients of some parameters → their weights and state after an update."""


@dataclass(frozen=True, eq=False)
class Offload:
    """How an update computes with moments that lie on the host.

    Attributes:
        optimizers: path → the optimizer of that parameter alone.
        layers: the paths of parameters that are stacked over layers.
    """

    optimizers: Mapping[str, optax.GradientTransformation]
    layers: frozenset[str]

    def __call__(self, update: Update, params: Mapping[str, Any], state: Any, gradients: Mapping[str, Any]) -> Updated:
        """Update all parameters, one after another and layer by layer; for use inside jit.

        Args:
            update: what is done to each.
            params: path → weight.
            state: of the optimizer of all of them; moments on the host.
            gradients: path → gradient.

        Returns:
            The weights, and the state with its moments on the host.
        """
        weights, states = {}, []
        for path, weight in params.items():
            change = self._each_layer if path in self.layers else _whole
            of_path = partial(update, self.optimizers[path])
            weights[path], own = change(of_path, path, weight, _of(state, path), gradients[path])
            states.append(own)
        return weights, jax.tree.map(_merged, *states, is_leaf=_by_path)

    @staticmethod
    def _each_layer(
        update: Callable[..., Updated], path: str, weight: jax.Array, state: Any, gradient: jax.Array
    ) -> tuple[jax.Array, Any]:
        leaves, tree = jax.tree.flatten(state)
        moments = [place for place, leaf in enumerate(leaves) if leaf.shape == weight.shape]

        def layer(number: jax.Array, carry: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
            weight, held = carry

            def at(stacked: jax.Array) -> jax.Array:
                return jax.lax.dynamic_index_in_dim(stacked, number, keepdims=False)

            def put(stacked: jax.Array, one: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_index_in_dim(stacked, one, number, 0)

            own = list(leaves)  # what is no moment, as the count of updates, is for each layer that before the update
            for place in moments:
                own[place] = _to_device(at(held[place]))
            changed, after = update({path: at(weight)}, jax.tree.unflatten(tree, own), {path: at(gradient)})
            new = jax.tree.leaves(after)
            for place in moments:
                new[place] = put(held[place], _to_host(new[place]))
            return put(weight, changed[path]), new

        weight, leaves = jax.lax.fori_loop(0, weight.shape[0], layer, (weight, leaves))
        return weight, jax.tree.unflatten(tree, leaves)


def _whole(
    update: Callable[..., Updated], path: str, weight: jax.Array, state: Any, gradient: jax.Array
) -> tuple[jax.Array, Any]:
    def moved(tree: Any, move: Callable[[jax.Array], jax.Array]) -> Any:
        return jax.tree.map(lambda leaf: move(leaf) if leaf.shape == weight.shape else leaf, tree)

    changed, after = update({path: weight}, moved(state, _to_device), {path: gradient})
    return changed[path], moved(after, _to_host)


def _to_device(value: jax.Array) -> jax.Array:
    return jax.device_put(value, jax.memory.Space.Device)


def _to_host(value: jax.Array) -> jax.Array:
    return jax.device_put(value, jax.memory.Space.Host)


def _by_path(node: Any) -> bool:
    """Whether a node of the state holds an array for each parameter."""
    return isinstance(node, dict)


def _of(state: Any, path: str) -> Any:
    """The state of one parameter's optimizer, out of that of all."""
    return jax.tree.map(lambda node: {path: node[path]} if _by_path(node) else node, state, is_leaf=_by_path)


def _merged(first: Any, *others: Any) -> Any:
    return {path: leaf for node in (first, *others) for path, leaf in node.items()} if _by_path(first) else first


def offload_for(settings: StepSettings, table: Mapping[str, Parameter], zero: ZeroPlacements) -> Offload:
    """How a run's optimizer state is held on the host.

    Args:
        settings: of the run.
        table: stacked path → trained parameter.
        zero: where the optimizer's state lies.

    Raises:
        UnsupportedError: the optimizer, or the mesh, does not treat each layer by itself; there is one device; or
            adapters are trained.
    """
    optimizer = settings.optimizer
    if optimizer.name not in ELEMENTWISE:
        raise UnsupportedError(
            f"offload_optimizer was asked for with optim={optimizer.name!r}, but only the state of "
            f"{', '.join(ELEMENTWISE)} can be brought to the devices layer by layer: use one of these, or leave "
            "offload_optimizer out."
        )
    if settings.adapters is not None:
        raise UnsupportedError(
            "offload_optimizer was asked for with adapters, whose optimizer state is small and stays on the devices: "
            "leave it out."
        )
    if zero.weights.mesh is None:
        raise UnsupportedError(
            "offload_optimizer was asked for on one device, but it works on meshes of several: set "
            "parallelism_strategy, as in fsdp, or leave offload_optimizer out."
        )
    layers = frozenset(path for path, one in table.items() if one.axes[:1] == (axes.LAYERS,))
    for path in layers:
        sharding: Any = zero.state(path, table[path])
        if sharding.spec and sharding.spec[0] is not None:
            raise UnsupportedError(
                f"offload_optimizer was asked for on a mesh that divides the layers ({sharding.spec[0]!r}), but "
                "moments are brought to the devices layer by layer: use another mesh, or leave it out."
            )
    return Offload({path: optimizer_for(optimizer, {path: one}) for path, one in table.items()}, layers)


def first_state(shapes: Any) -> Any:
    """The state before the first update, all zeros, made where it lies.

    Args:
        shapes: a tree of `jax.ShapeDtypeStruct` with shardings.
    """

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            sizes = [len(range(*part.indices(size))) for part, size in zip(index, leaf.shape, strict=True)]
            return np.zeros(sizes, leaf.dtype)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)

    return jax.tree.map(zeros, shapes)
