"""Workloads of benchmarks: random prompts or prompts from a file, and their arrival times. Equal seeds give equal
workloads."""

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
    length, if known in advance; `max_tokens` is the maximum output length."""

    content: str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
    max_tokens: int
    tokens: int | None = None

    @property
    def is_chat(self) -> bool:
        """Whether the content is a conversation."""
        return isinstance(self.content, tuple) and bool(self.content) and isinstance(self.content[0], Mapping)

    @property
    def is_ids(self) -> bool:
        """Whether the content is token ids."""
        return isinstance(self.content, tuple) and not self.is_chat


@dataclass(frozen=True)
class Lengths:
    """A uniform distribution of token counts from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, option: str) -> Lengths:
        """Parse `128` or `16-256`.

        Raises:
            RequestError: `text` has another form.
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
        """Draw `number` token counts uniformly from [low, high]."""
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
    """Make random prompts with a common prefix.

    Args:
        number: number of prompts.
        inputs: distribution of prompt lengths, without the prefix.
        outputs: distribution of maximum output lengths.
        seed: seed of all draws.
        prefix: length of the common prefix.
        vocab_size: make prompts of token ids below it.
        tokenizer: make texts with the given number of its tokens. Without `vocab_size` and `tokenizer`, lengths count
            common words.
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
    """Return random token ids of the vocabulary, [tokens], without special tokens and partial characters."""
    special = set(tokenizer.all_special_ids)
    some = [token for token in random.permutation(len(tokenizer))[:MOST_TOKENS].tolist() if token not in special]
    return np.array([token for token in some if "\ufffd" not in tokenizer.decode([token])] or some)


def _text_of(
    tokenizer: WorkloadTokenizer, allowed: np.ndarray, random: np.random.Generator, length: int
) -> tuple[str, int]:
    """Return a text of about `length` tokens and its exact number of tokens (decoding and encoding may change the
    count)."""
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
    """Read prompts from a file.

    A `.txt` file has one prompt per line. A `.jsonl` file has one object per line and a `.json` file a list of objects,
    each with `prompt` (a text or token ids), `messages`, or ShareGPT's `conversations`. Of a ShareGPT conversation the
    first turn is the prompt, and the length of the second turn, if a tokenizer is given, is the output length. An
    object's `max_tokens` overrides the output length.

    Args:
        path: the file.
        number: number of prompts to draw, repeating prompts only if the file has fewer; None returns all in order.
        outputs: distribution of output lengths for prompts that specify none.
        seed: seed of all draws.
        tokenizer: counts the tokens of texts; None leaves them unknown.

    Raises:
        RequestError: the file cannot be read, holds no prompt, or has a malformed entry.
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
    """Yield each row with a description of its place."""
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
    """Return the arrival time of each request, in seconds from the start.

    Args:
        rate: average requests per second; infinity sends all at once.
        burstiness: shape of the gamma distribution of the gaps. 1 is a Poisson process, lower values are burstier,
            higher values more regular.
    """
    if math.isinf(rate):
        return [0.0] * number
    random = np.random.default_rng([seed, 1])  # other draws than those of the prompts
    gaps = random.gamma(burstiness, 1 / (rate * burstiness), number)
    gaps[:1] = 0.0
    return [float(moment) for moment in np.cumsum(gaps)]
