"""The rollout worker: a serving engine on the devices of the training, which reads the trainer's weights. It sleeps
during updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from ttpu_core.errors import TTPUError
from ttpu_train.grpo.arguments import GRPOArguments
from ttpu_train.live_engine import HandsWeights, LiveEngine
from ttpu_train.runner import Batch, TrainRunner


class RolloutRunner(HandsWeights, Protocol):
    """A `TrainRunner` whose weights an engine can read, and which compares with its own."""

    def token_logprobs(self, batch: Batch, temperature: float, *, initial: bool = False) -> np.ndarray:
        """float32 [rows, seq], the log-probability of each token of this process's rows given those before it, where
        the batch has weight; 0 elsewhere.

        Args:
            batch: the rows.
            temperature: that logits are divided by.
            initial: of the weights before training.
        """
        ...


@dataclass(frozen=True)
class Completion:
    """A sampled completion.

    Attributes:
        tokens: with the stop token that ended it.
        logprobs: of the tokens, of the model without temperature; None if not asked for.
        ended: it ended by itself, not by its length.
    """

    tokens: list[int]
    logprobs: list[float] | None
    ended: bool


class RolloutWorker:
    """Samples completions.

    Args:
        runner: of the training.
        args: of the run.
        max_length: the most tokens of a prompt with its completion.
        rows: completions that are sampled at once.

    Attributes:
        live: the engine.

    Raises:
        UnsupportedError: the backend's weights cannot be served while they are trained.
    """

    def __init__(self, runner: TrainRunner, args: GRPOArguments, max_length: int, rows: int) -> None:
        self._runner = cast(RolloutRunner, runner)
        self._args = args
        self._with_logprobs = args.importance_sampling_correction
        penalties = args.repetition_penalty != 1
        options = {
            "max_model_len": max_length,
            "max_num_seqs": min(rows, 256),
            "sampling_level": "all" if self._with_logprobs or penalties else "draw",
            "penalties": penalties,
            "prompt_logprobs": False,
            "max_logprobs": 1,
            **args.engine_options,
        }
        self.live = LiveEngine(runner, options, "method='grpo'")

    def generate(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[Completion]:
        """Sample a completion of each prompt with the present weights.

        Args:
            prompts: token ids.
            seeds: of each completion. The same seeds, prompts and weights give the same tokens.

        Raises:
            UnsupportedError: the engine cannot serve the model or its mesh.
            MissingDependencyError: no serving engine is installed.
            TTPUError: a request failed in the engine.
        """
        with self.live.awake() as engine:
            tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
            logprobs: dict[str, list[float]] = {name: [] for name in tokens}
            reasons: dict[str, str] = {}
            try:
                for name, prompt, seed in zip(tokens, prompts, seeds, strict=True):
                    engine.add(name, prompt, self._args.sampling(seed))
                while len(reasons) < len(tokens):
                    for delta in engine.step():
                        name = delta.request_id
                        if delta.error is not None:
                            raise TTPUError(delta.error)
                        tokens[name] += delta.token_ids
                        if delta.logprobs is not None:
                            logprobs[name] += (
                                own[token].logprob for own, token in zip(delta.logprobs, delta.token_ids, strict=True)
                            )
                        if delta.finish_reason is not None:
                            reasons[name] = delta.finish_reason
            except BaseException:
                for name in tokens:
                    engine.abort(name)
                raise
        return [
            Completion(own, logprobs[name] if self._with_logprobs else None, reasons[name] == "stop")
            for name, own in tokens.items()
        ]

    def logprobs(self, batch: Batch, at_once: int, *, initial: bool = False) -> np.ndarray:
        """The log-probabilities of the tokens with weight, by the trainer's own forward pass, float32 [rows, seq].

        Args:
            batch: rows.
            at_once: rows that are computed at once.
            initial: with the weights before training.
        """
        parts = [
            Batch(batch.tokens[first:end], batch.weights[first:end], batch.positions[first:end])
            for first, end in ((first, first + at_once) for first in range(0, len(batch.tokens), at_once))
        ]
        found = [self._runner.token_logprobs(part, self._args.temperature, initial=initial) for part in parts]
        return np.concatenate(found)

    def close(self) -> None:
        """Free the engine's memory."""
        self.live.close()
