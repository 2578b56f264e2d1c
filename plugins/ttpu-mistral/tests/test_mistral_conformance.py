"""Every mistral model type against transformers, by the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from ttpu_conformance import parametrize_with_checks

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@parametrize_with_checks("mistral", "ministral", "ministral3", "mixtral", "mistral4", "mistral3")
def test_mistral(case: Any, check: Any) -> None:
    check(case)
