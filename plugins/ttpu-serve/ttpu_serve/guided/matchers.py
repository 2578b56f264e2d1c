"""llguidance's matchers: the position of an output in its grammar, and what makes one. `InlineMatchers` makes them in
this process, `ttpu_serve.guided.isolated` in others, where a grammar that ends its process harms nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_serve.guided.grammar import grammar_of, refusal, summary

MOST_LEXER_STATES = 100_000
"""States of one grammar's automaton, of 1 to 2 kB each."""


class SlowGrammarError(Exception):
    """The grammar was not compiled in the time that it was given."""


class CompilationEndedError(Exception):
    """The compilation was interrupted, because nobody waited for it any more."""


@dataclass(frozen=True)
class Vocabulary:
    """What llguidance knows of a tokenizer.

    Attributes:
        tokens: the bytes of each id.
        special: ids of special tokens.
        ends: ids of ends of sequence; at least one.
    """

    tokens: Sequence[bytes]
    special: Sequence[int]
    ends: Sequence[int]

    def compiled(self) -> Any:
        """The `LLTokenizer`.

        Raises:
            MissingDependencyError: llguidance is not installed.
        """
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise MissingDependencyError(
                "guided decoding was asked for, but llguidance is not installed: pip install llguidance."
            ) from error
        return LLTokenizer(cast("Any", _Wrapper(self)), eos_token=list(self.ends))


class Matcher(Protocol):
    """The position of an output in its grammar. It is not thread-safe. A matcher with an error never leaves that
    state, and counts as stopped."""

    def deep_copy(self) -> Matcher:
        """Another matcher at the same position."""
        ...

    def mask_into(self, buffer: np.ndarray) -> None:
        """Fill `buffer`, uint32 [words], with the allowed next tokens; undefined if there is an error."""
        ...

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Consume tokens until one is not allowed; return how many were."""
        ...

    def rollback(self, num_tokens: int) -> Any:
        """Take back the last tokens."""
        ...

    def is_error(self) -> bool:
        """Whether it cannot go on."""
        ...

    def get_error(self) -> str:
        """Why."""
        ...

    def is_stopped(self) -> bool:
        """Whether nothing but the end of sequence can follow."""
        ...

    def is_accepting(self) -> bool:
        """Whether the output is a match."""
        ...


class Matchers(Protocol):
    """Makes matchers for one vocabulary. All its methods are thread-safe."""

    def start(self, guided: GuidedDecoding, seconds: float | None = None) -> Matcher:
        """Return the matcher at the start of a grammar.

        Args:
            guided: the grammar.
            seconds: of the processor, that this may take where it can be ended; None takes what any grammar may.

        Raises:
            RequestError: the grammar is malformed, unsupported, too large or unmatchable.
            SlowGrammarError: it takes longer than `seconds`.
            CompilationEndedError: it was interrupted.
            MissingDependencyError: llguidance is not installed.
        """
        ...

    def is_ready(self, guided: GuidedDecoding) -> bool:
        """Whether outputs of a grammar that `start` took can begin at once, now and for some seconds."""
        ...

    def make_ready(self, guided: GuidedDecoding) -> None:
        """Have outputs of a grammar that `start` took begin at once, for some seconds; may wait.

        Raises:
            RequestError: the grammar takes too much after all.
            MissingDependencyError: llguidance is not installed.
        """
        ...

    def interrupt(self, guided: GuidedDecoding) -> None:
        """End the compilation of a grammar, if there is one and it can be ended."""
        ...

    def close(self) -> None:
        """Free what is held."""
        ...


class InlineMatchers:
    """Makes matchers in this process."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = vocabulary.compiled()

    def start(self, guided: GuidedDecoding, seconds: float | None = None) -> Matcher:
        """See `Matchers`. A thread cannot be ended, whatever `seconds` are.

        Raises:
            RequestError: the grammar cannot be followed.
        """
        return _Inline(compiled(self._tokenizer, guided))

    def is_ready(self, guided: GuidedDecoding) -> bool:
        """True: its matcher is here."""
        return True

    def make_ready(self, guided: GuidedDecoding) -> None:
        """Nothing: its matcher is here."""

    def interrupt(self, guided: GuidedDecoding) -> None:
        """Nothing: a thread cannot be ended."""

    def close(self) -> None:
        """Nothing is held beside the matchers."""


def compiled(tokenizer: Any, guided: GuidedDecoding) -> Any:
    """The `LLMatcher` at the start of a grammar, which was found to have a first token.

    Args:
        tokenizer: the `LLTokenizer`.
        guided: what is to be followed.

    Raises:
        RequestError: llguidance refuses it, or no text that the tokenizer can write matches it.
    """
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = grammar_of(guided)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(max_lexer_states=MOST_LEXER_STATES))
    except UnicodeEncodeError as error:
        raise refusal(guided, f"it holds half a character, {error.object[error.start]!r}") from error
    except RecursionError as error:
        raise refusal(guided, "it is nested too deeply") from error
    except RequestError:
        raise
    except Exception as error:  # of llguidance's converters, which raise all kinds for malformed text
        raise refusal(guided, f"it cannot be read: {type(error).__name__}: {error}") from error
    if matcher.is_error():
        raise refusal(guided, matcher.get_error())
    trial = matcher.deep_copy()
    trial.compute_bitmask()
    if trial.is_error():
        raise refusal(guided, f"no text that this tokenizer can write matches it, {summary(trial.get_error())}")
    return matcher


class _Inline:
    """An `LLMatcher` of this process."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.try_consume_tokens = matcher.try_consume_tokens
        self.rollback = matcher.rollback
        self.is_error, self.get_error = matcher.is_error, matcher.get_error
        self.is_stopped, self.is_accepting = matcher.is_stopped, matcher.is_accepting

    def deep_copy(self) -> _Inline:
        return _Inline(self._matcher.deep_copy())

    def mask_into(self, buffer: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)


class _Wrapper:
    """The tokenizer interface that llguidance requires."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids = list(vocabulary.tokens), list(vocabulary.special)
        self.eos_token_id = vocabulary.ends[0]

    def __call__(self, text: str) -> list[int]:
        """Only called for forced tokens, which the grammars turn off."""
        raise NotImplementedError
