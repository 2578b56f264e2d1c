"""Observes a model on the lazy runtime: where the host waited for a value, which operations ran on the host, and how
often programs were compiled."""

from __future__ import annotations

import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ttpu_torch_xla.runtime import TorchRuntime, current, device_type, is_device

READS = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::item"})
DYNAMIC = frozenset({"aten::nonzero", "aten::unique", "aten::_unique2", "aten::masked_select", "aten::unique_dim"})
OWN, INSPECTOR = "ttpu_torch_xla", "ttpu_torch_xla.inspector"


@dataclass(frozen=True)
class Finding:
    """One thing that costs time at every forward pass.

    kind: "error" (it does not run at all), "graph break" (the host waits for a value, so that the recorded program is
    cut there), "fallback" (the operation ran on the host), or "recompilation". what: the operation. where: file, line
    and function in the model's code; empty where that is not known.
    """

    kind: str
    what: str
    where: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """The part of the finding that does not depend on the inputs' shapes, which error messages may quote."""
        return self.kind, re.sub(r"\d+", "#", self.what) if self.kind == "error" else self.what, self.where


class HostReads(TorchDispatchMode):
    """Notes each operation that makes the host wait for the device, with the place in the model's code."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Finding] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        what = None
        if (name in READS or name in DYNAMIC) and any(_on_device(arg) for arg in args):
            what = name
        elif name in ("aten::_to_copy", "aten::copy_") and _leaves_device(name, args, kwargs or {}):
            what = "copy to the host"
        if what is not None:
            place = _place(sys._getframe())
            if place is not None:
                self.found[Finding("graph break", what, place)] += 1
        return func(*args, **(kwargs or {}))


def observe(
    runtime: TorchRuntime, run: Callable[[int], None], again: str = "with the same shapes"
) -> Counter[Finding]:
    """Run `run(0)` and `run(1)`, and return the findings.

    The first pass may compile; what the second one compiles is a recompilation. `again` says in what the second one
    differs.
    """
    found: Counter[Finding] = Counter()
    for step in range(2):
        runtime.sync(wait=True)
        runtime.reset_counters()
        with torch.no_grad(), HostReads() as reads:
            try:
                run(step)
            except Exception as error:  # what the stock model cannot do here is a finding too
                return Counter({_failure(error): 1})
        runtime.sync(wait=True)
        counters = runtime.counters()
        if step == 0:
            found.update(reads.found)
            seen = {finding.what for finding in reads.found}  # with their places, which the counters do not know
            fallbacks = {name: times for name, times in counters.fallbacks.items() if name not in seen}
            found.update({Finding("fallback", name): times for name, times in fallbacks.items()})
        elif counters.compiles:
            found[Finding("recompilation", f"programs compiled when it runs again {again}")] += counters.compiles
    return found


def _runtime() -> tuple[str, ...]:
    """Packages whose code is no model's."""
    return ("torch", *current().packages)


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_device(value)


def _leaves_device(name: str, args: Any, kwargs: Any) -> bool:
    if name == "aten::copy_":
        return _on_device(args[1]) and not _on_device(args[0])
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != device_type() and _on_device(args[0])


def _failure(error: Exception) -> Finding:
    """An error, with the innermost place in the model's code."""
    words = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in (*_runtime(), OWN):
            return Finding("error", words, _place(frame) or "")
    return Finding("error", words)


def _place(frame: FrameType | None) -> str | None:
    """The innermost frame that is not the runtime's; None where it is this backend's, which reads what it has to (the
    tokens of an answer) after the program that computes it was run."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package == OWN and not module.startswith(INSPECTOR):
            return None
        if package and package not in (*_runtime(), OWN):
            code = frame.f_code
            parts = Path(code.co_filename).parts
            file = "/".join(parts[parts.index(package) :]) if package in parts else parts[-1]
            return f"{file}:{frame.f_lineno} {code.co_qualname}"
        frame = frame.f_back
    return ""
