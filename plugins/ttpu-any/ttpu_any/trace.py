"""Traces a PyTorch model into a graph of ATen operations. The model's Python code runs once on tensors that have shapes
and no values; nothing is computed, so that a model on the meta device can be traced."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import torch
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.integrations import moe

from ttpu_any.aten.batches import keep_batches
from ttpu_any.aten.graph import constants_of, missing_operations, run
from ttpu_any.aten.table import NEEDS_PLUGIN
from ttpu_any.experts import replace_experts
from ttpu_core.errors import UnsupportedError

Tensors = Sequence[torch.Tensor]

@dataclass(frozen=True)
class Shape:
    """The shape and dtype of an argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Traced:
    """A traced function of a model's tensors and of more arguments, which runs on JAX arrays.

    Attributes:
        graph: of ATen operations.
        names: of the model's tensors, in the order of the graph's first arguments.
        results: shapes and dtypes.
        constants: tensors in the model's code, by name.
    """

    graph: torch.fx.GraphModule
    names: tuple[str, ...]
    results: tuple[Shape, ...]
    constants: Mapping[str, Any]

    def __call__(self, params: Mapping[str, Any], *arguments: Any) -> list[jax.Array]:
        """The function's results for the model's parameters and buffers, by name, and its other arguments."""
        return run(self.graph, [*(params[name] for name in self.names), *arguments], self.constants)


def trace(
    model: torch.nn.Module, call: Callable[[Callable[..., Any], Tensors], Tensors], arguments: Sequence[Shape]
) -> Traced:
    """Trace a function of a model.

    Args:
        model: the stock model, whose tensors may be on the meta device.
        call: given a function that calls the model, and the arguments, returns the results.
        arguments: beside the model's tensors.

    Raises:
        UnsupportedError: the model's code depends on values, or uses an operation that is not known.
    """
    tensors = tensors_of(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def function(*given: torch.Tensor) -> Tensors:
        # Writes into tensors become new tensors, as JAX has no others.
        with FunctionalTensorMode():
            functional = [to_fun(tensor) for tensor in given]
            held = dict(zip(tensors, functional, strict=False))
            forward = functools.partial(functional_call, model, held)
            found = list(call(lambda **keywords: forward((), keywords), functional[len(held) :]))
        return [from_fun(tensor) for tensor in found]

    with mode:
        fake = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors.values()]
        fake += [torch.empty(each.shape, dtype=each.dtype) for each in arguments]
    try:
        with torch.no_grad(), _compiling(), _unchanged(model):
            replace_experts(model)
            graph = make_fx(
                function,
                decomposition_table=_decompositions(),
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )(*fake)
    except UnsupportedError:
        raise
    except Exception as error:  # the code of any model, and of torch below it
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedError(
            f"{type(model).__name__} was to be traced, but its PyTorch code cannot be run on shapes alone "
            f"({type(error).__name__}: {reason}){NEEDS_PLUGIN}"
        ) from error
    graph.graph.eliminate_dead_code()
    keep_batches(graph)
    missing = missing_operations(graph)
    if missing:
        raise UnsupportedError(
            f"{type(model).__name__} uses the operations {', '.join(missing)}, which the fallback does not "
            f"know{NEEDS_PLUGIN}"
        )
    results = tuple(
        Shape(tuple(node.meta["val"].shape), node.meta["val"].dtype) for node in _outputs(graph)
    )
    return Traced(graph, tuple(tensors), results, constants_of(graph))


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a model, by name; one that has several names only by the first."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _outputs(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    output: Any = next(iter(reversed(graph.graph.nodes)))
    return list(output.args[0])


@functools.lru_cache(maxsize=1)
def _decompositions() -> dict[Any, Any]:
    return dict(torch._decomp.core_aten_decompositions())


@contextmanager
def _compiling() -> Iterator[None]:
    """While it is entered, torch says that it compiles, so that transformers branches on no value; transformers takes
    its own grouped product for every dtype, because the choice of torch's looks at memory that traced tensors do not
    have; and torch logs no failure: what fails is refused with its reason, and another manner may work."""
    before, log = torch.compiler._is_compiling_flag, logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    torch.compiler._is_compiling_flag = True
    log.setLevel(logging.CRITICAL)
    try:
        with mock.patch.object(moe, "_can_use_grouped_mm", lambda *_: False, create=True):
            yield
    finally:
        torch.compiler._is_compiling_flag = before
        log.setLevel(level)


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Give modules their attributes back afterwards: some models keep tensors of the last call."""
    saved = [(module, dict(module.__dict__), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
