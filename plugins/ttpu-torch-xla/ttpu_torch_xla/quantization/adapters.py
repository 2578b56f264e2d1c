"""peft's LoRA beside quantized layers, which train through them (QLoRA, arXiv 2305.14314). It imports peft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer

from ttpu_core.errors import UnsupportedError
from ttpu_torch_xla.quantization.linear import QuantizedLinear


class QuantizedLoraLinear(Linear):
    """LoRA beside a `QuantizedLinear`."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse: what an adapter adds is smaller than the steps between quantized numbers.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "an adapter was to be merged into quantized weights, but it is smaller than the steps between their "
            "numbers: save the adapter, and merge it into the model that is not quantized."
        )


def dispatch(original: Callable[..., Any]) -> Callable[..., Any]:
    """peft's choice of a LoRA layer, with one for quantized layers."""

    def chosen(target: Any, adapter_name: str, config: Any, parameter_name: str | None = None, **given: Any) -> Any:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, QuantizedLinear) and parameter_name is None:
            return QuantizedLoraLinear(target, adapter_name, config=config, **given)
        return original(target, adapter_name, config=config, parameter_name=parameter_name, **given)

    return chosen


dispatch.wraps_original = True  # type: ignore[attr-defined]
