"""The LoRA adapters of an engine, several of which one batch may use. The parameters hold all adapters beside the
kernels, with room for a fixed number of them, so that loading and unloading an adapter compiles nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.errors import BusyError, MappingError, RequestError, UnsupportedError
from ttpu_core.mapping import FlaxMapping
from ttpu_jax.ops.kernels import LowRankKernel, QuantizedKernel
from ttpu_jax.params.adapter_sites import Site, is_reached, make_site, module_shape, reached_tensors

if TYPE_CHECKING:
    from ttpu_jax.causal_lm import JaxCausalLM
    from ttpu_serve.api.engine_config import EngineConfig
    from ttpu_serve.runner import AdapterWeights, LowRankUpdate

DEFAULT_RANK = 16
"""Ranks that there is room for where neither `max_lora_rank` nor an adapter says."""


class Adapters:
    """The adapters that an engine holds. `names` maps each to its number, 1 to `capacity`."""

    def __init__(self, mapping: FlaxMapping, sites: Mapping[str, Site], capacity: int, rank: int) -> None:
        self.names: dict[str, int] = {}
        self.capacity, self.rank = capacity, rank
        self._mapping, self._sites = mapping, sites
        self._generations: dict[str, int] = {}
        self._loads = 0

    def salt(self, name: str) -> bytes:
        """Return the bytes that distinguish cached prefixes of this adapter from others, also from an earlier adapter
        of the same name."""
        return f"{name}\0{self._generations[name]}".encode()

    def updates(self, weights: AdapterWeights) -> dict[str, LowRankUpdate]:
        """Check an adapter's files and return the argument of `put`. It may be called from any thread.

        Raises:
            MappingError, UnsupportedError: the adapter is another model's, or changes what adapters do not reach.
        """
        return tensor_updates(self._mapping, self._sites, weights.updates, weights.source)

    def put(
        self, params: dict[str, Any], name: str, updates: Mapping[str, LowRankUpdate], busy: Collection[int] = ()
    ) -> None:
        """Write an adapter into `params`, whose arrays are replaced; one of the same name is replaced, and requests
        that use it finish with it. `updates` are by the mapping's tensors, `busy` the numbers of adapters that requests
        use.

        Raises:
            BusyError: requests still use the room that is not taken.
            RequestError: no room, or a rank above `rank`.
        """
        if not isinstance(name, str) or not name:
            raise RequestError(f"an adapter was given the name {name!r}, but a text is needed: name it.")
        rank = max(update.rank for update in updates.values())
        if rank > self.rank:
            raise RequestError(
                f"the adapter {name!r} has rank {rank}, but this engine has room for {self.rank}: set "
                f"max_lora_rank={rank}."
            )
        number = self._free(name, busy)
        for site in self._sites.values():
            if any(tensor in updates for tensor in site.tensors):
                a, b = site.matrices(updates, self.rank)
            else:
                a, b = np.zeros((), np.float32), np.zeros((), np.float32)
            kernel: LowRankKernel = params[site.path]
            params[site.path] = replace(kernel, a=_put(kernel.a, a, 0, number), b=_put(kernel.b, b, -2, number))
        self._loads += 1
        self.names[name], self._generations[name] = number, self._loads

    def unload(self, name: str) -> None:
        """Unload an adapter. Running requests that use it finish with it, and its slot is free when they are done."""
        del self.names[name]

    def _free(self, name: str, busy: Collection[int]) -> int:
        others = {number for other, number in self.names.items() if other != name}
        for number in range(1, self.capacity + 1):
            if number not in others and number not in busy:
                return number
        found = f"this engine has room for {self.capacity} and holds {', '.join(self.names) or 'none'}"
        if len(others) < self.capacity:
            raise BusyError(
                f"the adapter {name!r} was to be loaded, but {found}, and requests still use the other places: try "
                "again later, or raise max_adapters."
            )
        raise RequestError(f"the adapter {name!r} was to be loaded, but {found}: unload one, or raise max_adapters.")


def load_adapters(
    model: JaxCausalLM, config: EngineConfig, given: Mapping[str, AdapterWeights]
) -> tuple[dict[str, Any], Adapters]:
    """Return a model's parameters with room for adapters, and with the `given` ones in the kernels that adapters reach.

    Room is for `max_adapters` of `max_lora_rank` on every kernel that adapters reach; where `max_adapters` is not set,
    for the adapters given, on the kernels that they change.

    Raises:
        RequestError, MappingError, UnsupportedError: as `Adapters.updates` and `Adapters.put`.
    """
    capacity = config.max_adapters or len(given)
    if len(given) > capacity:
        raise RequestError(
            f"{len(given)} adapters were given with max_adapters={capacity}: raise it, or leave some out."
        )
    spec, mapping = model.programs.spec, model.architecture.mapping
    reached = {path: tensors for path, rule in mapping.rules if (tensors := reached_tensors(path, rule)) is not None}
    read = {name: tensor_updates(mapping, reached, each.updates, each.source) for name, each in given.items()}
    changed = {tensor for updates in read.values() for tensor in updates}
    ranks_given = [update.rank for updates in read.values() for update in updates.values()]
    rank = config.max_lora_rank or max(ranks_given, default=DEFAULT_RANK)
    sites: dict[str, Site] = {}
    params: dict[str, Any] = dict(model.params)
    placement = model.programs.runtime.placement
    for path, tensors in reached.items():
        used = tensors if config.max_adapters else tuple(name for name in tensors if name in changed)
        if not used:
            continue
        kernel = spec.parameters[path]
        site = make_site(path, used, mapping[path], rank * len(used), model.paddings.get(path))
        sites[path] = site
        base, ranks = params[path], rank * len(used)
        held = model.dtype if isinstance(base, QuantizedKernel) else base.dtype
        a, b = (capacity, ranks, kernel.shape[-1]), (*kernel.shape[:-1], capacity, ranks)
        params[path] = LowRankKernel(
            base,
            jnp.zeros(a, held, device=placement.sharding((None, None, kernel.axes[-1]), a, path)),
            jnp.zeros(b, held, device=placement.sharding((*kernel.axes[:-1], None, None), b, path)),
        )
    adapters = Adapters(mapping, sites, capacity, rank)
    for name, updates in read.items():
        adapters.put(params, name, updates)
    return params, adapters


def tensor_updates(
    mapping: FlaxMapping,
    sites: Mapping[str, Any],
    adapter: Mapping[str, LowRankUpdate],
    directory: str | Path,
) -> dict[str, LowRankUpdate]:
    """An adapter's updates by the names of the mapping's tensors; `sites` has the Flax paths that adapters reach.

    Raises:
        UnsupportedError: it changes something that adapters do not reach.
        MappingError: it changes modules that the model does not have, or has in other sizes.
    """
    shapes = {leaf.name: module_shape(leaf) for _, rule in mapping.rules for leaf in rule.leaves()}
    users = _users(mapping)
    actual = {f"{module}.weight": module for module in adapter}
    names = mapping.canonical(actual)
    # What the model itself ignores (keys of layers that use another's) has no effect with an adapter either.
    unknown = [name for name in actual if name not in names.values() and not mapping.is_ignored(name)]
    if unknown:
        raise MappingError(
            f"the adapter {str(directory)!r} changes {actual[unknown[0]]!r}, which this model does not have: it was "
            "trained for another model."
        )
    updates = {}
    for name, stored in names.items():
        module, update = actual[stored], adapter[actual[stored]]
        missing = [path for path in users[name] if path not in sites] if users[name] else ["head.kernel"]
        if missing:
            raise UnsupportedError(
                f"the adapter {str(directory)!r} changes {module!r}, {_why(missing[0])}: train one for the query, key, "
                "value, output, gate, up and down projections alone."
            )
        if shapes[name] != (update.b.shape[0], update.a.shape[1]):
            raise MappingError(
                f"the adapter {str(directory)!r} changes {module!r} of shape {update.b.shape[0], update.a.shape[1]}, "
                f"but this model's is {shapes[name]}: it was trained for another model."
            )
        updates[name] = update
    return updates


def _why(path: str) -> str:
    if path.startswith(("embed.", "head.")):
        return "but adapters of the embedding or the output head are not served"
    if ".experts." in path or ".router." in path:
        return "but adapters of routed experts or their router are not served"
    if is_reached(path):
        return "where this engine, which was built for what its first adapters change, has no room (set max_adapters)"
    return f"which is {path} here, but adapters of such a part are not served"


def _users(mapping: FlaxMapping) -> dict[str, list[str]]:
    """Checkpoint tensor → the parameters that are made of it."""
    users: dict[str, list[str]] = defaultdict(list)
    for path, rule in mapping.rules:
        for leaf in rule.leaves():
            if path not in users[leaf.name]:
                users[leaf.name].append(path)
    return users


def _put(array: jax.Array, value: np.ndarray, axis: int, number: int) -> jax.Array:
    """The array of all adapters with `value` as that of adapter `number`; `axis` is theirs."""
    one = np.broadcast_to(value, np.delete(array.shape, axis)).astype(array.dtype)
    written: jax.Array = _writer(array.sharding, axis)(array, one, np.int32(number - 1))
    return written


@lru_cache(maxsize=64)
def _writer(sharding: Any, axis: int) -> Any:
    """A program that writes one adapter into an array of all of them, in place; `axis` is theirs."""

    def write(array: jax.Array, one: jax.Array, number: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(array, one, number, axis % array.ndim)

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)
