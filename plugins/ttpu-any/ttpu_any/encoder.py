"""A loaded text encoder on JAX, such as BERT: call it for hidden states, or serve it for embeddings. Texts are padded
on the right, and a mask says which tokens are real."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from ttpu_any.aten.table import NEEDS_PLUGIN
from ttpu_any.check import TOLERANCE
from ttpu_any.sharding import batch_sharding
from ttpu_any.steps import position_offset
from ttpu_any.stock import context_of
from ttpu_any.trace import Shape, Traced, trace
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.generation.events import StreamEvent, Timings
from ttpu_jax.generation.prompts import read_prompts
from ttpu_jax.params.placement import Placement

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig
    from ttpu_serve.runner import AdapterWeights

LENGTH, PADDING = 16, 3
"""Tokens of the texts of the self-check, and how many of the first are padding."""


@dataclass(frozen=True)
class EncoderOutput:
    """The result of calling an encoder: `last_hidden_state` [batch, tokens, hidden]. Rows at padding are undefined."""

    last_hidden_state: Any


class EncoderPrograms:
    """Traces and runs one encoder.

    Args:
        model: the stock model; its tensors may be on the meta device.
        params: name → array.
        placement: of the parameters.

    Attributes:
        context: the most tokens of a text.
        vocab_size: the number of tokens.
        pad: the token that fills texts up; models that find positions by it need their own.
    """

    def __init__(self, model: Any, params: dict[str, jax.Array], placement: Placement) -> None:
        self.model, self.params, self.placement = model, params, placement
        config = model.config.get_text_config()
        self.context = context_of(config) - position_offset(model)
        self.vocab_size = int(config.vocab_size)
        self.pad = int(getattr(config, "pad_token_id", None) or 0)
        self._masked: dict[tuple[int, int], Traced] = {}
        self._jitted: dict[tuple[int, int], Any] = {}

    def traced(self, rows: int, width: int) -> Traced:
        """Trace (tokens [rows, width], mask [rows, width], 1 for real tokens) → hidden states [rows, width, hidden].

        Raises:
            UnsupportedError: the model cannot be traced.
        """
        if (rows, width) not in self._masked:
            shape = Shape((rows, width))
            self._masked[rows, width] = trace(
                self.model, lambda forward, given: [_states(forward(input_ids=given[0], attention_mask=given[1]))],
                [shape, shape],
            )  # fmt: skip
        return self._masked[rows, width]

    def __call__(self, tokens: np.ndarray, mask: np.ndarray) -> jax.Array:
        """Hidden states [batch, width, hidden] of tokens [batch, width]; the mask [batch, width] is 1 for real ones.
        What is padding is replaced by the model's own token for it.

        Raises:
            UnsupportedError: the model cannot be traced.
        """
        key = (int(tokens.shape[0]), int(tokens.shape[1]))
        if key not in self._jitted:
            traced = self.traced(*key)
            self._jitted[key] = jax.jit(lambda params, *given: traced(params, *given)[0])
        tokens, mask = np.where(mask > 0, tokens, self.pad).astype(np.int32), mask.astype(np.int32)
        found: jax.Array = self._jitted[key](self.params, self._placed(tokens), self._placed(mask))
        return found

    def check(self, name: str, dtype: str) -> None:
        """Compare the hidden states of texts that are padded together with those of each text alone.

        Raises:
            UnsupportedError: they differ, so that embeddings would depend on what runs beside a text, or the model
                cannot be traced.
        """
        random = np.random.default_rng(0)
        tokens = random.integers(0, self.vocab_size, (2, LENGTH))
        tokens = np.where(tokens == self.pad, (tokens + 1) % self.vocab_size, tokens)
        mask = np.ones_like(tokens)
        mask[0, LENGTH - PADDING :] = 0
        together = np.asarray(self(tokens, mask), np.float32)
        for row, length in enumerate((LENGTH - PADDING, LENGTH)):
            expected = self._alone(tokens[row : row + 1, :length])
            error = np.abs(together[row, :length] - expected).max() / max(float(expected.std()), 1e-6)
            if not error <= TOLERANCE[dtype]:
                raise UnsupportedError(
                    f"{name} was to be run without a plugin, but the hidden states of a text that is padded are "
                    f"{error:.2g} standard deviations from those of the text alone, where {TOLERANCE[dtype]:g} may be "
                    f"rounding, so that its embeddings would be wrong{NEEDS_PLUGIN}"
                )

    def _alone(self, tokens: np.ndarray) -> np.ndarray:
        """Hidden states [width, hidden] of one text [1, width] when the model is given nothing else."""
        traced = trace(self.model, lambda forward, given: [_states(forward(input_ids=given[0]))], [Shape(tokens.shape)])
        function = jax.jit(lambda params, each: traced(params, each)[0])
        return np.asarray(function(self.params, self._placed(tokens.astype(np.int32))), np.float32)[0]

    def _placed(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, batch_sharding(self.placement, len(array), array.ndim))


class StockEncoder:
    """A text encoder whose parameters are on this backend's devices. `AutoModelForTPU.from_pretrained` makes it.

    Args:
        checkpoint: that it was loaded from.
        programs: of the model.
        dtype: of the parameters.
        tokenizer: the checkpoint's transformers tokenizer, or None.
        load_seconds: how long loading took.

    Attributes:
        timings: of loading.
        backend: the name of this backend.
        stop_ids: none, for it generates nothing.
    """

    backend = "jax"
    stop_ids: frozenset[int] = frozenset()

    def __init__(
        self,
        checkpoint: Checkpoint,
        programs: EncoderPrograms,
        dtype: np.dtype[Any],
        tokenizer: Any = None,
        load_seconds: float = 0.0,
    ) -> None:
        self.programs, self.dtype, self.tokenizer, self._checkpoint = programs, dtype, tokenizer, checkpoint
        self.timings = Timings(load_seconds=load_seconds)

    @property
    def params(self) -> dict[str, jax.Array]:
        """transformers' name → array."""
        return self.programs.params

    @property
    def context(self) -> int:
        """The most tokens of a text."""
        return self.programs.context

    @property
    def name(self) -> str:
        """The name of the checkpoint: its Hub id, or its directory's name."""
        source = str(self._checkpoint.source)
        return Path(source).resolve().name if Path(source).exists() else source

    @property
    def source(self) -> str:
        """The Hub id or the folder, as an absolute path, that the model was loaded from."""
        path = Path(self._checkpoint.source).expanduser()
        return str(path.resolve()) if path.exists() else str(self._checkpoint.source)

    @property
    def files(self) -> Path:
        """The folder of the checkpoint that the model was loaded from."""
        return self._checkpoint.path

    @property
    def spec(self) -> Any:
        """Refused: what reads it needs a decoder.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            f"{self.name} was to give logits, but it is a text encoder, which gives embeddings alone: use a decoder."
        )

    def __call__(self, inputs: Any = None, attention_mask: Any = None, *, input_ids: Any = None) -> EncoderOutput:
        """Compute hidden states [batch, tokens, hidden].

        Args:
            inputs: texts, lists of ids, an array [batch, tokens] of ids, or what a tokenizer returns.
            attention_mask: [batch, tokens], marks the real tokens of an array.
            input_ids: another name for `inputs`.

        Raises:
            RequestError: ids outside the vocabulary, or a text longer than the context.
            MissingDependencyError: text for a checkpoint without a tokenizer.
        """
        inputs = input_ids if inputs is None else inputs
        prompts = read_prompts(inputs, attention_mask, self.tokenizer, self.programs.vocab_size)
        width = max(map(len, prompts.prompts))
        if width > self.context:
            raise RequestError(
                f"a text has {width:,} tokens, but this model reads at most {self.context:,}: shorten it."
            )
        if prompts.array is not None:
            tokens = prompts.array
            mask = np.ones_like(tokens) if prompts.mask is None else np.asarray(prompts.mask, np.int32)
        else:
            tokens, mask = (np.zeros((len(prompts.ids), width), np.int32) for _ in range(2))
            for row, ids in enumerate(prompts.ids):
                tokens[row, : len(ids)], mask[row, : len(ids)] = ids, 1
        return EncoderOutput(self.programs(np.asarray(tokens), mask))

    def generate(self, *inputs: Any, **arguments: Any) -> NoReturn:
        """Refused: an encoder generates nothing.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            f"{self.name} was to generate text, but it is an encoder, which sees the tokens that follow and gives "
            "embeddings alone: use LLM(...).embed, or `ttpu serve` and /v1/embeddings."
        )

    def stream(self, prompt: Any, **arguments: Any) -> Iterator[StreamEvent]:
        """Refused: see `generate`.

        Raises:
            RequestError: always.
        """
        self.generate(prompt)

    def save_pretrained(self, directory: str | Path) -> Path:
        """Refused: the weights are those of the checkpoint.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            f"save_pretrained was called on {self.name}, which no plugin describes: its weights are still those of "
            f"{self.source}; copy that folder."
        )

    def engine_runner(self, config: EngineConfig, adapters: Mapping[str, AdapterWeights] | None = None) -> Any:
        """What serves this model in an engine: see `ttpu_any.encoder_runner`.

        Raises:
            RequestError: settings that need pages, or that contradict the model.
        """
        from ttpu_any.encoder_runner import EncoderRunner

        return EncoderRunner(self.programs, config)


def open_encoder(
    checkpoint: Checkpoint,
    model: Any,
    params: dict[str, jax.Array],
    placement: Placement,
    dtype: np.dtype[Any],
    tokenizer: Any,
    began: float,
) -> StockEncoder:
    """Check a loaded encoder against itself.

    Args:
        checkpoint: that it was loaded from.
        model: the stock model.
        params: name → array.
        placement: of the parameters.
        dtype: of the parameters.
        tokenizer: the checkpoint's transformers tokenizer, or None.
        began: when loading began, by `time.perf_counter`.

    Raises:
        UnsupportedError: the model cannot be traced, or what it computes depends on padding.
    """
    programs = EncoderPrograms(model, params, placement)
    programs.check(f"{checkpoint.source} ({type(model).__name__})", dtype.name)
    return StockEncoder(checkpoint, programs, dtype, tokenizer, time.perf_counter() - began)


def _states(output: Any) -> Any:
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
