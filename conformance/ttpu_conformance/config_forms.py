"""Makes other forms of a config.json that transformers reads: without single keys, with null for them, under the names
that the config class still knows, and with rope parameters as older files write them."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ttpu_conformance.case import Case
from ttpu_conformance.config_reading import SIZE
from ttpu_conformance.tiny import SIZES, given_values
from ttpu_core.config import ModelConfig
from ttpu_core.config.key_audit import NOT_IN_THE_FORWARD_PASS
from ttpu_core.errors import TTPUError

_KEPT_SMALL = ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts")
ROPE_TYPES_OF_OLD = {"longrope": ("su",)}
"""Names of rope types that files had before the present one."""


@dataclass(frozen=True)
class Form:
    """One form of a config: what is special about it, its JSON, the key that it leaves out, if it is about one, and
    whether it says by other names what the plugin describes, so that the plugin may not refuse it."""

    what: str
    raw: Mapping[str, Any]
    without: str | None = None
    renamed: bool = False


def forms(case: Case) -> Iterator[Form]:
    """Yield every form of the case's config."""
    written, given = case.reference.config, given_json(case)
    yield Form("only the keys that its author gave", given)
    yield from rope_forms(written)
    if not case.is_base:
        return
    starts = [(written, ""), (given, " and what follows from other keys")]
    usual = usual_json(case)
    if usual is not None:
        yield Form("the sizes of the config class", usual)
        starts.append((usual, ", and the sizes of the config class"))
    for start, note in starts:
        for place, key in _keys(start):
            yield Form(f"no {key!r}{note}", _changed(start, place, {}, (key,)), key)
    yield from sparse_forms(case)
    for place, key in _keys(written):
        if _part(written, place)[key] is not None:
            yield Form(f"null for {key!r}", _changed(written, place, {key: None}))
    for start in (written, given):
        yield from _named_otherwise(case, start)


def given_json(case: Case) -> dict[str, Any]:
    """Return config.json with the keys that the declaration and the kit's sizes give, and none that the class adds."""
    given = given_values(case.declaration, case.variant)
    raw = {"model_type": case.model_type, "architectures": case.reference.config.get("architectures"), **given}
    text, own = raw.get("text_config"), case.reference.config.get("text_config")
    if isinstance(text, dict) and isinstance(own, dict) and "model_type" in own:
        raw["text_config"] = {"model_type": own["model_type"], **text}
    return raw


def usual_json(case: Case) -> dict[str, Any] | None:
    """Return config.json with the sizes of the config class itself, save for two layers and few experts, so that what
    it assumes of single keys fits the others; None where the class has no such sizes."""
    whole = case.reference.transformers_config
    kind = type(whole)
    place = ("text_config",) if isinstance(case.reference.config.get("text_config"), dict) else ()
    names = getattr(type(whole.get_text_config()), "attribute_map", {})
    usual: dict[str, Any] = {names.get(key, key): SIZES[key] for key in _KEPT_SMALL}
    try:
        with warnings.catch_warnings(action="ignore"):
            present = json.loads(kind().to_json_string())
            present = present if not place else present["text_config"]
            few = {key: value for key, value in usual.items() if key in present}
            made = dict(json.loads(kind(**({"text_config": few} if place else few)).to_json_string()))
            return _with_what_is_needed(case, made, place)
    except Exception:  # a class that has no sizes of its own, or whose defaults do not fit two layers
        return None


def _with_what_is_needed(case: Case, raw: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    """A config with the case's own values for the keys that the plugin needs and the class leaves null."""
    own = _part(case.reference.config, place)
    for _ in range(len(own)):
        try:
            case.describe(ModelConfig.from_dict(raw))
        except TTPUError as error:
            found = re.search(r"sets '(?:text_config\.)?(\w+)' to null", str(error))
            if found is None or own.get(found[1]) is None:
                break
            raw = _changed(raw, place, {found[1]: own[found[1]]})
        else:
            break
    return raw


def sparse_forms(case: Case) -> Iterator[Form]:
    """Yield the config with the class's own number of layers and none but the keys that the plugin requires, and the
    same with each flag turned and each window given: what else matters then is what the class assumes."""
    if case.wraps_text_model:
        return
    kind = type(case.reference.transformers_config)
    names = getattr(kind, "attribute_map", {})
    try:
        with warnings.catch_warnings(action="ignore"):
            usual = json.loads(kind().to_json_string())
            bare = set(vars(kind())) & {field.name for field in dataclasses.fields(kind)}
    except Exception:  # a class that has no sizes of its own
        return
    few: dict[str, Any] = {"model_type": case.model_type, names.get(_KEPT_SMALL[0], _KEPT_SMALL[0]): 2}
    for _ in range(len(usual)):  # of required keys, those that are no sizes
        missing = _required(case, few)
        if missing is None or usual.get(missing) is None or missing in few:
            break
        if SIZE.fullmatch(missing) is None:
            yield Form(f"no {missing!r}, and the sizes of the config class alone", dict(few), missing)
        few[missing] = usual[missing]
    raw: dict[str, Any] = {"model_type": case.model_type}
    raw |= {names.get(key, key): SIZES[key] for key in _KEPT_SMALL[1:] if names.get(key, key) in usual}
    for _ in range(len(usual)):  # add what is required, one after the other
        missing = _required(case, raw)
        if missing is None:
            break
        if usual.get(missing) is None or missing in raw:
            return
        raw[missing] = usual[missing]
    required = ", ".join(list(raw)[1:])
    yield Form(f"{required} alone", raw)
    for key, value in usual.items():
        if key in NOT_IN_THE_FORWARD_PASS or key not in bare:
            continue
        if isinstance(value, bool):
            yield Form(f"{required} and {key}={not value} alone", {**raw, key: not value})
        elif "window" in key and (value is None or isinstance(value, int)) and not isinstance(value, bool):
            yield Form(f"{required} and {key}=13 alone", {**raw, key: 13})


def _required(case: Case, raw: Mapping[str, Any]) -> str | None:
    """The key that the plugin misses in a config; None where it misses none."""
    try:
        case.describe(ModelConfig.from_dict(raw))
    except TTPUError as error:
        found = re.search(r"has no '(\w+)'", str(error))
        return found[1] if found else None
    return None


def rope_forms(written: Mapping[str, Any]) -> Iterator[Form]:
    """Yield the config with its rope parameters as older files have them: beside the others, under other names."""
    place = ("text_config",) if isinstance(written.get("text_config"), dict) else ()
    rope = _part(written, place).get("rope_parameters")
    if not isinstance(rope, dict):
        return
    new = ("rope_parameters",)
    nested = {name: entry for name, entry in rope.items() if isinstance(entry, dict)}
    flat = dict(nested.get("full_attention") or next(iter(nested.values()))) if nested else dict(rope)
    top: dict[str, Any] = {key: flat.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in flat}
    if isinstance(nested.get("sliding_attention"), dict):
        top["rope_local_base_freq"] = nested["sliding_attention"].get("rope_theta")
    kind = flat.pop("rope_type", "default")
    if kind == "default" and not flat:
        yield Form("rope_theta and no rope_scaling", _changed(written, place, top, new), renamed=True)
        null = _changed(written, place, {**top, "rope_scaling": None}, new)
        yield Form("rope_theta and null for rope_scaling", null, renamed=True)
        return
    for name in (kind, *ROPE_TYPES_OF_OLD.get(kind, ())):
        for key in ("rope_type",) if nested else ("type", "rope_type"):  # nested ones came with rope_type
            scaling = {key: name, **flat}
            yield Form(
                f"rope_theta and a rope_scaling of {key} {name!r}",
                _changed(written, place, {**top, "rope_scaling": scaling}, new),
                renamed=True,
            )
    if not nested:
        split = {**top, "rope_parameters": {"rope_type": kind, **flat}}
        yield Form("rope_theta beside rope_parameters", _changed(written, place, split, new), renamed=True)
        inside = {"rope_scaling": {"type": kind, "rope_type": kind, **top, **flat}}
        yield Form("rope_scaling with everything in it", _changed(written, place, inside, new), renamed=True)


def _named_otherwise(case: Case, start: Mapping[str, Any]) -> Iterator[Form]:
    """The config under each other name that its class reads: `attribute_map`, and keys that its constructor takes."""
    whole = case.reference.transformers_config
    for place in _places(start):
        part = _part(start, place)
        kind = type(whole.get_text_config() if place else whole)
        for other, usual in getattr(kind, "attribute_map", {}).items():
            for old, new in ((other, usual), (usual, other)):
                if new in part and old not in part:
                    value = part[new]
                    changed = _changed(start, place, {old: value}, (new,))
                    yield Form(f"{old!r} instead of {new!r}", changed, renamed=True)
        for name, values in keyword_names(kind).items():
            if name in NOT_IN_THE_FORWARD_PASS or name in part:
                continue
            for value in values:
                for without in ((), ("rope_parameters",), ("layer_types",)):
                    if all(key in part for key in without):
                        note = "".join(f" and no {key}" for key in without)
                        yield Form(f"{name}={value!r}{note}", _changed(start, place, {name: value}, without))


def keyword_names(kind: Any) -> dict[str, tuple[Any, ...]]:
    """Return the keys that a config class takes though they are no fields of it, each with values to try: the literal
    names of `kwargs.pop` and `kwargs.get` in its methods."""
    names: dict[str, tuple[Any, ...]] = {}
    for one in kind.__mro__:
        if not one.__module__.startswith("transformers.") or one.__name__ == "PreTrainedConfig":
            continue
        for call in _calls(one):
            name = ast.literal_eval(call.args[0])
            names.setdefault(name, _values_like(call.args[1] if len(call.args) > 1 else None, name))
    return names


def _calls(kind: Any) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("pop", "get")
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "kwargs"
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            yield node


def _values_like(default: ast.expr | None, name: str) -> tuple[Any, ...]:
    """Values for a key: another one than its default, or of every kind where that is no literal."""
    value = default.value if isinstance(default, ast.Constant) else None
    if "scaling" in name or name.endswith("_parameters"):
        return ()
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int) and value > 1:
        return (value - 1, value + 1)
    if isinstance(value, float):
        return (value * 0.5,)
    if any(part in name for part in ("theta", "base", "freq")):
        return (777.0,)
    if any(part in name for part in ("pct", "factor", "share")):
        return (0.5,)
    return (True, False, 2, 3, 0.5)


def _keys(raw: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every key that may change the model, with the section that it is in."""
    for place in _places(raw):
        for key in _part(raw, place):
            if key not in NOT_IN_THE_FORWARD_PASS and key != "model_type":
                yield place, key


def _places(raw: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    yield ()
    if isinstance(raw.get("text_config"), dict):
        yield ("text_config",)


def _part(raw: Mapping[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    part: Any = raw
    for name in place:
        part = part[name]
    return dict(part)


def _changed(
    raw: Mapping[str, Any], place: tuple[str, ...], values: Mapping[str, Any], without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A deep copy with other values in one section, and without some of its keys."""
    changed = copy.deepcopy(dict(raw))
    part = changed
    for name in place:
        part = part[name]
    for key in without:
        part.pop(key, None)
    part.update(copy.deepcopy(dict(values)))
    return changed
