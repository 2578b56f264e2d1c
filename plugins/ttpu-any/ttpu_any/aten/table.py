"""The table of ATen operations: a function is registered under the operation's name, with or without its overload, and
is called as function(result, *arguments, **keywords), where `result` has the dtype and shape that torch says the result
has; of several results it is a tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ttpu_core.errors import UnsupportedError

Operation = Callable[..., Any]
Result = jax.ShapeDtypeStruct

OPERATIONS: dict[str, Operation] = {}

NEEDS_PLUGIN = ": this model needs a plugin."
"""How a refusal of the fallback ends."""

DTYPES: dict[torch.dtype, Any] = {
    torch.float32: jnp.float32,
    torch.float64: jnp.float32,  # what JAX computes in where torch asks for 64 bits
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.int64: jnp.int32,
    torch.int32: jnp.int32,
    torch.int16: jnp.int16,
    torch.int8: jnp.int8,
    torch.uint8: jnp.uint8,
    torch.bool: jnp.bool_,
    torch.complex64: jnp.complex64,
}


def operation(*names: str) -> Callable[[Operation], Operation]:
    """Register a function for ATen operations, such as "add" or "index.Tensor"."""

    def register(function: Operation) -> Operation:
        OPERATIONS.update(dict.fromkeys(names, function))
        return function

    return register


def jax_dtype(dtype: torch.dtype) -> Any:
    """The dtype that JAX computes in for a torch dtype; 64-bit numbers become 32-bit ones.

    Raises:
        UnsupportedError: there is none.
    """
    if dtype not in DTYPES:
        raise UnsupportedError(
            f"the model computes in {dtype}, but the fallback runs {', '.join(str(each) for each in DTYPES)}"
            + NEEDS_PLUGIN
        )
    return DTYPES[dtype]


def described(value: Any) -> Any:
    """The dtype and shape of a traced value; a tuple of them for several."""
    if isinstance(value, list | tuple):
        return tuple(described(each) for each in value)
    if isinstance(value, torch.Tensor):
        return Result(tuple(value.shape), jax_dtype(value.dtype))
    return value


def cast(value: Any, dtype: Any) -> jax.Array:
    """An array of `dtype` in the same shape; numbers beyond the range of a 32-bit integer become its limits, as torch's
    64-bit limits are meant as limits."""
    if isinstance(value, int) and not isinstance(value, bool) and jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        value = min(max(value, int(limits.min)), int(limits.max))
    if isinstance(value, jax.Array):
        if value.dtype == dtype:
            return value
        if dtype == jnp.bool_:
            return value != 0
    return jnp.asarray(value, dtype)
