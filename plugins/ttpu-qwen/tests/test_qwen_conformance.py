"""Every Qwen type keeps the promises of the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
from ttpu_conformance import parametrize_with_checks

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@parametrize_with_checks("qwen3", "qwen3_moe")
def test_conformance_of_attention(case: Any, check: Any) -> None:
    check(case)


@parametrize_with_checks("qwen3_next", "qwen3_5", "qwen3_5_moe")
def test_conformance_of_gated_delta_net(case: Any, check: Any) -> None:
    check(case)


@parametrize_with_checks("qwen2", "qwen2_moe", "qwen3_5_text", "qwen3_5_moe_text", relatives=True)
def test_conformance_of_relatives(case: Any, check: Any) -> None:
    check(case)
