"""The calls of the stock model that are traced: logits of whole texts, the prefill of a static cache, the decoding of
one token, and the model left alone with tokens, against which the others are checked. Prompts are padded on the
left."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from transformers.cache_utils import (
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ttpu_any.aten.table import NEEDS_PLUGIN
from ttpu_any.held import put_together, taken_apart
from ttpu_any.trace import Shape, Traced, trace
from ttpu_core.errors import UnsupportedError

PrefillMask = Literal["prompt", "cache", "none"]


@dataclass(frozen=True)
class Manner:
    """How the stock model wants its masks; models differ in it.

    Attributes:
        mask: of a prefill as wide as the prompt, or as the cache, or none.
        decode_mask: whether decoding has a mask as wide as the cache.
        rows: the fewest rows that a batch may have. Some models ignore the mask of a single row.
        cache: whether decoding keeps the model's cache; without it each token reads the whole text again.
        offset: the position of a text's first token, which is not 0 where the table of positions has rows for padding.
    """

    mask: PrefillMask = "prompt"
    decode_mask: bool = True
    rows: int = 1
    cache: bool = True
    offset: int = 0

    @property
    def pads(self) -> bool:
        """Whether prompts may be padded."""
        return self.mask != "none"


MANNERS = (
    Manner(),
    Manner(rows=2),
    Manner(decode_mask=False, rows=2),
    Manner("cache"),
    Manner("none", decode_mask=False),
    Manner(cache=False),
    Manner(rows=2, cache=False),
    Manner("none", cache=False),
)
"""In the order in which they are tried."""


def manners_of(model: Any) -> Sequence[Manner]:
    """The manners that are tried for a stock model, in order: positions from the offset of its table first."""
    offset = position_offset(model)
    return [replace(manner, offset=first) for first in dict.fromkeys((offset, 0)) for manner in MANNERS]


def position_offset(model: Any) -> int:
    """The position of a text's first token: the row after that for padding in a table of positions, as in RoBERTa; 0
    where the table has no such row, or where there is no table."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and name.endswith("position_embeddings"):
            return 0 if module.padding_idx is None else int(module.padding_idx) + 1
    return 0


@dataclass(frozen=True)
class Prefill:
    """A traced prefill (tokens [batch, width], start [batch]) → (logits [batch, vocab], the cache's tensors).

    Attributes:
        program: what runs it.
        skeleton: the cache without its tensors.
    """

    program: Traced
    skeleton: Any

    @property
    def cache(self) -> tuple[Shape, ...]:
        """Shapes of the cache's tensors."""
        return self.program.results[1:]


class Steps:
    """Traces the calls of one stock model.

    Args:
        model: the stock model; its tensors may be on the meta device.
        manner: how it wants its masks.
    """

    def __init__(self, model: Any, manner: Manner = MANNERS[0]) -> None:
        self.model, self.manner = model, manner

    @cached_property
    def accepted(self) -> frozenset[str]:
        """The names that the model's forward takes."""
        return frozenset(inspect.signature(self.model.forward).parameters)

    @cached_property
    def cache_name(self) -> str:
        """The model's name for its cache.

        Raises:
            UnsupportedError: it has none.
        """
        for name in ("past_key_values", "cache_params"):
            if name in self.accepted:
                return name
        raise UnsupportedError(
            f"{type(self.model).__name__} keeps no cache that transformers knows, but generating needs "
            f"one{NEEDS_PLUGIN}"
        )

    def alone(self, batch: int, width: int) -> Traced:
        """Trace tokens [batch, width] → logits [batch, vocab] after them, with nothing else given: no mask, positions
        or cache, so that all of these are the model's own."""

        def call(forward: Any, given: Any) -> Any:
            keywords = {"use_cache": False} if "use_cache" in self.accepted else {}
            return [self._last(forward(input_ids=given[0], **keywords))]

        return trace(self.model, call, [Shape((batch, width))])

    def logits(self, batch: int, width: int) -> Traced:
        """Trace (tokens [batch, width], positions [batch, width], negative for padding) → logits."""

        def call(forward: Any, given: Any) -> Any:
            tokens, positions = given
            mask = (positions >= 0).long()
            keywords = self._placed(positions.clamp_min(0))
            if self.manner.pads:
                keywords["attention_mask"] = mask
            if "use_cache" in self.accepted:
                keywords["use_cache"] = False
            return [forward(input_ids=tokens, **keywords).logits.float()]

        return trace(self.model, call, [Shape((batch, width)), Shape((batch, width))])

    def prefill(self, batch: int, width: int, slots: int) -> Prefill:
        """Trace the prefill of prompts that fill `width` slots of a cache of `slots`.

        Raises:
            UnsupportedError: the model cannot be traced with a static cache.
        """
        if not self.manner.cache:
            return self._whole_prefill(batch, width, slots)
        held: list[Any] = []

        def call(forward: Any, given: Any) -> Any:
            tokens, start = given
            cache = self._cache(slots)
            places = torch.arange(slots if self.manner.mask == "cache" else width)[None]
            keywords = self._placed((torch.arange(width)[None] - start[:, None]).clamp_min(0))
            if self.manner.pads:
                keywords["attention_mask"] = (places >= start[:, None]).long()
            logits = self._last(forward(input_ids=tokens, **{self.cache_name: cache}, **keywords, **self._kept()))
            tensors, skeleton = taken_apart(cache)
            held.append(skeleton)
            return [logits, *tensors]

        program = trace(self.model, call, [Shape((batch, width)), Shape((batch,))])
        return Prefill(program, held[-1])

    def decode(self, prefill: Prefill, batch: int, slots: int) -> Traced:
        """Trace (token [batch, 1], start [batch], length [], the cache's tensors) → (logits, the cache's tensors).
        `length` is the number of slots in use.

        Raises:
            UnsupportedError: the cache has changed in more than its tensors, so that one program could not decode two
                tokens.
        """

        if not self.manner.cache:
            return self._whole_decode(prefill, batch, slots)

        def call(forward: Any, given: Any) -> Any:
            token, start, length, *tensors = given
            cache = put_together(prefill.skeleton, [tensor.clone() for tensor in tensors])
            keywords = self._placed((length - start)[:, None])
            if self.manner.decode_mask:
                keywords["attention_mask"] = (torch.arange(slots)[None] >= start[:, None]).long()
            logits = self._last(forward(input_ids=token, **{self.cache_name: cache}, **keywords, **self._kept()))
            after, skeleton = taken_apart(cache)
            if skeleton != prefill.skeleton:
                raise UnsupportedError(
                    f"{type(self.model).__name__} keeps more than tensors between tokens, so that each would need a "
                    f"program of its own{NEEDS_PLUGIN}"
                )
            return [logits, *after]

        traced = trace(self.model, call, [Shape((batch, 1)), Shape((batch,)), Shape(()), *prefill.cache])
        if traced.results[1:] != prefill.cache:
            raise UnsupportedError(
                f"the cache of {type(self.model).__name__} grows with each token, so that each would need a program of "
                f"its own{NEEDS_PLUGIN}"
            )
        return traced

    def _whole_prefill(self, batch: int, width: int, slots: int) -> Prefill:
        """As `prefill`, where the cache is the text itself: tokens [batch, slots], zeros behind the prompt."""

        def call(forward: Any, given: Any) -> Any:
            tokens, start = given
            text = torch.cat([tokens, torch.zeros(batch, slots - width, dtype=tokens.dtype)], 1)
            return [self._at(forward, text, start, torch.full((1,), width - 1)), text]

        return Prefill(trace(self.model, call, [Shape((batch, width)), Shape((batch,))]), None)

    def _whole_decode(self, prefill: Prefill, batch: int, slots: int) -> Traced:
        """As `decode`, reading the whole text again."""

        def call(forward: Any, given: Any) -> Any:
            token, start, length, text = given
            text = torch.where(torch.arange(slots)[None] == length, token, text)
            return [self._at(forward, text, start, length[None]), text]

        return trace(self.model, call, [Shape((batch, 1)), Shape((batch,)), Shape(()), *prefill.cache])

    def _at(self, forward: Any, text: torch.Tensor, start: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """The logits [batch, vocab] at a place [1] of texts [batch, slots]; what follows the place does not matter."""
        places = torch.arange(text.shape[1])[None]
        keywords = self._placed((places - start[:, None]).clamp_min(0))
        if self.manner.pads:
            keywords["attention_mask"] = (places >= start[:, None]).long()
        if "use_cache" in self.accepted:
            keywords["use_cache"] = False
        logits: torch.Tensor = forward(input_ids=text, **keywords).logits
        return logits.index_select(1, place)[:, 0].float()

    def _cache(self, slots: int) -> StaticCache:
        """An empty cache; one of a window's length would count tokens in Python, so the mask alone makes the window."""
        cache = StaticCache(config=self.model.config, max_cache_len=slots)
        for place, layer in enumerate(cache.layers):
            if type(layer) is StaticSlidingWindowLayer:
                cache.layers[place] = StaticLayer(slots)
            elif type(layer) is LinearAttentionAndStaticSlidingWindowAttentionLayer:
                cache.layers[place] = LinearAttentionAndStaticFullAttentionLayer(
                    max_cache_len=slots, number_of_states=layer.number_of_states
                )
        return cache

    def _placed(self, positions: torch.Tensor) -> dict[str, Any]:
        return {"position_ids": positions + self.manner.offset} if "position_ids" in self.accepted else {}

    def _kept(self) -> dict[str, Any]:
        return {"use_cache": True, **({"logits_to_keep": 1} if "logits_to_keep" in self.accepted else {})}

    @staticmethod
    def _last(output: Any) -> torch.Tensor:
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits
