"""Runs `generate` and `stream` of a model by its serving engine. The events and completions are the same as those of
`ttpu_jax.generation.loop`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ttpu_core.errors import RequestError
from ttpu_core.generation.events import StreamEvent, Timings
from ttpu_core.generation.options import GenerationOptions
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_jax.generation.call import Call
from ttpu_jax.generation.results import Completion

BEYOND = (
    "num_beams", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens",
    "forced_eos_token_id", "typical_p", "renormalize_logits", "max_time", "output_scores", "output_logits",
    "prompt_lookup_num_tokens", "output_hidden_states",
)  # fmt: skip
"""Options of `generate` that the engine does not have."""

if TYPE_CHECKING:
    from ttpu_serve.execution.engine_core import EngineCore


def refuse(call: Call) -> None:
    """Refuse what the engine does not have.

    Raises:
        RequestError: the call asks for it.
    """
    usual = GenerationOptions()
    asked = [name for name in BEYOND if getattr(call.options, name) != getattr(usual, name)]
    asked += ["logits_processor"] if call.calls.processors else []
    asked += ["stopping_criteria"] if call.calls.criteria and call.options.max_time is None else []
    asked += ["assistant_model"] if call.assistant is not None else []
    if asked:
        raise RequestError(
            f"generate() was given {asked[0]}, which the serving engine behind this model does not do: load the model "
            "without enable_paged_attention."
        )


def run(
    engine: EngineCore,
    prompts: list[list[int]],
    options: GenerationOptions,
    *,
    stop_ids: frozenset[int],
    context: int,
    timings: Timings,
) -> Iterator[tuple[StreamEvent, Completion]]:
    """Generate for a batch of prompts, as `ttpu_jax.generation.loop.run` does; events come in the order of their
    tokens. Where several sequences of a prompt are asked for, `prompts` has it as often.

    Args:
        engine: the model's serving engine.
        prompts: token ids of each prompt.
        options: of the call.
        stop_ids: tokens that end a sequence and are not part of it.
        context: the most tokens that a sequence may have.
        timings: receives the times of this call.

    Raises:
        RequestError: at the call, for a prompt or an option that the engine cannot serve.
        TTPUError: during iteration, where a request fails.
    """
    most = min(context, engine.max_model_len)
    requests = [_params(options, index, prompt, stop_ids, most) for index, prompt in enumerate(prompts)]
    events = engine.stream(prompts, requests, timings)
    return _completed(events, [_completion(prompt, options, engine) for prompt in prompts], stop_ids)


def _completed(
    events: Iterator[StreamEvent], completions: list[Completion], stop_ids: frozenset[int]
) -> Iterator[tuple[StreamEvent, Completion]]:
    for event in events:
        done = completions[event.index]
        done.text = None if done.text is None else done.text + event.text
        if event.finish_reason == "stop" and event.token_id in stop_ids:
            done.stop_id = event.token_id
        else:
            done.token_ids.append(event.token_id)
            if done.logprobs is not None and event.logprob is not None:
                done.logprobs.append(event.logprob)
            if done.top_logprobs is not None and event.top_logprobs is not None:
                done.top_logprobs.append(event.top_logprobs)
        if event.finish_reason is not None:
            done.finish_reason = event.finish_reason
        yield event, done


def _completion(prompt: list[int], options: GenerationOptions, engine: EngineCore) -> Completion:
    done = Completion(len(prompt), logprobs=None if options.logprobs is None else [])
    done.top_logprobs = [] if options.logprobs else None
    done.text = "" if engine.tokenizer is not None else None
    return done


def _params(
    options: GenerationOptions, index: int, prompt: list[int], stop_ids: frozenset[int], context: int
) -> SamplingParams:
    """One prompt's request, with the refusals of the loop without an engine."""
    limit = options.limit(len(prompt), context)
    own = options.sampling()
    values: dict[str, Any] = {name: getattr(own, name) for name in type(own).__dataclass_fields__}
    params = SamplingParams(
        **values,
        max_tokens=limit,
        min_tokens=min(options.fewest(len(prompt)), limit),
        stop=options.stop_strings,
        stop_token_ids=tuple(sorted(stop_ids)),
        ignore_eos=True,  # `stop_ids` are all that end it
    )
    return replace(params, seed=(int(own.seed or 0) + index) % 2**32)
