"""Names of the dtypes that weights are held in."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ttpu_core.config import ModelConfig
from ttpu_core.config.kinds import instance_of
from ttpu_core.errors import RequestError

if TYPE_CHECKING:
    from ttpu_core.checkpoint.checkpoint import Checkpoint

DTYPES = ("float32", "bfloat16", "float16")
DTYPE_ALIASES = {
    **dict.fromkeys(("fp32", "f32", "float"), "float32"), "bf16": "bfloat16", "fp16": "float16", "half": "float16",
}  # fmt: skip
_FLOATING = re.compile(r"float|double|float(16|32|64)|bfloat16|fp(64|8)|float[468]_e[0-9][a-z0-9_]*")


def dtype_in_config(config: ModelConfig) -> str | None:
    """The name of the dtype in which a config says to hold weights, one of `DTYPES`; None if it names none of them:
    nothing, "auto", a dtype for each part of a model, or a dtype of stored numbers, as float8.

    Raises:
        ConfigError: the value is no name of a floating dtype.
    """

    def floating(value: object) -> str | None:
        if isinstance(value, ModelConfig) or value == "auto":
            return None
        name = instance_of(str)(value).removeprefix("torch.")
        name = DTYPE_ALIASES.get(name, name)
        if not _FLOATING.fullmatch(name):
            raise ValueError
        return name if name in DTYPES else None

    key = "torch_dtype" if config.get("dtype") is None else "dtype"
    return config.converted(key, f"a floating dtype's name such as {', '.join(DTYPES)}", floating, None)


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
