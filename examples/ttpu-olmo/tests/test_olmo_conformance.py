"""Both model types against transformers: every check of the kit that runs on a CPU."""

from typing import Any

import pytest

pytest.importorskip("torch")
from ttpu_conformance import parametrize_with_checks  # noqa: E402


@parametrize_with_checks("olmo2", "olmo3")
def test_conformance(case: Any, check: Any) -> None:
    check(case)
