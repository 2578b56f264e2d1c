"""Programs of text encoders: traced for each shape, and checked that padding changes nothing."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ttpu_any.aten.table import NEEDS_PLUGIN
from ttpu_any.check import TOLERANCE
from ttpu_any.sharding import batch_sharding
from ttpu_any.steps import position_offset
from ttpu_any.stock import context_of
from ttpu_any.trace import Shape, Traced, trace
from ttpu_core.errors import UnsupportedError
from ttpu_jax.params.placement import Placement

LENGTH, PADDING = 16, 3
"""Tokens of the texts of the self-check, and how many of the first are padding."""


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
        self._seen = placement.read_by_host()
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
            self._jitted[key] = jax.jit(lambda params, *given: traced(params, *given)[0], out_shardings=self._seen)
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
        function = jax.jit(lambda params, each: traced(params, each)[0], out_shardings=self._seen)
        return np.asarray(function(self.params, self._placed(tokens.astype(np.int32))), np.float32)[0]

    def _placed(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, batch_sharding(self.placement, len(array), array.ndim))


def _states(output: Any) -> Any:
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
