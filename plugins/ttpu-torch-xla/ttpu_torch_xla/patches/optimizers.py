"""Makes torch's Adam and AdamW for parameters on the device without their fused kernel, which it has none of: XLA fuses
the whole step."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from ttpu_torch_xla.runtime import is_device


def without_fused(original: Callable[..., None]) -> Callable[..., None]:
    """`Adam.__init__` with the same arguments, where `fused=True` counts for parameters elsewhere alone."""

    @wraps(original)
    def init(self: Any, params: Any, *args: Any, **options: Any) -> None:
        if options.get("fused"):
            params = [dict(one, params=list(one["params"])) if isinstance(one, dict) else one for one in params]
            if any(is_device(one) for one in _tensors(params)):
                options["fused"] = None
        original(self, params, *args, **options)

    return init


without_fused.wraps_original = True  # type: ignore[attr-defined]


def _tensors(params: list[Any]) -> list[Any]:
    """The parameters of all groups; a parameter may have its name before it."""
    found = [one for group in params for one in (group["params"] if isinstance(group, dict) else [group])]
    return [one[1] if isinstance(one, tuple) else one for one in found]
