"""Offline inference. In: a checkpoint and prompts; out: finished outputs. Names are vLLM's, so that scripts move over
by changing an import."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.api.collector import Collector
from ttpu_serve.api.outputs import EmbeddingOutput, RequestOutput
from ttpu_serve.execution.engine_core import EngineCore
from ttpu_serve.execution.input_processor import PromptInput


class LLM:
    """A model and the engine that serves it.

    Args:
        model: a checkpoint's directory or Hub id, or a model from `AutoModelForTPU.from_pretrained`.
        dtype, parallelism_strategy, plan, …: what `from_pretrained` takes.
        backend: the name of the backend that loads a checkpoint; left out, the default one.
        tensor_parallel_size: the same as parallelism_strategy="tensor=N".
        progress: called as progress(stage, done, total) while loading and compiling; True shows bars, None nothing.
        engine options: `ttpu_serve.api.engine_config.EngineConfig`: max_model_len, max_num_seqs,
            max_num_batched_tokens, kv_cache_dtype, enable_prefix_caching, speculative, adapters, …

    Raises:
        TTPUError: the checkpoint, its plugin, a setting or the memory does not do, and why.
    """

    def __init__(
        self,
        model: Any,
        *,
        dtype: Any = "auto",
        tensor_parallel_size: int | None = None,
        backend: str | None = None,
        progress: Any = True,
        **options: Any,
    ) -> None:
        from ttpu_serve.api.open_engine import open_engine, read_options

        if tensor_parallel_size is not None:
            if options.get("parallelism_strategy") is not None:
                raise RequestError(
                    "tensor_parallel_size and parallelism_strategy were both given, but each says how the model is "
                    "sharded: pass one of them."
                )
            options["parallelism_strategy"] = f"tensor={tensor_parallel_size}" if tensor_parallel_size > 1 else None
        load, config = read_options(model, {"dtype": dtype, **options}, backend)
        self.engine: EngineCore = open_engine(model, load, config, backend=backend, progress=progress)
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts (texts, or lists of token ids), all at once; outputs are in the order of the prompts.

        `sampling_params`, `adapter` and `priority` are one for all prompts, or one for each. `use_tqdm` shows a bar.

        Raises:
            RequestError: a prompt or value that cannot be served; no prompt is then answered.
        """
        asked = _prompts(prompts)
        params = _each("sampling_params", SamplingParams() if sampling_params is None else sampling_params, len(asked))
        adapters = _each("adapter", adapter, len(asked))
        priorities = _each("priority", priority, len(asked))
        collectors = self._run(
            [
                (prompt, own, {"adapter": name, "priority": rank})
                for prompt, own, name, rank in zip(asked, params, adapters, priorities, strict=True)
            ],
            show=use_tqdm,
        )
        return [collector.output for collector in collectors]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, of {"role", "content"} messages, by the tokenizer's chat template.

        Args:
            messages: one conversation, or several.
            sampling_params, adapter, priority, use_tqdm: as for `generate`.
            add_generation_prompt: an answer begins behind the messages.
            chat_template: a Jinja template in place of the tokenizer's.
            tools: functions that the model may call, as OpenAI's API describes them.

        Raises:
            RequestError: there is no chat template, or it refuses the messages.
        """
        chats: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            chat_tokens(
                self.get_tokenizer(),
                chat,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                tools=tools,
            )
            for chat in chats
        ]
        return self.generate(prompts, sampling_params, adapter=adapter, priority=priority, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        pooling: Literal["last", "mean"] = "last",
        adapter: str | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingOutput]:
        """Embeddings of length one: the final hidden state of each prompt's last token, or the mean over its tokens."""
        if pooling not in ("last", "mean"):
            raise RequestError(f"pooling is {pooling!r}, but last and mean are known: use one of them.")
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        requests = [(prompt, params, {"pooling": pooling, "adapter": adapter}) for prompt in _prompts(prompts)]
        outputs = [collector.embedding for collector in self._run(requests, show=use_tqdm)]
        return [output for output in outputs if output is not None]

    def get_tokenizer(self) -> Any:
        """The checkpoint's transformers tokenizer, or None."""
        return self.engine.tokenizer

    def load_adapter(self, name: str, directory: str) -> None:
        """Load a LoRA adapter in PEFT's format for `generate(..., adapter=name)`, in place of one of the same name.

        Raises:
            RequestError: no room (`max_adapters`, `max_lora_rank`), or no adapter there.
            CheckpointError, MappingError, UnsupportedError: an adapter that this model cannot use.
        """
        self.engine.load_adapter(name, directory)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter."""
        self.engine.unload_adapter(name)

    def reset_prefix_cache(self) -> None:
        """Forget what prompts have in common with earlier ones."""
        self.engine.reset_prefix_cache()

    def sleep(self) -> None:
        """Give the devices' memory back: weights go to the host, cached keys and values are dropped."""
        self.engine.sleep()

    def wake_up(self) -> None:
        """Undo `sleep`."""
        self.engine.wake_up()

    def update_weights(self, weights: str | Path | Mapping[str, Any]) -> None:
        """Replace weights in place, as RL loops do between rollouts: a checkpoint's directory, or a mapping from the
        names under which transformers saves tensors to arrays; shapes must be those of the model.

        Raises:
            RequestError, MappingError, CheckpointError: what does not fit, before anything is replaced.
        """
        self.engine.update_weights(weights)

    def close(self) -> None:
        """Give the devices' memory back for good."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, requests: list[tuple[PromptInput, SamplingParams, dict[str, Any]]], *, show: bool
    ) -> list[Collector]:
        """Serve requests until all are done; on any error, and on Ctrl-C, none is left behind."""
        names = [str(next(self._numbers)) for _ in requests]
        collectors: dict[str, Collector] = {}
        with self.engine.inbox(names) as inbox, _bar(len(requests), show) as advance:
            for name, (prompt, params, options) in zip(names, requests, strict=True):
                ids = self.engine.token_ids(prompt)
                self.engine.add(name, ids, params, **options)
                sequences = 1 if options.get("pooling") else params.n
                collectors[name] = Collector(name, prompt if isinstance(prompt, str) else None, ids, sequences)
            left = len(collectors)
            while left:
                for delta in inbox.take():
                    collector = collectors[delta.request_id]
                    collector.take(delta)
                    if collector.output.finished:
                        left -= 1
                        advance()
        return list(collectors.values())


def chat_tokens(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    """The tokens of a conversation by the tokenizer's chat template; `options` are those of `apply_chat_template`.

    Raises:
        RequestError: no tokenizer, no template, or messages that it refuses.
    """
    if tokenizer is None:
        raise RequestError("messages were given, but the checkpoint has no tokenizer: pass token ids to generate().")
    if not (options.get("chat_template") or getattr(tokenizer, "chat_template", None)):
        raise RequestError(
            "messages were given, but this checkpoint has no chat template: pass chat_template, or plain text prompts."
        )
    try:
        given = {name: value for name, value in options.items() if value is not None}
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **given)
    except Exception as error:  # templates raise whatever they like
        reason = " ".join(str(error).split())[:300]
        raise RequestError(f"the chat template refuses these messages ({reason}): correct them.") from error
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def _prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    one = isinstance(prompts, str | Mapping) or getattr(prompts, "ndim", 2) == 1
    if one or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer)):  # type: ignore[index]
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _each(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{count} prompts were given with {len(value)} {name}: pass one, or one for each prompt.")
    return list(value)


class _bar:
    """A progress bar over requests on a terminal, or nothing."""

    def __init__(self, total: int, show: bool) -> None:
        self._total, self._show, self._progress = total, show, None

    def __enter__(self) -> Any:
        if not self._show:
            return lambda: None
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        progress = Progress(*columns, transient=True)
        progress.start()
        self._progress = progress  # type: ignore[assignment]
        task = progress.add_task("requests", total=self._total)
        return lambda: progress.advance(task)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
