"""Reads the values of the options of `generate` that are no plain numbers of sampling: lengths, lists of tokens, beams,
outputs. Each reader takes the name and the caller's value, and returns the value of `GenerationOptions`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, Literal

from ttpu_core.errors import RequestError
from ttpu_core.generation.ranges import Range, short

EarlyStopping = bool | Literal["never"]

_NUMBERS: Mapping[str, Range] = {
    "min_new_tokens": Range("a whole number, 0 or more", 0, whole=True),
    "min_length": Range("a whole number, 0 or more", 0, whole=True),
    "num_return_sequences": Range("an integer of at least 1", 1, whole=True),
    "num_beams": Range("an integer of at least 1", 1, whole=True),
    "length_penalty": Range("a finite number", -math.inf, math.inf),
    "no_repeat_ngram_size": Range("a whole number, 0 or more (0: repetitions are allowed)", 0, whole=True),
    "typical_p": Range("a number above 0 and up to 1 (1: all tokens)", 0, 1, above=True),
    **dict.fromkeys(
        ("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"),
        Range("an integer of at least 1", 1, whole=True),
    ),
    "max_time": Range("a number of seconds above 0", 0, above=True),
}


def truth(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        RequestError: something else.
    """
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {short(value)}, but True or False is needed: correct it.")
    return value


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """One token id, or several in a list, tuple, set or array.

    Raises:
        RequestError: something else, or a negative id.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    ids = tuple(value) if isinstance(value, list | tuple | set) else (value,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral) or int(token) < 0:
            raise RequestError(f"{name} is {short(token)}, but an integer of at least 0 is needed: correct it.")
    return tuple(map(int, ids))


def token_lists(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """A list of non-empty lists of token ids.

    Raises:
        RequestError: something else.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple) or not all(isinstance(ids, list | tuple) and ids for ids in value):
        raise RequestError(f"{name} is {short(value)}, but a list of non-empty lists of token ids is needed: fix it.")
    return tuple(token_ids(name, ids) for ids in value)


def biases(name: str, value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    """transformers' `sequence_bias`: a dict from tuples of token ids to numbers, or a list of pairs of both, of which
    the last holds for a sequence that occurs twice.

    Raises:
        RequestError: something else.
    """
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(isinstance(one, list | tuple) and len(one) == 2 for one in pairs):
        raise RequestError(
            f"{name} is {short(value)}, but a dict from tuples of token ids to numbers, or a list of such pairs, is "
            "needed: correct it."
        )
    for _, bias in pairs:
        if isinstance(bias, bool) or not isinstance(bias, Real) or math.isnan(bias):
            raise RequestError(f"{name} adds {short(bias)} to a token, but a number is needed: correct it.")
    sequences = token_lists(name, [ids for ids, _ in pairs])
    return tuple(dict(zip(sequences, (float(bias) for _, bias in pairs), strict=True)).items())


def early_stopping(name: str, value: Any) -> EarlyStopping:
    """When beam search ends: True, False or "never", as in transformers.

    Raises:
        RequestError: something else.
    """
    if not isinstance(value, bool) and value != "never":
        raise RequestError(f"{name} is {short(value)}, but True, False or 'never' is needed: correct it.")
    return True if value is True else False if value is False else "never"


def _number(name: str, value: Any) -> int | float:
    allowed = _NUMBERS[name]
    if not allowed.holds(value) or math.isinf(value):
        raise RequestError(f"{name} is {short(value)}, but {allowed.allowed} is needed: correct it.")
    return int(value) if allowed.whole else float(value)


READERS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_NUMBERS, _number),
    **dict.fromkeys(
        (
            "do_sample", "ignore_eos", "return_dict_in_generate", "renormalize_logits", "output_scores",
            "output_logits", "output_hidden_states",
        ),
        truth,
    ),
    **dict.fromkeys(
        ("eos_token_id", "stop_token_ids", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id"), token_ids
    ),
    "bad_words_ids": token_lists,
    "sequence_bias": biases,
    "early_stopping": early_stopping,
}
"""Name of an option → the reader of its value."""
