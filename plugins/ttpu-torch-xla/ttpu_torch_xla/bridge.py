"""Calls JAX functions from torch. A function of JAX arrays takes and returns tensors on the runtime's device, as one
torch operation; JAX computes its gradients where they are needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any

import torch

from ttpu_core.errors import MissingDependencyError, UnsupportedError
from ttpu_core.sharding.hardware import chip_of_device_kind, parse_topology
from ttpu_torch_xla.runtime import JaxOperation, current, device_type, is_device

JaxFunction = Callable[..., Any]
Signature = tuple[tuple[tuple[int, ...], str] | None, ...]
Static = tuple[tuple[str, Hashable], ...]

# int64 is torch's dtype for indices, which int32 holds; JAX has no 64 bits unless the whole process is switched.
DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}


@dataclass(frozen=True)
class Target:
    """The target of lowering: a platform, and the kind of its devices as in `jax.Device.device_kind`."""

    platform: str
    device_kind: str | None = None
    num_cores: int = 1


_target: ContextVar[Target | None] = ContextVar("ttpu_torch_xla_target", default=None)


def target() -> Target:
    """Return the target of the program being recorded: that of `lowering_for`, else the runtime's devices."""
    return _target.get() or _own_target()


@contextmanager
def lowering_for(topology: str) -> Iterator[Target]:
    """A context in which programs are recorded for a TPU slice such as "v5e:2x4", whether or not this machine has one.

    Raises:
        UnsupportedError: there is no such slice.
    """
    chip = parse_topology(topology).chip
    chosen = Target("tpu", chip.device_kind)
    token = _target.set(chosen)
    try:
        yield chosen
    finally:
        _target.reset(token)


def call_jax(
    function: JaxFunction,
    *tensors: torch.Tensor | None,
    static: Mapping[str, Hashable] | None = None,
    mesh: Any = None,
    platform: str | None = None,
    name: str | None = None,
) -> Any:
    """Call `function(*arrays, **static)` on tensors, without gradients.

    Args:
        function: of JAX arrays; called once for each signature, so one and the same object is to be given each time.
        tensors: on the runtime's device; int64 becomes int32; None stays None.
        static: hashable values, part of the signature.
        mesh: a `jax.sharding.AbstractMesh` where the function uses one (`abstract_mesh`).
        platform: in place of the current target's.
        name: of the operation in the graph.

    Returns:
        What the function returns, with tensors for arrays.

    Raises:
        MissingDependencyError: JAX or ttpu-jax is not installed.
        UnsupportedError: a dtype that JAX has not.
    """
    if platform is not None and platform != target().platform:
        token = _target.set(Target(platform))
        try:
            return call_jax(function, *tensors, static=static, mesh=mesh, name=name)
        finally:
            _target.reset(token)
    arguments = [_prepared(tensor) for tensor in tensors]
    program = _program(function, _static(static), _signature(arguments), mesh, target(), name)
    return program(arguments)


def differentiable(function: JaxFunction, name: str | None = None) -> Callable[..., torch.Tensor]:
    """The function on tensors with its gradients by JAX: call it as `call_jax`. It must return one array.

    Where a gradient is needed, what JAX keeps for it is kept by autograd, so that nothing is computed twice; tensors of
    whole numbers get none."""

    def call(
        *tensors: torch.Tensor | None, static: Mapping[str, Hashable] | None = None, mesh: Any = None
    ) -> torch.Tensor:
        wanted = tuple(t is not None and t.requires_grad and t.is_floating_point() for t in tensors)
        if not torch.is_grad_enabled() or not any(wanted):
            result: torch.Tensor = call_jax(function, *tensors, static=static, mesh=mesh, name=name)
            return result
        request = _Request(function, _static(static), mesh, target(), name or _name(function), wanted)
        mixed: torch.Tensor = _Differentiable.apply(request, *tensors)
        return mixed

    return call


def require_kernels() -> None:
    """Import JAX and the kernels.

    Raises:
        MissingDependencyError: JAX or ttpu-jax is not installed.
    """
    _jax()


def abstract_mesh(sizes: Mapping[str, int]) -> Any:
    """Return a JAX mesh of these axes without devices. A function that `jax.shard_map` shards over it is sharded over
    the runtime's devices, numbered in that order."""
    jax = _jax()
    names = tuple(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), names, abstract_device=_abstract_device(target()))


@dataclass(frozen=True)
class _Program:
    """A function lowered for one signature."""

    operation: JaxOperation
    structure: Any

    def __call__(self, arguments: list[torch.Tensor | None]) -> Any:
        leaves = self.operation([tensor for tensor in arguments if tensor is not None])
        return _jax().tree.unflatten(self.structure, list(leaves))


@dataclass(frozen=True)
class _Request:
    """What the forward and the backward pass of one call share."""

    function: JaxFunction
    static: Static
    mesh: Any
    target: Target
    name: str
    wanted: tuple[bool, ...]


@dataclass
class _Gradient:
    """Forward and backward functions of one signature; `residuals` is known once the forward one is traced."""

    request: _Request
    residuals: Any = field(default=None)

    def forward(self, *arrays: Any) -> Any:
        """The result, and what the gradients need of the way there."""
        jax, request = _jax(), self.request
        given = list(arrays)

        def of_wanted(*wanted: Any) -> Any:
            fresh = iter(wanted)
            full = [next(fresh) if is_wanted else x for is_wanted, x in zip(request.wanted, given, strict=True)]
            return request.function(*full, **dict(request.static))

        inputs = [x for is_wanted, x in zip(request.wanted, given, strict=True) if is_wanted]
        result, gradients_of = jax.vjp(of_wanted, *inputs)
        leaves, self.residuals = jax.tree.flatten(gradients_of)
        return result, leaves

    def backward(self, gradient: Any, *leaves: Any) -> Any:
        """The gradients of the arrays that want one."""
        return _jax().tree.unflatten(self.residuals, leaves)(gradient)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: _Request, *tensors: torch.Tensor | None) -> Any:
        arguments = [_prepared(tensor) for tensor in tensors]
        gradient = _gradient(request, _signature(arguments))
        program = _program(
            gradient.forward, (), _signature(arguments), request.mesh, request.target, f"{request.name}_forward"
        )
        result, residuals = program(arguments)
        ctx.gradient, ctx.request = gradient, request
        ctx.save_for_backward(*residuals)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        request = ctx.request
        arguments: list[torch.Tensor | None] = [gradient, *ctx.saved_tensors]
        program = _program(
            ctx.gradient.backward, (), _signature(arguments), request.mesh, request.target, f"{request.name}_backward"
        )
        gradients = iter(program(arguments))
        return None, *(next(gradients) if is_wanted else None for is_wanted in request.wanted)


@lru_cache(maxsize=512)
def _gradient(request: _Request, signature: Signature) -> _Gradient:
    return _Gradient(request)


@lru_cache(maxsize=1024)
def _program(
    function: JaxFunction, static: Static, signature: Signature, mesh: Any, target: Target, name: str | None
) -> _Program:
    """The function traced and lowered, as the computation of an operation."""
    jax = _jax()
    arrays = [None if one is None else jax.ShapeDtypeStruct(*one) for one in signature]
    structure: list[Any] = []

    def flat(*given: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(function(*given, **dict(static)))
        structure.append(tree)
        return list(leaves)

    with _lowering(mesh, target):
        lowered = jax.jit(flat, keep_unused=True).trace(*arrays).lower(lowering_platforms=(target.platform,))
        module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    return _Program(current().jax_operation(name or _name(function), module), structure[-1])


@contextmanager
def _lowering(mesh: Any, target: Target) -> Iterator[None]:
    """JAX as the runtime's programs need it, in this thread and for this time only: shardings are annotated as GSPMD
    has them, and kernels that ask which chip they are for are told."""
    from jax._src import config  # the switch has no public form that is not global

    jax = _jax()
    with ExitStack() as stack:
        stack.enter_context(config.use_shardy_partitioner(False))
        device = _abstract_device(target)
        if mesh is None and device is not None:
            mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=device)
        if mesh is not None:
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def _abstract_device(target: Target) -> Any:
    if target.device_kind is None:
        return None
    return _jax().sharding.AbstractDevice(
        device_kind=target.device_kind, num_cores=target.num_cores, platform=target.platform
    )


def _prepared(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of a dtype that JAX has."""
    if tensor is None:
        return None
    if not is_device(tensor):
        raise UnsupportedError(
            f"a JAX function was called on a tensor of shape {tuple(tensor.shape)} on {tensor.device}, but it can only "
            f"be part of a program for the {device_type()} device: move the tensor there with .to({device_type()!r})."
        )
    if tensor.dtype == torch.int64:
        return tensor.to(torch.int32)
    if tensor.dtype not in DTYPES:
        raise UnsupportedError(
            f"a JAX function was called on a tensor of {tensor.dtype}, but it takes "
            f"{', '.join(DTYPES.values())} and int64 (as int32): cast the tensor first."
        )
    return tensor


def _signature(tensors: list[torch.Tensor | None]) -> Signature:
    return tuple(None if t is None else (tuple(t.shape), DTYPES[t.dtype]) for t in tensors)


def _static(values: Mapping[str, Hashable] | None) -> Static:
    return tuple(sorted((values or {}).items()))


def _name(function: JaxFunction) -> str:
    inner = function.func if isinstance(function, partial) else function
    return str(getattr(inner, "__name__", "jax_function"))


@cache
def _own_target() -> Target:
    """What the runtime runs on. `num_cores`: torch_xla drives the cores of a v4 or v5p chip as one device."""
    platform = current().platform()
    if platform != "tpu":
        return Target(platform)
    kind = current().device_kind()
    chip = chip_of_device_kind(kind)
    return Target(platform, kind if chip is None else chip.device_kind)


@cache
def _jax() -> Any:
    """JAX, which traces and lowers here and runs nothing.

    Raises:
        MissingDependencyError: it or ttpu-jax is not installed.
    """
    runtime = current()
    runtime.device()
    # A TPU belongs to one runtime of a process, and the runtime has it by now: JAX would wait for it.
    if runtime.platform() == "tpu" and "jax" not in sys.modules:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        import jax

        import ttpu_jax.ops.attention  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"a kernel was asked for, but the kernels are JAX programs and {error.name or 'jax'} is not installed: "
            '`pip install "ttpu-torch-xla[kernels]"`, or use attn_implementation="eager".'
        ) from error
    return jax
