"""The options of `generate`, named as in transformers. `options_from` joins keyword arguments, a `GenerationConfig` and
the checkpoint's own defaults to frozen `GenerationOptions`, or raises one error that names the argument to correct."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_core.generation.option_values import READERS, EarlyStopping
from ttpu_core.generation.ranges import FILTERS_OFF, RANGES, short
from ttpu_core.generation.token_choice import TokenChoice

DEFAULT_MAX_NEW_TOKENS = 128
DEFAULT_TOP_K = 50
"""transformers' own, of sampling where neither the caller nor the checkpoint says how many tokens to draw from."""


@dataclass(frozen=True)
class GenerationOptions:
    """The options of one call of `generate`.

    Attributes:
        max_new_tokens: the most new tokens; takes precedence over `max_length`.
        max_length: the most tokens of prompt and output together.
        usual_new_tokens: the checkpoint's own `max_new_tokens`. Unlike the caller's, it is lowered to what the context
            has room for.
        logprobs: how many of the likeliest tokens to report beside each chosen one.
        min_new_tokens: no token ends a sequence before so many; takes precedence over `min_length`.
        min_length: the same, and counts the prompt too.
        num_return_sequences: sequences for each prompt.
        num_beams: of beam search; 1 is none.
        length_penalty: exponent of the length by which a finished beam's log-probability is divided.
        early_stopping: when beam search ends: with as many finished beams as asked for (True), where a better one is
            unlikely (False), or where none is possible ("never").
        no_repeat_ngram_size: no n-gram of this size occurs twice in a sequence; 0 allows them.
        bad_words_ids: sequences of tokens that are never completed.
        sequence_bias: (sequence of tokens, number added to the score of its last token where the others precede it).
        suppress_tokens: never chosen; `begin_suppress_tokens`: never chosen first.
        forced_eos_token_id: chosen, whatever the scores, where the limit of length leaves room for one token.
        typical_p: mass of the locally typical tokens that are kept (arXiv:2202.00666).
        renormalize_logits: scores are log-probabilities again after everything else.
        max_time: seconds after which no further token is begun.
        prompt_lookup_num_tokens: tokens that are guessed at once from the text so far; None guesses none.
        max_matching_ngram_size: tokens of the longest end of the text that such a guess looks for.
        num_assistant_tokens: tokens that an assistant model guesses at once.
        output_scores: report the scores of all tokens at every step, after everything that changes them.
        output_logits: report the logits of all tokens at every step.
        output_hidden_states: report the stream before each layer and after the last.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    usual_new_tokens: int | None = None
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    eos_token_id: tuple[int, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    return_dict_in_generate: bool = False
    min_new_tokens: int | None = None
    min_length: int = 0
    num_return_sequences: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_eos_token_id: tuple[int, ...] = ()
    typical_p: float = 1.0
    renormalize_logits: bool = False
    max_time: float | None = None
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int = 2
    num_assistant_tokens: int = 5
    output_scores: bool = False
    output_logits: bool = False
    output_hidden_states: bool = False

    def fewest(self, prompt_length: int) -> int:
        """Return how many tokens must follow a prompt of this length before one may end the sequence."""
        return max(0, self.min_length - prompt_length) if self.min_new_tokens is None else self.min_new_tokens

    def named_tokens(self) -> dict[str, tuple[int, ...]]:
        """Return the tokens that rules name, by option."""
        return {
            "bad_words_ids": tuple(token for word in self.bad_words_ids for token in word),
            "sequence_bias": tuple(token for word, _ in self.sequence_bias for token in word),
            "suppress_tokens": self.suppress_tokens,
            "begin_suppress_tokens": self.begin_suppress_tokens,
            "forced_eos_token_id": self.forced_eos_token_id,
        }

    def limit(self, prompt_length: int, context: int) -> int:
        """Return how many tokens may follow a prompt of this length in a context of `context` tokens.

        Raises:
            RequestError: there is no room for one token, or for as many as the caller asked for.
        """
        return output_length(
            prompt_length, context, asked=self.max_new_tokens, total=self.max_length, usual=self.usual_new_tokens
        )

    def sampling(self) -> TokenChoice:
        """Return the sampler's parameters; greedy unless `do_sample`.

        Raises:
            RequestError: a value that is out of range, whether or not it would be used.
        """
        params = TokenChoice(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=0.0 if self.min_p is None else self.min_p,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=0.0 if self.presence_penalty is None else self.presence_penalty,
            frequency_penalty=0.0 if self.frequency_penalty is None else self.frequency_penalty,
            seed=self.seed,
            logprobs=self.logprobs,
        ).with_seed()
        return params if self.do_sample else replace(params, temperature=0.0)


NAMES = tuple(field.name for field in fields(GenerationOptions) if field.name != "usual_new_tokens")
"""What callers and checkpoints may name; `usual_new_tokens` follows from a checkpoint's `max_new_tokens`."""

# Arguments of transformers that change nothing here, and the values of others that ask for nothing.
_WITHOUT_EFFECT = {
    "use_cache", "bos_token_id", "transformers_version", "_from_model_config",
    "cache_implementation", "disable_compile", "compile_config", "low_memory", "is_assistant", "use_mtp",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "force_words_ids": ([], ()),
    "constraints": ([], ()),
    "output_attentions": (False,),
    "remove_invalid_values": (False,),
    "synced_gpus": (False,),
    "token_healing": (False,),
}


def output_length(prompt: int, context: int, *, asked: int | None, total: int | None, usual: int | None) -> int:
    """How many tokens may follow a prompt. What is not asked for is cut at the context's end.

    Args:
        prompt: tokens of the prompt.
        context: the most tokens that a sequence may have.
        asked: the caller's `max_new_tokens`, which wins.
        total: `max_length`, which counts the prompt too.
        usual: the checkpoint's own `max_new_tokens`; None is 128.

    Raises:
        RequestError: there is no room for one, or for as many as the caller asked for.
    """
    room = context - prompt
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt:,} tokens, but this model's context holds {context:,} and one must be left for "
            "the output: shorten the prompt."
        )
    if asked is not None:
        if asked > room:
            raise RequestError(
                f"{asked:,} new tokens were asked for after a prompt of {prompt:,}, but this model's context holds "
                f"{context:,}: ask for at most {room:,}."
            )
        return asked
    if total is not None and total <= prompt:
        raise RequestError(
            f"max_length={total} counts the prompt, which has {prompt} tokens already: raise it, or pass "
            "max_new_tokens."
        )
    return min(room, total - prompt if total is not None else usual or DEFAULT_MAX_NEW_TOKENS)


def token_count(name: str, value: Any) -> int:
    """`max_new_tokens` or `max_length` as an int.

    Raises:
        RequestError: it is no whole number, or less than 1.
    """
    allowed = RANGES[name]
    if not allowed.holds(value):
        raise RequestError(f"{name} is {short(value)}, but {allowed.allowed} is needed: correct it.")
    return int(value)


def stop_texts(value: Any) -> tuple[str, ...]:
    """`stop_strings`: a text, several, or None.

    Raises:
        RequestError: something else, or an empty text.
    """
    texts = (value,) if isinstance(value, str) else value or ()
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"stop_strings is {value!r}, but non-empty strings are needed: correct it.")
    return tuple(texts)


def options_from(
    arguments: Mapping[str, Any], config: Any = None, checkpoint_defaults: Mapping[str, Any] | None = None
) -> GenerationOptions:
    """Join the three sources. `arguments` take precedence over `config` (a GenerationConfig or dict), which takes
    precedence over the checkpoint.

    Sampling is on if `do_sample` says so, or if the caller leaves it out and gives a temperature above 0 or a filter. A
    checkpoint's temperature alone does not turn it on, as in transformers. Tokens are then drawn from the 50 likeliest,
    unless a source has another `top_k`. Of a checkpoint's own lengths `max_new_tokens` takes precedence.

    Raises:
        RequestError: an unknown argument, a value of the wrong type or range, or one that asks for something that this
            backend does not do. A checkpoint's own unsupported default is left out, as it asks for quality, not
            meaning.
    """
    values: dict[str, Any] = {}
    for name, value in (checkpoint_defaults or {}).items():
        if name in NAMES and value is not None:
            values[name] = value
    given: dict[str, Any] = {}
    if config is not None:
        given |= {k: v for k, v in _as_dict(config).items() if v is not None}
    given |= {name: value for name, value in arguments.items() if value is not None}
    for name, value in given.items():
        if name in NAMES:
            values[name] = value
        elif name not in _WITHOUT_EFFECT and not _asks_for_nothing(name, value):
            raise RequestError(
                f"generate() was given {name}={short(value)}, which this backend does not do; it takes "
                f"{', '.join(NAMES)}: leave it out."
            )
    if "max_new_tokens" not in given and "max_new_tokens" in values:
        usual = values.pop("max_new_tokens")  # the checkpoint's own, which is cut at the context's end
        if "max_length" not in given:
            values["usual_new_tokens"] = token_count("max_new_tokens", usual)
            values.pop("max_length", None)
    if "do_sample" not in given:
        off = {**FILTERS_OFF, "typical_p": 1}
        asked = "temperature" in given or any(given.get(name, number) != number for name, number in off.items())
        values["do_sample"] = (asked or values.get("do_sample", False)) and given.get("temperature") != 0
    if values["do_sample"] is True:
        values.setdefault("top_k", DEFAULT_TOP_K)
    values["stop_strings"] = stop_texts(values.get("stop_strings"))
    for name in ("max_new_tokens", "max_length"):
        if name in values:
            values[name] = token_count(name, values[name])
    values |= {name: READERS[name](name, value) for name, value in values.items() if name in READERS}
    if not isinstance(values.get("pad_token_id", 0), Integral):
        raise RequestError(f"pad_token_id is {short(values['pad_token_id'])}, but one token id is needed: correct it.")
    options = GenerationOptions(**values)
    options.sampling()  # refuse bad values now, before anything is loaded or compiled
    _check_sequences(options)
    _check_lengths(options, given)
    return options


def _check_sequences(options: GenerationOptions) -> None:
    """Refuse numbers of sequences that contradict each other."""
    number, beams = options.num_return_sequences, options.num_beams
    if beams > 1 and number > beams:
        raise RequestError(
            f"num_return_sequences={number} were asked for of num_beams={beams}, which give at most {beams}: raise "
            "num_beams, or lower num_return_sequences."
        )
    if beams == 1 and number > 1 and not options.do_sample:
        raise RequestError(
            f"num_return_sequences={number} were asked for, but greedy decoding gives one sequence for each prompt: "
            "pass do_sample=True or num_beams."
        )
    if beams > 1 and options.output_hidden_states:
        raise RequestError(
            f"output_hidden_states was asked for with num_beams={beams}, whose beams are not kept: leave one of them "
            "out."
        )
    if beams > 1 and options.logprobs is not None:
        raise RequestError(
            f"logprobs={options.logprobs} was asked for with num_beams={beams}, which chooses no tokens one by one: "
            "pass output_scores=True instead."
        )


def _check_lengths(options: GenerationOptions, given: Mapping[str, Any]) -> None:
    """Refuse a smallest length that the caller asked for above the largest."""
    fewest, most = options.min_new_tokens, options.max_new_tokens
    if most is None and options.max_length is None:
        most = options.usual_new_tokens or DEFAULT_MAX_NEW_TOKENS
    if "min_new_tokens" in given and fewest is not None and most is not None and fewest > most:
        raise RequestError(
            f"min_new_tokens={fewest} was asked for, but at most {most} new tokens are generated: raise "
            "max_new_tokens, or lower min_new_tokens."
        )
    total = options.max_length if options.max_new_tokens is None else None
    if "min_length" in given and fewest is None and total is not None and options.min_length > total:
        raise RequestError(
            f"min_length={options.min_length} was asked for, but max_length is {total}: raise max_length, or lower "
            "min_length."
        )


def _asks_for_nothing(name: str, value: Any) -> bool:
    return not hasattr(value, "__array__") and value in _NEUTRAL.get(name, ())


def _as_dict(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    raise RequestError(
        f"generation_config is a {type(config).__name__}, but a transformers GenerationConfig or a dict is needed."
    )
