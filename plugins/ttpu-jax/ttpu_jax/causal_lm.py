"""A loaded model on JAX: call it for logits, `generate` or `stream` for text, `save_pretrained` for a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.errors import RequestError
from ttpu_core.generation.events import StreamEvent, Timings
from ttpu_core.generation.options import GenerationOptions, options_from
from ttpu_core.mapping import FlaxMapping, pad_mapping
from ttpu_core.quantization.report import QuantizationReport
from ttpu_core.sharding.padding import Paddings
from ttpu_core.spec import ArchitectureSpec
from ttpu_jax.generation import beam_loop, by_engine, loop
from ttpu_jax.generation.call import Call, Reports
from ttpu_jax.generation.hidden_states import hidden_states
from ttpu_jax.generation.host_calls import HostCalls
from ttpu_jax.generation.programs import Programs
from ttpu_jax.generation.prompts import Prompts, left_pad, read_prompts, rectangle
from ttpu_jax.generation.results import CausalLMOutput, Completion, GenerateOutput
from ttpu_jax.generation.special_tokens import SpecialTokens
from ttpu_jax.model.decoder import Decoder
from ttpu_jax.ops.kernels import AdaptedKernel
from ttpu_jax.params.export import save_checkpoint
from ttpu_jax.text_tokenizer import TextTokenizer

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig
    from ttpu_serve.execution.engine_core import EngineCore
    from ttpu_serve.runner import AdapterWeights


class JaxCausalLM:
    """A causal language model whose parameters are on this backend's devices. `AutoModelForTPU.from_pretrained` makes
    it.

    Args:
        architecture: the family plugin's description of the model; `spec` is its data.
        checkpoint: the checkpoint that the model was loaded from; None for a model with other weights.
        programs: compiles and runs the model's programs.
        params: Flax path → `jax.Array`, padded for the mesh.
        dtype: of the parameters.
        tokenizer: the checkpoint's tokenizer, a `TextTokenizer` or transformers'; None without one.
        load_seconds: how long loading took.
        paddings: Flax path → padding, for the parameters that are padded.

    Attributes:
        timings: of loading, and of the call of `generate` or `stream` that began last. Where several threads call one
            model, `generate(return_dict_in_generate=True)` has those of its own call.
        backend: the name of this backend.
    """

    backend = "jax"

    def __init__(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint | None,
        programs: Programs,
        params: dict[str, Any],
        dtype: np.dtype[Any],
        tokenizer: Any = None,
        load_seconds: float = 0.0,
        paddings: Paddings | None = None,
    ) -> None:
        self.architecture, self.params, self.dtype, self._tokenizer = architecture, params, dtype, tokenizer
        self.timings = Timings(load_seconds=load_seconds)
        self.programs = programs
        self.paddings: Paddings = paddings or {}
        self.engine: EngineCore | None = None
        """The serving engine that `generate` and `stream` use, where paged attention is enabled."""
        self.quantization: QuantizationReport | None = None
        """What is quantized, how, and what is not and why; None for a model that is not quantized."""
        self._checkpoint = checkpoint

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's transformers tokenizer, or None. It is loaded when it is asked for, if it was not needed to
        read the checkpoint."""
        if isinstance(self._tokenizer, TextTokenizer):
            self._tokenizer = self._tokenizer.whole()
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def spec(self) -> ArchitectureSpec:
        """The architecture as data."""
        return self.architecture.spec

    def engine_runner(self, config: EngineConfig, adapters: Mapping[str, AdapterWeights] | None = None) -> Any:
        """What serves this model in an engine, a `ttpu_serve.runner.ModelRunner`; see `ttpu_jax.runner.build`.

        Raises:
            UnsupportedError: a model, or a mesh, that the engine cannot serve.
            RequestError: settings that contradict the model or each other.
            MappingError: an adapter of another model.
        """
        from ttpu_jax.runner.build import model_runner

        return model_runner(self, config, adapters)

    @property
    def name(self) -> str:
        """The name of the checkpoint: its Hub id, or its directory's name."""
        if self._checkpoint is None:
            return self.spec.model_type
        source = str(self._checkpoint.source)
        return Path(source).resolve().name if Path(source).exists() else source

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a sequence, as the checkpoint says."""
        named = self._checkpoint.generation_config if self._checkpoint else {}
        options = options_from({}, None, named)
        return SpecialTokens.of(options, self.architecture.config, named, self._tokenizer).stop_ids

    @property
    def module(self) -> Decoder:
        """The decoder as a Flax NNX module over these parameters."""
        return self.programs.model.module(self.params)

    @property
    def context(self) -> int:
        """The most tokens that a sequence may have: the config's limit, or the length to which its rope stretches it.
        """
        return self.spec.context

    def __call__(self, input_ids: Any, attention_mask: Any = None) -> CausalLMOutput:
        """Compute the logits, float32 [batch, seq, vocab], of input_ids [batch, seq] (or [seq], or lists of equal
        length).

        Positions follow `attention_mask` [batch, seq], so that the real tokens of a padded row have the same logits as
        the row without padding. Logits at padding are undefined.

        Raises:
            RequestError: the input is text, has ids outside the vocabulary, or is longer than the context, or a
                trainer has the weights.
        """
        self._need_weights()
        prompts = read_prompts(input_ids, attention_mask, self._tokenizer, self.spec.vocab_size)
        if prompts.form == "text":
            raise RequestError(
                "a model was called with text, but logits are computed for ids: call generate(), or tokenize."
            )
        ids = rectangle(prompts.ids) if prompts.array is None else prompts.array
        mask = np.ones(ids.shape, np.bool_) if prompts.mask is None else prompts.mask
        positions = np.where(mask, np.cumsum(mask, axis=1) - 1, -1)
        if positions.max() >= self.context:
            raise RequestError(
                f"the input has {positions.max() + 1:,} tokens, but this model's context holds {self.context:,}: "
                "shorten it."
            )
        return CausalLMOutput(self.programs.logits(ids.astype(np.int32), positions.astype(np.int32)))

    def generate(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        streamer: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        tokenizer: Any = None,
        assistant_model: Any = None,
        **arguments: Any,
    ) -> Any:
        """Continue one or more prompts; argument names and meanings are transformers'.

        Args:
            inputs: a string, a list of strings, chat messages, a list of ids, or an array [batch, seq] of ids.
            generation_config: a transformers GenerationConfig, or a dict of its fields.
            input_ids: another name for `inputs`, so that `generate(**tokenizer(...))` works.
            attention_mask: [batch, seq], marks the real tokens of an array, padded on either side. Without it, the pad
                token of an array is padding unless it ends sequences too, as in transformers.
            streamer: an object with `put(ids)` and `end()`, such as transformers' TextStreamer; one sequence only.
            logits_processor: transformers' logits processors, or functions of ids [rows, length] and scores
                [rows, vocab] that return scores. They run on the host at every token, which is slow.
            stopping_criteria: transformers' stopping criteria, or functions of the same arguments that return
                bool [rows]: which rows end.
            tokenizer: decodes tokens in place of the checkpoint's own, as for `stop_strings`; a serving engine uses its
                own in any case.
            assistant_model: a smaller model of this backend with the same tokenizer, which guesses tokens; one prompt
                only. The tokens are the same as without it, drawn ones too.
            **arguments: `GenerationOptions`: max_new_tokens (128), max_length, do_sample, temperature, top_k (50),
                top_p, min_p, typical_p, repetition_penalty, presence_penalty, frequency_penalty, seed, stop_strings,
                eos_token_id, stop_token_ids, pad_token_id, ignore_eos, min_new_tokens, min_length,
                num_return_sequences, num_beams, length_penalty, early_stopping, no_repeat_ngram_size, bad_words_ids,
                sequence_bias, suppress_tokens, begin_suppress_tokens, forced_eos_token_id, renormalize_logits,
                max_time, prompt_lookup_num_tokens, max_matching_ngram_size, num_assistant_tokens, logprobs,
                output_scores, output_logits, output_hidden_states (one more pass over the sequences),
                return_dict_in_generate (returns a `GenerateOutput`).

        Returns:
            For text the continuation as text, without the stop string that ended it; for ids an int array
            [batch * num_return_sequences, prompt + new], padded as the prompt was given: what transformers returns.
            Sampling is on if `do_sample` is, or if it is left out and a temperature above 0 or a filter is given.

        Raises:
            RequestError: an argument that is out of range or not supported, or a prompt longer than the context.
        """
        if inputs is not None and input_ids is not None:
            raise RequestError("generate() was given both inputs and input_ids, two names of one argument: pass one.")
        inputs = input_ids if inputs is None else inputs
        calls = HostCalls.of(logits_processor, stopping_criteria)
        prompts, options, special = self._request(inputs, generation_config, attention_mask, arguments)
        call = self._call(prompts, options, special, calls)
        call = replace(call, tokenizer=call.tokenizer if tokenizer is None else tokenizer, assistant=assistant_model)
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise RequestError(
                f"streamer is {streamer!r}, but an object with put() and end() is needed, such as a TextStreamer: "
                "pass one."
            )
        if streamer is not None and len(call.sequences) != 1:
            raise RequestError(
                f"a streamer follows one sequence, but {len(call.sequences)} were asked for: ask for one, or pass no "
                "streamer."
            )
        if options.num_beams > 1:
            return self._searched(prompts, call, streamer)
        if streamer is not None:
            streamer.put(np.asarray(prompts.ids))
        completions: dict[int, Completion] = {}
        reports, timings = Reports(), self._begin_timings()
        for event, completion in self._run(call, reports, timings):
            completions[event.index] = completion
            if streamer is not None:
                streamer.put(np.asarray([event.token_id]))
        if streamer is not None:
            streamer.end()
        done = [completions[index] for index in range(len(call.sequences))]
        return self._answer(prompts, call, done, reports, timings)

    def stream(
        self,
        prompt: Any = None,
        generation_config: Any = None,
        *,
        input_ids: Any = None,
        attention_mask: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        tokenizer: Any = None,
        assistant_model: Any = None,
        **arguments: Any,
    ) -> Iterator[StreamEvent]:
        """Yield one `StreamEvent` per token of one prompt as it is generated. The arguments are those of `generate`,
        without `streamer`.

        Args:
            prompt: the `inputs` of `generate`, of one prompt.
            generation_config: as in `generate`.
            input_ids: another name for `prompt`, so that `stream(**tokenizer(...))` works.
            attention_mask: as in `generate`.
            logits_processor: as in `generate`.
            stopping_criteria: as in `generate`.
            tokenizer: as in `generate`.
            assistant_model: as in `generate`.
            **arguments: as in `generate`.

        Raises:
            RequestError: several prompts or sequences, an argument that is out of range or not supported, or a prompt
                longer than the context.
        """
        if prompt is not None and input_ids is not None:
            raise RequestError("stream() was given both prompt and input_ids, two names of one argument: pass one.")
        prompt = input_ids if prompt is None else prompt
        calls = HostCalls.of(logits_processor, stopping_criteria)
        leave = ("num_beams", "num_return_sequences")  # the checkpoint's own, which are for `generate`
        prompts, options, special = self._request(prompt, generation_config, attention_mask, arguments, leave)
        if len(prompts.prompts) != 1:
            raise RequestError(f"stream() follows one prompt, but {len(prompts.prompts)} were given: call generate().")
        several = next((name for name in leave if getattr(options, name) > 1), None)
        if several is not None:
            raise RequestError(
                f"stream() follows one sequence, but {several}={getattr(options, several)} was given: call generate()."
            )
        call = self._call(prompts, options, special, calls)
        call = replace(call, tokenizer=call.tokenizer if tokenizer is None else tokenizer, assistant=assistant_model)
        return (event for event, _ in self._run(call, Reports(), self._begin_timings()))

    def save_pretrained(self, directory: str | Path) -> Path:
        """Write a checkpoint that transformers loads with identical tensors; returns its directory.

        Raises:
            RequestError: the model is quantized, adapters are trained beside it, a trainer has its weights, or
                `directory` is a file.
        """
        self._need_weights()
        if any(isinstance(value, AdaptedKernel) for value in self.params.values()):
            raise RequestError(
                "save_pretrained was called on a model beside which adapters are trained, but it writes weights alone: "
                "write the adapters with the trainer's save_model, or merge them with `ttpu export --merge`."
            )
        if self.programs.spec.kernel_formats:
            raise RequestError(
                "save_pretrained was called on a quantized model, but it writes dense weights, which this model no "
                "longer has: write a quantized checkpoint from the original one with `ttpu quantize`."
            )
        return self.save_parameters(
            directory, pad_mapping(self.architecture.mapping, self.paddings), self.params, self.dtype
        )

    def save_parameters(
        self, directory: str | Path, mapping: FlaxMapping, parameters: Mapping[str, Any], dtype: np.dtype[Any]
    ) -> Path:
        """Write a checkpoint with other parameters, and this model's config and small files; returns its directory.

        Args:
            directory: the checkpoint's folder.
            mapping: from the checkpoint's tensors to the parameters.
            parameters: path → array.
            dtype: of the parameters, which the config then states.

        Raises:
            RequestError: `directory` is a file.
        """
        source = self._checkpoint.path if self._checkpoint else None
        return save_checkpoint(directory, mapping, parameters, self.saved_config(dtype), source)

    def saved_config(self, dtype: np.dtype[Any]) -> dict[str, Any]:
        """The content of config.json for weights in a dtype."""
        source = self._checkpoint.path if self._checkpoint else None
        raw = source / "config.json" if source else None
        config = json.loads(raw.read_text()) if raw and raw.is_file() else self.architecture.config.to_dict()
        config.pop("torch_dtype", None)
        config["dtype"] = dtype.name
        if self._checkpoint and self._checkpoint.config.get("tie_word_embeddings") is False:
            config["tie_word_embeddings"] = False  # also where the weights said so against the file
        return config

    @property
    def source(self) -> str | None:
        """The Hub id or the folder, as an absolute path, that the model was loaded from."""
        if self._checkpoint is None:
            return None
        path = Path(self._checkpoint.source).expanduser()
        return str(path.resolve()) if path.exists() else str(self._checkpoint.source)

    @property
    def files(self) -> Path | None:
        """The folder of the checkpoint that the model was loaded from."""
        return self._checkpoint.path if self._checkpoint else None

    def _request(
        self, inputs: Any, config: Any, mask: Any, arguments: dict[str, Any], leave: tuple[str, ...] = ()
    ) -> tuple[Prompts, GenerationOptions, SpecialTokens]:
        """The prompts, options and special tokens of a call; `leave`: options of the checkpoint that are left out."""
        leave += () if self.engine is None else by_engine.BEYOND
        defaults = self._checkpoint.generation_config if self._checkpoint else {}
        options = options_from(arguments, config, {name: v for name, v in defaults.items() if name not in leave})
        if options.logprobs is not None and options.logprobs > self.spec.vocab_size:
            raise RequestError(
                f"logprobs of the {options.logprobs:,} likeliest tokens were asked for, but the vocabulary has "
                f"{self.spec.vocab_size:,}: lower it."
            )
        for name, tokens in options.named_tokens().items():
            if tokens and max(tokens) >= self.spec.vocab_size:
                raise RequestError(
                    f"{name} has the token id {max(tokens)}, but ids of this model run from 0 to "
                    f"{self.spec.vocab_size - 1}: correct it."
                )
        special = SpecialTokens.of(options, self.architecture.config, defaults, self._tokenizer)
        prompts = read_prompts(inputs, mask, self._tokenizer, self.spec.vocab_size, special.padding_of_prompts)
        return prompts, options, special

    def _need_weights(self) -> None:
        if not self.params and self.engine is None:
            raise RequestError(
                "a model was used while a trainer has its weights, which updates replace: use the trainer's `model`, "
                "which has the present ones until the next update."
            )

    def _call(self, prompts: Prompts, options: GenerationOptions, special: SpecialTokens, calls: HostCalls) -> Call:
        self._need_weights()
        if prompts.array is not None:
            heads = prompts.array.astype(np.int64)
        else:
            heads = left_pad(prompts.ids, max(map(len, prompts.prompts)), special.pad)[0].astype(np.int64)
        return Call(
            prompts.prompts,
            options,
            special.stop_ids,
            self._tokenizer,
            self.context,
            np.repeat(heads, options.num_return_sequences, axis=0),
            special.pad,
            calls.within(options.max_time),
        )

    def _searched(self, prompts: Prompts, call: Call, streamer: Any) -> Any:
        """The answer by beam search."""
        if streamer is not None:
            raise RequestError(
                f"a streamer was given with num_beams={call.options.num_beams}, which knows no token before the end: "
                "leave one of them out."
            )
        if call.guesses:
            raise RequestError(
                f"num_beams={call.options.num_beams} was given with assistant_model or prompt_lookup_num_tokens, whose "
                "guesses are checked for one sequence: leave one of them out."
            )
        reports, timings = Reports(), self._begin_timings()
        if self.engine is not None:
            by_engine.refuse(call)
        found = beam_loop.search(self.programs, call, timings, reports)
        answer = self._answer(prompts, call, found.completions, reports, timings)
        if isinstance(answer, GenerateOutput):
            return replace(answer, sequences_scores=found.scores, beam_indices=found.rows)
        return answer

    def _answer(
        self, prompts: Prompts, call: Call, done: list[Completion], reports: Reports, timings: Timings
    ) -> Any:
        """What `generate` returns for finished sequences."""
        if call.options.return_dict_in_generate:
            scores, logits = tuple(reports.scores) or None, tuple(reports.logits) or None
            states = None
            if call.options.output_hidden_states:
                mask = np.repeat(_mask(prompts, call), call.options.num_return_sequences, axis=0)
                states = hidden_states(self.programs, call, mask, done)
            return GenerateOutput(_sequences(call, done), done, timings, scores, logits, states)
        if prompts.form == "text":
            texts = [completion.text for completion in done]
            return texts[0] if prompts.single and len(texts) == 1 else texts
        return _sequences(call, done)

    def _begin_timings(self) -> Timings:
        """Those of a new call, which fills them itself: other threads may have replaced the model's by then."""
        timings = Timings(load_seconds=self.timings.load_seconds)
        self.timings = timings
        return timings

    def _run(self, call: Call, reports: Reports, timings: Timings) -> Iterator[tuple[StreamEvent, Completion]]:
        if self.engine is None:
            return loop.run(self.programs, call, timings, reports)
        by_engine.refuse(call)
        return by_engine.run(
            self.engine,
            [list(prompt.token_ids) for prompt in call.sequences],
            call.options,
            stop_ids=call.stop_ids,
            context=self.context,
            timings=timings,
        )


def _mask(prompts: Prompts, call: Call) -> np.ndarray:
    """bool [prompts, width], the real tokens of the prompts as the caller padded them, or we did."""
    if prompts.mask is not None:
        return prompts.mask
    width = call.heads.shape[1]
    return np.arange(width) >= width - np.array([[len(prompt)] for prompt in prompts.prompts])


def _sequences(call: Call, done: list[Completion]) -> np.ndarray:
    """Prompt and new ids [batch, length]; a sequence that ended early ends with its stop id and then padding."""
    tails = [completion.all_ids for completion in done]
    tail = np.full((len(done), max(map(len, tails))), call.pad, np.int64)
    for row, ids in enumerate(tails):
        tail[row, : len(ids)] = ids
    return np.concatenate([call.heads, tail], axis=1)
