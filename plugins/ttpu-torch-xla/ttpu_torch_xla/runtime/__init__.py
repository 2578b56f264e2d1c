"""The runtime that puts torch tensors on a TPU, found by entry point. Nothing outside a runtime's own package
imports its library or names its device."""

from ttpu_torch_xla.runtime.choice import current, device_type, is_device, runtime_class
from ttpu_torch_xla.runtime.protocol import Counters, JaxOperation, PartitionSpec, TorchRuntime

__all__ = [
    "Counters",
    "JaxOperation",
    "PartitionSpec",
    "TorchRuntime",
    "current",
    "device_type",
    "is_device",
    "runtime_class",
]
