"""Converts a saved config to the older JSON form of rope parameters that checkpoints on the Hub have, if transformers
reads both as the same parameters."""

from __future__ import annotations

import json
import warnings
from typing import Any

from ttpu_conformance.case import Reference

_OLD_NAMES = ("linear", "dynamic", "yarn")  # whose oldest files write "type", not "rope_type"


def old_style(reference: Reference) -> dict[str, Any] | None:
    """config.json with `rope_theta` and `rope_scaling` instead of `rope_parameters`; None where no such form exists."""
    values: dict[str, Any] = json.loads(json.dumps(reference.config))
    part = values["text_config"] if isinstance(values.get("text_config"), dict) else values
    rope = part.pop("rope_parameters", None)
    if not isinstance(rope, dict):
        return None
    nested = {name: entry for name, entry in rope.items() if isinstance(entry, dict)}
    part |= _nested(nested) if nested else _flat(rope)
    kind = type(reference.transformers_config)
    try:
        with warnings.catch_warnings(action="ignore"):  # transformers deprecates the form that is asked for here
            read = kind.from_dict(json.loads(json.dumps(values))).get_text_config().rope_parameters
    except Exception:  # a form that this config class never had
        return None
    return values if _same(read, reference.transformers_config.get_text_config().rope_parameters) else None


def _flat(rope: dict[str, Any]) -> dict[str, Any]:
    rest = dict(rope)
    old = {"rope_theta": rest.pop("rope_theta", 10_000.0)}
    if "partial_rotary_factor" in rest:
        old["partial_rotary_factor"] = rest.pop("partial_rotary_factor")
    kind = rest.pop("rope_type", "default")
    named = {"type" if kind in _OLD_NAMES else "rope_type": kind, **rest}
    return old | {"rope_scaling": None if kind == "default" and not rest else named}


def _nested(rope: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The full layers' parameters at the top, and the sliding layers' base beside them, as gemma 3 wrote them."""
    old = _flat(rope.get("full_attention") or next(iter(rope.values())))
    if "sliding_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
    return old


def _same(one: Any, other: Any) -> bool:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if item is not None and key != "type"}
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    return bool(plain(one) == plain(other))
