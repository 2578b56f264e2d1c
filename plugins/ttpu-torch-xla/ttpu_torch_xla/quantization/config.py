"""The quantization settings that this backend takes: the core's `QuantizationConfig` without what it lacks, and with
AutoXLA's `pack_4bit`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Self

from ttpu_core.errors import RequestError
from ttpu_core.quantization import QuantizationConfig as CoreConfig
from ttpu_core.services import Quantization


@dataclass(frozen=True, init=False)
class QuantizationConfig(CoreConfig):
    """The format of the weights of linear layers and experts, and whether their inputs are quantized too; see
    `ttpu_core.quantization.QuantizationConfig`, whose arguments and AutoXLA names it takes.

    W8A16 is the default; `bits=4` makes W4A16, `quantize_activation=True` W8A8 or W4A8, `dtype="fp8"` float8_e4m3fn.
    Refused are mxfp4, quantized embeddings and a quantized cache. A head that is tied to the embeddings gets a
    quantized copy.
    `use_pallas` changes nothing, with a warning: XLA multiplies int8 by int8 at the matrix units' int8 rate, and
    unpacks and converts weights within the product.

    Attributes:
        pack_4bit: two weights of 4 bits to a byte; False leaves one to a byte. Without effect on 8 bits.
    """

    pack_4bit: bool

    def __init__(self, *positional: Any, **given: Any) -> None:
        """Take the arguments of the core's class.

        Raises:
            RequestError: a value that there is not, two that contradict each other, or what this backend lacks.
        """
        pack = given.pop("pack_4bit", True)
        super().__init__(*positional, **given)
        if not isinstance(pack, bool):
            raise RequestError(f"pack_4bit={pack!r} was given, but it is True or False: pass one.")
        object.__setattr__(self, "pack_4bit", pack)
        if self.embeddings:
            raise RequestError(
                "quantized embeddings were asked for, but this backend quantizes only linear layers and experts: leave "
                "them out; lm_head=True quantizes a head that is tied to the embeddings, as a copy."
            )
        if self.dtype == "mxfp4":
            raise RequestError(
                "mxfp4 weights were asked for, but this backend quantizes to int8, int4 and fp8: pass one of those as "
                "dtype, or use the JAX backend."
            )
        if self.kv_cache is not None:
            raise RequestError(
                f"kv_cache={self.kv_cache!r} was asked for, but this backend keeps keys and values as the model "
                "computes them: leave it out, or use the JAX backend."
            )
        if self.use_pallas is True:
            warnings.warn(
                "use_pallas=True changes nothing here: XLA's own quantized products are used.", stacklevel=2
            )

    @property
    def n_bits(self) -> int:
        """AutoXLA's name of `bits`."""
        return self.bits

    @property
    def block_size(self) -> int:
        """AutoXLA's name of `group_size`, -1 for one scale per output channel."""
        return -1 if self.group_size is None else int(self.group_size)

    @property
    def exclude_layers(self) -> tuple[str, ...]:
        """AutoXLA's name of `skip`."""
        return self.skip

    @property
    def quantize_lm_head(self) -> bool:
        """AutoXLA's name of `lm_head`."""
        return self.lm_head

    @property
    def packed(self) -> bool:
        """Whether two weights share a byte."""
        return self.bits == 4 and self.pack_4bit

    @property
    def name(self) -> str:
        """The usual name of the format, such as W4A16, W8A8 or W8A8-FP8."""
        name = f"W{self.bits}A{8 if self.quantize_activation else 16}"
        return name if self.dtype != "fp8" else f"{name}-FP8"

    @property
    def planned_as(self) -> Quantization:
        """The planner's name of the format."""
        return "int4" if self.packed else "int8"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a shorthand such as w4a16-g128."""
        return cls.from_dict(CoreConfig.parse(text).to_dict())
