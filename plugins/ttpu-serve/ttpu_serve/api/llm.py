"""Offline inference: `LLM` turns prompts into finished outputs. Its names are vLLM's, so that scripts move over by
changing an import."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from ttpu_core.errors import RequestError, TTPUError, UnsupportedError
from ttpu_core.generation.chat_template import chat_text
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.api.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from ttpu_serve.api.call_arguments import (
    list_of_prompts,
    places_of,
    prompt_salt,
    prompt_text,
    values_for_each,
    with_values,
)
from ttpu_serve.api.collector import Collector, PromptsFailedError, check_all
from ttpu_serve.api.default_sampling import default_sampling, within
from ttpu_serve.api.lora_request import LoRARequest, absolute, adapters_of
from ttpu_serve.api.outputs import EmbeddingOutput, RequestOutput, ScoreOutput
from ttpu_serve.api.progress_bar import ProgressBar
from ttpu_serve.api.template_variables import check_variables
from ttpu_serve.execution.engine_core import EngineCore
from ttpu_serve.execution.errors import QueueFullError
from ttpu_serve.execution.input_processor import PromptInput
from ttpu_serve.pair_scores import NO_CLASSES, check_embeds, cosine, paired
from ttpu_serve.scheduling.request import AskedPooling

_Asked = tuple[PromptInput, SamplingParams, dict[str, Any]]
"""A prompt, its parameters, and options of `EngineCore.add`."""


class LLM:
    """A model and the engine that serves it. Several threads may call it: their requests share the engine's steps.

    Args:
        model: a checkpoint's directory or Hub id, or a model from `AutoModelForTPU.from_pretrained`.
        dtype, parallelism_strategy, plan, …: options of `from_pretrained`.
        tokenizer: directory or Hub id of another checkpoint, whose tokenizer is used.
        backend: name of the backend that loads a checkpoint; None is the default one.
        tensor_parallel_size: equals parallelism_strategy="tensor=N".
        enable_expert_parallel: equals sharding_rules={"expert": "tensor"}: of several devices each has some whole
            experts of a mixture, not a part of every expert.
        progress: called as progress(stage, done, total) while loading and compiling; True shows bars, None nothing.
        enable_lora: make room for an adapter that is loaded later, as max_adapters=1 does.
        generation_config: "auto" lets the checkpoint's generation_config.json say how to sample where a call says
            nothing, as far as the engine can; "vllm" or "none" leaves it out.
        engine options: fields of `ttpu_serve.api.engine_config.EngineConfig`: max_model_len, max_num_seqs,
            max_num_batched_tokens, kv_cache_dtype, enable_prefix_caching, speculative, adapters, …

    Raises:
        TTPUError: the checkpoint or its plugin is invalid, or memory does not suffice.
        RequestError: a setting is invalid, or both tensor_parallel_size and parallelism_strategy are given, or
            enable_expert_parallel and sharding_rules or a plan, or a tokenizer with a model that is loaded.
    """

    def __init__(
        self,
        model: Any,
        *,
        dtype: Any = "auto",
        tokenizer: str | Path | None = None,
        tensor_parallel_size: int | None = None,
        enable_expert_parallel: bool = False,
        backend: str | None = None,
        progress: Any = True,
        enable_lora: bool = False,
        generation_config: str = "auto",
        **options: Any,
    ) -> None:
        from ttpu_serve.api.open_engine import open_engine, read_options

        if generation_config not in ("auto", "vllm", "none"):
            raise RequestError(
                f"generation_config is {generation_config!r}, but it is auto, which reads the checkpoint's "
                "generation_config.json, or vllm or none, which leave it out: write one of them."
            )

        if enable_lora and not any(options.get(name) for name in ("adapters", "max_adapters", "max_loras")):
            options["max_adapters"] = 1
        if not isinstance(model, str | Path) and not hasattr(model, "backend"):
            raise RequestError(
                f"model is {model!r}, but a checkpoint's directory, a Hub id, or a model that AutoModelForTPU loaded "
                "is needed: pass one of them."
            )
        loaded = not isinstance(model, str | Path)
        if loaded and tokenizer is not None:
            raise RequestError("a loaded model was given with tokenizer, but it has its own: leave tokenizer out.")
        if tensor_parallel_size is not None:
            whole = isinstance(tensor_parallel_size, int) and not isinstance(tensor_parallel_size, bool)
            if not whole or tensor_parallel_size < 1:
                raise RequestError(
                    f"tensor_parallel_size is {tensor_parallel_size!r}, but a whole number, 1 or more, is needed: "
                    "correct it."
                )
            if options.get("parallelism_strategy") is not None:
                raise RequestError(
                    "tensor_parallel_size and parallelism_strategy were both given, but each says how the model is "
                    "sharded: pass one of them."
                )
            options["parallelism_strategy"] = f"tensor={tensor_parallel_size}" if tensor_parallel_size > 1 else None
        if enable_expert_parallel:
            for name in ("sharding_rules", "plan"):
                if options.get(name) is not None:
                    raise RequestError(
                        f"enable_expert_parallel and {name} were both given, but each says how experts are sharded: "
                        "pass one of them."
                    )
            meshes = (options.get(name) for name in ("parallelism_strategy", "sharding_strategy", "mesh"))
            # A loaded model refuses rules, as all that says how it is loaded. One device has all experts.
            if loaded or any(mesh is not None for mesh in meshes):
                options["sharding_rules"] = {"expert": "tensor"}
        load, config = read_options(model, {"dtype": dtype, **options}, backend)
        self.engine: EngineCore = open_engine(
            model,
            load,
            config,
            backend=backend,
            progress=progress,
            tokenizer=None if tokenizer is None else str(tokenizer),
        )
        self._default_sampling: dict[str, Any] = {}
        if not loaded and generation_config == "auto":
            asked, limits = default_sampling(str(model), options.get("revision")), self.engine.input_processor.limits
            self._default_sampling = within(asked, penalties=limits.penalties, sampling_level=limits.sampling_level)
        self._numbers = itertools.count()
        self._adapter_paths = {name: absolute(path) for name, path in (options.get("adapters") or {}).items()}

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generate completions of all prompts in one batch. Outputs are in the order of the prompts.

        Args:
            prompts: one prompt or several: texts, lists of token ids, or mappings with `prompt` or `prompt_token_ids`.
            sampling_params: parameters for all prompts, or one per prompt; None is `get_default_sampling_params()`.
            prompt_token_ids: token ids of one prompt or several, instead of `prompts`.
            adapter: name of a LoRA adapter for all prompts, or one per prompt.
            lora_request: the same as vLLM names it; an adapter that is not loaded yet is loaded.
            priority: priority of all prompts, or one per prompt; lower values run first.
            use_tqdm: show a progress bar.

        Raises:
            RequestError: a prompt or a value cannot be served; no output is returned then.
            PromptsFailedError: the engine failed at some prompts; the error has the outputs of the others.
            Exception: a whole step of the engine failed; no output is returned then.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise RequestError("prompts or prompt_token_ids are needed, and not both: pass one of them.")
        asked = list_of_prompts(prompt_token_ids if prompts is None else prompts)  # type: ignore[arg-type]
        needed: dict[str, str] = {}
        if lora_request is not None:
            adapter, needed = adapters_of(lora_request, adapter)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = values_for_each("sampling_params", sampling_params, len(asked))
        for own in params:
            if not isinstance(own, SamplingParams):
                raise RequestError(
                    f"sampling_params holds {own!r}, but SamplingParams are needed: pass SamplingParams(...), or one "
                    "for each prompt."
                )
        adapters = values_for_each("adapter", adapter, len(asked))
        priorities = values_for_each("priority", priority, len(asked))
        collectors = self._run(
            [
                (prompt, own, {"adapter": name, "priority": rank})
                for prompt, own, name, rank in zip(asked, params, adapters, priorities, strict=True)
            ],
            places_of("prompts", len(asked), "prompts"),
            needed,
            show=use_tqdm,
        )
        outputs = [collector.output for collector in collectors]
        check_all(collectors, outputs)
        return outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generate the next message of one or several conversations, rendered with the tokenizer's chat template.

        Args:
            messages: one conversation of {"role", "content"} messages, or several.
            sampling_params, adapter, lora_request, priority, use_tqdm: as for `generate`.
            add_generation_prompt: a reply begins behind the messages.
            continue_final_message: the reply continues the last message instead.
            chat_template: a Jinja template in place of the tokenizer's.
            chat_template_kwargs: further variables of the template, such as enable_thinking.
            tools: functions that the model may call, as OpenAI's API describes them.

        Raises:
            MissingDependencyError: the checkpoint has no tokenizer.
            RequestError: there is no chat template, it refuses the messages, or `chat_template_kwargs` has the name of
                an argument of rendering, such as tokenize.
            PromptsFailedError: as for `generate`.
        """
        check_variables(chat_template_kwargs)
        chats: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[PromptInput] = []
        with self.engine.turns.lock:  # a step of another thread may use the tokenizer
            tokenizer = self.get_tokenizer()
            text_of = partial(
                chat_text,
                tokenizer,
                template=chat_template,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for chat in chats:
                try:
                    text = text_of([with_values(message) for message in chat])
                except RequestError:  # of a template that adds arguments to a text, or of one that refuses both
                    text = text_of(chat)
                ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
                prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(
            prompts, sampling_params, adapter=adapter, lora_request=lora_request, priority=priority, use_tqdm=use_tqdm
        )

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        pooling: AskedPooling = "auto",
        adapter: str | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingOutput]:
        """Return embeddings of unit length.

        Args:
            prompts: texts or token ids.
            pooling: which final hidden states: of each prompt's last token, the mean of all, or of the first (cls).
                "auto" is what the checkpoint's files declare (`modules.json` of sentence-transformers), else "last".
            adapter: name of a loaded LoRA adapter; None uses the base model.
            use_tqdm: show a bar.

        Raises:
            RequestError: `pooling` is unknown, the checkpoint declares another, or a prompt cannot be served.
            PromptsFailedError: the engine failed at some prompts; the error has the embeddings of the others.
            Exception: a whole step of the engine failed; no embedding is returned then.
        """
        asked = list_of_prompts(prompts)
        return self._embed(asked, places_of("prompts", len(asked), "prompts"), pooling, adapter, show=use_tqdm)

    def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        pooling: AskedPooling = "auto",
        adapter: str | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingOutput]:
        """Return pooled hidden states, which are embeddings here: see `embed`.

        Raises:
            RequestError, PromptsFailedError: as for `embed`.
        """
        return self.embed(prompts, pooling=pooling, adapter=adapter, use_tqdm=use_tqdm)

    def score(
        self,
        text_1: PromptInput | Sequence[PromptInput],
        text_2: PromptInput | Sequence[PromptInput],
        *,
        pooling: Literal["last", "mean", "cls"] | None = None,
        adapter: str | None = None,
        use_tqdm: bool = False,
    ) -> list[ScoreOutput]:
        """Return the cosine of the embeddings of each pair of texts.

        Args:
            text_1: one text for all of `text_2`, or as many.
            text_2: one text or several.
            pooling: which hidden states are compared, for a model that is not made for embeddings.
            adapter: name of a loaded LoRA adapter; None uses the base model.
            use_tqdm: show a bar.

        Raises:
            RequestError: the numbers of texts do not go together, or the model makes no embeddings and `pooling` is
                left out.
            PromptsFailedError: the engine failed at some texts, numbered through `text_1` and then `text_2`.
        """
        check_embeds(self.engine, pooling)
        first, second = list_of_prompts(text_1), list_of_prompts(text_2)
        pairs = paired(len(first), len(second))
        lists = (("text_1", first), ("text_2", second))
        places = [place or name for name, texts in lists for place in places_of(name, len(texts), "texts")]
        found = self._embed([*first, *second], places, pooling or "auto", adapter, show=use_tqdm)
        both = ((found[one], found[len(first) + other]) for one, other in pairs)
        return [
            ScoreOutput(f"{one.request_id}_{other.request_id}", cosine(one.embedding, other.embedding))
            for one, other in both
        ]

    def classify(self, prompts: PromptInput | Sequence[PromptInput], **options: Any) -> NoReturn:
        """Refused: engines compute no classifier's head.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(NO_CLASSES)

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Search the likeliest continuations of each prompt; see `ttpu_serve.api.beam_search`.

        Args:
            prompts: one prompt or several.
            params: width, length and ranking.
            lora_request: an adapter for all of them. If another thread replaces it during the search, it is loaded
                again for the next step.
            use_tqdm: show a bar for each step.

        Raises:
            RequestError: there are more beams than the engine's log-probabilities allow, or a prompt cannot be served.
            TTPUError: the engine failed at a beam.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(
                f"params is {params!r}, but BeamSearchParams are needed: pass BeamSearchParams(beam_width=..., "
                "max_tokens=...)."
            )
        adapter, needed = (None, {}) if lora_request is None else adapters_of(lora_request, None)
        for name, path in needed.items():  # all steps use the adapter that is loaded now
            needed[name] = path or self._adapter_paths.get(name, "")
        asked = list_of_prompts(prompts)
        places = places_of("prompts", len(asked), "prompts")
        ids = [self._ids_of(prompt, place) for prompt, place in zip(asked, places, strict=True)]
        limits = self.engine.runner.limits
        most = limits.max_model_len - max(map(len, ids), default=0)
        if params.max_tokens > most:
            raise RequestError(
                f"max_tokens is {params.max_tokens}, but the context of {limits.max_model_len} leaves {most} behind "
                "the longest prompt: lower it."
            )
        stop_ids = self.engine.input_processor.stop_ids

        def next_tokens(given: list[list[int]], numbers: list[int], params: SamplingParams) -> list[RequestOutput]:
            sequences: list[_Asked] = [
                ({"prompt_token_ids": tokens, "cache_salt": prompt_salt(asked[number])}, params, {"adapter": adapter})
                for tokens, number in zip(given, numbers, strict=True)
            ]
            collectors = self._run(sequences, [places[number] for number in numbers], needed, show=use_tqdm)
            outputs = [collector.output for collector in collectors]
            try:
                check_all(collectors, outputs)
            except PromptsFailedError as error:
                raise TTPUError(error.reason) from error
            return outputs

        found = beam_search(ids, params, next_tokens, stop_ids, limits.max_logprobs)
        if (tokenizer := self.get_tokenizer()) is not None:
            for output in found:
                for sequence in output.sequences:
                    sequence.text = tokenizer.decode(sequence.tokens)
        return found

    def get_tokenizer(self) -> Any:
        """The checkpoint's transformers tokenizer, or None."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling that the checkpoint's generation_config.json asked for when it was opened, as `ttpu serve` has
        it; of a model that was loaded before, `SamplingParams()`."""
        return SamplingParams(**self._default_sampling)

    def load_adapter(self, name: str, directory: str) -> None:
        """Load a LoRA adapter in PEFT's format for `generate(..., adapter=name)`. It replaces an adapter of the same
        name.

        Raises:
            RequestError: the limits `max_adapters` or `max_lora_rank` do not suffice, or the directory holds no
                adapter.
            CheckpointError, MappingError, UnsupportedError: this model cannot use the adapter.
        """
        with self.engine.turns.lock:
            self.engine.load_adapter(name, directory)
            self._adapter_paths[name] = absolute(directory)

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter."""
        with self.engine.turns.lock:
            self.engine.unload_adapter(name)
            self._adapter_paths.pop(name, None)

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        self.engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory: move the weights to the host and drop the KV cache, which is level 1 of vLLM.

        Raises:
            RequestError: another level is asked for.
        """
        if level != 1:
            raise RequestError(
                f"level is {level!r}, but weights go to the host, which is level 1 of vLLM: leave it out."
            )
        self.engine.sleep()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`.

        Raises:
            RequestError: `tags` are given.
        """
        if tags is not None:
            raise RequestError(f"tags is {tags!r}, but weights and KV cache come back together: leave it out.")
        self.engine.wake_up()

    def update_weights(self, weights: str | Path | Mapping[str, Any]) -> None:
        """Replace weights in place, as RL loops do between rollouts. `weights` is a checkpoint's directory, or a
        mapping from tensor names of the transformers checkpoint to arrays of the model's shapes.

        Raises:
            RequestError, MappingError, CheckpointError: the weights do not fit; nothing is replaced then.
        """
        self.engine.update_weights(weights)

    def close(self) -> None:
        """Free the devices' memory for good."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load_asked(self, name: str, path: str) -> None:
        """Load an adapter, unless it was loaded from this path already; without a path it must be loaded."""
        if name in self.engine.adapters and (not path or self._adapter_paths.get(name) == absolute(path)):
            return
        if not path:
            raise RequestError(
                f"the adapter {name!r} was asked for, but it is not loaded, and its lora_path is empty: give the "
                "directory."
            )
        self.load_adapter(name, path)

    def _embed(
        self,
        prompts: list[PromptInput],
        places: Sequence[str | None],
        pooling: AskedPooling,
        adapter: str | None,
        *,
        show: bool,
    ) -> list[EmbeddingOutput]:
        """Return embeddings of prompts; see `embed`. `places`: as for `_run`."""
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        requests: list[_Asked] = [(prompt, params, {"pooling": pooling, "adapter": adapter}) for prompt in prompts]
        collectors = self._run(requests, places, {}, show=show)
        outputs = [collector.embedding for collector in collectors]
        check_all(collectors, outputs)
        return [output for output in outputs if output is not None]

    def _ids_of(self, prompt: PromptInput, place: str | None) -> list[int]:
        with self._noted(place):
            return self.engine.token_ids(prompt)

    @contextmanager
    def _noted(self, place: str | None) -> Iterator[None]:
        """Add a note that names the prompt to a refusal. A full queue and a closed engine are not about a prompt."""
        try:
            yield
        except RequestError as error:
            if place is not None and not isinstance(error, QueueFullError) and not self.engine.closed:
                error.add_note(f"This is about {place}.")
            raise

    def _run(
        self, requests: list[_Asked], places: Sequence[str | None], needed: Mapping[str, str], *, show: bool
    ) -> list[Collector]:
        """Serve requests until all have finished or failed. On an error of the call itself, such as Ctrl-C or a prompt
        that cannot be served, abort those that are left.

        Args:
            requests: prompts, parameters and options of `EngineCore.add`.
            places: for each request, the caller's words for its prompt; None adds no note to its refusal.
            needed: adapters and their paths, as `_adapters_of` returns them.
            show: show a progress bar.
        """
        read = [self._ids_of(prompt, place) for (prompt, _, _), place in zip(requests, places, strict=True)]
        names = [str(next(self._numbers)) for _ in requests]
        collectors: dict[str, Collector] = {}
        with self.engine.inbox(names) as inbox, ProgressBar(len(requests), show) as advance:
            with self.engine.turns.lock:  # no other thread replaces an adapter before all requests are added
                for adapter, path in needed.items():
                    self._load_asked(adapter, path)
                for name, ids, place, (prompt, params, options) in zip(names, read, places, requests, strict=True):
                    with self._noted(place):
                        self.engine.add(name, ids, params, cache_salt=prompt_salt(prompt), **options)
                    sequences = 1 if options.get("pooling") else params.n
                    collectors[name] = Collector(name, prompt_text(prompt), ids, sequences)
            left = len(collectors)
            while left:
                for delta in inbox.take():
                    collector = collectors[delta.request_id]
                    collector.take(delta)
                    if collector.output.finished:
                        left -= 1
                        advance()
        return list(collectors.values())
