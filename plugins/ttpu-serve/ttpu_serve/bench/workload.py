"""What a benchmark asks for, and when. In: lengths, or a file of prompts, and a rate; out: prompts and the moments at
which they are sent, the same for the same seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_serve.bench.tokenizer import WorkloadTokenizer

WORDS = (
    "time", "people", "way", "water", "words", "day", "part", "sound", "work", "place", "year", "back", "thing", "name",
    "sentence", "man", "line", "boy", "farm", "end", "men", "land", "home", "hand", "picture", "air", "play", "animal",
    "house", "page", "letter", "mother", "answer", "study", "school", "father", "tree", "sun", "food", "city", "eyes",
)  # fmt: skip
MOST_TOKENS = 4096
"""Different tokens of random texts: to look at a whole vocabulary would take seconds."""
MOST_TRIES = 8
"""How often a random text is cut or grown until it has as many tokens as asked for."""


@dataclass(frozen=True)
class Prompt:
    """One request. `content` is a text, token ids, or a conversation of {"role", "content"} messages; `tokens` is its
    length where that is known before it is sent; `max_tokens` is the most to answer."""

    content: str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
    max_tokens: int
    tokens: int | None = None

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return isinstance(self.content, tuple) and bool(self.content) and isinstance(self.content[0], Mapping)

    @property
    def is_ids(self) -> bool:
        """Whether it is token ids."""
        return isinstance(self.content, tuple) and not self.is_chat


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens, drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, option: str) -> Lengths:
        """`128`, or `16-256`.

        Raises:
            RequestError: anything else.
        """
        first, dash, last = text.strip().partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            low = high = 0
        if not 1 <= low <= high:
            raise RequestError(f"{option} {text!r} was given, but tokens are needed as in 128 or 16-256: correct it.")
        return cls(low, high)

    def draw(self, random: np.random.Generator, number: int) -> list[int]:
        """`number` of them."""
        return [int(length) for length in random.integers(self.low, self.high + 1, number)]


def random_prompts(
    number: int,
    inputs: Lengths,
    outputs: Lengths,
    *,
    seed: int = 0,
    prefix: int = 0,
    vocab_size: int | None = None,
    tokenizer: WorkloadTokenizer | None = None,
) -> list[Prompt]:
    """Prompts of random lengths, after `prefix` tokens that all have in common.

    With `vocab_size` they are token ids below it; with a tokenizer, texts of so many of its tokens; with
    neither, texts of so many common words, whose number of tokens only the server can tell.
    """
    random = np.random.default_rng(seed)
    lengths, output_lengths = inputs.draw(random, number), outputs.draw(random, number)
    if vocab_size is not None:
        common = random.integers(0, vocab_size, prefix).tolist()
        rows = [tuple(common + random.integers(0, vocab_size, length).tolist()) for length in lengths]
        return [Prompt(row, output_tokens, len(row)) for row, output_tokens in zip(rows, output_lengths, strict=True)]
    if tokenizer is not None:
        allowed = _readable(tokenizer, random)
        start = _text_of(tokenizer, allowed, random, prefix)[0] if prefix else ""
        prompts = []
        for length, output_tokens in zip(lengths, output_lengths, strict=True):
            text, tokens = _text_of(tokenizer, allowed, random, length)
            tokens = len(tokenizer.encode(start + text, add_special_tokens=False)) if prefix else tokens
            prompts.append(Prompt(start + text, output_tokens, tokens))
        return prompts
    start = "".join(f"{word} " for word in random.choice(WORDS, prefix))
    return [
        Prompt(start + " ".join(random.choice(WORDS, length)), output_tokens)
        for length, output_tokens in zip(lengths, output_lengths, strict=True)
    ]


def _readable(tokenizer: WorkloadTokenizer, random: np.random.Generator) -> np.ndarray:
    """Some tokens of the vocabulary: no special ones, and none that is half a character."""
    special = set(tokenizer.all_special_ids)
    some = [token for token in random.permutation(len(tokenizer))[:MOST_TOKENS].tolist() if token not in special]
    return np.array([token for token in some if "\ufffd" not in tokenizer.decode([token])] or some)


def _text_of(
    tokenizer: WorkloadTokenizer, allowed: np.ndarray, random: np.random.Generator, length: int
) -> tuple[str, int]:
    """A text that has `length` tokens, or nearly (not every sequence of tokens is what its text is encoded to)."""
    ids = random.choice(allowed, length).tolist()
    text = tokenizer.decode(ids)
    for _ in range(MOST_TRIES):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == length:
            break
        missing = length - len(ids)
        ids = ids[:length] + random.choice(allowed, max(missing, 0)).tolist()
        text = tokenizer.decode(ids)
    return text, len(tokenizer.encode(text, add_special_tokens=False))


def read_dataset(
    path: str | Path, number: int | None, outputs: Lengths, *, seed: int = 0, tokenizer: WorkloadTokenizer | None = None
) -> list[Prompt]:
    """Prompts of a file, `number` of them drawn without repetition as long as they last (None: all, in their order).

    A `.txt` file has a prompt in each line. `.jsonl` has an object in each line, `.json` a list of them: with `prompt`
    (a text or token ids), `messages`, or ShareGPT's `conversations`, of which the first turn is asked and the second,
    if a tokenizer is there to count it, says how long the answer is. `max_tokens` in an object says it too; else it is
    drawn from `outputs`.

    Raises:
        RequestError: the file cannot be read, or holds no prompt, or something else than prompts.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the dataset {str(path)!r} was asked for, but it cannot be read ({error}): name a text, JSONL "
            "or JSON file."
        ) from error
    random = np.random.default_rng(seed)
    prompts = [_prompt(path, place, value, outputs, random, tokenizer) for place, value in _rows(path, file, text)]
    if not prompts:
        raise RequestError(
            f"the dataset {str(path)!r} was asked for, but it holds no prompt: fill it, or name another."
        )
    if number is None:
        return prompts
    chosen: list[Prompt] = []
    while len(chosen) < number:
        order = random.permutation(len(prompts))[: number - len(chosen)]
        chosen += [prompts[index] for index in order]
    return chosen


def _rows(path: str | Path, file: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Each row with where it stands."""
    try:
        if file.suffix == ".json":
            rows = json.loads(text)
            if not isinstance(rows, list):
                raise RequestError(f"the dataset {str(path)!r} holds a {type(rows).__name__}, but a list is needed.")
            yield from ((f"entry {index}", row) for index, row in enumerate(rows))
            return
        for index, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"line {index}", json.loads(line) if file.suffix == ".jsonl" else line.rstrip("\r")
    except json.JSONDecodeError as error:
        raise RequestError(
            f"the dataset {str(path)!r} was asked for, but it is not valid {file.suffix[1:].upper()} "
            f"({error}): correct it."
        ) from error


def _prompt(
    path: str | Path,
    place: str,
    row: Any,
    outputs: Lengths,
    random: np.random.Generator,
    tokenizer: WorkloadTokenizer | None,
) -> Prompt:
    output_tokens = outputs.draw(random, 1)[0]
    if isinstance(row, str) and row:
        return Prompt(row, output_tokens, _tokens(tokenizer, row))
    if isinstance(row, Mapping):
        names = ("max_tokens", "output_tokens", "output_len")
        asked = next((row[name] for name in names if name in row), output_tokens)
        if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 1:
            prompt, messages, turns = row.get("prompt"), row.get("messages"), row.get("conversations")
            if isinstance(prompt, str) and prompt:
                return Prompt(prompt, asked, _tokens(tokenizer, prompt))
            if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
                return Prompt(tuple(prompt), asked, len(prompt))
            if isinstance(messages, list) and messages and all(isinstance(one, Mapping) for one in messages):
                return Prompt(tuple(messages), asked)
            texts = [turn.get("value") for turn in turns or () if isinstance(turn, Mapping)]
            if texts and isinstance(texts[0], str) and texts[0]:
                if tokenizer is not None and asked is output_tokens and len(texts) > 1 and isinstance(texts[1], str):
                    asked = _tokens(tokenizer, texts[1]) or asked
                return Prompt(texts[0], asked, _tokens(tokenizer, texts[0]))
    raise RequestError(
        f"{place} of the dataset {str(path)!r} is {json.dumps(row)[:80]}, but a text is needed, or an object with "
        "prompt, messages or conversations, and max_tokens of 1 or more if any: correct it."
    )


def _tokens(tokenizer: WorkloadTokenizer | None, text: str) -> int | None:
    return None if tokenizer is None else len(tokenizer.encode(text))


def arrivals(number: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> Sequence[float]:
    """When each request is sent, in seconds from the start.

    Args:
        rate: requests per second on average; infinite: all at once.
        burstiness: shape of the gamma distribution of the gaps. 1 is a Poisson process, less comes in bursts, more is
            steadier.
    """
    if math.isinf(rate):
        return [0.0] * number
    random = np.random.default_rng([seed, 1])  # other draws than those of the prompts
    gaps = random.gamma(burstiness, 1 / (rate * burstiness), number)
    gaps[:1] = 0.0
    return [float(moment) for moment in np.cumsum(gaps)]
