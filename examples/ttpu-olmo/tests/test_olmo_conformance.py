"""OLMo against transformers: every check of the conformance kit that runs on a CPU."""

from typing import Any

from ttpu_conformance import parametrize_with_checks


@parametrize_with_checks("olmo2", "olmo3")
def test_conformance(case: Any, check: Any) -> None:
    check(case)
