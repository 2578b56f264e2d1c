"""Every gemma model type against transformers, by the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from ttpu_conformance import parametrize_with_checks

pytestmark = [pytest.mark.torch, pytest.mark.slow]


TYPES = ("gemma2", "gemma3_text", "gemma3", "gemma3n", "gemma3n_text", "gemma4_text", "gemma4")


@parametrize_with_checks(*TYPES)
def test_gemma(case: Any, check: Any) -> None:
    check(case)


@parametrize_with_checks("gemma", "vaultgemma", relatives=True)
def test_relatives_of_gemma2(case: Any, check: Any) -> None:
    check(case)
