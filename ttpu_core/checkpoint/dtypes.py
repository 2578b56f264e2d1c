"""Names of the dtypes that weights are held in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ttpu_core.errors import RequestError

if TYPE_CHECKING:
    from ttpu_core.checkpoint.checkpoint import Checkpoint

DTYPES = ("float32", "bfloat16", "float16")
DTYPE_ALIASES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def dtype_name(dtype: Any, checkpoint: Checkpoint | None = None, advice: str = "") -> str:
    """The name of the dtype that a model's weights are to be held in.

    Args:
        dtype: a name, a numpy, jax or torch dtype, or "auto": as the checkpoint stores them (float32 without one).
        checkpoint: the weights, for "auto".
        advice: what the error says beside.

    Raises:
        RequestError: weights are not held in it.
    """
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return "float32" if checkpoint is None else checkpoint.dtype
    if isinstance(dtype, str) or type(dtype).__module__.partition(".")[0] == "torch":
        name = str(dtype).removeprefix("torch.").removeprefix("jnp.")
    else:
        import numpy as np  # not for those who only read names

        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = "no dtype"
    name = DTYPE_ALIASES.get(name, name)
    if name not in DTYPES:
        raise RequestError(
            f"dtype {dtype!r} was asked for, but weights are held in auto (as stored), {', '.join(DTYPES)}: pass one "
            f"of them{advice}."
        )
    return name
