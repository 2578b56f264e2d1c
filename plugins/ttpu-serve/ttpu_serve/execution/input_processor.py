"""Turns a caller's prompt and parameters into requests that can be scheduled: one `SequenceOutput` with its `Request`
per sequence. Invalid requests are refused."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, cast

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_core.generation.prompt import Prompt
from ttpu_core.generation.ranges import short
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.execution.bad_words import BadWords, sequences_of
from ttpu_serve.execution.declared_pooling import LAST, DeclaredPooling
from ttpu_serve.execution.logit_rules import NO_WORDS, Rules
from ttpu_serve.execution.sampling_level import level_of
from ttpu_serve.execution.sequence_output import SequenceOutput
from ttpu_serve.guided.guides import Guide, GuideFactory, GuidePlace, GuideState
from ttpu_serve.runner import SAMPLING_LEVELS, ModelRunner
from ttpu_serve.scheduling.request import AskedPooling, Pooling, Request

PromptInput = str | Sequence[int] | Mapping[str, Any] | Prompt
"""Text, token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}, which may hold a "cache_salt" too. A
`Prompt` is what `InputProcessor.read` made of one, or that with tokens of this model behind it."""
MOST_SEQUENCES = 16_384
MOST_PRIORITY = 2**31


class InputProcessor:
    """Checks and converts the requests of one engine."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        stop_ids: frozenset[int],
        declared: DeclaredPooling = LAST,
        guides: GuidePlace = "inline",
    ) -> None:
        """
        Args:
            runner: that serves the requests.
            tokenizer: the model's transformers tokenizer, or None.
            stop_ids: tokens that end a sequence.
            declared: what the checkpoint says of its embeddings.
            guides: where grammars are compiled and masks computed.
        """
        self.runner, self.tokenizer, self.stop_ids, self.declared = runner, tokenizer, stop_ids, declared
        self.limits, self.adapters = runner.limits, runner.adapters
        self.max_model_len = self.limits.max_model_len
        self.vocab_size = self.limits.vocab_size
        self.guides = GuideFactory(tokenizer, self.vocab_size, self.limits.logit_columns, stop_ids, guides)
        self._texts: dict[int, str] = {}

    def read(self, prompt: PromptInput) -> Prompt:
        """Return the prompt's token ids; texts are tokenized as the checkpoint specifies.

        Raises:
            RequestError: a text is given without a tokenizer, the prompt is empty, or an id is outside the vocabulary.
        """
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, Mapping):
            ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
            if ids is None and text is None:
                raise RequestError(
                    "a prompt was given as a mapping without prompt or prompt_token_ids: pass one of them."
                )
            if isinstance(ids, str):
                raise RequestError(
                    f"prompt_token_ids is {short(ids)}, but a list of token ids is needed: pass a text as prompt."
                )
            prompt = cast("str | Sequence[int]", text if ids is None else ids)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("a prompt was given as text, but the checkpoint has no tokenizer: pass token ids.")
            tokens = [int(token) for token in self.tokenizer.encode(prompt)]
        else:
            listed: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt
            if not isinstance(listed, Sequence) or isinstance(listed, bytes):
                raise RequestError(
                    f"a prompt is {short(listed)}, but a text, a list of token ids or a mapping with one of them is "
                    "needed: correct it."
                )
            tokens = [self._token(token) for token in listed]
        if not tokens:
            raise RequestError("the prompt has no tokens: pass at least one.")
        return Prompt(tuple(tokens))

    def _token(self, token: Any) -> int:
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < self.vocab_size:
            raise RequestError(
                f"the prompt holds {token!r} as a token id, but this model's are whole numbers from 0 to "
                f"{self.vocab_size - 1}: correct it."
            )
        return int(token)

    def outputs(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        priority: int = 0,
        adapter: str | None = None,
        pooling: AskedPooling | None = None,
        cache_salt: str | None = None,
    ) -> list[SequenceOutput]:
        """Check a request and return one output per sequence (`params.n`; one for pooling).

        Args:
            request_id: the caller's id; sequences of one request share it.
            prompt: a text, token ids, or a mapping with one of them and possibly `cache_salt`.
            params: sampling parameters.
            priority: requests with lower values run first.
            adapter: name of a loaded LoRA adapter; None uses the base model.
            pooling: asks for the prompt's embedding instead of generated tokens.
            cache_salt: only requests with the same salt share cached prefixes.

        Raises:
            RequestError: the prompt or a value cannot be served.
        """
        read = self.read(prompt)
        if isinstance(prompt, Mapping):
            cache_salt = cache_salt or prompt.get("cache_salt")
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= MOST_PRIORITY:
            raise RequestError(
                f"priority is {str(priority)[:40]}, but a whole number below 2**31 is needed: correct it."
            )
        pooled = self._pooling_of(pooling)
        self._check(read, params, pooled)
        if adapter is not None and (self.adapters is None or adapter not in self.adapters.names):
            known = ", ".join(self.adapters.names if self.adapters else ()) or "none"
            raise RequestError(f"the adapter {adapter!r} was asked for, but those loaded are: {known}.")
        if params.seed is None:
            params = replace(params, seed=secrets.randbelow(2**32))
        salt = self._salt(read, adapter, cache_salt)
        bad_words = NO_WORDS
        if params.bad_words:
            bad_words = BadWords(sequences_of(params.bad_words, self.tokenizer))
        count = params.n if pooled is None else 1
        made: list[SequenceOutput] = []
        rules: Rules | None = None
        guide = None if params.guided is None else self.guides.compile(params.guided)
        for index in range(count):
            own = params.of_sequence(index) if count > 1 else params
            if index and own.prompt_logprobs is not None:
                own = replace(own, prompt_logprobs=None)  # those of the first sequence are those of all
            # A character that no caller's id has a reason to hold keeps the names of several sequences apart.
            name = request_id if count == 1 else f"{request_id}\0{index}"
            request = self._request(name, read, own, priority, adapter, pooled, salt)
            if rules is None:  # all sequences have the same
                rules = Rules.for_request(request, self.vocab_size, self.limits.logit_columns, bad_words)
            made.append(self._output(request, request_id, index, rules, guide))
        return made

    def _request(
        self,
        name: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        adapter: str | None,
        pooling: Pooling | None,
        salt: bytes,
    ) -> Request:
        room = self.max_model_len - len(prompt)
        request = Request(
            name,
            list(prompt.token_ids),
            params,
            priority=priority,
            adapter=self.adapters.names[adapter] if self.adapters and adapter else 0,
            salt=salt,
            pooling=pooling,
            stop_ids=frozenset() if params.ignore_eos else self.stop_ids,
            max_output=1 if pooling else min(params.max_tokens or room, room),
        )
        if params.prompt_logprobs is not None or pooling in ("mean", "cls"):
            request.findable = False  # every token of it has to pass
        return request

    def _output(
        self, request: Request, request_id: str, index: int, rules: Rules, guide: Guide | None
    ) -> SequenceOutput:
        params = request.params
        output = SequenceOutput(request, request_id, index, self.tokenizer, self._text_of)
        if rules.any:
            output.rules = rules
        if guide is not None:
            stops = request.stop_ids | {*params.stop_token_ids}
            output.guide = GuideState(guide.begin(), min_tokens=params.min_tokens, stop_ids=stops)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        return output

    def _salt(self, prompt: Prompt, adapter: str | None, cache_salt: str | None) -> bytes:
        """Return the salt of the prompt's page hashes: the caller's salt, the adapter, and the prompt's length if keys
        depend on it."""
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise RequestError(f"cache_salt is {cache_salt!r}, but a text is needed: correct it, or leave it out.")
        chosen = blake2b(cache_salt.encode("utf-8", "surrogatepass")).digest() if cache_salt else b""
        of_adapter = self.adapters.salt(adapter) if self.adapters and adapter else b""
        return chosen + of_adapter + self.runner.length_salt(len(prompt))

    def _text_of(self, token: int) -> str | None:
        """Return one token as text, as log-probabilities show it."""
        if self.tokenizer is None:
            return None
        if token not in self._texts:
            self._texts[token] = str(self.tokenizer.decode([token]))
        return self._texts[token]

    def _pooling_of(self, asked: AskedPooling | None) -> Pooling | None:
        if asked is None or asked in ("last", "mean", "cls"):
            return asked
        if asked != "auto":
            raise RequestError(f"pooling is {asked!r}, but auto, last, mean and cls are known: use one of them.")
        if self.declared.mode is None:
            raise RequestError(self.declared.reason)
        return self.declared.mode

    def _check(self, prompt: Prompt, params: SamplingParams, pooling: Pooling | None) -> None:
        if pooling is not None and not self.limits.hidden_states:
            raise RequestError(
                "an embedding was asked for, but no plugin describes this model, whose own code gives logits alone: "
                "use a model type with a plugin (`ttpu list-plugins`)."
            )
        if pooling is None and not self.limits.generates:
            raise RequestError(
                "text was asked for, but this model is a text encoder, which gives embeddings alone: use "
                "/v1/embeddings, or LLM(...).embed."
            )
        if params.n > MOST_SEQUENCES:
            raise RequestError(f"n is {params.n:,}, but one request may have {MOST_SEQUENCES:,} sequences: lower it.")
        room = self.max_model_len - len(prompt)
        if room < (0 if pooling else 1):
            raise RequestError(
                f"the prompt has {len(prompt):,} tokens, but this engine's sequences have at most "
                f"{self.max_model_len:,}, output included: shorten the prompt.",
                code="context_length_exceeded",
            )
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but after the prompt's {len(prompt):,} tokens only {room:,} fit "
                f"into the {self.max_model_len:,} of this engine's sequences: lower it, or shorten the prompt."
            )
        limits = self.limits
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > limits.max_logprobs:
                raise RequestError(
                    f"{name} is {value}, but this engine reports at most {limits.max_logprobs}: lower it, or "
                    "raise max_logprobs where the engine is built."
                )
        if params.prompt_logprobs is not None and not limits.prompt_logprobs:
            raise RequestError(
                "prompt_logprobs was asked for, as echo with logprobs does too, but this engine was built without: "
                "leave it out."
            )
        if params.has_penalties and not limits.penalties:
            raise RequestError("penalties were asked for, but this engine was built without: leave them out.")
        if level_of(params) > SAMPLING_LEVELS.index(limits.sampling_level):
            raise RequestError(
                f"the request needs the sampling level {SAMPLING_LEVELS[level_of(params)]!r}, but this engine was "
                f"built with sampling_level={limits.sampling_level!r}: ask for less, or raise it where the engine is "
                "built."
            )
        if params.stop and self.tokenizer is None:
            raise RequestError(
                "stop strings were given, but the checkpoint has no tokenizer: use stop_token_ids instead."
            )
