"""Reads what several schemes have in a `quantization_config`: lists of names, sizes of groups and blocks, choices."""

from __future__ import annotations

import re

from ttpu_core.config import ModelConfig
from ttpu_core.config.kinds import instance_of, integer, positive_integer

BLOCK = "a list of two positive integers"


def block(value: object) -> tuple[int, int]:
    """Outputs and inputs that share a scale, from a list of two. A converter for `ModelConfig.converted`."""
    rows, columns = map(positive_integer, instance_of(tuple)(value))
    return rows, columns


def names_of(section: ModelConfig, key: str) -> tuple[str, ...]:
    """The names in a list; none where it is absent.

    Raises:
        ConfigError: the value is not a list of strings.
    """
    return section.converted(key, "a list of strings", _strings, ())


def patterns_of(section: ModelConfig, key: str) -> tuple[str, ...]:
    """The names in a list, of which those that begin with "re:" are regular expressions; none where it is absent.

    Raises:
        ConfigError: the value is not a list of strings, or a regular expression is not valid.
    """
    return section.converted(key, "a list of names, or of valid regular expressions after 're:'", _patterns, ())


def group_size_of_config(section: ModelConfig, key: str) -> int | None:
    """Number of inputs that share a scale; None where it is absent or -1, which stands for all inputs.

    Raises:
        ConfigError: the value is not such a number.
    """
    return section.converted(key, "a positive integer or -1", _group_size, None)


def choice_of(section: ModelConfig, key: str, choices: tuple[str, ...], default: str | None) -> str | None:
    """One of several words, in small letters.

    Raises:
        ConfigError: the value is none of them.
    """

    def one(value: object) -> str:
        return choices[choices.index(instance_of(str)(value).lower())]

    return section.converted(key, f"one of {', '.join(choices)}", one, default)


def first_present(section: ModelConfig, *keys: str) -> str:
    """The first of several names of a key that the section has; the first name if it has none."""
    return next((key for key in keys if key in section), keys[0])


def _strings(value: object) -> tuple[str, ...]:
    return tuple(map(instance_of(str), instance_of(tuple)(value)))


def _patterns(value: object) -> tuple[str, ...]:
    patterns = _strings(value)
    try:
        for pattern in patterns:
            if pattern.startswith("re:"):
                re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise ValueError(str(error)) from error
    return patterns


def _group_size(value: object) -> int | None:
    return None if integer(value) == -1 else positive_integer(value)
