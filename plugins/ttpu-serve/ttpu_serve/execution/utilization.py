"""Computes the cost of steps by formula: floating point operations of the model's matrix products, and bytes that must
be read. Divided by time and peak rates, the totals give MFU and MBU."""

from __future__ import annotations

import numpy as np

from ttpu_core.sharding.hardware import CHIPS
from ttpu_core.spec import ArchitectureSpec, AttentionSpec
from ttpu_core.spec.arithmetic import attention_flops, kv_elements, product_flops
from ttpu_serve.scheduling.scheduler_output import ScheduledStep


class StepCosts:
    """Totals over all steps.

    Operations: two per active parameter and token for each layer that uses the parameter, and 4 * heads * head_dim per
    token and cached token it attends to.
    Bytes: the weights once per step, and each sequence's cached keys and values once, limited by windows and chunks.

    Args:
        spec: the model's architecture.
        weight_bytes: bytes of all weights over all devices.
        kv_itemsize: bytes of one number of a cached key or value.
        devices: number of devices.
        device_kind: the hardware's name; peak rates are None for unknown hardware.
    """

    def __init__(
        self, spec: ArchitectureSpec, weight_bytes: int, kv_itemsize: float, devices: int = 1, device_kind: str = ""
    ) -> None:
        self.flops = self.bytes = 0.0
        self._weight_bytes = weight_bytes
        self._flops_per_token = product_flops(spec.num_multiplied_parameters, 1)
        spans: dict[int | None, list[float]] = {}
        for layer in spec.layers:
            mixer = layer.mixer
            if isinstance(mixer, AttentionSpec):
                kept = spans.setdefault(mixer.window or mixer.chunk, [0.0, 0.0])
                kept[0] += attention_flops(mixer.num_heads, mixer, 1)
                kept[1] += kv_elements(mixer) * kv_itemsize
        self._spans = spans
        chip = next((chip for chip in CHIPS.values() if chip.device_kind == device_kind), None)
        self.peak_flops = None if chip is None else chip.bf16_flops * devices
        self.peak_bytes = None if chip is None else chip.hbm_bytes_per_second * devices

    def count(self, step: ScheduledStep) -> None:
        """Add the cost of one step."""
        ends = step.starts + step.counts
        self.flops += self._flops_per_token * step.num_tokens
        self.bytes += self._weight_bytes
        for span, (flops, size) in self._spans.items():
            seen = ends if span is None else np.minimum(ends, span)
            self.flops += flops * float((step.counts * seen).sum())
            self.bytes += size * float(seen.sum())
