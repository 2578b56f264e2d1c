"""From tokens to text as it comes: what is shown, what is held back, and that it is the text of all tokens at once."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from ttpu_core.generation.detokenizer import TextStream
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.execution.sequence_output import SequenceOutput
from ttpu_serve.scheduling.request import Request


class Backend:
    """What streams use of a fast tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self.backend_tokenizer = tokenizer


def letters(pieces: list[str]) -> Backend:
    """Each id is a piece of text."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    return Backend(tokenizer)


def byte_fallback() -> Backend:
    """As Llama 2's: a token for each byte, of which a run is decoded as a whole; 258 is special."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁the": 256, "?": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="?", byte_fallback=True))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Backend(tokenizer)


def byte_level() -> Backend:
    """As GPT-2's: a token for each byte; 258 is special."""
    from tokenizers import Tokenizer, decoders, models

    own = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that are written as themselves
    others = [byte for byte in range(256) if byte not in own]
    letters = {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}
    vocabulary = letters | {"Ġthe": 256, "?": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.decoder = decoders.ByteLevel()
    return Backend(tokenizer)


SPECIAL = 258
KINDS = pytest.mark.parametrize("make", [byte_fallback, byte_level])


def streamed(tokenizer: Any, prompt: list[int], tokens: list[int]) -> tuple[list[str], str]:
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.push(token) for token in tokens]
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    return pieces, stream.text


def at_once(tokenizer: Any, tokens: list[int]) -> str:
    decode = tokenizer.backend_tokenizer.decode
    return str(decode([256, *tokens])[len(decode([256])) :])


# stop strings


def test_a_stop_string_across_tokens_is_never_shown() -> None:
    stream = TextStream(letters(["a", "<", "/e", "nd>", "?"]), [0], ["</end>"])
    assert [stream.push(token) for token in (0, 1, 2, 3)] == ["a", "", "", ""]
    assert stream.stopped and stream.text == "a"
    stream = TextStream(letters(["a", "<", "/e", "nd>", "?"]), [0], ["</end>"])
    assert [stream.push(token) for token in (0, 1, 2, 0)] == ["a", "", "", "</ea"]
    assert stream.push(1) == "" and stream.finish() == "<"


def test_a_stop_string_counts_that_begins_before_and_ends_after_the_stream_is_armed() -> None:
    stream = TextStream(letters(["a", "<", "/e", "nd>", "?"]), [0], ["</end>"])
    stream.armed = False
    assert [stream.push(token) for token in (0, 1, 2)] == ["a", "", ""]
    stream.armed = True
    assert stream.push(3) == "" and stream.stopped_by == "</end>" and stream.text == "a"


def test_a_stop_string_that_ended_before_the_stream_is_armed_is_text() -> None:
    stream = TextStream(letters(["x", "a", "b", "y", "?"]), [0], ["ab", "xaby"])
    stream.armed = False
    assert [stream.push(token) for token in (1, 2, 0, 1, 2)] == ["", "ab", "", "", ""]
    stream.armed = True
    assert stream.push(0) == "xab" and not stream.stopped
    assert [stream.push(token) for token in (1, 2)] == ["", "x"] and stream.stopped_by == "ab"


@pytest.mark.parametrize(
    "min_tokens, text, tokens", [(0, "", 2), (2, "", 2), (3, "ab", 4), (4, "ab", 4), (5, "ababx", 5)]
)
def test_a_stop_string_ends_an_answer_of_min_tokens_or_more(min_tokens: int, text: str, tokens: int) -> None:
    params = SamplingParams(max_tokens=5, min_tokens=min_tokens, stop=("ab",))
    tokenizer = letters(["x", "a", "b", "?"])
    answer = SequenceOutput(Request("r", [0], params, max_output=5), "r", 0, tokenizer, lambda token: None)
    count = 0
    while not answer.finished:
        count += answer.take([[1, 2, 1, 2, 0][count]])
        answer.request.output.append(0)
    delta = answer.delta()
    assert delta is not None and count == tokens
    assert (delta.text, delta.finish_reason) == (text, "stop" if tokens < 5 else "length")


# bytes


def test_a_prompt_that_ends_within_a_character_is_not_repeated() -> None:
    stream = TextStream(byte_level(), list("café".encode()[:-1]))
    assert [stream.push(token) for token in b"(AB"] == ["(", "A", "B"]


def test_bytes_that_become_a_character_come_with_its_last() -> None:
    stream = TextStream(byte_fallback(), [256])
    assert [stream.push(token) for token in "\né".encode()] == ["\n", "", "é"]
    assert stream.push(256) == " the"


def test_bytes_that_become_no_character_are_shown_as_such() -> None:
    stream = TextStream(byte_fallback(), [256])
    pieces = [stream.push(token) for token in (0x0A, 0xF0, 0x9F, 256)]
    assert pieces[:3] == ["\n", "", ""] and pieces[3].endswith(" the") and "\ufffd" in pieces[3]
    stream.push(0xF0)
    assert stream.finish() == "\ufffd" and stream.text == "".join(pieces) + "\ufffd"


@KINDS
@pytest.mark.parametrize("garbage", [b"\xff", b"\x98", b"\xf0\x9f\x98", b"\x98\xf0", b"\xe4\xbd\xff"], ids=bytes.hex)
def test_a_run_of_bytes_that_is_no_text_comes_as_it_grows_and_is_what_it_is_at_once(make: Any, garbage: bytes) -> None:
    tokenizer = make()
    for count in range(1, 40):
        for end in ([], [256], list("😀".encode()), [256, *"😀é".encode()]):
            tokens = [*(garbage * 40)[:count], *end]
            pieces, text = streamed(tokenizer, [256], tokens)
            assert text == at_once(tokenizer, tokens)
            assert count < 13 or any(pieces[:count]), "nothing was shown of a long run"


@KINDS
def test_random_bytes_and_words_are_what_they_are_at_once(make: Any) -> None:
    tokenizer, choose = make(), random.Random(3)
    texts = [[256], [SPECIAL], *(list(text.encode()) for text in "é你😀")]
    for _ in range(300):
        garbage = [0xFF, *choose.choices([0xF0, 0x9F, 0x98, 0x80, 0xE4, 0xBD, 0x41, 0xFF], k=choose.randint(1, 40))]
        parts = [choose.choice([*texts, garbage]) for _ in range(12)]
        # In byte-fallback tokenizers bytes that are no text undo the text right before them, which was shown.
        tokens = [token for part in parts for token in ((256, *part) if part[0] == 0xFF else part)]
        _, text = streamed(tokenizer, [256], tokens)
        assert text == at_once(tokenizer, tokens)


@KINDS
@pytest.mark.parametrize("garbage", [0xFF, SPECIAL], ids=["no text", "special"])
def test_long_runs_that_are_no_text_cost_no_more_than_text(make: Any, garbage: int) -> None:
    tokenizer = make()

    def seconds(tokens: list[int]) -> float:
        began = time.process_time()
        streamed(tokenizer, [256], tokens)
        return time.process_time() - began

    assert seconds([garbage] * 4000) < 20 * seconds([65] * 4000) + 0.05  # 200 times where all is decoded again


# the prompt


@KINDS
@pytest.mark.parametrize(
    "prompt",
    ["héllo wörld 你好 😀 " * 5, "😀" * 30, "\n" * 50, "a" + "é" * 9],
    ids=["text", "bytes", "line breaks", "short"],
)
@pytest.mark.parametrize("inserted", [[], [256], [256, SPECIAL, SPECIAL]], ids=["", "word", "special"])
def test_the_end_of_a_prompt_says_as_much_as_all_of_it(
    make: Any, prompt: str, inserted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, ids = make(), [*prompt.encode(), *inserted]
    for answer in ([256, 65], [0xFF, 256], [0x98, 0x80, 256], list("\n😀".encode())):
        for length in range(len(ids) - 5, len(ids) + 1):
            ours = streamed(tokenizer, ids[:length], answer)
            with monkeypatch.context() as patched:
                patched.setattr("ttpu_core.generation.detokenizer._CONTEXT", 10**6)
                assert ours == streamed(tokenizer, ids[:length], answer)


@KINDS
def test_special_tokens_at_the_end_of_a_prompt_hide_no_text_before_them(make: Any) -> None:
    assert streamed(make(), [256, *[SPECIAL] * 40], [256])[1] == " the"


def test_a_long_prompt_is_not_decoded() -> None:
    tokenizer, lengths = byte_level(), []
    decode = tokenizer.backend_tokenizer.decode

    class Counting:
        def decode(self, ids: list[int], **options: Any) -> str:
            lengths.append(len(ids))
            return str(decode(ids, **options))

    tokenizer.backend_tokenizer = type("Both", (Counting,), {"id_to_token": tokenizer.backend_tokenizer.id_to_token})()
    streamed(tokenizer, list("é 😀 text".encode() * 1000), [256, 65])
    assert max(lengths) < 40


def test_a_tokenizer_that_is_not_of_the_tokenizers_library_streams_too() -> None:
    class Slow:
        def decode(self, ids: list[int], **_: Any) -> str:
            return bytes(ids).decode(errors="replace")

    stream = TextStream(Slow(), b"caf", ["stop"])
    assert "".join(stream.push(token) for token in "é stop".encode()) == "é " and stream.stopped
