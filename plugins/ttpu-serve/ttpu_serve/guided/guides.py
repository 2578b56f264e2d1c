"""Guides that restrict an output to a schema, a regular expression, a choice or a grammar, by a bit mask of the allowed
next tokens.

A mask contains every token that keeps the text a prefix of a match, not only the tokens of the tokenizer's own
segmentation, so that it depends on the text alone. It contains the end-of-sequence tokens if the text is a match, and
only these if nothing can follow.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Literal, get_args

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_serve.api.outputs import ErrorKind
from ttpu_serve.execution.logit_rules import mask_of, mask_words
from ttpu_serve.guided.grammar import summary, written
from ttpu_serve.guided.isolated import IsolatedMatchers
from ttpu_serve.guided.matchers import InlineMatchers, Matcher, Matchers, Vocabulary
from ttpu_serve.guided.token_bytes import token_bytes

GuidePlace = Literal["inline", "isolated", "off"]
PLACES: tuple[GuidePlace, ...] = get_args(GuidePlace)
"""Where grammars are compiled and masks computed: in this process, in others that survive any grammar, or nowhere."""

CACHED_GRAMMARS = 256
"""Compiled grammars that are kept, the least recently used dropped first; a large schema's takes a few MB."""


class GuideFactory:
    """Compiles guides for one tokenizer and model. All its methods are thread-safe."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        rows: int,
        stop_ids: Collection[int] = (),
        place: GuidePlace = "inline",
    ) -> None:
        """
        Args:
            tokenizer: the model's transformers tokenizer, or None.
            vocab_size: number of tokens of the model.
            rows: number of logits, `vocab_size` or more; the rest is padding and never allowed.
            stop_ids: the model's end-of-sequence tokens.
            place: one of `PLACES`.
        """
        self.vocab_size = vocab_size
        self.words = mask_words(rows)
        self.stop_ids = frozenset(token for token in stop_ids if 0 <= token < vocab_size)
        # Without an end of sequence there is nothing to force: what is sampled behind a finished output is dropped.
        self.stop_mask = mask_of(self.stop_ids or range(vocab_size), rows)
        self._tokenizer, self._place = tokenizer, place
        self._matchers: Matchers | None = None
        self._matchers_lock = threading.Lock()
        self._compiled: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._compiled_lock = threading.Lock()

    def compile(self, guided: GuidedDecoding, seconds: float | None = None) -> Guide:
        """Return a guide at the start of an output. A recently used grammar takes microseconds, a large new one a
        second.

        Args:
            guided: the grammar.
            seconds: of the processor, that this may take where it can be ended; None takes what any grammar may.

        Raises:
            RequestError: a schema, regular expression or grammar is malformed, unsupported, too large or unmatchable,
                the bytes of the tokenizer's tokens are unknown, or guides are off.
            SlowGrammarError: it takes longer than `seconds`.
            CompilationEndedError: it was interrupted.
            MissingDependencyError: llguidance is not installed.
        """
        if self._place == "off":
            raise RequestError("guided decoding was asked for, but this engine has it turned off: leave it out.")
        guided = written(guided)
        with self._compiled_lock:
            compiled = self._compiled.setdefault(guided.key, _Compiled())
            self._compiled.move_to_end(guided.key)
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        with compiled.lock:  # whoever asks for the same grammar meanwhile waits here, others do not
            if compiled.matcher is None and compiled.error is None:
                try:
                    compiled.matcher = self._matcher(guided, seconds)
                except RequestError as error:
                    compiled.error = str(error)
            elif compiled.error is None:
                assert self._matchers is not None
                if not self._matchers.is_ready(guided):
                    self._matchers.make_ready(guided)
            if compiled.error is not None:
                raise RequestError(compiled.error)
            assert compiled.matcher is not None
            if compiled.first is None:  # here, so that no output waits for it
                compiled.first = Guide(self, compiled.matcher).prepare()
            return Guide(self, compiled.matcher, compiled.first)

    def is_compiled(self, guided: GuidedDecoding) -> bool:
        """Whether `compile` would return, or refuse, at once.

        Raises:
            RequestError: the schema is not JSON, is nested too deeply or is too long.
        """
        guided = written(guided)
        with self._compiled_lock:
            compiled = self._compiled.get(guided.key)
        if compiled is None or compiled.matcher is None or self._matchers is None:
            return compiled is not None and compiled.error is not None
        return self._matchers.is_ready(guided)

    def interrupt(self, guided: GuidedDecoding) -> None:
        """End the compilation of a guide that nobody waits for any more."""
        if self._matchers is not None:
            self._matchers.interrupt(guided)

    def close(self) -> None:
        """End processes that compute guides."""
        if self._matchers is not None:
            self._matchers.close()

    def _matcher(self, guided: GuidedDecoding, seconds: float | None) -> Matcher:
        with self._matchers_lock:
            if self._matchers is None:
                isolated = self._place == "isolated"
                self._matchers = IsolatedMatchers(self._vocabulary) if isolated else InlineMatchers(self._vocabulary())
        return self._matchers.start(guided, seconds)

    def _vocabulary(self) -> Vocabulary:
        written = token_bytes(self._tokenizer, self.vocab_size)
        size = 32 * (self.words if self.stop_ids else self.words + 1)
        return Vocabulary(written.tokens + [b""] * (size - self.vocab_size), written.special, self._ends())

    def _ends(self) -> list[int]:
        """Return the end-of-sequence ids. llguidance needs at least one: a model without any gets an id beyond the
        mask."""
        return sorted(self.stop_ids) or [32 * self.words]


class _Compiled:
    """A grammar's matcher at its start and the mask there, or the reason why there is none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.matcher: Matcher | None = None
        self.first: np.ndarray | None = None
        self.error: str | None = None


class Guide:
    """The position of one output in its grammar. It is not thread-safe.

    error: the reason why the output cannot continue, if the grammar exceeded a limit or requires text that no token can
    write. Then only the end of sequence is allowed, and the output is not a match.
    """

    def __init__(self, factory: GuideFactory, start: Matcher, first: np.ndarray | None = None) -> None:
        """
        Args:
            factory: of the tokenizer and the model.
            start: the matcher at the start of an output, which stays there.
            first: the mask there, uint32 [words], or None where it is not known.
        """
        self.factory = factory
        self._start, self._first = start, first
        self._prepared = first  # the mask at this position, if it is known
        self._matcher = start.deep_copy()
        self._tokens: list[int] = []
        self._ends = 0  # how many of the last of them are ends of sequence, which the matcher is not told of
        self._buffer = np.zeros(factory.words if factory.stop_ids else factory.words + 1, np.uint32)
        self.error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the end of sequence is reached or is the only allowed token."""
        return self._ends > 0 or self._matcher.is_stopped()

    def begin(self) -> Guide:
        """Return another guide at the start of an output of the same grammar."""
        return Guide(self.factory, self._start, self._first)

    def prepare(self) -> np.ndarray | None:
        """Compute the mask that `fill` gives at this position; return it, uint32 [words], or None if the output cannot
        continue."""
        if self._prepared is None:
            mask = np.empty(self.factory.words, np.uint32)
            self.fill(mask)
            self._prepared = None if self.error is not None else mask
        return self._prepared

    def fill(self, mask: np.ndarray) -> None:
        """Fill `mask`, uint32 [words], with the allowed next tokens: bit i % 32 of word i // 32 stands for token i."""
        if self._prepared is not None:
            mask[:] = self._prepared
            return
        if self.finished:
            mask[:] = self.factory.stop_mask
            return
        self._matcher.mask_into(self._buffer)
        if self._matcher.is_error():
            self.error = self._reason()
            mask[:] = self.factory.stop_mask
            return
        mask[:] = self._buffer[: self.factory.words]

    def accept(self, token: int) -> bool:
        """Append `token` if it is allowed; return whether it was."""
        if token in self.factory.stop_ids:
            if not (self._ends or self._matcher.is_accepting() or self._names(token)):
                return False
            self._ends += 1
        elif self._ends or not 0 <= token < self.factory.vocab_size:
            return False
        elif self._matcher.try_consume_tokens([token]) != 1:
            if self._matcher.is_error():
                self.error = self._reason()
            return False
        self._tokens.append(token)
        self._prepared = None
        return True

    def rollback(self, count: int) -> None:
        """Remove the last `count` accepted tokens."""
        if count == 0 and self.error is None:
            return
        self._prepared = None
        del self._tokens[len(self._tokens) - count :]
        ends = min(count, self._ends)
        self._ends -= ends
        if self.error is not None or self._matcher.is_error():  # such a matcher never leaves that state
            self.error = None
            self._matcher = self._start.deep_copy()
            self._matcher.try_consume_tokens(self._tokens)
        elif count > ends:
            self._matcher.rollback(count - ends)

    def legal_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` are allowed in sequence; none after an end of sequence."""
        count = 0
        for token in tokens:
            if self._ends or not self.accept(token):
                break
            count += 1
        self.rollback(count)
        return count

    def _names(self, token: int) -> bool:
        """Whether the grammar itself contains this end-of-sequence token here, as in `start: "a" <|eot_id|>`."""
        if self._matcher.is_stopped():
            return False
        self._matcher.mask_into(self._buffer)
        word = self._buffer[token // 32]
        return bool(word >> np.uint32(token % 32) & 1) and not self._matcher.is_error()

    def _reason(self) -> str:
        return f"the output cannot go on as its guide wants: {summary(self._matcher.get_error())}."


class GuideState:
    """The guide of one request as the engine uses it: masks for the positions of a step, then the accepted tokens.

    It combines the grammar with the request's other rules and `min_tokens`. Because these can contradict each other,
    an end that the grammar forces is allowed even before `min_tokens`.

    stop_ids: tokens that end the request, forbidden until `min_tokens` tokens were generated.
    """

    def __init__(
        self,
        guide: Guide,
        *,
        min_tokens: int = 0,
        stop_ids: Collection[int] = (),
    ) -> None:
        self.guide = guide
        self._min_tokens = min_tokens
        self._words, self._end = guide.factory.words, guide.factory.stop_mask
        self._not_stop = ~mask_of(stop_ids, 32 * self._words)
        self._generated = 0
        self.error: str | None = None
        self.fault: ErrorKind = "request"  # whose the error is
        self._following: Future[int] | None = None

    @property
    def finished(self) -> bool:
        """Whether the output is complete; the request ends then, even if it ignores the end of sequence."""
        return self.guide.finished

    def legal_prefix(self, drafts: Sequence[int]) -> int:
        """Return how many draft tokens the guide allows in sequence."""
        return self.guide.legal_prefix(drafts)

    def masks(self, drafts: Sequence[int] = (), allowed: Sequence[np.ndarray | None] | None = None) -> list[np.ndarray]:
        """Return masks uint32 [words] for positions 0 to len(drafts): the tokens allowed after the first i drafts.

        The mask of position i is used only if drafts[:i] are all accepted. Positions after an illegal draft, which is
        never accepted, repeat the previous mask. The guide does not advance. Check `error` afterwards.

        Args:
            drafts: tokens that are expected next.
            allowed: of each position uint32 [words], the tokens that the request's other rules allow; None allows all.
        """
        self.followed()
        others = allowed or [None] * (len(drafts) + 1)
        masks = [self._mask(0, others[0])]
        taken = 0
        for draft in drafts:
            if taken == len(masks) - 1 and not self.finished and self.guide.accept(draft):
                taken += 1
                masks.append(self._mask(taken, others[taken]))
            else:
                masks.append(masks[-1])
        if taken:
            self.guide.rollback(taken)
        return masks

    def advance(self, tokens: Sequence[int]) -> int:
        """Advance by sampled tokens and return how many of them belong to the output; tokens after its end do not."""
        for count, token in enumerate(tokens):
            if self.finished:
                return count
            if not self.guide.accept(token):
                self.error = self.guide.error
                if self.error is None:
                    self.error = f"token {token} was sampled, but the request's guide forbids it: report it."
                    self.fault = "engine"
                return count
            self._generated += 1
        return len(tokens)

    def follow(self, token: int, executor: Executor) -> Future[int]:
        """Advance by a sampled token and compute the next mask, in a thread of an executor. Until its future is done,
        nothing but `masks` and `followed`, which wait for it, may be called."""
        self._following = executor.submit(self._follow, token)
        return self._following

    def followed(self) -> int:
        """Wait for `follow`; return how many tokens of it belong to the output. Errors in it are raised."""
        return 1 if self._following is None else self._following.result()

    def _follow(self, token: int) -> int:
        count = self.advance([token])
        if count and not self.finished and self.guide.prepare() is None:
            self.error, count = self.guide.error, 0
        return count

    def _mask(self, ahead: int, allowed: np.ndarray | None) -> np.ndarray:
        mask = np.empty(self._words, np.uint32)
        self.guide.fill(mask)
        if self.finished:
            if ahead == 0:
                self.error = self.guide.error
            return mask
        if allowed is not None:
            both = mask & allowed
            if not both.any():
                both = mask & self._end
            if not both.any():
                if ahead == 0:
                    self.error = "allowed_token_ids and bad_words leave no token that the request's guide allows next."
                both = allowed
            mask = both
        if self._generated + ahead < self._min_tokens:
            longer = mask & self._not_stop
            mask = longer if longer.any() else mask
        return mask
