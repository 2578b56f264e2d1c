"""Every type of the zoo keeps the promises of the conformance kit, at its quick level; `make conformance` runs all."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("torch")
from ttpu_conformance import parametrize_with_checks

pytestmark = [pytest.mark.torch, pytest.mark.slow]

TYPES = (
    "arcee",
    "cohere",
    "cohere2",
    "ernie4_5",
    "ernie4_5_moe",
    "glm",
    "glm4",
    "glm4_moe",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "helium",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
)
LEVEL = "full" if os.environ.get("TTPU_CONFORMANCE_LEVEL") == "full" else "quick"


@parametrize_with_checks(*TYPES, level=LEVEL)
def test_zoo(case: Any, check: Any) -> None:
    check(case)
