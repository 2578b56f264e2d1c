"""Along which dimension devices divide a parameter that they share."""

from __future__ import annotations

import pytest

from ttpu_core.sharding.shares import shared_dimension
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, TRAINING_STRATEGY, Strategy
from ttpu_core.spec import axes

UP = (axes.EXPERT, axes.GATE_UP, axes.MLP, axes.EMBED)
DOWN = (axes.EXPERT, axes.EMBED, axes.MLP)


@pytest.mark.parametrize(
    ("logical", "shape", "devices", "place"),
    [
        (UP, (128, 2, 768, 2048), 32, 0),
        (DOWN, (128, 2048, 768), 32, 0),
        (UP, (8, 2, 14336, 4096), 32, 2),  # 448 rows each
        (DOWN, (8, 4096, 14336), 32, 1),  # the last dimension is none of rows
        (UP, (60, 2, 1408, 2048), 32, 3),  # 44 rows are no whole tiles
        (UP, (60, 2, 1408, 2048), 22, 2),  # 64 rows are
        (UP, (6, 2, 100, 129), 4, None),
        ((axes.LAYERS, *UP), (48, 128, 2, 768, 2048), 32, 1),
        ((axes.MLP, axes.EMBED), (14336, 4096), 32, 1),
        ((axes.EMBED, axes.KV_HEADS), (4096, 4096), 8, 0),
        ((None, axes.LATENT), (3, 64), 8, 1),
        ((axes.NORM,), (4096,), 8, None),
    ],
)
def test_experts_are_divided_by_experts_or_by_whole_tiles_of_rows(
    logical: tuple[str | None, ...], shape: tuple[int, ...], devices: int, place: int | None
) -> None:
    assert shared_dimension(logical, shape, (1,) * len(shape), devices) == place


def test_what_others_divide_already_counts() -> None:
    assert shared_dimension(UP, (16, 2, 768, 2048), (8, 1, 1, 1), 2) == 0
    assert shared_dimension(UP, (16, 2, 768, 2048), (8, 1, 1, 1), 4) == 2
    assert shared_dimension(UP, (16, 2, 768, 2048), (8, 1, 16, 1), 4) == 3


def sharding(strategy: Strategy, logical: tuple[str | None, ...], shape: tuple[int, ...], **mesh: int) -> list[str]:
    return ["+".join(by) for by in strategy.mesh_axes(logical, shape, mesh, "a kernel")]


def test_strategies_divide_experts_where_they_would_divide_features() -> None:
    up, down = (128, 2, 768, 2048), (128, 2048, 768)
    assert sharding(DEFAULT_STRATEGY, UP, up, fsdp=8) == ["fsdp", "", "", ""]
    assert sharding(DEFAULT_STRATEGY, DOWN, down, fsdp=8, tensor=4) == ["fsdp", "", "tensor"]
    assert sharding(TRAINING_STRATEGY, UP, up, fsdp=4, expert=8) == ["expert+fsdp", "", "", ""]
    assert sharding(TRAINING_STRATEGY, UP, up, expert=8) == ["expert", "", "", ""]
    few = (8, 2, 14336, 4096)
    assert sharding(TRAINING_STRATEGY, UP, few, fsdp=4, expert=8, tensor=2) == ["expert", "", "tensor+fsdp", ""]
    assert sharding(TRAINING_STRATEGY, DOWN, (8, 4096, 14336), fsdp=4, expert=8) == ["expert", "fsdp", ""]
    assert sharding(DEFAULT_STRATEGY, UP, (60, 2, 1408, 2048), fsdp=16) == ["", "", "", "fsdp"]
    assert sharding(DEFAULT_STRATEGY, (axes.MLP, axes.EMBED), (14336, 4096), fsdp=8) == ["", "fsdp"]


def test_rules_that_divide_experts_and_features_alike_keep_their_order() -> None:
    rules = {**dict(DEFAULT_STRATEGY.rules), axes.EXPERT: ("fsdp",), axes.EMBED: ("fsdp", "data")}
    found = Strategy(tuple(rules.items()))
    assert sharding(found, UP, (128, 2, 768, 2048), fsdp=4, data=2) == ["fsdp+data", "", "", ""]
    assert sharding(found, UP, (4, 2, 768, 2048), fsdp=4, data=2) == ["fsdp", "", "data", ""]
