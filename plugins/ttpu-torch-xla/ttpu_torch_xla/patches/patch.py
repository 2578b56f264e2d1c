"""Patches of the stock model. A `Patch` says what it replaces, why, and when; `applied` changes modules and mappings
for as long as its context lasts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from threading import RLock
from typing import Any, Literal

from ttpu_core.errors import PluginError
from ttpu_core.spec import TorchPatch

Kind = Literal["interface", "module", "monkey"]
MISSING = object()
INHERITED = object()


@dataclass(frozen=True)
class Patch:
    """One replacement.

    Args:
        name: what `ttpu info` and `ttpu inspect` call it.
        target: what is replaced: `package.module:attribute.path`, or `package.module:attribute.path[key]` for one
            entry of a mapping (transformers' interfaces are mappings).
        replacement: `package.module:object`, put in the target's place. An object whose attribute `wraps_original` is
            true is called with the original instead, and its answer is put there.
        reason: what goes wrong without it.
        when: in words, to which models or settings it applies.
        kind: interface (an extension point of transformers), module (a class), or monkey (a function or method).
        source: the distribution or plugin that asks for it.
        needed: without it results are wrong, or the model does not run.
    """

    name: str
    target: str
    replacement: str
    reason: str
    when: str = "always"
    kind: Kind = "monkey"
    source: str = "ttpu-torch-xla"
    needed: bool = False


def from_family(patch: TorchPatch, source: str) -> Patch:
    """A family plugin's patch."""
    _, _, attribute = patch.target.partition(":")
    last = attribute.partition("[")[0].rpartition(".")[2]
    kind: Kind = "interface" if attribute.endswith("]") else "module" if last[:1].isupper() else "monkey"
    return Patch(attribute, patch.target, patch.replacement, patch.reason, patch.when, kind, source)


@dataclass
class _Applied:
    container: Any
    key: str
    is_entry: bool
    original: Any
    replacement: str
    users: int = 1


_lock = RLock()
_active: dict[str, _Applied] = {}


@contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    """A context in which the patches are in place. Patches that several contexts share are undone when the last of them
    ends.

    Raises:
        PluginError: a target or a replacement does not exist, or is already replaced by something else.
    """
    done: list[Patch] = []
    try:
        for patch in patches:
            _apply(patch)
            done.append(patch)
        yield
    finally:
        for patch in reversed(done):
            _undo(patch)


def active() -> tuple[str, ...]:
    """Return the targets that are replaced now."""
    return tuple(_active)


def _apply(patch: Patch) -> None:
    with _lock:
        before = _active.get(patch.target)
        if before is not None:
            if before.replacement != patch.replacement:
                raise PluginError(
                    f"the patch {patch.name!r} of {patch.source} replaces {patch.target}, but that is replaced by "
                    f"{before.replacement} at the moment: leave the context of the other model or patch first."
                )
            before.users += 1
            return
        container, key, is_entry = _locate(patch)
        original = _read(container, key, is_entry)
        if original is MISSING and not is_entry:
            raise PluginError(
                f"the patch {patch.name!r} of {patch.source} replaces {patch.target}, but this version of transformers "
                "has no such thing: update the plugin, or leave the patch out."
            )
        new = _load(patch)
        if getattr(new, "wraps_original", False):
            new = new(getattr(container, key) if original is INHERITED else None if original is MISSING else original)
        _write(container, key, is_entry, new)
        _active[patch.target] = _Applied(container, key, is_entry, original, patch.replacement)


def _undo(patch: Patch) -> None:
    with _lock:
        entry = _active[patch.target]
        entry.users -= 1
        if entry.users == 0:
            del _active[patch.target]
            _write(entry.container, entry.key, entry.is_entry, entry.original)


def _locate(patch: Patch) -> tuple[Any, str, bool]:
    """The object or mapping that holds the target, the name or key in it, and whether it is a mapping's entry."""
    module, _, path = patch.target.partition(":")
    path, bracket, key = path.partition("[")
    try:
        found: Any = import_module(module)
        parts = [part for part in path.split(".") if part]
        if not bracket:
            *parts, key = parts
        for part in parts:
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(
            f"the patch {patch.name!r} of {patch.source} replaces {patch.target}, which cannot be had ({error}): it is "
            "written package.module:attribute or package.module:attribute[key]; update the plugin, or leave it out."
        ) from error
    return found, key.rstrip("]"), bool(bracket)


def _load(patch: Patch) -> Any:
    module, _, path = patch.replacement.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"the patch {patch.name!r} of {patch.source} puts {patch.replacement} in the place of {patch.target}, but "
            f"that cannot be imported ({error}): update or reinstall {patch.source}."
        ) from error
    return found


def _read(container: Any, key: str, is_entry: bool) -> Any:
    if is_entry:
        return container.get(key, MISSING)
    # A class's own attribute, as it is stored: `getattr` would bind or unwrap it.
    if key in vars(container):
        return vars(container)[key]
    return INHERITED if hasattr(container, key) else MISSING


def _write(container: Any, key: str, is_entry: bool, value: Any) -> None:
    if is_entry and value is MISSING:
        container.pop(key, None)
    elif is_entry:
        container[key] = value
    elif value is INHERITED:
        delattr(container, key)
    else:
        setattr(container, key, value)
