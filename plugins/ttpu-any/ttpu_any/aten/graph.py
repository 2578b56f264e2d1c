"""`run` takes a traced graph and JAX arrays and returns JAX arrays: each operation of
ATen becomes one or a few of JAX. Under `jax.jit` it makes one program."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ttpu_any.aten import elementwise, products, reductions, shapes  # noqa: F401 (they fill the table)
from ttpu_any.aten.table import NEEDS_PLUGIN, OPERATIONS, described
from ttpu_core.errors import UnsupportedError


def run(graph: torch.fx.GraphModule, arguments: Sequence[jax.Array], constants: Mapping[str, Any]) -> list[jax.Array]:
    """The results of a graph.

    Args:
        graph: as `ttpu_any.trace` returns it.
        arguments: one for each placeholder.
        constants: name → array, see `constants_of`.

    Raises:
        UnsupportedError: an operation is not in the table, or does not give what torch says it gives.
    """
    values: dict[torch.fx.Node, Any] = {}
    given = iter(arguments)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = constants[node.target]
        elif node.op == "output":
            return list(torch.fx.node.map_arg(node.args[0], values.__getitem__))
        else:
            args = torch.fx.node.map_arg(node.args, values.__getitem__)
            kwargs = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
            values[node] = _result(node, args, kwargs)
    raise AssertionError("a graph without an output")


def constants_of(graph: torch.fx.GraphModule) -> dict[str, Any]:
    """The tensors that a trace has found in the model's code, as arrays of the host."""
    names = [str(node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    return {name: _array(getattr(graph, name)) for name in dict.fromkeys(names)}


def missing_operations(graph: torch.fx.GraphModule) -> list[str]:
    """The names of operations in a graph that are not in the table, sorted."""
    calls = (node.target for node in graph.graph.nodes if node.op == "call_function")
    return sorted({str(target) for target in calls if target is not operator.getitem and _function(target) is None})


def _function(target: Any) -> Any:
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.rpartition("::")[2]
    return OPERATIONS.get(f"{name}.{target._overloadname}", OPERATIONS.get(name))


def _result(node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
    if node.target is operator.getitem:
        return args[0][args[1]]
    function = _function(node.target)
    if function is None:
        raise UnsupportedError(
            f"the model's PyTorch code uses the operation {node.target}, which the fallback does not "
            f"know{NEEDS_PLUGIN}"
        )
    expected = described(node.meta.get("val"))
    value = function(expected, *args, **kwargs)
    _check(node, value, expected)
    return value


def _check(node: torch.fx.Node, value: Any, expected: Any) -> None:
    """Refuse a result of another shape or dtype than torch's."""
    several = isinstance(expected, tuple)
    for got, wanted in zip(value if several else (value,), expected if several else (expected,), strict=True):
        if isinstance(wanted, jax.ShapeDtypeStruct) and (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
            raise UnsupportedError(
                f"the operation {node.target} gave {got.dtype}{list(got.shape)}, but in PyTorch it gives "
                f"{wanted.dtype}{list(wanted.shape)}: report this, with the model's config."
            )


def _array(tensor: torch.Tensor) -> jax.Array:
    """A tensor of the model's code as an array."""
    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.float().numpy(), jnp.bfloat16)
    value: jax.Array = jnp.asarray(tensor.numpy(), described(tensor).dtype)
    return value
