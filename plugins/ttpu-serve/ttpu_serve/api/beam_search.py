"""Beam search over an engine, with vLLM's names: each step asks for the likeliest next tokens of every beam, whose
prompts are in the prefix cache. `AutoModelForTPU.generate(num_beams=...)` keeps beams on the device and is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.api.outputs import RequestOutput

NextTokens = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]
"""Runs sequences of token ids for one token each."""


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

    Raises:
        RequestError: a value is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

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


@dataclass
class BeamSearchSequence:
    """One beam.

    Attributes:
        tokens: ids of the prompt and of what follows, with the token that ended it.
        cum_logprob: the sum of the new tokens' natural log-probabilities.
        text: of all tokens; None without a tokenizer.
        finish_reason: "stop" behind a token that ends sequences, else "length".
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None


@dataclass
class BeamSearchOutput:
    """The beams of one prompt, the best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def beam_search(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    next_tokens: NextTokens,
    stop_ids: frozenset[int],
    max_logprobs: int,
) -> list[BeamSearchOutput]:
    """Search the likeliest continuations of prompts.

    Args:
        prompts: token ids.
        params: how.
        next_tokens: runs sequences for a token each, with log-probabilities.
        stop_ids: tokens that end a sequence.
        max_logprobs: the most log-probabilities that it can give of a token.

    Raises:
        RequestError: the beams are too many for the engine's log-probabilities.
    """
    wanted = 2 * params.beam_width  # half of them may end
    if wanted > max_logprobs:
        raise RequestError(
            f"beam_width is {params.beam_width}, which needs {wanted} log-probabilities of each token, but this engine "
            f"gives {max_logprobs}: use fewer beams, or raise max_logprobs of LLM."
        )
    asked = SamplingParams(max_tokens=1, temperature=0.0, logprobs=wanted, ignore_eos=True, detokenize=False)
    ends = frozenset[int]() if params.ignore_eos else stop_ids

    def score(beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.finish_reason == "stop")
        return beam.cum_logprob / max(length, 1) ** params.length_penalty

    running = [[BeamSearchSequence(list(prompt))] for prompt in prompts]
    ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]
    for _ in range(params.max_tokens):
        given = [beam.tokens for beams in running for beam in beams]
        if not given:
            break
        found = iter(next_tokens(given, asked))
        for place, beams in enumerate(running):
            grown: list[BeamSearchSequence] = []
            for beam in beams:
                likeliest = (next(found).outputs[0].logprobs or [{}])[0]
                ranked = sorted(likeliest.items(), key=lambda pair: -pair[1].logprob)[:wanted]
                for token, known in ranked:
                    more = BeamSearchSequence([*beam.tokens, token], beam.cum_logprob + known.logprob)
                    if token in ends:
                        more.finish_reason = "stop"
                        ended[place].append(more)
                    else:
                        grown.append(more)
            running[place] = sorted(grown, key=score, reverse=True)[: params.beam_width]
    for beams in running:
        for beam in beams:
            beam.finish_reason = "length"
    return [
        BeamSearchOutput(sorted([*done, *beams], key=score, reverse=True)[: params.beam_width])
        for done, beams in zip(ended, running, strict=True)
    ]
