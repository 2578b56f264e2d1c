"""Reward models: a decoder whose head gives one number for a text, opened from the checkpoint of a language model or
from one that transformers' `AutoModelForSequenceClassification` saved with one label."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.checkpoint import Checkpoint, open_checkpoint
from ttpu_core.checkpoint.header import TensorReader
from ttpu_core.config.key_audit import refuse_ignored
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.loading import describe_checkpoint
from ttpu_jax.causal_lm import JaxCausalLM
from ttpu_jax.params.dtypes import stored_dtype
from ttpu_jax.train.objectives.reward import SCORE, RewardDecoder, rewards_of
from ttpu_jax.train.rows import row_layout
from ttpu_jax.train.score_head import TENSOR, without_head

if TYPE_CHECKING:
    from ttpu_jax.backend import JaxBackend
    from ttpu_jax.load_options import JaxLoadOptions

CLASSES = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
"""What transformers calls the classes of its sequence classifiers by model type."""
ROWS, LEAST = 32, 32
"""Texts that are judged at once, and the length to which the shortest are filled up; others to a power of 2."""


class JaxRewardModel(JaxCausalLM):
    """A loaded reward model; its parameters are those of the decoder without a language model head.

    Attributes:
        score: float32 [1, hidden], the score head; None where the checkpoint has none.
        pad_token_id: that transformers finds the end of a text by.
    """

    score: np.ndarray | None = None
    pad_token_id: int | None = None

    def generate(self, *_: Any, **__: Any) -> Any:
        """Refuse.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            "generate() was called on a reward model, but that has no language model head: open the language model."
        )

    stream = generate

    def rewards(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """The reward of each text, float32 [rows], from its token ids.

        Raises:
            RequestError: a text is longer than the model's context, or the model has no score head.
        """
        if self.score is None:
            raise RequestError(
                f"{self.name} was to reward texts, but the checkpoint has no {TENSOR}: train it with method='reward'."
            )
        longest = max(len(row) for row in rows)
        if longest > self.context:
            raise RequestError(
                f"a text of {longest:,} tokens was to be rewarded by {self.name}, whose context holds "
                f"{self.context:,}: shorten prompts or completions."
            )
        at_once = -(-ROWS // (shards := row_layout(self.programs.runtime.placement).shards)) * shards
        width = min(self.context, max(LEAST, 1 << (longest - 1).bit_length()))
        found = []
        for first in range(0, len(rows), at_once):
            part = rows[first : first + at_once]
            tokens, positions = np.zeros((at_once, width), np.int32), np.full((at_once, width), -1, np.int32)
            for place, row in enumerate(part):
                tokens[place, : len(row)], positions[place, : len(row)] = row, np.arange(len(row))
            found.append(np.asarray(self._rewards(self._held, tokens, positions))[: len(part)])
        return np.concatenate(found)

    @property
    def _held(self) -> dict[str, Any]:
        return {**self.params, SCORE: jnp.asarray(self.score)}

    @property
    def _rewards(self) -> Any:
        if "_compiled" not in vars(self):
            programs = self.programs
            model = RewardDecoder(programs.spec, programs.runtime)
            self._compiled = jax.jit(partial(rewards_of, model, pad_token_id=self.pad_token_id))
        return self._compiled

    def saved_config(self, dtype: np.dtype[Any]) -> dict[str, Any]:
        """The content of config.json, by which transformers opens a classifier with one label."""
        config = super().saved_config(dtype)
        for name in ("num_labels", "problem_type"):
            config.pop(name, None)
        named = classifier_of(self.spec.model_type)
        config |= {"architectures": [named], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        if self.pad_token_id is not None:
            config["pad_token_id"] = self.pad_token_id
        return config


def open_reward_model(backend: JaxBackend, source: str | Path, options: JaxLoadOptions) -> JaxRewardModel:
    """Open a checkpoint without its language model head.

    Args:
        backend: that opens models.
        source: a checkpoint's folder or Hub id.
        options: how it is loaded.

    Raises:
        UnsupportedError: transformers has no classifier of this type, or the weights are quantized.
    """
    checkpoint = open_checkpoint(source, revision=options.revision)
    checkpoint, architecture = describe_checkpoint(checkpoint, options.patch_packs)
    for sentence in refuse_ignored(checkpoint.config):
        warnings.warn(sentence, stacklevel=3)
    classifier_of(architecture.spec.model_type)
    if architecture.config.get("quantization_config") or options.quantization is not None:
        raise UnsupportedError(
            f"a reward model was to be made of {source} with quantized weights, but all of its weights are trained: "
            "open the checkpoint that is not quantized."
        )
    model = backend.open(without_head(architecture), checkpoint, options)
    opened = JaxRewardModel(
        model.architecture, checkpoint, model.programs, model.params, model.dtype, model.tokenizer,
        model.timings.load_seconds, model.paddings,
    )  # fmt: skip
    opened.score = _stored_score(checkpoint)
    opened.pad_token_id = architecture.config.get("pad_token_id")
    return opened


def classifier_of(model_type: str) -> str:
    """The name of transformers' class that classifies texts with this model.

    Raises:
        UnsupportedError: there is none.
    """
    found = _classifiers().get(model_type)
    if found is None:
        raise UnsupportedError(
            f"a reward model of type {model_type!r} was asked for, but transformers, whose format it is saved in, has "
            "no sequence classifier of that type: use the text model of another type, such as llama or qwen3."
        )
    return found


@cache
def _classifiers() -> dict[str, str]:
    """transformers' sequence classifiers by model type, read from its source: importing that takes long, and torch."""
    folder = find_spec("transformers")
    assert folder is not None and folder.origin is not None
    source = Path(folder.origin).parent / "models" / "auto" / "modeling_auto.py"
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == CLASSES:
            assert isinstance(statement.value, ast.Call)
            return dict(ast.literal_eval(statement.value.args[0]))
    return {}


def _stored_score(checkpoint: Checkpoint) -> np.ndarray | None:
    """float32 [1, hidden], the score head in a checkpoint; None if there is none.

    Raises:
        UnsupportedError: it has several labels.
    """
    info = checkpoint.tensors.get(TENSOR)
    if info is None:
        return None
    if info.shape[0] != 1:
        raise UnsupportedError(
            f"{checkpoint.source} was to be opened as a reward model, but its {TENSOR} has {info.shape[0]} labels: use "
            "a checkpoint with one (num_labels=1)."
        )
    stored = np.empty(info.shape, stored_dtype(info.dtype, TENSOR))
    with TensorReader() as reader:
        reader.read_into(info, stored.reshape(-1).view(np.uint8).data)
    return stored.astype(np.float32)
