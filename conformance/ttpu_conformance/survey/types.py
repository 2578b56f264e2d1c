"""The model types of the survey: transformers' whole mapping of causal language models, which of them are no decoders
of text, and the tiny sizes of those that the kit's sizes do not fit."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ttpu_conformance.declaration import Declaration, declaration_for
from ttpu_core.registry import default_registry


@dataclass(frozen=True)
class Exclusion:
    """Types that the survey's shares leave out.

    Attributes:
        name: of the kind, as in "encoder".
        reason: why, as the rest of "It is …" or "It …".
        types: by name.
    """

    name: str
    reason: str
    types: tuple[str, ...]


def surveyed_types() -> dict[str, str]:
    """transformers' causal language models: model type → class name, in alphabetical order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def exclusions() -> tuple[Exclusion, ...]:
    """The types that are no decoders of text, by why."""
    known = surveyed_types()
    return tuple(
        Exclusion(name, each["reason"], tuple(one for one in each["types"] if one in known))
        for name, each in _facts()["excluded"].items()
    )


def is_tried(model_type: str) -> bool:
    """Whether the survey runs a type: all but those that are excluded; encoders are run as decoders."""
    return not any(model_type in each.types for each in exclusions() if each.name != "encoder")


def tiny_declaration(model_type: str) -> Declaration:
    """The sizes of a type's tiny model: those of its plugin, or else the survey's own.

    Raises:
        PluginError, DeclarationError: the plugin's declaration is malformed.
    """
    registry = default_registry()
    if registry.is_described(model_type):
        record = next(each for each in registry.plugins("ttpu.architectures") if each.name == model_type)
        return declaration_for(model_type, record.value.partition(":")[0])
    facts = _facts()
    base: dict[str, Any] = dict(facts["sizes"].get(model_type, {}))
    if any(model_type in each.types for each in exclusions() if each.name == "encoder"):
        base = {**facts["encoders"], **base}
    return Declaration(model_type, "survey.toml", base=base)


@functools.lru_cache(maxsize=1)
def _facts() -> Mapping[str, Any]:
    text = resources.files("ttpu_conformance.survey").joinpath("survey.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
