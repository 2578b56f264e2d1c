"""Reads prompts in every form that callers pass: text, chat messages, token ids, padded arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_core.generation.chat_template import chat_tokens
from ttpu_core.generation.prompt import Prompt

Form = Literal["text", "ids", "array"]


@dataclass(frozen=True)
class Prompts:
    """`prompts` without padding; `form` and `single` say what the caller passed, and so gets back.
    Where that was an array, `array` [batch, seq] is it with its padding, and `mask` of that shape its real tokens."""

    prompts: tuple[Prompt, ...]
    form: Form
    single: bool
    array: np.ndarray | None = None
    mask: np.ndarray | None = None

    @classmethod
    def of(cls, ids: Iterable[Iterable[int]], form: Form, *, single: bool) -> Prompts:
        """Make prompts of lists of ids."""
        return cls(tuple(Prompt(tuple(row)) for row in ids), form, single)

    @property
    def ids(self) -> list[list[int]]:
        """One list of ids per prompt."""
        return [list(prompt.token_ids) for prompt in self.prompts]


def read_prompts(
    inputs: Any, attention_mask: Any, tokenizer: Any, vocab_size: int, padding: int | None = None
) -> Prompts:
    """Tokenize or unpad `inputs`.

    `inputs` is a string, a list of strings, chat messages ({"role", "content"} dicts) or a list of such chats, a list
    of ids, a list of lists of ids, an array [seq] or [batch, seq] of any framework, or a tokenizer's mapping with
    `input_ids`. `attention_mask` [batch, seq] marks real tokens of ids of that shape, wherever the padding is.

    Args:
        inputs: the prompts.
        attention_mask: see above; None if all ids are real but `padding`.
        tokenizer: the checkpoint's, or None.
        vocab_size: of the model; ids are below it.
        padding: the id that is padding in an array without a mask, in lists it is a token; None if no id is.

    Raises:
        RequestError: an empty prompt, an id outside the vocabulary, a mask that does not fit, or a form that is none
            of these.
        MissingDependencyError: text for a checkpoint without a tokenizer.
    """
    if isinstance(inputs, Mapping) and "input_ids" in inputs:
        attention_mask = inputs.get("attention_mask") if attention_mask is None else attention_mask
        inputs = inputs["input_ids"]
    is_text = isinstance(inputs, str) or _is_chat(inputs) or _is_texts(inputs)
    if is_text and attention_mask is not None:
        raise RequestError(
            "attention_mask was given for text, whose tokens are all real: leave it out, or pass the tokenizer's ids."
        )
    if isinstance(inputs, str) or _is_chat(inputs):
        prompts = Prompts.of([_encode(inputs, tokenizer)], "text", single=True)
    elif is_text:
        prompts = Prompts.of([_encode(item, tokenizer) for item in inputs], "text", single=False)
    elif _is_rows(inputs):
        rows = [[_token(token) for token in (row if isinstance(row, list | tuple) else row.tolist())] for row in inputs]
        masked = attention_mask is not None
        prompts = _from_array(rectangle(rows), attention_mask) if masked else Prompts.of(rows, "ids", single=False)
    else:
        prompts = _from_array(inputs, attention_mask, None if isinstance(inputs, list | tuple) else padding)
    for index, ids in enumerate(prompts.ids):
        if not ids:
            raise RequestError(f"prompt {index} is empty, but generation continues at least one token: pass some text.")
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise RequestError(
                f"prompt {index} has the token id {min(ids) if min(ids) < 0 else max(ids)}, but ids of this model "
                f"run from 0 to {vocab_size - 1}: use the checkpoint's own tokenizer."
            )
    if not prompts.prompts:
        raise RequestError("generate() was given no prompts: pass at least one.")
    return prompts


def left_pad(ids: Sequence[Sequence[int]], width: int, fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Left-pad prompts to int32 tokens [batch, width], and return them with the start of each prompt [batch]."""
    tokens = np.full((len(ids), width), fill, np.int32)
    for row, prompt in enumerate(ids):
        tokens[row, width - len(prompt) :] = prompt
    return tokens, np.array([width - len(prompt) for prompt in ids], np.int32)


def rectangle(rows: list[list[int]]) -> np.ndarray:
    """Rows of one length as an array [batch, seq].

    Raises:
        RequestError: rows that differ in length.
    """
    if len({len(row) for row in rows}) > 1:
        raise RequestError("the rows of input_ids differ in length: pad them and pass attention_mask.")
    return np.array(rows, np.int64)


def _encode(item: Any, tokenizer: Any) -> list[int]:
    if not isinstance(item, str):
        return chat_tokens(tokenizer, item)
    if tokenizer is None:
        raise MissingDependencyError(
            "the prompt is text, but the checkpoint has no tokenizer files: copy tokenizer.json into it, or pass "
            "token ids."
        )
    return [int(token) for token in tokenizer(item, verbose=False)["input_ids"]]


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(turn, Mapping) and "role" in turn and "content" in turn for turn in value)
    )


def _is_texts(value: Any) -> bool:
    """A list of strings and chats."""
    return isinstance(value, Sequence) and bool(value) and all(isinstance(i, str) or _is_chat(i) for i in value)


def _is_rows(value: Any) -> bool:
    """A list of lists or vectors of ids: each is a prompt of its own length."""
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_row, value))


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple) or (hasattr(value, "tolist") and getattr(value, "ndim", 0) == 1)


def _token(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise RequestError(f"a prompt holds {value!r} where a token id is needed: pass integers.")
    return int(value)


def _from_array(inputs: Any, attention_mask: Any, padding: int | None = None) -> Prompts:
    try:
        array = np.asarray(inputs)
    except (TypeError, ValueError):
        array = np.empty(0, object)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or array.size == 0:
        raise RequestError(
            f"generate() was given {type(inputs).__name__} {str(inputs)[:60]!r}, but it takes text, chat messages, or "
            "integer ids of shape [seq] or [batch, seq]: pass one of those."
        )
    single = array.ndim == 1
    array = np.atleast_2d(array)
    if attention_mask is not None:
        mask = _mask(attention_mask)
    else:
        mask = np.ones(array.shape, np.bool_) if padding is None else array != padding
    if mask.shape != array.shape:
        raise RequestError(f"attention_mask has shape {mask.shape}, but input_ids has {array.shape}: make them equal.")
    ids = [row[keep].astype(int).tolist() for row, keep in zip(array, mask, strict=True)]
    return replace(Prompts.of(ids, "array", single=single), array=array, mask=mask)


def _mask(value: Any) -> np.ndarray:
    try:
        mask = np.atleast_2d(np.asarray(value))
        mask = mask.astype(np.float32) if mask.dtype.kind == "V" else mask  # bfloat16, as JAX has it
    except (TypeError, ValueError):  # rows of different lengths
        mask = np.empty(0, object)
    if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        raise RequestError(
            f"attention_mask is {type(value).__name__} {str(value)[:60]!r}, but an array of the shape of input_ids, 1 "
            "at real tokens and 0 at padding, is needed: pass that."
        )
    return mask.astype(np.bool_)
