"""The options for loading a model with the torch_xla backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ttpu_core.errors import RequestError
from ttpu_core.loading import LoadOptions

SWITCHES = ("auto_shard", "do_quant", "scan_layers", "gradient_checkpointing", "patches")


@dataclass(frozen=True, kw_only=True)
class TorchXlaLoadOptions(LoadOptions):
    """`LoadOptions`, where `dtype` may be a torch dtype and `attn_implementation` is "auto", "eager", "sdpa",
    "xla_flash_attention" or "splash_attention".

    Args:
        auto_shard: False leaves the model whole, whatever the strategy.
        use_fsdp_wrap: wrap the layers in torch_xla's FSDPv2 after they were sharded; "auto" does so where the mesh has
            devices along "fsdp".
        do_quant: quantize linear layers and experts as `quantization_config` says (int8 per channel where it is None).
        quantization_config: AutoXLA's name of `quantization`, with `do_quant`.
        gradient_checkpointing: recompute each layer's activations in the backward pass.
        scan_layers: trace equal layers once; compiles faster, and takes more memory for temporaries.
        patches: False leaves out every patch that the model runs rightly without.
    """

    auto_shard: bool = True
    use_fsdp_wrap: bool | Literal["auto"] = False
    do_quant: bool = False
    quantization_config: Any = None
    gradient_checkpointing: bool = False
    scan_layers: bool = False
    patches: bool = True

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RequestError: an unknown purpose, a switch that is not a bool, or a `quantization_config` without
                `do_quant`.
        """
        super().__post_init__()
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}, but it is a switch: write True or False.")
        if self.use_fsdp_wrap not in (True, False, "auto"):
            raise RequestError(f"use_fsdp_wrap is {self.use_fsdp_wrap!r}, but it is True, False or 'auto': write one.")
        if self.quantization is not None and self.quantization_config is not None:
            raise RequestError(
                "quantization and quantization_config were both given, but they are two names of one setting: pass one "
                "of them."
            )
        if self.quantization_config is not None and not self.do_quant:
            raise RequestError(
                "quantization_config was given without do_quant=True, so that nothing would be quantized: pass "
                "do_quant=True, or leave the configuration out."
            )
