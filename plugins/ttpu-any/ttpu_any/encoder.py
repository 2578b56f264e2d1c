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

from ttpu_any.encoder_programs import EncoderPrograms
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.errors import RequestError
from ttpu_core.generation.events import StreamEvent, Timings
from ttpu_jax.generation.prompts import read_prompts
from ttpu_jax.params.placement import Placement

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig
    from ttpu_serve.runner import AdapterWeights

@dataclass(frozen=True)
class EncoderOutput:
    """The result of calling an encoder: `last_hidden_state` [batch, tokens, hidden]. Rows at padding are undefined."""

    last_hidden_state: Any


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
