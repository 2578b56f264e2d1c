"""The mapping of a whole model: one rule per Flax parameter, read forwards to load a checkpoint and backwards to
write one."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from ttpu_core.errors import MappingError
from ttpu_core.mapping.expressions import Expression, Padded, Shape, Stack, Tensor
from ttpu_core.mapping.padding import Padding
from ttpu_core.mapping.strides import covers_once
from ttpu_core.spec.parameters import LAYERS, stacked_paths

if TYPE_CHECKING:
    from ttpu_core.spec import ArchitectureSpec, Parameter


_OF_LAYER = re.compile(r"\.\d+\.")
"""In names of a layer's tensors. Those that are tied repeat another layer's."""


@dataclass(frozen=True)
class FlaxMapping:
    """All mapping rules of one model.

    Args:
        rules: pairs of Flax path and expression.
        tied: checkpoint tensors that repeat a parameter and are not read. That of a head is read where a checkpoint
            has no other tensor of the embedding.
        ignored: regular expressions of tensors that are not read (rotary tables, multi-token-prediction heads).
        prefixes: pairs (old, new) that rename leading parts of checkpoint names; the first match wins.
        alternatives: sets of rules that replace the rules of the same paths if a checkpoint holds their tensors
            (experts stored as one tensor, or as one tensor per expert); see `suited_to`.

    Raises:
        MappingError: two rules have the same path.
    """

    rules: tuple[tuple[str, Expression], ...]
    tied: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    alternatives: tuple[tuple[tuple[str, Expression], ...], ...] = ()
    _by_path: dict[str, Expression] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_path", dict(self.rules))
        if len(self._by_path) != len(self.rules):
            twice = [path for path, count in Counter(path for path, _ in self.rules).items() if count > 1]
            raise MappingError(
                f"the mapping has more than one rule for {_some(twice)}, but a parameter has exactly one rule: remove "
                "the others from `ttpu_flax_mapping`."
            )

    def __getitem__(self, path: str) -> Expression:
        return self._by_path[path]

    def suited_to(self, available: Iterable[str]) -> FlaxMapping:
        """The mapping for a checkpoint with tensors of these names. The first of the `alternatives` whose tensors
        appear among the names is used; the usual rules are used if none does."""
        held = list(available)
        for rules in self.alternatives:
            wanted = {leaf.name: leaf.shape for _, rule in rules for leaf in rule.leaves()}
            if any(self._canonical(name, wanted) in wanted for name in held):
                instead = dict(rules)
                chosen = tuple((path, instead.get(path, rule)) for path, rule in self.rules)
                return replace(self, rules=chosen, alternatives=())
        return replace(self, alternatives=()) if self.alternatives else self

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint's tensor of this name is not read."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    @property
    def tensors(self) -> dict[str, Shape]:
        """Every checkpoint tensor that the rules read, with its shape on disk."""
        return {leaf.name: leaf.shape for _, rule in self.rules for leaf in rule.leaves()}

    def check_parameters(self, parameters: Mapping[str, Parameter]) -> None:
        """Check the rules against the parameter table.

        Raises:
            MappingError: a parameter has no rule, a rule has no parameter, a shape differs, or the rules use only a
                part of a checkpoint tensor.
        """
        missing = [path for path in parameters if path not in self._by_path]
        if missing:
            raise MappingError(
                f"the mapping has no rule for the parameter{_s(missing)} {_some(missing)}: add to `ttpu_flax_mapping`."
            )
        unknown = [path for path in self._by_path if path not in parameters]
        if unknown:
            raise MappingError(
                f"the mapping has a rule for {_some(unknown)}, but the architecture has no such "
                f"parameter{_s(unknown)}: remove it from `ttpu_flax_mapping`, or describe what uses it."
            )
        for path, rule in self.rules:
            if rule.result_shape != parameters[path].shape:
                raise MappingError(
                    f"the mapping makes {path} of shape {rule.result_shape}, but the architecture needs "
                    f"{parameters[path].shape}: correct the rule for it in `ttpu_flax_mapping`."
                )
        self._check_tensors()
        for rules in self.alternatives:
            self.suited_to(leaf.name for _, rule in rules for leaf in rule.leaves()).check_parameters(parameters)

    def resolve(self, available: Mapping[str, Shape], source: str = "the checkpoint") -> dict[str, str]:
        """Map the names that the rules use to the names in a checkpoint. `available` holds the checkpoint's names
        and shapes.

        Raises:
            MappingError: a tensor is missing or has another shape, or no rule accounts for a tensor.
        """
        wanted = self.tensors
        found: dict[str, str] = {}
        copies: dict[str, str] = {}
        extras: list[str] = []
        for actual, shape in available.items():
            name = self._canonical(actual, wanted)
            if name in found:
                raise MappingError(
                    f"{source} holds both {found[name]!r} and {actual!r} for the tensor {name!r}, but one is needed: "
                    "remove the other from the checkpoint."
                )
            if name in wanted:
                if tuple(shape) != wanted[name]:
                    raise _other_shape(actual, source, shape, wanted[name])
                found[name] = actual
            elif name in self.tied:
                copies[name] = actual
            elif not self.is_ignored(actual):
                extras.append(actual)
        if (table := self._only_in_head(found, copies)) is not None:
            name, actual = table
            found[name] = actual
            if tuple(available[actual]) != wanted[name]:
                raise _other_shape(actual, source, available[actual], wanted[name])
        missing = [name for name in wanted if name not in found]
        if missing:
            raise MappingError(
                f"{source} has no tensor{_s(missing)} {_some(missing)}, which the architecture needs: the download is "
                "incomplete, or config.json belongs to another model."
            )
        if extras:
            raise MappingError(
                f"{source} holds {_some(extras)}, which no rule accounts for: config.json belongs to another model, or "
                "the family plugin must map or ignore it."
            )
        return found

    def canonical(self, available: Iterable[str]) -> dict[str, str]:
        """Map the names that the rules use, and the names of tied tensors, to the names in a checkpoint."""
        wanted = self.tensors
        found = {self._canonical(actual, wanted): actual for actual in available}
        held = {name: actual for name, actual in found.items() if name in wanted or name in self.tied}
        table = self._only_in_head(held, held)
        return held if table is None else held | dict([table])

    def _check_tensors(self) -> None:
        """Check that every checkpoint tensor has one shape and that each of its elements is used once."""
        users: dict[str, list[Tensor]] = defaultdict(list)
        for _, rule in self.rules:
            for leaf in rule.leaves():
                users[leaf.name].append(leaf)
        for name, leaves in users.items():
            shape, size = leaves[0].shape, prod(leaves[0].shape)
            others = [leaf.shape for leaf in leaves if leaf.shape != shape]
            if others:
                raise MappingError(
                    f"the mapping gives {name!r} the shape {shape} in one rule and {others[0]} in another, but a "
                    "tensor has one shape on disk: correct `ttpu_flax_mapping`."
                )
            used = sum(prod(leaf.result_shape) for leaf in leaves)
            if used != size:
                raise MappingError(
                    f"the mapping uses {used:,} of the {size:,} elements of {name!r}, but every element must be used "
                    "once: complete the rules that slice it in `ttpu_flax_mapping`."
                )
            if any(leaf.is_part for leaf in leaves) and not covers_once(size, [leaf.layout for leaf in leaves]):
                raise MappingError(
                    f"the mapping uses some elements of {name!r} more than once and leaves as many out, but every "
                    "element must be used once: correct the rules that slice it in `ttpu_flax_mapping`."
                )

    def _only_in_head(self, found: Mapping[str, str], copies: Mapping[str, str]) -> tuple[str, str] | None:
        """The embedding's name and that of the tied head which a checkpoint holds in its place, as transformers reads
        it; None where the embedding is among the names `found`. `copies` has the tied tensors that are there."""
        rule = self._by_path.get("embed.embedding")
        tables = [] if rule is None else [leaf.name for leaf in rule.leaves()]
        if len(tables) != 1 or tables[0] in found:
            return None
        heads = [actual for name, actual in copies.items() if name in self.tied and not _OF_LAYER.search(name)]
        return (tables[0], heads[0]) if heads else None

    def _canonical(self, name: str, wanted: Mapping[str, Shape]) -> str:
        if name in wanted or name in self.tied:
            return name
        for old, new in self.prefixes:
            if name.startswith(old) and (new + name[len(old) :] in wanted or new + name[len(old) :] in self.tied):
                return new + name[len(old) :]
        return name


def stack_layers(mapping: FlaxMapping, spec: ArchitectureSpec) -> FlaxMapping:
    """The mapping for parameters stacked over equal layers, as a decoder that scans over layers stores them:
    `groups.<g>.<position>.<path>` with a leading layers axis instead of `layers.<i>.<path>`."""
    rules = [rule for rule in mapping.rules if not rule[0].startswith(LAYERS)]
    by_path = dict(mapping.rules)
    for path, copies in stacked_paths(spec, by_path):
        rules.append((path, Stack(tuple(by_path[copy] for copy in copies))))
    return replace(mapping, rules=tuple(rules), alternatives=())


def pad_mapping(mapping: FlaxMapping, paddings: Mapping[str, Padding]) -> FlaxMapping:
    """The mapping for padded parameters. `paddings` holds the padding by Flax path, see
    `ttpu_core.sharding.padding`."""

    def padded(rules: tuple[tuple[str, Expression], ...]) -> tuple[tuple[str, Expression], ...]:
        return tuple((path, Padded(rule, paddings[path]) if path in paddings else rule) for path, rule in rules)

    alternatives = tuple(padded(rules) for rules in mapping.alternatives)
    return replace(mapping, rules=padded(mapping.rules), alternatives=alternatives)


def _other_shape(name: str, source: str, shape: Shape, wanted: Shape) -> MappingError:
    return MappingError(
        f"tensor {name!r} in {source} has shape {tuple(shape)}, but the config asks for {wanted}: config.json and the "
        "weights belong to different models, or one is damaged."
    )


def _s(names: list[str]) -> str:
    return "s" if len(names) > 1 else ""


def _some(names: Iterable[str], limit: int = 4) -> str:
    listed = list(names)
    text = ", ".join(repr(name) for name in listed[:limit])
    return text if len(listed) <= limit else f"{text} and {len(listed) - limit} more"
