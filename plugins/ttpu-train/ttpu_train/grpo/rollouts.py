"""One rollout: the completions of some prompts with their rewards, as rows that a loss is computed of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from ttpu_train.grpo.arguments import GRPOArguments
from ttpu_train.grpo.worker import Completion
from ttpu_train.runner import Batch


@dataclass(frozen=True)
class Rollout:
    """Completions of prompts, those of a prompt next to each other.

    Attributes:
        tokens: int32 [rows, seq]: prompt, completion, padding.
        lengths: int32 [rows, 2]: tokens of the prompt, and of the completion.
        kept: float32 [rows], 0 for completions that are left out of the loss.
        advantages: float32 [rows].
        old_logprobs: float32 [rows, seq], of the trainer's weights when it was sampled; None where they are those of
            the update itself.
        ref_logprobs: float32 [rows, seq], of the weights before training; None without beta.
        importance: float32 [rows, seq], the ratio of the trainer's probabilities to the engine's, limited; None without
            the correction.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    kept: np.ndarray
    advantages: np.ndarray
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    importance: np.ndarray | None = None

    @property
    def mask(self) -> np.ndarray:
        """float32 [rows, seq], 1 for the tokens of completions that are trained on."""
        places = np.arange(self.tokens.shape[1])
        begin, end = self.lengths[:, :1], self.lengths.sum(1, keepdims=True)
        return ((places >= begin) & (places < end)).astype(np.float32) * self.kept[:, None]

    @property
    def positions(self) -> np.ndarray:
        """int32 [rows, seq], -1 for padding."""
        places = np.broadcast_to(np.arange(self.tokens.shape[1], dtype=np.int32), self.tokens.shape)
        return np.where(places < self.lengths.sum(1, keepdims=True), places, np.int32(-1))

    def plain(self) -> Batch:
        """The rows with weight 1 for each token that is trained on."""
        return Batch(self.tokens, self.mask, self.positions)

    def taken(self, rows: np.ndarray) -> Self:
        """The rows of the numbers `rows` [taken], in their order."""
        arrays: dict[str, Any] = {name: None if one is None else one[rows] for name, one in self._arrays().items()}
        return type(self)(**arrays)

    def saved(self) -> dict[str, Any]:
        """All of it as JSON, bit for bit: float32 numbers become decimals that read back to the same bits."""
        return {
            name: None if one is None else {"dtype": one.dtype.name, "values": one.tolist()}
            for name, one in self._arrays().items()
        }

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Self:
        """Undo `saved`."""
        arrays: dict[str, Any] = {
            name: None if one is None else np.asarray(one["values"], one["dtype"]) for name, one in saved.items()
        }
        return cls(**arrays)

    def _arrays(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


def update_rows(args: GRPOArguments, rollout: Rollout, rows: slice) -> Batch:
    """The rows of one update. The losses of a row's tokens are multiplied by its number in `scales`, and the sum of all
    is divided by the sum of `shares`: so every loss type is the same however rows are divided."""
    mask = rollout.mask[rows]
    tokens = mask.sum(1)
    ones = np.ones(len(mask), np.float32)
    scales, shares = {
        "grpo": (1 / np.maximum(tokens, 1), ones),
        "bnpo": (ones, tokens),
        "dapo": (ones, ones * (rollout.mask.sum() / len(rollout.tokens))),
        "dr_grpo": (ones, ones * args.max_completion_length),
    }[args.loss_type]
    extra = {"advantages": rollout.advantages[rows], "scales": scales, "shares": shares}
    for name in ("old_logprobs", "ref_logprobs", "importance"):
        values = getattr(rollout, name)
        if values is not None:
            extra[name] = values[rows]
    extra = {name: np.ascontiguousarray(values, np.float32) for name, values in extra.items()}
    return Batch(rollout.tokens[rows], mask, rollout.positions[rows], extra=extra)


def rows_of(prompts: Sequence[list[int]], completions: Sequence[Completion], length: int, padding: int) -> np.ndarray:
    """Tokens int32 [rows, length] of prompts with their completions."""
    tokens = np.full((len(prompts), length), padding, np.int32)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        both = [*prompt, *completion.tokens]
        tokens[row, : len(both)] = both
    return tokens


def importance_ratios(
    args: GRPOArguments, completions: Sequence[Completion], rollout: Rollout
) -> tuple[np.ndarray, dict[str, float]]:
    """The ratio of the trainer's probabilities to the engine's, limited as the arguments say, float32 [rows, seq], and
    what the log shows of the difference; formulas as TRL's `vllm_importance_sampling_mode`."""
    assert rollout.old_logprobs is not None
    sampled = np.zeros_like(rollout.old_logprobs)
    for row, completion in enumerate(completions):
        begin = int(rollout.lengths[row, 0])
        sampled[row, begin : begin + len(completion.tokens)] = completion.logprobs
    mask = rollout.mask
    difference = (rollout.old_logprobs - sampled) * mask
    by_sequence = args.importance_sampling_mode.startswith("sequence")
    ratio = np.exp(difference.sum(1, keepdims=True) if by_sequence else difference)
    least = -np.inf if args.importance_sampling_clip_min is None else args.importance_sampling_clip_min
    most = args.importance_sampling_clip_max
    if args.importance_sampling_mode.endswith("truncate"):
        ratio = np.clip(ratio, least, most)
    else:
        ratio = np.where((ratio < least) | (ratio > most), 0.0, ratio)
    seen = np.abs(difference[mask > 0])
    metrics = {
        "sampling/sampling_logp_difference/mean": float(seen.mean()) if seen.size else 0.0,
        "sampling/sampling_logp_difference/max": float(seen.max()) if seen.size else 0.0,
        "sampling/importance_sampling_ratio/mean": float((ratio if by_sequence else ratio[mask > 0]).mean()),
    }
    return np.broadcast_to(ratio, difference.shape).astype(np.float32), metrics
