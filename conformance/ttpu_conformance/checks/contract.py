"""Checks of a plugin's contract, which need no numbers: it imports no framework, returns equal frozen values each time,
names the right logical axes, and reads, refuses or reports every key of a config."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

from ttpu_conformance.case import Case
from ttpu_conformance.check import check
from ttpu_conformance.config_reading import hook_of_family
from ttpu_conformance.errors import NotApplicable, fail
from ttpu_conformance.key_hooks import hooks_of_keys
from ttpu_conformance.rope_json import old_style
from ttpu_core.config import ModelConfig
from ttpu_core.config.key_audit import keys_ignored
from ttpu_core.errors import ConfigError, TTPUError
from ttpu_core.plugin_records import BACKENDS
from ttpu_core.registry import default_registry
from ttpu_core.spec.axes import PARAMETER_AXES

FRAMEWORKS = ("torch", "torch_xla", "jax", "jaxlib", "flax", "transformers")
UNKNOWN = "a_key_that_no_plugin_can_know"

_IN_ANOTHER_PROCESS = """
import hashlib, json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what a hook prints is no answer
job = json.load(sys.stdin)
sys.path[:] = job["path"]
from importlib.metadata import EntryPoint
from ttpu_core.config import ModelConfig
from ttpu_core.registry import Registry
registry = Registry([EntryPoint(*point) for point in job["entry_points"]])
answer = registry.architecture(ModelConfig.from_dict(job["config"]), job["patch_packs"])
answer.spec.parameters
text = repr((answer.spec, answer.mapping))
answer = [hashlib.sha256(text.encode()).hexdigest(), [m for m in job["frameworks"] if m in sys.modules]]
print(json.dumps(answer), file=answers, flush=True)
"""


@check("contract", scope="type", quick="all")
def check_imports_no_framework(case: Case) -> None:
    """Importing the plugin and describing a config imports no torch, jax, flax or transformers, and no backend."""
    _, imported = _described_elsewhere(case)
    if imported:
        fail(
            f"describing a {case.model_type!r} config imports {', '.join(imported)}: import in the plugin's modules "
            "only ttpu_core, and name what a backend needs by import string."
        )


@check("contract", scope="type", quick="all")
def check_description_is_deterministic(case: Case) -> None:
    """Two calls, and two processes, describe a config by equal values."""
    first, second = (case.describe(case.config()) for _ in range(2))
    if first.spec != second.spec or hash(first.spec) != hash(second.spec) or first.mapping != second.mapping:
        fail("two calls describe one config by different values: hooks must depend on nothing but the config.")
    digest = hashlib.sha256(repr((first.spec, first.mapping)).encode()).hexdigest()
    if _described_elsewhere(case)[0] != digest:
        fail(
            "another process describes the same config by other values: hooks must not depend on the environment, on "
            "the order of a set, or on an object's address."
        )


@check("contract", scope="type", quick="all")
def check_spec_is_frozen(case: Case) -> None:
    """The description is made of frozen values, so that it can be a static jit argument."""
    spec, mapping = case.architecture.spec, case.architecture.mapping
    for where, value in (*_parts("spec", spec), *_parts("mapping", mapping)):
        if is_dataclass(value):
            kind: Any = type(value)
            if not kind.__dataclass_params__.frozen:
                fail(f"{where} is a {type(value).__name__}, which is not a frozen dataclass: return frozen values.")
        elif not isinstance(value, bool | int | float | str | tuple | frozenset | None):
            fail(f"{where} is a {type(value).__name__}, which can change: return numbers, strings and tuples.")
    hash(spec)
    config = case.config()
    before = {key: repr(config.get(key)) for key in config}
    case.describe(config)
    changed = sorted(before.items() ^ {key: repr(config.get(key)) for key in config}.items())
    if changed:
        fail(
            f"describing a config changes its {changed[0][0]!r}: let `ttpu_config` return `with_values` or "
            "`with_defaults`, which make another config."
        )


@check("contract", quick="all")
def check_logical_axes(case: Case) -> None:
    """Every dimension of every parameter has a known logical axis, of a size that this axis has."""
    spec = case.architecture.spec
    sizes: dict[str | None, set[int]] = defaultdict(set)
    for parameter in replace(spec, parameter_axes=()).parameters.values():
        for axis, size in zip(parameter.axes, parameter.shape, strict=True):
            sizes[axis].add(size)
    for path, parameter in spec.parameters.items():
        if len(parameter.axes) != len(parameter.shape):
            fail(
                f"{path} has the shape {parameter.shape} and the axes {parameter.axes}: correct `ttpu_sharding_rules`."
            )
        for axis, size in zip(parameter.axes, parameter.shape, strict=True):
            if axis is None:
                continue
            if axis not in PARAMETER_AXES:
                fail(f"{path} names the logical axis {axis!r}, which no strategy knows: correct `ttpu_sharding_rules`.")
            if size not in sizes[axis]:
                known = ", ".join(map(str, sorted(sizes[axis]))) or "no size"
                fail(
                    f"{path} of shape {parameter.shape} calls its dimension of {size} {axis!r}, but that axis has "
                    f"{known} in this model: correct `ttpu_sharding_rules`."
                )


@check("contract", quick="all")
def check_config_keys_are_read(case: Case) -> None:
    """Every key that transformers writes for this model is read, or cannot matter."""
    config = case.config()
    case.describe(config)
    ignored = keys_ignored(config)
    if isinstance(case.reference.config.get("text_config"), dict):  # the rest belongs to other parts of the model
        ignored = tuple(key for key in ignored if key.startswith("text_config."))
    if ignored:
        hooks = " or ".join(f"`{hook}`" for hook in hooks_of_keys(ignored)) or "the hook that it concerns"
        fail(
            f"nobody reads {', '.join(map(repr, ignored))} in the config that transformers writes: correct {hooks} to "
            "read it, or refuse in `ttpu_config` the values that change the model."
        )


@check("contract", scope="type", quick="all")
def check_unknown_key_is_reported(case: Case) -> None:
    """A key that the plugin does not know is reported as having no effect."""
    changes: dict[str, Any] = {UNKNOWN: 1.5}
    text = case.reference.config.get("text_config")
    if isinstance(text, dict):
        changes["text_config"] = text | {UNKNOWN: 1.5}
    config = case.config(**changes)
    case.describe(config)
    reported = keys_ignored(config)
    for key in (UNKNOWN, *([f"text_config.{UNKNOWN}"] if isinstance(text, dict) else [])):
        if key not in reported:
            fail(
                f"config.json was given the unknown key {key!r}, but it counts as read: let hooks ask a config for the "
                "keys they need, and not walk over all of them."
            )


@check("contract", scope="type", quick="all")
def check_unknown_rope_is_refused(case: Case) -> None:
    """An unknown rope type is refused by a ConfigError that names it.

    Raises:
        CheckFailure: it is accepted, or refused without its name or by another error.
        NotApplicable: the model has no rope.
    """
    kind = "rope-of-the-future"
    changed = json.loads(json.dumps(case.reference.config))
    part = changed.get("text_config", changed)
    rope = part.get("rope_parameters")
    ropes = [getattr(layer.mixer, "rope", None) for layer in case.architecture.spec.layers]
    if not isinstance(rope, dict) or all(one is not None and one.type == "none" for one in ropes):
        raise NotApplicable("this model rotates nothing, or its config has no rope parameters")
    nested = [entry for entry in rope.values() if isinstance(entry, dict)]
    for entry in nested or [rope]:
        entry["rope_type"] = kind
        entry.pop("type", None)
    try:
        case.describe(case.config(**changed))
    except ConfigError as error:
        if kind not in str(error):
            fail(f"the rope type {kind!r} is refused without being named ({error}): name it in the error.")
        return
    except TTPUError as error:
        fail(f"the rope type {kind!r} is refused by a {type(error).__name__}, but a ConfigError is needed ({error}).")
    fail(f"the rope type {kind!r} is accepted, though nothing can rotate so: use `rope_from_config` in `ttpu_rope`.")


@check("contract", quick="all")
def check_old_rope_json(case: Case) -> None:
    """The older JSON form of rope parameters, which most published checkpoints have, describes the same model.

    Raises:
        CheckFailure: it describes another model.
        NotApplicable: transformers reads no older form as these parameters.
    """
    old = old_style(case.reference)
    if old is None:
        raise NotApplicable("there is no older JSON form that transformers reads as these rope parameters")
    was, now = case.describe(ModelConfig.from_dict(old)), case.describe(case.config())
    if was.spec == now.spec:
        return
    for index, (before, after) in enumerate(zip(was.spec.layers, now.spec.layers, strict=True)):
        if before != after:
            fail(
                f"with rope_theta and rope_scaling instead of rope_parameters, layer {index} gets "
                f"{getattr(before.mixer, 'rope', before)} instead of {getattr(after.mixer, 'rope', after)}: correct "
                f"`{hook_of_family(case, 'ttpu_rope')}`, or what `ttpu_config` fills in."
            )
    fail("with rope_theta and rope_scaling instead of rope_parameters another model is described: correct `ttpu_rope`.")


@lru_cache(maxsize=1)
def _described_elsewhere(case: Case) -> tuple[str, list[str]]:
    """A digest of the description that another process gives, and the frameworks that it imported meanwhile."""
    job = {
        "path": sys.path,
        "entry_points": [(point.name, point.value, point.group) for point in case.entry_points],
        "config": case.reference.config,
        "patch_packs": case.options.patch_packs,
        "frameworks": (*FRAMEWORKS, *sorted(_backend_packages())),
    }
    finished = subprocess.run(
        [sys.executable, "-c", _IN_ANOTHER_PROCESS], input=json.dumps(job), capture_output=True, text=True, timeout=300
    )
    if finished.returncode:
        last = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        fail(f"another process cannot describe the config: {last}")
    digest, imported = json.loads(finished.stdout)
    return digest, imported


def _backend_packages() -> set[str]:
    """Top-level packages of the backends that are installed."""
    return {record.value.partition(":")[0].partition(".")[0] for record in default_registry().plugins(BACKENDS)}


def _parts(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value inside, with where it is."""
    yield where, value
    if is_dataclass(value):
        for field in fields(value):
            if field.compare:  # the others are made of these
                yield from _parts(f"{where}.{field.name}", getattr(value, field.name))
        named = {field.name for field in fields(value)}
        for name, hidden in getattr(value, "__dict__", {}).items():
            cached = hasattr(type(value), name)
            if name not in named and (not cached or isinstance(hidden, dict | list | set)):
                yield from _parts(f"{where}.{name}", hidden)
    elif isinstance(value, tuple | frozenset):
        for index, item in enumerate(value):
            yield from _parts(f"{where}[{index}]", item)
