"""Finds the tokens that end sequences and the token of padding: the caller's, the checkpoint's or the tokenizer's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ttpu_core.config import ModelConfig
from ttpu_core.generation.option_values import token_ids
from ttpu_core.generation.options import GenerationOptions


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of one call.

    Attributes:
        stop_ids: the tokens that end a sequence.
        pad: the token that fills the end of sequences that are shorter than others.
        padding_of_prompts: the token that is padding in an array of ids without a mask; None if no token is.
    """

    stop_ids: frozenset[int]
    pad: int
    padding_of_prompts: int | None

    @classmethod
    def of(
        cls, options: GenerationOptions, config: ModelConfig, generation_config: Mapping[str, Any], tokenizer: Any
    ) -> SpecialTokens:
        """Find the tokens of a call. The options, which have those of generation_config.json, come before config.json,
        and the tokenizer's own come last. Without a pad token the first end-of-sequence token is it, else 0.

        The padding of prompts is transformers' (`_prepare_attention_mask_for_generation`): a pad token that ends
        sequences is none, the tokenizer's own does not count, and config.json counts where there is no
        generation_config.json.

        Raises:
            RequestError: a file names something else than token ids.
        """
        given = None if options.pad_token_id is None else (options.pad_token_id,)
        ends = _named("eos_token_id", options.eos_token_id, config, tokenizer)
        pads = _named("pad_token_id", given, config, tokenizer)
        read = None if generation_config else config
        theirs, padding = _named("eos_token_id", options.eos_token_id, read), _named("pad_token_id", given, read)
        known = padding[0] if padding and padding[0] not in theirs else None
        stops = frozenset((*(() if options.ignore_eos else ends), *options.stop_token_ids))
        return cls(stops, (*pads, *ends, 0)[0], known)


def _named(
    name: str, given: tuple[int, ...] | None, config: ModelConfig | None, tokenizer: Any = None
) -> tuple[int, ...]:
    """The tokens that the options have, or else the config, or else the tokenizer."""
    if given is not None:
        return given
    found = None if config is None else config.get(name, getattr(tokenizer, name, None))
    return () if found in (None, -1) else token_ids(f"{name} of config.json", found)  # -1 in old configs is none
