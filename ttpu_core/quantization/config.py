"""`QuantizationConfig`: how the weights of a model are to be quantized, as a user writes it. Both backends read it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal, Self, TypedDict, Unpack, cast, get_args

from ttpu_core.errors import RequestError
from ttpu_core.spec.kernel_format import ActivationFormat, KernelFormat, ValueDtype

Dtype = Literal["int8", "int4", "fp8", "mxfp4"]
CacheDtype = Literal["int8", "fp8"]

BITS: Mapping[str, int] = {"int8": 8, "int4": 4, "fp8": 8, "mxfp4": 4}
"""Bits of a weight by dtype."""

VALUES: Mapping[str, ValueDtype] = {
    "int8": "int8",
    "int4": "int4",
    "fp8": "float8_e4m3fn",
    "mxfp4": "float4_e2m1fn",
}
MX_GROUP = 32
"""Weights that share a scale in the microscaling formats (OCP MX 1.0)."""


_IDLE = MappingProxyType(
    {
        "auto_tune_block_sizes": "block sizes are data, tuned ahead for each chip",
        "use_xla_kernel": "use_pallas=False takes XLA's products",
    }
)


class AutoXLAArguments(TypedDict, total=False):
    """AutoXLA's names of the arguments, and those of its arguments that have no meaning here."""

    n_bits: int | None
    block_size: int | None
    per_channel: bool
    quantize_embeddings: bool
    quantize_lm_head: bool
    exclude_layers: str | tuple[str, ...] | list[str] | None
    pack_4bit: bool
    auto_tune_block_sizes: bool | None
    use_xla_kernel: bool | None


class _SettledInt(int):
    """A number that a configuration has derived, or has taken already: in `dataclasses.replace` what is passed beside
    it counts."""


class _SettledText(str):
    """The same for a text."""


@dataclass(frozen=True, init=False)
class QuantizationConfig:
    """How the kernels of a model's layers are quantized. The default is int8 with one scale per output channel (W8A16).

    Attributes:
        bits: of a weight, 8 or 4.
        group_size: number of neighbouring inputs that share a scale; None for one scale per output channel.
        symmetric: a range around zero; False for the range of the weights, with a zero point.
        quantize_activation: quantize the input of each product too, each token by its largest feature as it comes in:
            to int8, or to fp8 if the weights are fp8.
        dtype: int8, int4, fp8 (e4m3) or mxfp4.
        use_pallas: True takes Pallas kernels for the products, False those of XLA, "auto" whichever is faster.
        skip: kernels that stay as they are: whole parameter paths, runs of a path's parts ("mlp.down", "layers.0"), or
            patterns with * and ?.
        lm_head: quantize the output head too.
        embeddings: quantize the embedding table too, to int8 with a scale per row, also where it is the output head.
        kv_cache: the dtype of a serving engine's keys and values; None for the weights' dtype.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    quantize_activation: bool
    dtype: Dtype
    use_pallas: bool | Literal["auto"]
    skip: tuple[str, ...]
    lm_head: bool
    embeddings: bool
    kv_cache: CacheDtype | None

    def __init__(
        self,
        bits: int | None = None,
        group_size: int | None = None,
        symmetric: bool = True,
        quantize_activation: bool = False,
        dtype: Dtype | None = None,
        use_pallas: bool | Literal["auto"] = "auto",
        skip: str | tuple[str, ...] | list[str] = (),
        lm_head: bool = False,
        embeddings: bool = False,
        kv_cache: CacheDtype | None = None,
        **autoxla: Unpack[AutoXLAArguments],
    ) -> None:
        """Args:
            bits, group_size, symmetric, quantize_activation, dtype: see the class.
            use_pallas, skip, lm_head, embeddings, kv_cache: see the class.
            autoxla: AutoXLA's names: n_bits, block_size (-1 for one scale per output channel), per_channel,
                quantize_lm_head, quantize_embeddings, exclude_layers.

        Raises:
            RequestError: an unknown value, or two that contradict each other.
        """
        unknown = sorted(set(autoxla) - set(AutoXLAArguments.__annotations__))
        if unknown:
            raise _unknown_arguments(unknown)
        size = group_size if group_size != -1 else None
        size = _one("group_size", "block_size", size, autoxla.get("block_size"), nothing=-1)
        flags = {
            "symmetric": symmetric,
            "quantize_activation": quantize_activation,
            "lm_head": autoxla.get("quantize_lm_head", False) or lm_head,
            "embeddings": autoxla.get("quantize_embeddings", False) or embeddings,
            "per_channel": autoxla.get("per_channel", True),
        }
        if autoxla.get("pack_4bit", True) is not True:
            raise RequestError(
                f"pack_4bit={autoxla['pack_4bit']!r} was given, but two weights of 4 bits always share a byte here: "
                "leave it out."
            )
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise RequestError(f"{name}={flag!r} was given, but it is True or False: pass one.")
        number, kind = _bits_and_dtype(_one("bits", "n_bits", bits, autoxla.get("n_bits")), dtype)
        if kind == "mxfp4" and size is None:
            size = MX_GROUP
        _check_group(size, number, kind)
        if not flags["per_channel"] and size is None:
            raise RequestError(
                "per_channel=False was given without a group size, but one scale for a whole matrix is too coarse to "
                "be offered: leave per_channel out, or pass a group_size."
            )
        if not symmetric and not kind.startswith("int"):
            raise RequestError(
                f"symmetric=False was given with {kind} weights, but only integers have zero points: leave it out, or "
                "use int8 or int4."
            )
        if use_pallas not in (True, False, "auto"):
            raise RequestError(f"use_pallas={use_pallas!r} was given, but it is True, False or 'auto': pass one.")
        if kv_cache not in (None, *get_args(CacheDtype)):
            raise RequestError(
                f"kv_cache={kv_cache!r} was given, but keys and values are quantized to int8 or fp8: pass one of them, "
                "or leave it out."
            )
        values: dict[str, Any] = {
            "bits": _SettledInt(number),
            "group_size": None if size is None else _SettledInt(size),
            "symmetric": symmetric,
            "quantize_activation": quantize_activation,
            "dtype": _SettledText(kind),
            "use_pallas": use_pallas,
            "skip": (*_names(skip), *_names(autoxla.get("exclude_layers"))),
            "lm_head": flags["lm_head"],
            "embeddings": flags["embeddings"],
            "kv_cache": kv_cache,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        for name, reason in _IDLE.items():
            if autoxla.get(name) is not None:
                given = autoxla.get(name)
                warnings.warn(f"{name}={given} changes nothing here: {reason}.", stacklevel=2)

    def __str__(self) -> str:
        """The shorthand of the format, such as w4a16-g128-asym, as `parse` reads it."""
        activation = 8 if self.quantize_activation else 16
        if self.dtype == "mxfp4":
            words = ["mxfp4"] + (["a8"] if self.quantize_activation else [])
        else:
            words = [f"w{self.bits}a{activation}"] + (["fp8"] if self.dtype == "fp8" else [])
            words += [] if self.group_size is None else [f"g{int(self.group_size)}"]
            words += [] if self.symmetric else ["asym"]
        return "-".join(words)

    @property
    def kernel_format(self) -> KernelFormat:
        """The format of each quantized kernel."""
        floating = not self.dtype.startswith("int")
        activation = ActivationFormat("float8_e4m3fn" if floating else "int8") if self.quantize_activation else None
        scale = "float8_e8m0fnu" if self.dtype == "mxfp4" else "float32"
        size = None if self.group_size is None else int(self.group_size)
        return KernelFormat(VALUES[self.dtype], size, self.symmetric, scale, activation=activation)

    def skips(self, name: str) -> str | None:
        """The entry of `skip` that names a parameter or module, or None."""
        return next((pattern for pattern in self.skip if is_named(name, pattern)), None)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON values, which `from_dict` reads."""
        size = None if self.group_size is None else int(self.group_size)
        plain = {"bits": int(self.bits), "group_size": size, "dtype": str(self.dtype), "skip": list(self.skip)}
        return {field.name: getattr(self, field.name) for field in fields(self)} | plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration of these arguments.

        Raises:
            RequestError: an argument is unknown or has an invalid value.
        """
        known = _known(cls)
        if unknown := sorted(set(values) - set(known)):
            raise _unknown_arguments(unknown, known)
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a shorthand.

        w8a16, w4a16, w8a8, w4a8: bits of weights and of activations; int8 and int4 mean w8a16 and w4a16. `-g128`:
        groups of 128 inputs. `-asym`: zero points. fp8 means w8a16 in e4m3; `fp8-block128` has a scale for every 128
        inputs; w8a8-fp8 also quantizes activations. mxfp4: 4-bit floats in groups of 32.

        Raises:
            RequestError: the text is no shorthand.
        """
        first, *rest = text.strip().lower().replace("_", "-").split("-")
        arguments: dict[str, Any] = {}
        pair = re.fullmatch(r"w(4|8)a(8|16)", first)
        if pair:
            arguments = {"bits": int(pair[1]), "quantize_activation": pair[2] == "8"}
        elif first in BITS:
            arguments = {"dtype": first}
        else:
            raise _unknown_shorthand(text)
        for word in rest:
            group = re.fullmatch(r"(?:g|block)(\d+)", word)
            if group and "group_size" not in arguments:
                arguments["group_size"] = int(group[1])
            elif word in ("asym", "sym") and "symmetric" not in arguments:
                arguments["symmetric"] = word == "sym"
            elif word in ("fp8", "int8", "int4", "mxfp4") and "dtype" not in arguments:
                arguments["dtype"] = word
            elif word == "a8" and "quantize_activation" not in arguments:
                arguments["quantize_activation"] = True
            else:
                raise _unknown_shorthand(text)
        return cls(**arguments)

    @classmethod
    def read(cls, value: Any) -> Self:
        """A configuration as it is, or the one that a shorthand or a mapping of arguments makes.

        Raises:
            RequestError: it is none of these, or an argument is wrong.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, QuantizationConfig):
            return cls.from_dict(value.to_dict())
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise RequestError(
            f"the quantization is the {type(value).__name__} {str(value)[:60]!r}, but a QuantizationConfig or a "
            "mapping of its arguments is needed, or a shorthand such as 'w4a16-g128': pass one of them."
        )


def is_named(name: str, pattern: str) -> bool:
    """Whether a pattern is a dotted name, a run of its parts, or matches it with * and ?."""
    return f".{pattern}." in f".{name}." or fnmatchcase(name, pattern)


def _one(name: str, other: str, value: int | None, given: int | None, nothing: int | None = None) -> int | None:
    """The value of an argument with two names. `nothing` under the second name means None."""
    if given is None:
        return value
    given = None if given == nothing else given
    if value is not None and not isinstance(value, _SettledInt) and value != given:
        raise RequestError(
            f"{name}={value} and {other}={given} were asked for, but they are two names of one number: pass one of "
            "them."
        )
    return given


def _bits_and_dtype(bits: int | None, dtype: str | None) -> tuple[int, Dtype]:
    if dtype is not None and dtype not in BITS:
        raise RequestError(
            f"weights of the dtype {dtype!r} were asked for, but they are quantized to {', '.join(BITS)}: pass one."
        )
    if bits is not None and (isinstance(bits, bool) or bits not in (4, 8)):
        raise RequestError(f"weights of {bits!r} bits were asked for, but a weight is held in 4 or 8: pass one.")
    if dtype is None or (isinstance(dtype, _SettledText) and not isinstance(bits, _SettledInt | None)):
        number = 8 if bits is None else bits
        return number, "int8" if number == 8 else "int4"
    number = BITS[dtype]
    if bits is not None and not isinstance(bits, _SettledInt) and bits != number:
        raise RequestError(
            f"bits={bits} and dtype={dtype!r} were asked for, but {dtype} has {number} bits: pass one of them."
        )
    return number, cast(Dtype, str(dtype))


def _check_group(size: int | None, bits: int, dtype: str) -> None:
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int) or size < 2:
        raise RequestError(
            f"group_size={size!r} was given, but it is None (one scale per output channel) or a number of inputs from "
            "2 on that divides the kernels' inputs: pass 128, for one."
        )
    if bits == 4 and size % 2:
        raise RequestError(
            f"group_size={size} was given with 4 bits, but two weights of a group share a byte: pass an even number."
        )
    if dtype == "mxfp4" and size != MX_GROUP:
        raise RequestError(
            f"group_size={size} was given with mxfp4, but its scales hold for {MX_GROUP} weights each: leave it out."
        )


def _names(given: str | tuple[str, ...] | list[str] | None) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given or ())
    if not all(isinstance(name, str) and name for name in names):
        raise RequestError(f"skip={names!r} was given, but it holds names of layers: pass strings.")
    return names


def _known(kind: type[QuantizationConfig]) -> tuple[str, ...]:
    return tuple(sorted({*(field.name for field in fields(kind)), *AutoXLAArguments.__annotations__}))


def _unknown_arguments(unknown: list[str], known: tuple[str, ...] | None = None) -> RequestError:
    return RequestError(
        f"a quantization configuration was given {', '.join(unknown)}, but it takes "
        f"{', '.join(known or _known(QuantizationConfig))}: leave the rest out."
    )


def _unknown_shorthand(text: str) -> RequestError:
    return RequestError(
        f"the quantization {text!r} was asked for, but w8a16, w4a16, w8a8, w4a8, int8, int4, fp8 and mxfp4 are known, "
        "with -g128 for groups of 128 inputs and -asym for zero points: write one of them, such as 'w4a16-g128'."
    )
