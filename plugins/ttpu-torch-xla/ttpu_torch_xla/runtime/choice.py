"""Chooses the runtime of this process among those installed under the entry-point group `ttpu.torch_runtimes`. Two
runtimes need different versions of torch, so an environment normally has one; where it has several, an environment
variable chooses."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import entry_points

import torch

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_torch_xla.runtime.protocol import TorchRuntime

GROUP = "ttpu.torch_runtimes"
VARIABLE = "TTPU_TORCH_RUNTIME"


@cache
def runtime_class() -> type[TorchRuntime]:
    """Return the class of this environment's runtime without starting it.

    Raises:
        MissingDependencyError: no distribution brings one.
        RequestError: several are installed and the variable names none of them.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    if not found:
        raise MissingDependencyError(
            "a runtime for torch tensors on TPUs was asked for, but no installed distribution has an entry point in "
            f'the group {GROUP}: `pip install "ttpu-core[torch-xla]"` brings torch_xla.'
        )
    asked = os.environ.get(VARIABLE) or None
    if asked is None and len(found) == 1:
        (asked,) = found
    if asked not in found:
        raise RequestError(
            f"the runtime for torch tensors is to be {asked or 'chosen'}, but installed are "
            f"{', '.join(sorted(found))}: set {VARIABLE} to one of them, or uninstall the others."
        )
    loaded: type[TorchRuntime] = found[asked].load()
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
