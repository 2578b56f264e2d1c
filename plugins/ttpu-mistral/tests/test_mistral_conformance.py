"""Every mistral model type against transformers, by the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from ttpu_conformance import parametrize_with_checks

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@parametrize_with_checks("mistral", "mixtral", "mistral4", "mistral3")
def test_mistral(case: Any, check: Any) -> None:
    check(case)


@parametrize_with_checks("ministral", "ministral3", relatives=True)
def test_relatives_of_mistral(case: Any, check: Any) -> None:
    check(case)
