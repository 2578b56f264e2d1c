"""Examples as tokens with weights, by a checkpoint's tokenizer. An example's fields tell its kind: token ids, a
conversation, a prompt with its completion, or plain text. The tokenizer is one of transformers, which this package does
not import."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ttpu_core.errors import DataError
from ttpu_train.data.chat import ChatEncoder, Encoded, common_prefix
from ttpu_train.data.settings import DataSettings
from ttpu_train.data.sources import Example, check_characters

TEXTS_AT_ONCE = 512  # a fast tokenizer divides a list of texts over the cores
VERSION = 1  # of what this module writes: another one does not read the tokens that are cached


@dataclass(frozen=True)
class Document:
    """One example.

    Attributes:
        tokens: int32 [tokens].
        weights: uint8 [tokens], 1 where a token is trained on.
        divisible: a part of it is worth training on without what comes before, as with plain text.
    """

    tokens: np.ndarray
    weights: np.ndarray
    divisible: bool


class Tokenization:
    """Turns examples into documents."""

    def __init__(self, tokenizer: Any, settings: DataSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._chat = ChatEncoder(tokenizer, settings)

    def key(self) -> str:
        """Words that change when the same examples would become other tokens."""
        settings = self._settings
        return json.dumps(
            [
                VERSION,
                tokenizer_key(self._tokenizer),
                settings.text_field,
                settings.append_eos,
                settings.assistant_only_loss,
                settings.completion_only_loss,
                settings.chat_template,
            ]
        )

    def documents(self, examples: Iterable[tuple[str, Example]]) -> Iterator[Document]:
        """The documents of examples, in order.

        Raises:
            DataError: an example of no known kind, or whose fields hold the wrong values.
        """
        for part in _batched(examples, TEXTS_AT_ONCE):
            texts = [
                (number, text) for number, (place, example) in enumerate(part) if (text := self._text(example, place))
            ]
            encoded = iter(self._encode([text for _, text in texts]) if texts else ())
            plain = {number for number, _ in texts}
            for number, (place, example) in enumerate(part):
                yield _text_document(next(encoded)) if number in plain else self._other(example, place)

    def _text(self, example: Example, place: str) -> str | None:
        """The plain text of an example, or None if it is of another kind."""
        field = self._settings.text_field
        if not hasattr(example, "get"):
            raise DataError(
                f"{place} was given as training data, but it is a {type(example).__name__}: each example must be a "
                f"mapping with the field {field!r}, 'messages', 'prompt' and 'completion', or 'input_ids'."
            )
        if kind(example, field) != "text":
            return None
        text = example[field]
        if not isinstance(text, str) or not text:
            raise DataError(
                f"{place} was given as plain text, but its field {field!r} holds {type(text).__name__} "
                f"{str(text)[:40]!r}: it must be a string that is not empty; correct it or leave it out."
            )
        check_characters(text, place)
        return text

    def _encode(self, texts: list[str]) -> list[list[int]]:
        tokenizer = self._need_tokenizer()
        found: list[list[int]] = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        return [self._ended(ids) for ids in found]

    def _ended(self, ids: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return [*ids, end] if self._settings.append_eos and end is not None and ids[-1:] != [end] else ids

    def _other(self, example: Example, place: str) -> Document:
        found = kind(example, self._settings.text_field)
        if found == "input_ids":
            return _ids_document(example, place)
        self._need_tokenizer()
        if found == "messages":
            return Document(*self._chat.conversation(example, place), divisible=False)
        if found == "prompt":
            return Document(*self._completion(example, place), divisible=False)
        raise DataError(
            f"{place} was given as training data, but it has the fields {', '.join(map(repr, example)) or '(none)'}: "
            f"an example needs {self._settings.text_field!r}, or 'messages', or 'prompt' and 'completion', or "
            "'input_ids'; add one, or name the field of the text by dataset_text_field."
        )

    def _completion(self, example: Example, place: str) -> Encoded:
        prompt, completion = example["prompt"], example.get("completion")
        if completion is None:
            raise DataError(
                f"{place} was given with the field 'prompt', but it has no 'completion': write both, as strings or as "
                "lists of messages."
            )
        if isinstance(prompt, str) != isinstance(completion, str):
            raise DataError(
                f"{place} was given with a prompt that is a {type(prompt).__name__} and a completion that is a "
                f"{type(completion).__name__}: write both as strings, or both as lists of messages."
            )
        if not isinstance(prompt, str):
            return self._chat.completion(example, place)
        if not completion:
            raise DataError(
                f"{place} was given with the field 'completion', but it is empty: write what the model shall say, or "
                "leave the example out."
            )
        check_characters(prompt + completion, place)
        # The completion is all that comes after the tokens of the prompt alone. A token that both share at the boundary
        # is the completion's.
        given = self._tokenizer([prompt, prompt + completion], return_attention_mask=False, verbose=False)["input_ids"]
        ids = self._ended(given[1])
        weights = np.ones(len(ids), np.uint8)
        if self._settings.completion_only_loss:
            alone = self._without_end(given[0])
            weights[: common_prefix(alone, ids)] = 0
        return np.asarray(ids, np.int32), weights

    def _without_end(self, ids: list[int]) -> list[int]:
        """Some tokenizers end each text by themselves; a prompt goes on."""
        return ids[:-1] if ids and ids[-1] == self._tokenizer.eos_token_id else ids

    def _need_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise DataError(
                "training data with text was given, but there is no tokenizer: pass the checkpoint's, or examples with "
                "'input_ids'."
            )
        return self._tokenizer


def kind(example: Example, text_field: str) -> str | None:
    """The field that tells what an example is, or None. A text field of the user's own comes before all others."""
    if text_field != "text" and text_field in example:
        return "text"
    for field in ("input_ids", "messages", "prompt"):
        if example.get(field) is not None:
            return field
    return "text" if text_field in example else None


def tokenizer_key(tokenizer: Any) -> str:
    """A hash of all that decides the tokens that a tokenizer gives."""
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = (
        backend.to_str()
        if backend is not None and hasattr(backend, "to_str")
        else json.dumps(sorted(tokenizer.get_vocab().items()))
    )
    parts = [type(tokenizer).__name__, words, tokenizer.eos_token_id, tokenizer.bos_token_id]
    parts += [getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token", "chat_template")]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _text_document(ids: list[int]) -> Document:
    return Document(np.asarray(ids, np.int32), np.ones(len(ids), np.uint8), divisible=True)


def _ids_document(example: Example, place: str) -> Document:
    """Tokens as the user made them. A label of -100 is a token without weight; attention mask 0 is padding."""
    ids = _integers(example, "input_ids", place)
    labels = _integers(example, "labels", place) if example.get("labels") is not None else None
    mask = _integers(example, "attention_mask", place) if example.get("attention_mask") is not None else None
    for name, values in (("labels", labels), ("attention_mask", mask)):
        if values is not None and len(values) != len(ids):
            raise DataError(
                f"{place} was given with {len(ids)} input_ids, but with {len(values)} {name}: write one for each token."
            )
    if not len(ids) or ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise DataError(
            f"{place} was given with the field 'input_ids', but it is empty or has a number below 0: write a "
            "tokenizer's token ids."
        )
    if labels is not None and not np.all((labels == ids) | (labels == -100)):
        at = int(np.argmax((labels != ids) & (labels != -100)))
        raise DataError(
            f"{place} was given with the label {labels[at]} for token {at}, which is {ids[at]}: a label is the token "
            "itself or -100 (no loss); labels must not be shifted."
        )
    keep = np.ones(len(ids), bool) if mask is None else mask != 0
    weights = np.ones(len(ids), np.uint8) if labels is None else (labels != -100).astype(np.uint8)
    return Document(ids[keep].astype(np.int32), weights[keep], divisible=labels is None)


def _integers(example: Example, field: str, place: str) -> np.ndarray:
    try:
        found = np.asarray(example[field])
    except ValueError:  # lists of several lengths
        found = np.zeros((0, 0))
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iub"):
        raise DataError(
            f"{place} was given with the field {field!r}, but it is not a flat list of whole numbers: write one number "
            "for each token."
        )
    return found.astype(np.int64)


def _batched(items: Iterable[tuple[str, Example]], size: int) -> Iterator[tuple[tuple[str, Example], ...]]:
    rest = iter(items)
    while part := tuple(islice(rest, size)):
        yield part
