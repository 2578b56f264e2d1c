"""Settings of an engine: a frozen `EngineConfig` that is checked when it is made and completed for a model and a
platform."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import MAX_LOGPROBS
from ttpu_serve.guided.guides import PLACES, GuidePlace
from ttpu_serve.runner import SAMPLING_LEVELS
from ttpu_serve.speculative.config import SpeculativeConfig, speculative_config

KV_CACHE_DTYPES = {
    "auto": None,
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
    "int8": "int8",
}


@dataclass(frozen=True)
class EngineConfig:
    """Limits and options of one engine. None leaves an option to the engine.

    max_model_len: maximum tokens of one sequence; None uses the model's context length.
    max_num_seqs: requests that run at once. max_num_batched_tokens: tokens per step.
    page_size: tokens per page of the KV cache. num_pages: pages of the largest group; None fills the free memory.
    kv_cache_memory: bytes per device for pages; None uses what remains after weights and programs.
    memory_utilization: share of what remains of each device that pages may take, instead of the default share.
    kv_cache_dtype: auto (the model's dtype), float32, bfloat16, float16, fp8, int8.
    max_waiting: waiting requests beyond which new ones are refused.
    sequence_buckets, token_buckets: sizes of compiled steps, instead of the defaults.
    speculative: "ngram", "ngram:4", a checkpoint's path, or a mapping (`ttpu_serve.speculative`).
    adapters: name → directory of a LoRA adapter in PEFT's format.
    strict_compile: while serving, a program that was not compiled ahead raises an error instead of being compiled.
    compile_meanwhile: serve when the programs with which any request can be served are compiled, and compile the others
    while serving; strict_compile compiles all before.
    sampling_level: which sampler programs are compiled: "greedy", "draw" (temperature, top-k, top-p, min-p), or "all"
    (also token rules, penalties and log-probabilities). Requests that need a higher level are refused.
    penalties: support presence, frequency and repetition penalties, at five bytes per request slot and vocabulary
    token. prompt_logprobs: support log-probabilities of prompts.
    guides: where grammars of guided decoding are compiled and masks computed: "inline", in this process; "isolated", in
    processes of their own, which survive the grammars of strangers; "off" refuses them.

    Raises:
        RequestError: a value is out of range or unknown.
    """

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    kv_cache_memory: int | None = None
    memory_utilization: float | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_waiting: int | None = None
    sequence_buckets: tuple[int, ...] | None = None
    token_buckets: tuple[int, ...] | None = None
    speculative: str | Mapping[str, Any] | SpeculativeConfig | None = None
    adapters: Mapping[str, str] | None = None
    max_adapters: int | None = None
    max_lora_rank: int | None = None
    max_logprobs: int = MAX_LOGPROBS
    strict_compile: bool = False
    compile_meanwhile: bool = False
    sampling_level: str = "all"
    penalties: bool = True
    prompt_logprobs: bool = True
    overlap: bool = True
    guides: GuidePlace = "inline"

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages",
                     "kv_cache_memory", "max_waiting", "max_adapters", "max_lora_rank", "max_logprobs"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise RequestError(f"{name} is {value!r}, but a whole number, 1 or more, is needed: correct it.")
        share = self.memory_utilization
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
            raise RequestError(f"memory_utilization is {share!r}, but a share above 0, up to 1, is needed: correct it.")
        if share is not None and (self.kv_cache_memory is not None or self.num_pages is not None):
            raise RequestError(
                "memory_utilization was given with kv_cache_memory or num_pages, two ways to say how much memory pages "
                "take: pass one of them."
            )
        for name in ("sequence_buckets", "token_buckets"):
            value = getattr(self, name)
            if value is not None:
                if not value or not all(isinstance(size, int) and size >= 1 for size in value):
                    raise RequestError(f"{name} is {value!r}, but sizes of 1 or more are needed: correct it.")
                object.__setattr__(self, name, tuple(sorted(value)))
        if self.guides not in PLACES:
            raise RequestError(f"guides is {self.guides!r}, but {', '.join(PLACES)} are known: use one of them.")
        if self.sampling_level not in SAMPLING_LEVELS:
            raise RequestError(
                f"sampling_level is {self.sampling_level!r}, but {', '.join(SAMPLING_LEVELS)} are known: use one of "
                "them."
            )
        if self.sampling_level != "all":
            object.__setattr__(self, "penalties", False)
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise RequestError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}, but {', '.join(KV_CACHE_DTYPES)} are known: use one of "
                "them."
            )

    @property
    def kv_dtype(self) -> str | None:
        """The dtype of cached keys and values; None is the model's."""
        return KV_CACHE_DTYPES[self.kv_cache_dtype]

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The settings of speculative decoding, or None if it is off.

        Raises:
            RequestError: `speculative` has an unknown form.
        """
        return None if self.speculative is None else speculative_config(self.speculative)

    def filled(
        self, context: int, *, max_num_seqs: int, max_num_batched_tokens: int, page_size: int
    ) -> EngineConfig:
        """Return the configuration with every option set that does not depend on free memory.

        Args:
            context: the model's context length in tokens.
            max_num_seqs, max_num_batched_tokens, page_size: the backend's defaults for its platform.

        Raises:
            RequestError: `max_model_len` exceeds the context, or settings contradict each other.
        """
        if self.max_model_len is not None and self.max_model_len > context:
            raise RequestError(
                f"max_model_len is {self.max_model_len:,}, but this model's context holds {context:,}: lower it."
            )
        length = self.max_model_len or context
        sequences = self.max_num_seqs or max_num_seqs
        tokens = self.max_num_batched_tokens or max(max_num_batched_tokens, sequences)
        if not self.enable_chunked_prefill and tokens < length:
            raise RequestError(
                f"enable_chunked_prefill is off and max_num_batched_tokens is {tokens:,}, but a prompt may have "
                f"{length:,}: raise max_num_batched_tokens, lower max_model_len, or leave chunked prefill on."
            )
        for name, most in (("sequence_buckets", sequences), ("token_buckets", tokens)):
            if max(getattr(self, name) or (0,)) > most:
                raise RequestError(
                    f"{name} has {max(getattr(self, name))}, but no step is larger than {most}: leave it out, or raise "
                    f"{'max_num_seqs' if name == 'sequence_buckets' else 'max_num_batched_tokens'}."
                )
        if tokens < sequences:
            raise RequestError(
                f"max_num_batched_tokens is {tokens}, but max_num_seqs is {sequences} and each running request takes "
                "one token per step: raise the first or lower the second."
            )
        return replace(
            self,
            max_model_len=length,
            max_num_seqs=sequences,
            max_num_batched_tokens=tokens,
            page_size=self.page_size or page_size,
        )


NAMES = tuple(field.name for field in fields(EngineConfig))
