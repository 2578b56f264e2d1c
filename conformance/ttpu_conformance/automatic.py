"""Turns the knobs of a model type's config class one by one, those too that no variant of its author turns: booleans,
epsilons, activations, counts, windows, lists of layers, ropes."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ttpu_conformance.case import Case
from ttpu_conformance.declaration import Variant
from ttpu_core.config.key_audit import NOT_IN_THE_FORWARD_PASS
from ttpu_core.spec.rope import ROPE_TYPES

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu", "relu")
KINDS_OF_LAYERS = ("full_attention", "sliding_attention")
LARGE_EPS = 1e-2
"""An epsilon that shows beside activations of order one."""

_NEGLIGIBLE = 1e-4  # a least or greatest value that shows only where it is of order one
_SMALL = 4  # counts up to this are tried one more, doubled and one less
_NOT_KNOBS = ("text_config", "vision_config", "audio_config", "model_type", "transformers_version")


@dataclass(frozen=True)
class Knob:
    """A key of a config, and the settings to try for it besides the present one; each is keys over the base. `one` says
    that one accepted setting is enough, as for sizes."""

    key: str
    settings: tuple[Mapping[str, Any], ...]
    one: bool = False


def knobs(case: Case) -> list[Knob]:
    """Return every knob of the case's config class; those with no settings are ones that the kit cannot turn."""
    config, written = case.reference.transformers_config, case.reference.config
    hints = {field.name: field.type for field in dataclasses.fields(config)}
    names = dict.fromkeys([*hints, *(key for key in written if key not in hints)])
    found = []
    for key in names:
        if key in NOT_IN_THE_FORWARD_PASS or key in _NOT_KNOBS:
            continue
        if key == "rope_parameters":
            found.append(Knob(key, tuple(_ropes(case))))
            continue
        value = written.get(key)
        settings = [one for one in _values(case, key, value, hints.get(key)) if repr(one) != repr(value)]
        large = isinstance(value, int) and value > _SMALL
        found.append(Knob(key, tuple({key: one, **_with_layers(case, key, one)} for one in settings), one=large))
    return found


def _with_layers(case: Case, key: str, value: Any) -> dict[str, Any]:
    """The layer types that the declaration gives, for as many layers as are set."""
    kinds = case.declaration.base.get("layer_types")
    if key != "num_hidden_layers" or not kinds:
        return {}
    return {"layer_types": [kinds[index % len(kinds)] for index in range(value)]}


def named(setting: Mapping[str, Any]) -> str:
    """Return a setting in words, as in `attention_bias=True`."""

    def short(value: Any) -> str:
        if isinstance(value, Mapping) and "rope_type" in value:
            return f"{value['rope_type']!r}"
        if isinstance(value, Mapping):
            inner = {short(one) for one in value.values()}
            return "/".join(sorted(inner))
        return repr(value)

    return ", ".join(f"{key}={short(value)}" for key, value in setting.items())


def over(variant: Variant, setting: Mapping[str, Any]) -> Variant:
    """Return a variant with a setting on top."""
    on = "" if variant.name == "base" else f" over {variant.name!r}"
    return Variant(f"{named(setting)}{on}", {**variant.keys, **setting})


def _values(case: Case, key: str, value: Any, hint: Any) -> Iterator[Any]:
    """Other values for a key, those first that say most."""
    if isinstance(value, bool):
        yield not value
    elif "window" in key and _takes(hint, int) and not isinstance(value, list) and not key.startswith("max_"):
        yield from (7, None) if isinstance(value, int) else (7,)
    elif isinstance(value, str) and ("act" in key or value in ACTIVATIONS):
        yield from [name for name in ACTIVATIONS if name != value][:2]
    elif isinstance(value, float) or (value is None and _takes(hint, float)):
        yield from _numbers(key, value)
    elif isinstance(value, int) or (value is None and _takes(hint, int) and not _takes(hint, list)):
        yield from _counts(case, key, value)
    elif isinstance(value, list) or (value is None and _takes(hint, list)):
        yield from _lists(case, key, value)
    elif value is None and _takes(hint, bool):
        yield from (True, False)
    yield from (one for one in _literals(hint) if one != value)


def _numbers(key: str, value: float | None) -> Iterator[float]:
    if value is None:
        yield 0.5
    elif "eps" in key:
        yield max(100 * value, LARGE_EPS)
    else:
        yield 1.5 * value if abs(value) > _NEGLIGIBLE else 0.5


def _counts(case: Case, key: str, value: int | None) -> Iterator[int]:
    heads = case.architecture.config.get("num_attention_heads", 4)
    if key in ("num_key_value_heads", "num_kv_heads"):
        yield from (1, heads)
    elif value is None:
        yield from (2, 1, 24)
    elif key == "head_dim":
        yield 32 if value != 32 else 16
    elif value <= _SMALL:
        yield from (value + 1, 2 * value, value - 1)
    else:
        yield from (2 * value, value + 1)


def _lists(case: Case, key: str, value: list[Any] | None) -> Iterator[list[Any]]:
    layers = case.architecture.spec.num_layers
    if key == "layer_types":
        kinds = list(dict.fromkeys([*(value or ()), *_kinds_of_layers(case), *KINDS_OF_LAYERS]))
        if value and value[::-1] != value:
            yield value[::-1]
        for kind in kinds:
            yield [kind] * layers
        for kind in kinds[1:]:
            yield [kinds[0]] * (layers - 1) + [kind]
    elif not value:
        yield from ([0], [layers - 1])
    elif all(isinstance(one, int) for one in value):
        yield [0, *value[1:]] if value[0] else [1, *value[1:]]
        if value[::-1] != value:
            yield value[::-1]
    elif all(isinstance(one, float) for one in value):
        yield [0.5, *value[1:]]


def _kinds_of_layers(case: Case) -> tuple[str, ...]:
    try:
        return tuple(getattr(type(case.reference.transformers_config)(), "layer_types", None) or ())
    except Exception:  # a class without sizes of its own
        return ()


def _ropes(case: Case) -> Iterator[dict[str, Any]]:
    """The base's rope with another base and another share of turned features, then every type."""
    present = case.reference.config.get("rope_parameters")
    if not isinstance(present, dict):
        return
    nested = {name: one for name, one in present.items() if isinstance(one, dict)}
    for rope, others in _other_ropes(case, next(iter(nested.values())) if nested else present):
        if not nested:
            yield {"rope_parameters": rope, **others}
        for name in nested:
            yield {"rope_parameters": {**nested, name: {**rope}}, **others}


def _other_ropes(case: Case, rope: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    plain = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    share = plain.get("partial_rotary_factor")
    yield {**rope, "rope_theta": 777.0}, {}
    for other in (0.5, 1.0):
        if share is not None and share != other:
            yield {**rope, "partial_rotary_factor": other}, {}
    pairs = next((one.mixer.rope.rotary_dim // 2 for one in case.architecture.spec.layers if one.mixer.rope), 0)
    stretched = {"factor": 4.0, "original_max_position_embeddings": 32}
    own: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "linear": ({"factor": 4.0}, {}),
        "dynamic": ({"factor": 4.0}, {"max_position_embeddings": 16}),
        "yarn": (stretched, {}),
        "llama3": ({**stretched, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, {}),
        "proportional": ({"partial_rotary_factor": 0.5}, {}),
        "longrope": (
            {
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0 + index / 8 for index in range(pairs)],
                "long_factor": [1.0 + index / 2 for index in range(pairs)],
            },
            {},
        ),
    }
    for kind in ROPE_TYPES:
        if kind in own and kind != rope.get("rope_type"):
            parameters, others = own[kind]
            yield {"rope_type": kind, **plain, **parameters}, others


def _takes(hint: Any, kind: type) -> bool:
    """Whether a field's annotation allows values of a kind."""
    if isinstance(hint, str):
        return kind.__name__ in hint
    origin = typing.get_origin(hint)
    if origin is list:
        return kind is list
    return hint is kind or any(_takes(one, kind) for one in typing.get_args(hint) if not isinstance(one, str | int))


def _literals(hint: Any) -> tuple[Any, ...]:
    """The values that an annotation lists."""
    if isinstance(hint, str):
        return ()
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(value for one in typing.get_args(hint) for value in _literals(one))
