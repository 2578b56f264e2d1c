"""Changes of every field of one layer's description: another flag, another choice, a number that the config holds, one
more or less, or what another layer has. They are tried after `ttpu_conformance.hypotheses`, which knows the common
mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ttpu_conformance.hypotheses import Hypothesis, Numbers
from ttpu_core import spec as vocabulary
from ttpu_core.architecture import Architecture
from ttpu_core.errors import TTPUError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, CustomSpec, LayerSpec, NormSpec, Parameter
from ttpu_core.spec.rope import RopeSpec, rope_from_config

NOT_TRIED = (
    "norm_features",
    "table_rows",
    "table_features",
    "vocab_size",
    "hidden_size",
    "num_experts",
    "identity_experts",
    "kv_from_layer",
)
"""Fields that shapes prove already, or that other fields decide."""

PLAIN_ROPE = ("theta", "rotary_dim", "layout", "sign", "fp32")
"""Fields of a rope that count whatever its type is."""

LIKE = 4
"""Letters that a word of a field's name and a config's key must share, as in scale and scaling."""


@dataclass(frozen=True)
class Change:
    """One changed field, in words, and the whole part with it."""

    text: str
    part: Any


def in_layer(architecture: Architecture, layer: int, numbers: Numbers) -> Iterator[Hypothesis]:
    """Changes to one layer, and to the layers described like it where it is the first of them. The layers before it are
    taken to be right."""
    spec = architecture.spec
    this = spec.layers[layer]
    yield from _as_other_layers(spec, layer)
    yield from _ropes(architecture, layer)
    for name in ("mixer", "mlp", "block", "norm"):
        part, hook = getattr(this, name), "ttpu_attention" if name == "mixer" else f"ttpu_{name}"
        if part is None:
            continue
        earlier = any(getattr(one, name) == part for one in spec.layers[:layer])
        places = {layer} if earlier else {i for i, one in enumerate(spec.layers) if getattr(one, name) == part}
        where = f" in layer {layer}" if earlier and name != "norm" else ""
        if name == "mixer" and not isinstance(part, AttentionSpec):
            hook = "ttpu_mixer"
        for one in changes_of(part, numbers):
            called = "ttpu_rope" if one.text.startswith("RopeSpec") else hook
            changed = _with(spec, places, **{name: one.part})
            if name == "norm" and spec.final_norm == part:  # which `ttpu_norm` answers too
                changed = replace(changed, final_norm=one.part)
            yield Hypothesis(called, one.text + where, changed)


def at_the_ends(spec: ArchitectureSpec, numbers: Numbers) -> Iterator[Hypothesis]:
    """Changes to the embedding, the final norm and the head."""
    for name, hook in (("embedding", "ttpu_embedding"), ("final_norm", "ttpu_final_norm"), ("head", "ttpu_head")):
        part = getattr(spec, name)
        for one in changes_of(part, numbers) if part is not None else ():
            yield Hypothesis(hook, one.text, replace(spec, **{name: one.part}))


def changes_of(part: Any, numbers: Numbers) -> Iterator[Change]:
    """Every change of one field of a frozen value, and of the values inside it."""
    hints = get_type_hints(type(part), None, _TYPES)
    for field in fields(part):
        if field.name in NOT_TRIED or not field.init:
            continue
        if isinstance(part, RopeSpec) and part.type in ("none", "default") and field.name not in PLAIN_ROPE:
            continue
        if isinstance(part, CustomSpec) and field.name == "options":
            yield from _options(part, numbers)
            continue
        value, hint = getattr(part, field.name), hints[field.name]
        if is_dataclass(value):
            for inner in changes_of(value, numbers):
                yield from _made(inner.text, part, field.name, inner.part)
        for other in _others(value, hint, field.name, numbers):
            yield from _made(f"{type(part).__name__}({field.name}={_short(other)})", part, field.name, other)


def _made(text: str, part: Any, name: str, value: Any) -> Iterator[Change]:
    try:
        yield Change(text, replace(part, **{name: value}))
    except (TTPUError, TypeError, ValueError):  # a value that the part refuses explains nothing
        return


def _others(value: Any, hint: Any, name: str, numbers: Numbers) -> Iterator[Any]:
    """Other values of a field."""
    kinds = set(get_args(hint)) if NoneType in get_args(hint) else {hint}
    if NoneType in kinds and value is not None:
        yield None
    choices = {choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)}
    yield from sorted(choices - {value})
    if bool in kinds:
        yield not value
    elif int in kinds:
        whole = {int(number) for number in _like(name, numbers) if number == int(number)}
        near = {value - 1, value + 1} if value is not None else set()
        yield from sorted((whole | near) - {value})
    elif float in kinds:
        found = dict.fromkeys([0.0, 1.0, *_transformed(name, numbers)])
        yield from [number for number in found if number != value]
    if value is None:
        for kind in kinds:
            if kind in (NormSpec, *_TRIED_WHOLE):
                yield kind()


def _options(part: CustomSpec, numbers: Numbers) -> Iterator[Change]:
    """Changes of the options of a mixer, which have no declared types."""
    for index, (name, value) in enumerate(part.options):
        others: list[tuple[str, Any]] = []
        if is_dataclass(value):
            others = [(one.text, one.part) for one in changes_of(value, numbers)]
        elif isinstance(value, bool | int | float):
            tried = _others(value, type(value), name, numbers)
            others = [(f"{type(part).__name__}({name}={_short(other)})", other) for other in tried]
        for text, other in others:
            options = (*part.options[:index], (name, other), *part.options[index + 1 :])
            yield from _made(text, part, "options", options)


def _like(name: str, numbers: Numbers) -> list[float]:
    """The config's numbers whose keys share a word with a field's name."""
    words = [word[:LIKE] for word in name.split("_") if len(word) >= LIKE or word == "mlp"]
    return list(dict.fromkeys(value for key, value in numbers.items() if any(word in key for word in words)))


def _transformed(name: str, numbers: Numbers) -> Iterator[float]:
    """Numbers for a field, and for a scale also inverted and to the powers of 1/2 and -1/2."""
    like = _like(name, numbers)
    yield from like
    if "scal" in name or "multiplier" in name:
        for value in (value for value in like if value > 0):
            yield from (1.0 / value, value**-0.5, value**0.5)


def _as_other_layers(spec: ArchitectureSpec, layer: int) -> Iterator[Hypothesis]:
    """This layer with a part of another one, as where the pattern of layers is wrong."""
    this = spec.layers[layer]
    for name in ("mixer", "mlp", "block"):
        seen = {getattr(this, name)}
        for index, other in enumerate(spec.layers):
            part = getattr(other, name)
            if part in seen:
                continue
            seen.add(part)
            hook = {"mlp": "ttpu_mlp", "block": "ttpu_block"}.get(name) or _mixer_hook(this, part)
            changed = _with(spec, {layer}, **{name: part})
            yield Hypothesis(hook, f"the {name} of layer {index} in layer {layer}", changed)


def _mixer_hook(this: LayerSpec, other: Any) -> str:
    if not (isinstance(this.mixer, AttentionSpec) and isinstance(other, AttentionSpec)):
        return "ttpu_mixer"
    return "ttpu_rope" if replace(this.mixer, rope=other.rope) == other else "ttpu_attention"


def _ropes(architecture: Architecture, layer: int) -> Iterator[Hypothesis]:
    """Ropes that the config gives by the usual reading, for this layer alone and for all that have its rope."""
    spec, mixer = architecture.spec, architecture.spec.layers[layer].mixer
    if not isinstance(mixer, AttentionSpec):
        return
    like = {i for i, one in enumerate(spec.layers) if getattr(one.mixer, "rope", None) == mixer.rope}
    for text, given in (
        ("", {}),
        (", partial=True", {"partial": True}),
        (', layout="interleaved"', {"layout": "interleaved"}),
        (', partial=True, layout="interleaved"', {"partial": True, "layout": "interleaved"}),
    ):
        try:
            rope = rope_from_config(architecture.config, head_dim=mixer.head_dim, **given)
        except TTPUError:
            continue
        for where, places in ((f" in layer {layer}", {layer}), ("", like)):
            layers = tuple(
                replace(one, mixer=replace(one.mixer, rope=rope)) if i in places else one
                for i, one in enumerate(spec.layers)
            )
            yield Hypothesis("ttpu_rope", f"rope_from_config(…{text}){where}", replace(spec, layers=layers))


def without_mlp(architecture: Architecture, layer: int) -> Architecture:
    """The architecture without one layer's MLP, which tells a mistake in the MLP from one before it."""
    spec = _with(architecture.spec, {layer}, mlp=None)
    rules = tuple((path, rule) for path, rule in architecture.mapping.rules if path in spec.parameters)
    mapping = FlaxMapping(rules, ignored=(".*",), prefixes=architecture.mapping.prefixes)
    return replace(architecture, spec=spec, mapping=mapping)


def _with(spec: ArchitectureSpec, places: set[int], **parts: Any) -> ArchitectureSpec:
    layers = tuple(replace(one, **parts) if index in places else one for index, one in enumerate(spec.layers))
    return replace(spec, layers=layers)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


_TRIED_WHOLE: tuple[type, ...] = (vocabulary.OutputGate, vocabulary.AlibiSpec)
_TYPES: dict[str, Any] = {"RopeSpec": RopeSpec, "NormSpec": NormSpec, "Parameter": Parameter, "Any": Any}
"""Types that the vocabulary's modules import for annotations alone."""
