"""Chooses the runtime of this process among those installed under the entry-point group `ttpu.torch_runtimes`. Two
runtimes need different versions of torch, so an environment normally has one; where it has several, an environment
variable chooses."""

from __future__ import annotations

import os
from functools import cache

import torch

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_core.plugin_records import TORCH_RUNTIMES
from ttpu_core.registry import default_registry
from ttpu_torch_xla.runtime.protocol import TorchRuntime

VARIABLE = "TTPU_TORCH_RUNTIME"


@cache
def runtime_class() -> type[TorchRuntime]:
    """Return the class of this environment's runtime without starting it.

    Raises:
        MissingDependencyError: no distribution brings one.
        RequestError: several are installed and the variable names none of them.
        PluginError: it cannot be imported, or two distributions claim its name.
    """
    found = default_registry().names(TORCH_RUNTIMES)
    if not found:
        raise MissingDependencyError(
            "a runtime for torch tensors on TPUs was asked for, but no installed distribution has an entry point in "
            f'the group {TORCH_RUNTIMES}: `pip install "ttpu-core[torch-xla]"` brings torch_xla.'
        )
    asked = os.environ.get(VARIABLE) or None
    if asked is None and len(found) == 1:
        (asked,) = found
    if asked not in found:
        raise RequestError(
            f"the runtime for torch tensors is to be {asked or 'chosen'}, but installed are "
            f"{', '.join(found)}: set {VARIABLE} to one of them, or uninstall the others."
        )
    loaded: type[TorchRuntime] = default_registry().load(TORCH_RUNTIMES, asked, "the runtime for torch tensors")
    return loaded


def current() -> TorchRuntime:
    """Return the runtime of this process; the first call starts it."""
    return _started(runtime_class())


def device_type() -> str:
    """Return the `torch.device.type` of the runtime's tensors without starting it."""
    return runtime_class().device_type


def is_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor of any shape is on the runtime's device; does not start the runtime."""
    return tensor.device.type == runtime_class().device_type


@cache
def _started(kind: type[TorchRuntime]) -> TorchRuntime:
    return kind.start()
