"""Tensors inside of a transformers cache. `taken_apart` takes a cache and returns its tensors and a skeleton, a plain
value that can be compared; `put_together` makes the cache again from other tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

PARTS = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)


@dataclass(frozen=True)
class Place:
    """The place of a tensor: its number among the tensors of the cache."""

    number: int


@dataclass(frozen=True)
class Part:
    """A cache, or one of its layers: the class and the skeletons of its attributes."""

    kind: type
    attributes: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Listed:
    """A list, tuple or dict: its class and the skeletons of its items, (key, skeleton) for a dict."""

    kind: Any
    items: tuple[Any, ...]


def taken_apart(value: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors of a cache in a fixed order, and the cache without them."""
    tensors: list[torch.Tensor] = []
    return tensors, _skeleton(value, tensors)


def put_together(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """The cache of a skeleton with these tensors."""
    if isinstance(skeleton, Place):
        return tensors[skeleton.number]
    if isinstance(skeleton, Part):
        part: Any = object.__new__(skeleton.kind)
        part.__dict__.update({name: put_together(each, tensors) for name, each in skeleton.attributes})
        return part
    if isinstance(skeleton, Listed):
        if issubclass(skeleton.kind, dict):
            return skeleton.kind((key, put_together(each, tensors)) for key, each in skeleton.items)
        return skeleton.kind(put_together(each, tensors) for each in skeleton.items)
    return skeleton


def _skeleton(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Place(len(tensors) - 1)
    if isinstance(value, PARTS):
        return Part(type(value), tuple((name, _skeleton(each, tensors)) for name, each in vars(value).items()))
    if type(value) is dict:
        return Listed(dict, tuple((key, _skeleton(each, tensors)) for key, each in value.items()))
    if type(value) in (list, tuple):
        return Listed(type(value), tuple(_skeleton(each, tensors) for each in value))
    return value
