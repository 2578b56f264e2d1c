"""Finds the tensors of a checkpoint that a model does not read because its plugin ignores them, such as heads that
predict further tokens, towers for pictures, and saved rotary tables."""

from __future__ import annotations

from collections.abc import Iterable

from ttpu_core.mapping import FlaxMapping


def unread_tensors(mapping: FlaxMapping, names: Iterable[str]) -> tuple[str, ...]:
    """The names, among a checkpoint's tensors, that the mapping's patterns of ignored tensors match and that no rule
    reads. Tied tensors do not count."""
    held = tuple(names)
    suited = mapping.suited_to(held)
    accounted = set(suited.canonical(held).values())
    return tuple(name for name in held if name not in accounted and suited.is_ignored(name))


def unread_sentences(mapping: FlaxMapping, names: Iterable[str], source: str) -> tuple[str, ...]:
    """One sentence about the tensors of a checkpoint that are not read; none if every tensor is read. `source` names
    the checkpoint."""
    unread = unread_tensors(mapping, names)
    if not unread:
        return ()
    more = f" and {len(unread) - 1:,} more" if len(unread) > 1 else ""
    return (f"nothing reads {unread[0]!r}{more} in {source}, which the plugin ignores, so they have no effect",)
