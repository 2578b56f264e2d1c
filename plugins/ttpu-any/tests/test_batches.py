"""Products of batches keep their batch dimensions, so that these can be sharded apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ttpu_any.trace import Shape, Traced, trace

QUERY, KEY = (2, 6, 3, 4), (2, 2, 5, 4)


class Scores(torch.nn.Module):
    """Attention's scores of queries [batch, heads, ...] and keys of fewer heads."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, merged: bool) -> torch.Tensor:
        key = key[:, :, None].expand(2, 2, 3, 5, 4).reshape(2, 6, 5, 4)
        if merged:
            return torch.bmm(query.reshape(12, 3, 4), key.reshape(12, 5, 4).transpose(1, 2))
        return query @ key.transpose(2, 3)


def traced(merged: bool) -> Traced:
    return trace(
        Scores(),
        lambda forward, given: [forward(query=given[0], key=given[1], merged=merged)],
        [Shape(QUERY, torch.float32), Shape(KEY, torch.float32)],
    )


@pytest.mark.parametrize("merged", [False, True])
def test_a_product_whose_batches_the_model_does_not_merge_keeps_them(merged: bool) -> None:
    program = traced(merged)
    names = {str(node.target) for node in program.graph.graph.nodes}
    assert ("aten.bmm.default" in names) == merged
    assert ("aten.matmul.default" in names) != merged
    query, key = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in (QUERY, KEY))
    expected = Scores()(torch.tensor(query), torch.tensor(key), merged).numpy()
    np.testing.assert_allclose(program({}, query, key)[0], expected, atol=1e-5)
