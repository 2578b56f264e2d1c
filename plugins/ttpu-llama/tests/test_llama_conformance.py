"""Llama and Llama 4 against transformers, by the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from ttpu_conformance import parametrize_with_checks

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@parametrize_with_checks("llama", "llama4_text", "llama4")
def test_llama(case: Any, check: Any) -> None:
    check(case)
