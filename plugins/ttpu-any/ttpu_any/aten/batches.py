"""torch multiplies batches of matrices with all batch dimensions merged into one. Merged dimensions cannot stay
sharded apart, so that keys and values sharded over heads would be gathered on every device: `keep_batches` undoes the
merging."""

from __future__ import annotations

import math

import torch

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
SAME = (aten.clone.default, aten.expand.default)


def keep_batches(graph: torch.fx.GraphModule) -> None:
    """Replace each product of merged batches, whose result is taken apart again, by one of the batches as they were."""
    for node in list(graph.graph.nodes):
        if node.target is not aten.bmm.default:
            continue
        first, second = (_unmerged(each) for each in node.args)
        if first is None or second is None or _shape(first)[:-2] != _shape(second)[:-2]:
            continue
        shape = (*_shape(first)[:-1], _shape(second)[-1])
        if not all(user.target in VIEWS and _shape(user) == shape for user in node.users):
            continue
        with graph.graph.inserting_before(node):
            product = graph.graph.call_function(aten.matmul.default, (first, second))
        for user in list(node.users):
            product.meta["val"] = user.meta["val"]
            user.replace_all_uses_with(product)
    graph.graph.eliminate_dead_code()


def _unmerged(node: torch.fx.Node) -> torch.fx.Node | None:
    """The matrices before their batch dimensions were merged; None if they were not."""
    merged, found = _shape(node), node
    while found.target in (*VIEWS, *SAME) and len(_shape(found)) == 3:
        found = found.args[0]  # type: ignore[assignment]
        shape = _shape(found)
        if len(shape) > 3:
            return found if shape[-2:] == merged[-2:] and math.prod(shape[:-2]) == merged[0] else None
    return None


def _shape(node: torch.fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
