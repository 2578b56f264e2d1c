"""Reads config.json by a plugin and by transformers, and compares what the plugin describes for both: for the JSON as
it stands, and for the JSON that transformers' config class makes of it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any, Literal

from ttpu_conformance.case import Case
from ttpu_conformance.tiny import config_class
from ttpu_core.architecture import Architecture
from ttpu_core.config import ModelConfig
from ttpu_core.config.key_audit import refuse_ignored
from ttpu_core.errors import ConfigError, TTPUError, UnsupportedError
from ttpu_core.spec import MixerSpec

Status = Literal["same", "different", "refused by the plugin", "refused by transformers"]

SIZE = re.compile(
    "hidden_size|intermediate_size|num_attention_heads|num_hidden_layers|n_embd|n_head|n_layer|n_heads|n_layers|d_model"
)
"""Keys that a plugin may require although the config class has a default for them: the sizes of one checkpoint."""

ANSWERED_WITH = {"ttpu_rope": "ttpu_attention", "ttpu_final_norm": "ttpu_norm", "ttpu_attention": "ttpu_mixer"}
"""Hooks that a plugin may leave out because another one answers for them."""

ROPE_KEYS = {
    "theta": "theta",
    "rotary_dim": r"""["'](partial_rotary_factor|rotary_pct|rotary_dim|qk_rope_head_dim)["']|rotary_dim=""",
    "type": r"""["'](rope_type|type|rope_parameters|rope_scaling)["']""",
}
"""By field of a rope, what a hook says that reads or assumes it by itself; other fields are called as their keys.
Without that, the difference is one of defaults."""

HOOK_OF_PART = {
    "embedding": "ttpu_embedding",
    "final_norm": "ttpu_final_norm",
    "head": "ttpu_head",
    "max_position_embeddings": "ttpu_config",
    "parameter_axes": "ttpu_sharding_rules",
    "kernels": "ttpu_kernels",
    "torch_patches": "ttpu_torch_patches",
    "rope": "ttpu_rope",
    "mixer": "ttpu_attention",
    "mlp": "ttpu_mlp",
    "norm": "ttpu_norm",
    "block": "ttpu_block",
}
"""The hook that answers each part of a spec."""


@dataclass(frozen=True)
class Reading:
    """How a plugin and transformers read one JSON.

    Attributes:
        sentence: what differs, or who refused the JSON and why; empty where both read the same model.
        hook: the hook to correct where they differ.
    """

    status: Status
    sentence: str = ""
    hook: str = ""


@dataclass(frozen=True)
class Difference:
    """The first part in which two descriptions differ: where, the hook that answers it, and both values."""

    where: str
    hook: str
    one: Any
    other: Any


def read_by_both(
    case: Case, raw: Mapping[str, Any], without: str | None = None, *, renamed: bool = False
) -> Reading:
    """Compare what the case's plugin describes for a JSON and for transformers' reading of it.

    `without` is the key that the JSON leaves out, if it is about one. A plugin may require a key that is a size, which
    it then names, by this name or by the usual one; else it must take what transformers takes for it. `renamed` says
    that the JSON has a key under another name that the config class knows, which the plugin must know too. A key that
    nobody reads and that is known to change the model counts as refused, as when a model is loaded."""
    try:
        read = read_by_transformers(case, raw)
    except Exception as error:  # config classes validate with errors of many kinds
        return Reading("refused by transformers", _one_line(error))
    try:
        ours = _described(case, raw)
    except (ConfigError, UnsupportedError) as error:
        other_names = config_class(case.declaration).attribute_map
        names = {without, *(usual for usual, own in other_names.items() if own == without)}
        named = any(f"{name}'" in str(error) for name in names)
        required = without is not None and SIZE.fullmatch(without) is not None and named
        other_name = renamed and "rope" not in str(error)
        hook = "ttpu_config" if other_name else _hook_of_refusal(error, read)
        if required or (without in (None, "text_config") and not renamed):
            return Reading("refused by the plugin", _one_line(error), hook)
        with contextlib.suppress(TTPUError):
            _described(case, read)
            sentence = f"the plugin refuses the config ({_one_line(error)}), though it describes transformers' reading"
            return Reading("different", sentence, hook or "ttpu_config")
        return Reading("refused by the plugin", _one_line(error), hook)
    except Exception as error:
        return Reading("different", _one_line(error), getattr(error, "hook", None) or "")
    try:
        theirs = _described(case, read)
    except TTPUError as error:
        # Where the plugin described the JSON as it stands, it filled in other values than transformers.
        sentence = f"transformers reads a model that the plugin refuses ({_one_line(error)})"
        return Reading("different", sentence, "ttpu_config" if without else error.hook or "")
    found = first_difference(ours, theirs)
    if found is None:
        return Reading("same")
    hook = "ttpu_config" if _fills_in_otherwise(case, raw, ours, theirs, found) else hook_of_family(case, found.hook)
    return Reading("different", f"{found.where} is {found.one!r} instead of {found.other!r}", hook)


def _fills_in_otherwise(
    case: Case, raw: Mapping[str, Any], ours: Architecture, theirs: Architecture, found: Difference
) -> bool:
    """Whether a difference comes from a key that is absent, for which `ttpu_config` filled in another value than
    transformers, or none."""
    part = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    if part.get("rope_parameters") is None and theirs.config.section("rope_parameters") is not None:
        field = found.where.rpartition(".")[2]
        words = ROPE_KEYS.get(field, rf"""["']{field}["']|\b{field}=""") if ".rope." in found.where else None
        if words is not None and not re.search(words, _source_of(case, hook_of_family(case, "ttpu_rope"))):
            return True
    for key in theirs.config:
        value = theirs.config.get(key)
        if (key in part and (part is raw or key in raw)) or not isinstance(value, bool | int | float | str | None):
            continue
        if key in ours.config:
            if ours.config.get(key) != value:
                return True
            continue
        filled = {**part, key: value}
        try:
            now = _described(case, filled if part is raw else {**raw, "text_config": filled})
        except TTPUError:
            continue
        if first_difference(now, theirs) != found:
            return True
    return False


def _source_of(case: Case, hook: str) -> str:
    """The source of a family's hook; empty where it leaves the hook out."""
    function = getattr(import_module(case.record.value.partition(":")[0]), hook, None)
    try:
        return "" if function is None else inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _hook_of_refusal(error: TTPUError, read: Mapping[str, Any]) -> str:
    """The hook to correct where a plugin should not refuse a config: the one that fills in keys, where a key is missing
    that transformers knows, else the one that refuses."""
    missing = re.search(r"has no '(?:text_config\.)?(\w+)'", str(error))
    text = read.get("text_config")
    if missing is not None and (missing[1] in read or (isinstance(text, dict) and missing[1] in text)):
        return "ttpu_config"
    return error.hook or ""


def hook_of_family(case: Case, hook: str) -> str:
    """Return the hook, or the one that answers for it in the case's family."""
    family = import_module(case.record.value.partition(":")[0])
    other = ANSWERED_WITH.get(hook, hook)
    return other if not hasattr(family, hook) and hasattr(family, other) else hook


def read_by_transformers(case: Case, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers would write it after reading `raw`.

    Raises:
        Exception: of many kinds, where the config class refuses the values.
    """
    kind = type(case.reference.transformers_config)
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
        read = kind.from_dict(copy.deepcopy(dict(raw)))
        return dict(json.loads(read.to_json_string()))


def as_transformers_reads(case: Case, raw: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the JSON with what transformers reads for those of the keys that it does not write, in the part where it
    would write them."""
    filled, read = copy.deepcopy(dict(raw)), read_by_transformers(case, raw)
    for mine, its in ((filled, read), (filled.get("text_config"), read.get("text_config"))):
        if isinstance(mine, dict) and isinstance(its, dict):
            mine |= {key: its[key] for key in keys if key in its and key not in mine}
    return filled


def first_difference(ours: Architecture, theirs: Architecture) -> Difference | None:
    """Return the first difference of two descriptions; None where both are equal."""
    if ours.spec == theirs.spec:
        if ours.mapping == theirs.mapping:
            return None
        return Difference("the mapping", "ttpu_flax_mapping", "one", "another")
    if len(ours.spec.layers) != len(theirs.spec.layers):
        return Difference("the number of layers", "ttpu_config", len(ours.spec.layers), len(theirs.spec.layers))
    return next(_differences("", "ttpu_config", ours.spec, theirs.spec))


def _differences(where: str, hook: str, one: Any, other: Any) -> Iterator[Difference]:
    if one == other:
        return
    if is_dataclass(one) and type(one) is type(other):
        for field in sorted(fields(one), key=lambda field: field.name == "rope"):  # last: it may follow from others
            mine = getattr(one, field.name)
            mixes = isinstance(mine, MixerSpec) or isinstance(getattr(other, field.name), MixerSpec)
            inner = "ttpu_mixer" if mixes else HOOK_OF_PART.get(field.name, hook)
            name = f"{where}.{field.name}" if where else field.name
            yield from _differences(name, inner, mine, getattr(other, field.name))
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for index, (mine, others) in enumerate(zip(one, other, strict=True)):
            yield from _differences(f"{where}[{index}]", hook, mine, others)
    else:
        yield Difference(where, hook, one, other)


def _described(case: Case, raw: Mapping[str, Any]) -> Architecture:
    config = ModelConfig.from_dict(raw)
    architecture = case.describe(config)
    refuse_ignored(config)
    return architecture


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
