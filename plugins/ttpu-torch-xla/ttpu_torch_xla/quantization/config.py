"""The quantization settings of a model: AutoXLA's arguments as a checked, frozen `QuantizationConfig`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_core.sharding.workload import Quantization

BITS = (4, 8)
FLAGS = ("symmetric", "quantize_activation", "use_pallas", "per_channel", "quantize_lm_head", "pack_4bit")


class _Settled(int):
    """A number of bits that a configuration has written into both of its names: where `dataclasses.replace` passes one
    beside a new number, the new one counts."""


@dataclass(frozen=True)
class QuantizationConfig:
    """The format of the weights of linear layers, and whether their inputs are quantized too.

    W8A16 is the default; `bits=4` makes W4A16, `quantize_activation=True` W8A8 or W4A8.

    Args:
        n_bits: of a weight, 4 or 8; the same as `bits`, and 8 where neither is given.
        block_size: inputs that share a scale: -1 for all inputs of an output channel, else a divisor of in_features
            (128 is usual with 4 bits: arXiv 2210.17323).
        symmetric: True for a range around zero; False for the range of the weights, with a zero point.
        quantize_activation: round each token to int8 by its largest feature as it comes in, and multiply int8 by int8.
        use_pallas: accepted for AutoXLA's sake, with a warning. XLA multiplies int8 by int8 at the matrix units' int8
            rate, and unpacks and converts weights within the product, so that no kernel of ours takes its place: the
            same products are used either way.
        per_channel: scales for each output channel (and block of it). False is only taken with a `block_size`, which
            has them too; one scale for a whole matrix is refused.
        quantize_embeddings: refused when True: a table is read row by row, not multiplied.
        quantize_lm_head: also the head that gives the logits. A head that is tied to the embeddings gets a copy of
            its own.
        auto_tune_block_sizes: no effect, with a warning when given: no kernel here has block sizes to tune.
        pack_4bit: two weights of 4 bits to a byte; False leaves one to a byte. Without effect on 8 bits.
        exclude_layers: linear layers to leave as they are: whole names, runs of a name's parts ("mlp.down_proj",
            "layers.0"), or patterns with * and ?. Each must name at least one.
        use_xla_kernel: no effect, with a warning when given: all products here are XLA's.
        bits: the same as `n_bits`, as AutoXLA's README has it.

    Raises:
        RequestError: a value that there is not, or two that contradict each other.
    """

    n_bits: int | None = None
    block_size: int = -1
    symmetric: bool = True
    quantize_activation: bool = False
    use_pallas: bool = False
    per_channel: bool = True
    quantize_embeddings: bool = False
    quantize_lm_head: bool = False
    auto_tune_block_sizes: bool | None = None
    pack_4bit: bool = True
    exclude_layers: tuple[str, ...] = ()
    use_xla_kernel: bool | None = None
    bits: int = 0  # 0: whatever n_bits says

    def __post_init__(self) -> None:
        said = [bits for bits in (self.n_bits, self.bits or None) if bits is not None]
        given = {bits for bits in said if not isinstance(bits, _Settled)} or set(said)
        if len(given) > 1:
            raise RequestError(
                f"bits={self.bits} and n_bits={self.n_bits} were asked for, but they are two names of one number: pass "
                "one of them."
            )
        bits = given.pop() if given else 8
        if isinstance(bits, bool) or bits not in BITS:
            raise RequestError(f"weights of {bits!r} bits were asked for, but a weight is held in 4 or 8: pass one.")
        object.__setattr__(self, "bits", _Settled(bits))
        object.__setattr__(self, "n_bits", _Settled(bits))
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} was given, but it is True or False: pass one.")
        self._check_block_size()
        if self.quantize_embeddings:
            raise RequestError(
                "quantize_embeddings=True was asked for, but only linear layers are quantized: leave it out; "
                "quantize_lm_head=True quantizes a head that is tied to the embeddings, as a copy."
            )
        excluded = (self.exclude_layers,) if isinstance(self.exclude_layers, str) else self.exclude_layers or ()
        if not all(isinstance(name, str) and name for name in excluded):
            raise RequestError(f"exclude_layers={excluded!r} was given, but it holds names of layers: pass strings.")
        object.__setattr__(self, "exclude_layers", tuple(excluded))
        self._warn()

    def _check_block_size(self) -> None:
        size = self.block_size
        if isinstance(size, bool) or not isinstance(size, int) or (size != -1 and size < 2):
            raise RequestError(
                f"block_size={size!r} was given, but it is -1 (one scale for each output channel) or a number of "
                "inputs from 2 on that divides in_features: pass 128, for one."
            )
        if self.packed and size % 2 and size != -1:
            raise RequestError(
                f"block_size={size} was given with 4 bits, but two weights of a block share a byte: pass an even "
                "number, or pack_4bit=False."
            )
        if not self.per_channel and size == -1:
            raise RequestError(
                "per_channel=False was given without a block_size, but one scale for a whole matrix is too coarse to "
                "be offered: leave per_channel out, or pass a block_size."
            )

    def _warn(self) -> None:
        reasons = {
            "use_pallas": "XLA's own quantized products are used" if self.use_pallas else None,
            "auto_tune_block_sizes": "no kernel here has block sizes to tune",
            "use_xla_kernel": "all products here are XLA's",
        }
        for name, reason in reasons.items():
            if getattr(self, name) is not None and reason:
                warnings.warn(f"{name}={getattr(self, name)} changes nothing here: {reason}.", stacklevel=4)

    @property
    def packed(self) -> bool:
        """Whether two weights share a byte."""
        return self.bits == 4 and self.pack_4bit

    @property
    def name(self) -> str:
        """The usual name of the format, such as W4A16 or W8A8."""
        return f"W{self.bits}A{8 if self.quantize_activation else 16}"

    @property
    def planned_as(self) -> Quantization:
        """The planner's name of the format."""
        return "int4" if self.packed else "int8"

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that have an effect as plain JSON values, which `from_dict` reads."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _LASTING}
        return values | {"bits": int(self.bits), "exclude_layers": list(self.exclude_layers)}

    @classmethod
    def read(cls, value: Any) -> QuantizationConfig:
        """A configuration as it is, or the one that a mapping of arguments makes.

        Raises:
            RequestError: it is neither, or an argument is wrong.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise RequestError(
            f"quantization_config is the {type(value).__name__} {str(value)[:60]!r}, but a QuantizationConfig or a "
            "mapping of its arguments is needed: pass QuantizationConfig(bits=8), for one."
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantizationConfig:
        """Make a configuration of these arguments.

        Raises:
            RequestError: an argument that there is not.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise RequestError(
                f"a quantization configuration was given {', '.join(unknown)}, but it takes "
                f"{', '.join(sorted(known))}: leave the rest out."
            )
        return cls(**values)


_LASTING = ("bits", "block_size", "symmetric", "quantize_activation", "quantize_lm_head", "pack_4bit", "exclude_layers")
