"""Every model type: the patched model's logits are the stock model's, whatever the padding, in one program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch_xla")

from xla_tiny import TOKENS, WINDOW, Tiny, model_types, prompt, relative_error, tiny

pytestmark = pytest.mark.torch

FLOAT32 = 1e-5
IDS, MASK = prompt(3, TOKENS, left={0: 9})
MASK[1, TOKENS - 7 :] = 0  # the first row is padded on its left, the second on its right, the third not at all
POSITIONS = (MASK.cumsum(-1) - 1).clamp(min=0)


@pytest.fixture(scope="module", params=model_types())
def case(request: pytest.FixtureRequest) -> Iterator[Tiny]:
    with tiny(request.param) as made:
        made.stock["plain"] = made.logits(input_ids=IDS)
        made.stock["padded"] = made.logits(input_ids=IDS, attention_mask=MASK, position_ids=POSITIONS)
        made.move()
        yield made


def test_padded_logits_equal_stock_logits_in_one_program(case: Tiny) -> None:
    case.runtime.reset_counters()
    ours = case.logits(input_ids=IDS, attention_mask=MASK, position_ids=POSITIONS)
    counters = case.runtime.counters()
    real = MASK.bool()
    assert relative_error(ours[real], case.stock["padded"][real]) < FLOAT32
    assert not counters.fallbacks
    assert counters.compiles <= 1
    assert ours.isfinite().all(), "what stands at padding is multiplied by zero later, which does not remove NaN"


def test_plain_logits_equal_stock_logits_in_one_program(case: Tiny) -> None:
    case.runtime.reset_counters()
    ours = case.logits(input_ids=IDS)
    counters = case.runtime.counters()
    assert relative_error(ours, case.stock["plain"]) < FLOAT32
    assert not counters.fallbacks
    assert counters.compiles <= 1


def test_the_sequence_is_longer_than_every_window(case: Tiny) -> None:
    text = case.model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if "sliding_attention" in kinds or getattr(text, "sliding_window", None):
        assert text.sliding_window is None or text.sliding_window <= WINDOW
    if "chunked_attention" in kinds:
        assert text.attention_chunk_size < TOKENS


def test_the_model_types_are_those_of_the_four_families() -> None:
    assert len(model_types()) == 27
