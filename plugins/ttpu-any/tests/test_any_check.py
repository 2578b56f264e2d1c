"""The sentence that refuses a model in which no manner agrees with itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ttpu_any.aten.table import NEEDS_PLUGIN
from ttpu_any.check import checked_programs
from ttpu_any.steps import MANNERS, Manner
from ttpu_core.errors import UnsupportedError


def refused(reason: Any, dtype: str = "float32") -> str:
    """The refusal of a model whose programs fail in each manner with `reason(manner)`."""

    def make(manner: Manner) -> Any:
        def fail(*_: Any) -> Any:
            raise reason(manner)

        config = SimpleNamespace(pad_token_id=0, get_text_config=lambda **_: config)
        steps = SimpleNamespace(model=SimpleNamespace(config=config))
        return SimpleNamespace(manner=manner, spec=SimpleNamespace(vocab_size=8), steps=steps, checked_prefill=fail)

    with pytest.raises(UnsupportedError) as caught:
        checked_programs(make, MANNERS, dtype, "a checkpoint (Some)")
    return str(caught.value)


def test_a_reason_is_given_once_and_the_advice_once() -> None:
    message = refused(lambda _: UnsupportedError(f"Some keeps a list{NEEDS_PLUGIN}"))
    assert message.startswith("a checkpoint (Some) was to be run without a plugin")
    assert message.endswith("would be wrong: (1) Some keeps a list. This model needs a plugin.")


def test_of_many_reasons_the_first_are_given() -> None:
    message = refused(lambda manner: ValueError(f"manner {MANNERS.index(manner)}\n  broke"))
    assert "(1) ValueError: manner 0 broke; (2) ValueError: manner 1 broke; (3) ValueError: manner 2 broke; " in message
    assert f"; and {len(MANNERS) - 3} more. This model" in message


def test_where_rounding_may_be_the_reason_a_wider_dtype_is_advised() -> None:
    message = refused(lambda _: ValueError("far apart"), "bfloat16")
    assert message.endswith("needs a plugin; if bfloat16 rounds too much for it, pass dtype='float32'.")
