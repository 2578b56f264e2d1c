"""A plugin's declarations about its own conformance. They are read from the `conformance.toml` beside the plugin's
module; each model type gets a `Declaration`. An unknown entry raises an error."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ttpu_conformance.errors import DeclarationError

FILE = "conformance.toml"
BASE = "base"
NEVER_WRITTEN = "never_written"
DERIVED_BUFFERS = "derived_buffers"
ATTENTION = ("eager", "sdpa")
"""Attention implementations of transformers that the reference model may have."""
NULL = "null"  # TOML has no null: `null = ["sliding_window"]` sets these keys to None

OTHERWISE = "reads_otherwise"

_SECTION = (
    "transformers", BASE, "variants", "heavy", "published", "expected_failures", "not_proven", OTHERWISE, NEVER_WRITTEN,
    DERIVED_BUFFERS, "attention",
)  # fmt: skip
_EXPECTED = ("check", "variant", "reason", "backend")
_SLICE = ("slice", "mesh", "train_slice", "train_mesh")


@dataclass(frozen=True)
class Variant:
    """A named change to the tiny config: `keys` come on top of the kit's defaults and the declared base."""

    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExpectedFailure:
    """A check that is known to fail, of one variant or (None) of all, on one backend or (None) on every, and why."""

    check: str
    variant: str | None
    reason: str
    backend: str | None = None


@dataclass(frozen=True)
class Slice:
    """The slices to compile a published model for: slice and mesh of decode and prefill, and those of the train step.
    """

    slice: str | None = None
    mesh: str | None = None
    train_slice: str | None = None
    train_mesh: str | None = None


@dataclass(frozen=True)
class Published:
    """A real model's config.json, shipped in the plugin's package, and where to compile it, by TPU generation."""

    name: str
    config: Path
    slices: Mapping[str, Slice] = field(default_factory=dict)


@dataclass(frozen=True)
class Declaration:
    """A plugin's declarations about one model type.

    `transformers` names the class of the reference model, where it is not the auto class's. `heavy` names the variants
    besides the base for which the costly checks run. `not_proven` says what the reference model needs that is not
    everywhere; without it a reference that cannot be made is a failure. `reads_otherwise` says of keys why a
    config without them is read otherwise than transformers' config class reads it. `never_written` names tensors that
    published checkpoints hold, transformers never writes, and the plugin ignores. `derived_buffers` are patterns of
    buffers that transformers saves although they follow from the config: the kit leaves their values as they are, and
    a plugin may ignore them. `attention` is the reference model's attention implementation: "sdpa" for a type whose
    eager attention in transformers computes another model."""

    model_type: str
    source: str = "the kit's defaults"
    transformers: str | None = None
    base: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Variant, ...] = (Variant(BASE),)
    heavy: tuple[str, ...] = ()
    published: tuple[Published, ...] = ()
    expected_failures: tuple[ExpectedFailure, ...] = ()
    not_proven: str | None = None
    reads_otherwise: Mapping[str, str] = field(default_factory=dict)
    never_written: tuple[str, ...] = ()
    derived_buffers: tuple[str, ...] = ()
    attention: str = ATTENTION[0]

    def is_derived(self, name: str) -> bool:
        """Whether a buffer of this name is declared as following from the config."""
        return any(re.fullmatch(pattern, name) for pattern in self.derived_buffers)

    def variant(self, name: str) -> Variant:
        """The variant of a name.

        Raises:
            DeclarationError: no such variant.
        """
        for variant in self.variants:
            if variant.name == name:
                return variant
        names = ", ".join(variant.name for variant in self.variants)
        raise DeclarationError(f"variant {name!r} of {self.model_type!r} was asked for, but {self.source} has {names}.")

    def expected_failure(self, check: str, names: tuple[str, ...], backend: str) -> ExpectedFailure | None:
        """Return the declared failure on a backend of a check for a variant or published model, which may have several
        names; None without one."""
        for expected in self.expected_failures:
            meant = expected.check == check and expected.backend in (None, backend)
            if meant and (expected.variant is None or expected.variant in names):
                return expected
        return None

    def check_ids(self, known: Iterable[str]) -> None:
        """Refuse expected failures of checks that do not exist.

        Raises:
            DeclarationError: naming the first such id and the ids that exist.
        """
        ids = sorted(known)
        for expected in self.expected_failures:
            if expected.check not in ids:
                raise DeclarationError(
                    f"{self.source} expects the check {expected.check!r} of {self.model_type!r} to fail, but there is "
                    f"no such check; the checks are {', '.join(ids)}: correct the id."
                )


def declaration_for(model_type: str, module: str) -> Declaration:
    """The declaration of one model type, from the file beside `module`; the kit's defaults where there is none.

    Raises:
        DeclarationError: the file is malformed or holds a key that the kit does not know.
    """
    file = find_declaration_file(module)
    if file is None:
        return Declaration(model_type)
    return read_declaration(model_type, file)


def find_declaration_file(module: str) -> Path | None:
    """`conformance.toml` in the package of a plugin's module (or in the package above it); None without one."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = find_spec(".".join(parts[:end]))
        except ImportError:
            continue
        for folder in (found.submodule_search_locations or ()) if found else ():
            if (Path(folder) / FILE).is_file():
                return Path(folder) / FILE
    return None


def read_declaration(model_type: str, file: Path) -> Declaration:
    """One model type's section of a file.

    Raises:
        DeclarationError: the file is malformed or holds a key that the kit does not know.
    """
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DeclarationError(
            f"{file} was asked for as a conformance declaration, but it cannot be read: {error}."
        ) from error
    section = content.get(model_type)
    if section is None:
        return Declaration(model_type, source=str(file))
    return parse_declaration(model_type, section, str(file), file.parent)


CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
"""TPU generations by the names that the compiler knows."""


def parse_declaration(model_type: str, section: Any, source: str, folder: Path) -> Declaration:
    """Parse a section of TOML; its paths are relative to `folder`.

    Raises:
        DeclarationError: a key or value that the kit does not know.
    """
    at = f"[{model_type}]"
    _known(source, at, section, _SECTION)
    base = _table(source, f"{at} base", section.get(BASE, {}))
    variants = [Variant(BASE)]
    for name, keys in _table(source, f"{at} variants", section.get("variants", {})).items():
        if name == BASE:
            raise DeclarationError(
                f"{source} has a variant {BASE!r} of {model_type!r}, but that is the name of the base itself, which "
                f"is always checked: put its keys under [{model_type}.{BASE}], or rename it."
            )
        variants.append(Variant(name, _table(source, f"{at} variants.{name}", keys)))
    published = tuple(
        _published(source, at, name, entry, folder)
        for name, entry in _table(source, f"{at} published", section.get("published", {})).items()
    )
    names = [variant.name for variant in variants]
    transformers = section.get("transformers")
    if transformers is not None and not isinstance(transformers, str):
        raise DeclarationError(f"{source} sets transformers in {at} to {transformers!r}, but a class's name is needed.")
    not_proven = section.get("not_proven")
    if not_proven is not None and not (isinstance(not_proven, str) and not_proven.strip()):
        raise DeclarationError(
            f"{source} sets not_proven in {at} to {not_proven!r}, but a sentence is needed that says what its "
            "reference model needs: write one, or leave it out."
        )
    heavy = section.get("heavy", [])
    if not isinstance(heavy, list) or not all(name in names for name in heavy):
        raise DeclarationError(
            f"{source} names {heavy!r} as heavy in {at}, but the variants are {', '.join(names)}: name some of those."
        )
    attention = section.get("attention", ATTENTION[0])
    if attention not in ATTENTION:
        raise DeclarationError(
            f"{source} sets attention in {at} to {attention!r}, but the reference model has {' or '.join(ATTENTION)}: "
            "choose one, or leave it out."
        )
    chips = [f"{model.name}@{chip}" for model in published for chip in CHIPS]
    places = [*names, *(model.name for model in published), *chips]
    return Declaration(
        model_type,
        source,
        transformers,
        base,
        tuple(variants),
        tuple(heavy),
        published,
        tuple(_expected(source, at, entry, places) for entry in section.get("expected_failures", ())),
        not_proven,
        _reasons(source, at, section.get(OTHERWISE, {})),
        _names(source, at, section, NEVER_WRITTEN),
        _names(source, at, section, DERIVED_BUFFERS),
        attention,
    )


def _names(source: str, at: str, section: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = section.get(key, [])
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise DeclarationError(
            f"{source} sets {key} in {at} to {value!r}, but a list of names of tensors is needed, as checkpoints have "
            "them: write one, or leave it out."
        )
    return tuple(value)


def _reasons(source: str, at: str, value: Any) -> dict[str, str]:
    reasons = _table(source, f"{at} {OTHERWISE}", value)
    for key, reason in reasons.items():
        if not (isinstance(reason, str) and reason.strip()):
            raise DeclarationError(
                f"{source} sets {key!r} in {at} {OTHERWISE} to {reason!r}, but a sentence is needed that says why a "
                "config without the key is read otherwise than transformers reads it: write one, or leave it out."
            )
    return reasons


def _published(source: str, at: str, name: str, entry: Any, folder: Path) -> Published:
    where = f"{at} published.{name}"
    _known(source, where, entry, ("config", *CHIPS))
    config = folder / str(entry.get("config"))
    if not config.is_file():
        raise DeclarationError(f"{source} gives {where} the config {entry.get('config')!r}, but there is no {config}.")
    slices = {}
    for chip, choice in entry.items():
        if chip != "config":
            _known(source, f"{where}.{chip}", choice, _SLICE)
            slices[chip] = Slice(**choice)
    return Published(name, config, slices)


def _expected(source: str, at: str, entry: Any, places: list[str]) -> ExpectedFailure:
    where = f"{at} expected_failures"
    _known(source, where, entry, _EXPECTED)
    reason = entry.get("reason")
    if not isinstance(reason, str) or not reason.strip():
        raise DeclarationError(
            f"{source} expects {entry.get('check')!r} in {at} to fail without saying why: give a reason."
        )
    variant = entry.get("variant")
    if variant is not None and variant not in places:
        raise DeclarationError(
            f"{source} expects a failure of variant {variant!r} in {at}, but there is no such variant; there are "
            f"{', '.join(places)}: correct the name."
        )
    return ExpectedFailure(str(entry.get("check")), variant, reason, entry.get("backend"))


def _known(source: str, where: str, table: Any, keys: Iterable[str]) -> None:
    for key in _table(source, where, table):
        if key not in keys:
            raise DeclarationError(
                f"{source} has the key {key!r} in {where}, but the keys there are {', '.join(keys)}: correct it."
            )


def _table(source: str, where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DeclarationError(f"{source} sets {where} to {value!r}, but a table is needed there.")
    return value
