"""Beam search over an engine, with vLLM's names: each step asks for the likeliest next tokens of every beam, whose
prompts are in the prefix cache. `AutoModelForTPU.generate(num_beams=...)` keeps beams on the device and is faster."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.api.outputs import Logprob, RequestOutput

NextTokens = Callable[[list[list[int]], list[int], SamplingParams], list[RequestOutput]]
"""Runs sequences of token ids for one token each; it is also told the number of the prompt of each sequence."""
MOST_PENALTY = 10.0


@dataclass(frozen=True)
class BeamSearchParams:
    """How beams are searched.

    Args:
        beam_width: the beams of each prompt that are kept after each step, and that are returned.
        max_tokens: the most new tokens of a beam.
        ignore_eos: go on behind tokens that end a sequence.
        temperature: 0, for beams are ranked by the model's own distribution.
        length_penalty: exponent of a sequence's length, the prompt's included and the ending token left out, by which
            the sum of its log-probabilities is divided when sequences are ranked, as in vLLM.
        early_stopping: True ends a search as soon as `beam_width` sequences have ended. False and "never" end it when
            no running sequence can come before these any more.

    Raises:
        RequestError: a value is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"{name} is {value!r}, but a whole number, 1 or more, is needed: correct it.")
        if self.temperature != 0:
            raise RequestError(
                f"temperature is {self.temperature}, but beams are ranked by the model's own distribution: leave it "
                "out, or sample with `generate`."
            )
        penalty: Any = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not abs(penalty) <= MOST_PENALTY:
            raise RequestError(
                f"length_penalty is {penalty!r}, but a number from -{MOST_PENALTY:g} to {MOST_PENALTY:g} is needed: "
                "correct it."
            )
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(
                f"early_stopping is {self.early_stopping!r}, but True, False and 'never' are known: use one of them."
            )


@dataclass
class BeamSearchSequence:
    """One beam.

    Attributes:
        tokens: ids of the prompt and of what follows, with the token that ended it.
        cum_logprob: the sum of the new tokens' natural log-probabilities.
        text: of all tokens; None without a tokenizer.
        finish_reason: "stop" behind a token that ends sequences, else "length".
        logprobs: for each new token, token id → Logprob, the token itself first.
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)

    def score(self, penalty: float, length: int | None = None) -> float:
        """Return what sequences are ranked by: the sum of log-probabilities divided by length ** penalty.

        Args:
            penalty: the exponent.
            length: in tokens; None takes its own, without the token that ended it.
        """
        own = len(self.tokens) - (self.finish_reason == "stop")
        divisor: float = max(own if length is None else length, 1) ** penalty
        return self.cum_logprob / divisor


@dataclass
class BeamSearchOutput:
    """The beams of one prompt, the best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


Search = Generator[list[list[int]], list[dict[int, Logprob]], BeamSearchOutput]
"""A search of one prompt: it yields sequences of token ids, and is sent the log-probabilities of the next token of each
of them."""


def step_params(params: BeamSearchParams, max_logprobs: int, *, logprobs: int = 0) -> SamplingParams:
    """Return the parameters with which the sequences of a search run for a token.

    Args:
        params: of the search.
        max_logprobs: the most log-probabilities of a token that the engine reports.
        logprobs: how many of them the caller reports.

    Raises:
        RequestError: the beams are too many for the engine's log-probabilities.
    """
    wanted = 2 * params.beam_width  # half of them may end
    if wanted > max_logprobs:
        raise RequestError(
            f"{params.beam_width} beams were asked for, which needs {wanted} log-probabilities of each token, but this "
            f"engine reports at most {max_logprobs}: use fewer beams, or raise max_logprobs where the engine is built.",
            param="n",
        )
    asked = max(wanted, logprobs)
    return SamplingParams(max_tokens=1, temperature=0.0, logprobs=asked, ignore_eos=True, detokenize=False)


def search(prompt: Sequence[int], params: BeamSearchParams, stop_ids: frozenset[int]) -> Search:
    """Search the likeliest continuations of a prompt.

    Args:
        prompt: token ids.
        params: how.
        stop_ids: tokens that end a sequence.
    """
    ends = frozenset[int]() if params.ignore_eos else stop_ids
    width, penalty, longest = params.beam_width, params.length_penalty, len(prompt) + params.max_tokens

    def best(beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=lambda beam: beam.score(penalty), reverse=True)[:width]

    running, ended = [BeamSearchSequence(list(prompt))], list[BeamSearchSequence]()
    for _ in range(params.max_tokens):
        told = yield [beam.tokens for beam in running]
        grown = [more for beam, likeliest in zip(running, told, strict=True) for more in _grown(beam, likeliest, width)]
        grown.sort(key=lambda more: -more.cum_logprob)  # all are of one length
        ending = [more for more in grown if more.token in ends]
        going = [more for more in grown if more.token not in ends]
        ended = best([*ended, *(more.sequence("stop") for more in ending[:width])])
        running = [more.sequence(None) for more in going[:width]]
        if len(ended) == width and (params.early_stopping is True or not running):
            return BeamSearchOutput(ended)
        # A sum only falls, so that a running sequence can rank as with the length at which a sum counts least.
        length = longest if penalty > 0 else None
        if len(ended) == width and ended[-1].score(penalty) >= max(beam.score(penalty, length) for beam in running):
            return BeamSearchOutput(ended)
    for beam in running:
        beam.finish_reason = "length"
    return BeamSearchOutput(best([*ended, *running]))


@dataclass(frozen=True)
class _Grown:
    """A beam and a token that may follow it; most of these are dropped before they are a sequence of their own."""

    beam: BeamSearchSequence
    token: int
    cum_logprob: float
    likeliest: dict[int, Logprob]

    def sequence(self, finish_reason: str | None) -> BeamSearchSequence:
        """Return the sequence of both."""
        logprobs = [*self.beam.logprobs, {self.token: self.likeliest[self.token], **self.likeliest}]
        return BeamSearchSequence(
            [*self.beam.tokens, self.token], self.cum_logprob, finish_reason=finish_reason, logprobs=logprobs
        )


def _grown(beam: BeamSearchSequence, likeliest: dict[int, Logprob], width: int) -> list[_Grown]:
    ranked = sorted(likeliest.items(), key=lambda pair: -pair[1].logprob)[: 2 * width]
    return [_Grown(beam, token, beam.cum_logprob + known.logprob, likeliest) for token, known in ranked]


def beam_search(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    next_tokens: NextTokens,
    stop_ids: frozenset[int],
    max_logprobs: int,
) -> list[BeamSearchOutput]:
    """Search the likeliest continuations of several prompts, whose sequences run together.

    Args:
        prompts: token ids.
        params: how.
        next_tokens: runs sequences for a token each, with log-probabilities.
        stop_ids: tokens that end a sequence.
        max_logprobs: the most log-probabilities that it can give of a token.

    Raises:
        RequestError: the beams are too many for the engine's log-probabilities.
    """
    asked = step_params(params, max_logprobs)
    searches = {place: search(prompt, params, stop_ids) for place, prompt in enumerate(prompts)}
    running = {place: next(each) for place, each in searches.items()}
    found: dict[int, BeamSearchOutput] = {}
    while running:
        sequences = [(place, tokens) for place, beams in running.items() for tokens in beams]
        outputs = iter(next_tokens([tokens for _, tokens in sequences], [place for place, _ in sequences], asked))
        for place, beams in list(running.items()):
            told = [(next(outputs).outputs[0].logprobs or [{}])[0] for _ in beams]
            try:
                running[place] = searches[place].send(told)
            except StopIteration as done:
                found[place] = done.value
                del running[place]
    return [found[place] for place in range(len(prompts))]
