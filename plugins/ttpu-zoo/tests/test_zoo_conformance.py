"""Every type of the zoo keeps the promises of the conformance kit; `make conformance` runs every check."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from ttpu_conformance import parametrize_with_checks

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
TYPES = tuple(PROJECT["project"]["entry-points"]["ttpu.architectures.collection"])


@parametrize_with_checks(*TYPES, relatives=True)
def test_zoo(case: Any, check: Any) -> None:
    check(case)
