"""The batches of GRPO: completions are sampled with the weights as they are, rewarded, and given out in the parts of
one update each. What is sampled depends on the run's seed, the number of the rollout and the weights alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ttpu_core.errors import CheckpointError, RequestError
from ttpu_train.callbacks import TrainerState
from ttpu_train.grpo.arguments import GRPOArguments
from ttpu_train.grpo.prompts import Prompt, Prompts
from ttpu_train.grpo.rewards import scored
from ttpu_train.grpo.rollouts import Rollout, importance_ratios, rows_of, update_rows
from ttpu_train.grpo.worker import Completion, RolloutWorker
from ttpu_train.runner import Batch


class RolloutBatches(Iterator[Batch]):
    """An endless iterator over the rows of each update.

    Args:
        args: of the run.
        prompts: in their order.
        worker: samples completions.
        tokenizer: makes texts of them.
        state: what reward functions are told of the run.
        seed: of sampling.
        rows: of one update.
        parts: that one update is computed in.

    Attributes:
        epoch: passes over the prompts so far, with their fraction.
        steps_per_epoch: updates of a pass on average: a rollout may read on into the next pass.

    Raises:
        RequestError: numbers of rows that do not divide each other.
    """

    def __init__(
        self,
        args: GRPOArguments,
        prompts: Prompts,
        worker: Callable[[], RolloutWorker],
        tokenizer: Any,
        state: TrainerState,
        seed: int,
        rows: int,
        parts: int,
    ) -> None:
        self._args, self._prompts, self._tokenizer, self._state = args, prompts, tokenizer, state
        self._make_worker = worker
        self._worker: RolloutWorker | None = None
        self._seed, self._rows, self._parts = seed, rows, parts
        at_once = args.steps_per_generation or parts
        if at_once % parts:
            raise RequestError(
                f"steps_per_generation={at_once} was given with gradient_accumulation_steps={parts}, but whole updates "
                f"are sampled at once: give a multiple of {parts}."
            )
        self._slices = at_once // parts
        self._sampled_rows = rows * self._slices
        if self._sampled_rows % args.num_generations:
            raise RequestError(
                f"num_generations={args.num_generations} was given, but {self._sampled_rows} completions are sampled "
                "at once (per_device_train_batch_size times the devices that share rows times steps_per_generation), "
                "which are not whole groups: change one of them."
            )
        self._groups = self._sampled_rows // args.num_generations
        self._length = prompts.longest + args.max_completion_length
        self._number = self._update = 0
        self._rollout: Rollout | None = None
        self._metrics: dict[str, list[float]] = {}
        self.epoch = 0.0

    @property
    def samples_next(self) -> bool:
        """Whether the next update needs a new rollout."""
        return self._rollout is None

    @property
    def steps_per_epoch(self) -> float:
        return len(self._prompts) / self._groups * self._updates

    def steps_of(self, epochs: float) -> int:
        """Updates of the rollouts that a number of passes need. Only the last of these rollouts may read further."""
        return math.ceil(round(len(self._prompts) * epochs / self._groups, 9)) * self._updates

    @property
    def _updates(self) -> int:
        """Updates with one rollout."""
        return self._slices * self._args.num_iterations

    def __next__(self) -> Batch:
        if self._rollout is None:
            self._rollout = self._sampled()
        first = self._update % self._slices * self._rows
        batch = update_rows(self._args, self._rollout, slice(first, first + self._rows))
        self._update += 1
        if self._update == self._updates:
            self._number, self._update, self._rollout = self._number + 1, 0, None
        self._place()
        return batch

    def _place(self) -> None:
        self.epoch = (self._number + self._update / self._updates) * self._groups / len(self._prompts)

    def metrics(self) -> dict[str, float]:
        """The means of the figures since the last call; without those that are NaN in every rollout."""
        found, self._metrics = self._metrics, {}
        known = {name: [one for one in values if one == one] for name, values in found.items()}
        return {name: float(np.mean(values)) for name, values in known.items() if values}

    def state(self) -> dict[str, Any]:
        """The position, for JSON, with what was sampled if it is not used up."""
        return {
            "rollout": self._number,
            "update": self._update,
            "sampled": None if self._rollout is None else self._rollout.saved(),
            "data": self._identity(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a position.

        Raises:
            CheckpointError: the position is one in another run's prompts, or of other rollouts.
        """
        for name, ours in self._identity().items():
            theirs = state["data"].get(name)
            if theirs != ours:
                raise CheckpointError(
                    f"a position was to be restored that was saved with {name}={theirs!r}, but this run has "
                    f"{name}={ours!r}: resume with the same prompts and settings, or start a new run from the weights."
                )
        self._number, self._update = state["rollout"], state["update"]
        self._rollout = None if state["sampled"] is None else Rollout.restored(state["sampled"])
        self._place()

    def close(self) -> None:
        """Free the engine."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _identity(self) -> dict[str, Any]:
        args = self._args
        return {
            "prompts": self._prompts.digest(),
            "seed": self._seed,
            "completions": self._sampled_rows,
            "steps_per_generation": self._slices * self._parts,
            "num_generations": args.num_generations,
            "num_iterations": args.num_iterations,
            "shuffle_dataset": args.shuffle_dataset,
        }

    def _sampled(self) -> Rollout:
        """Sample and reward completions with the weights as they are."""
        began = time.perf_counter()
        args, group = self._args, self._args.num_generations
        if self._worker is None:
            self._worker = self._make_worker()
        taken = self._prompts.taken(self._number * self._groups, self._groups)
        prompts = [prompt for prompt in taken for _ in range(group)]
        seeds = np.random.SeedSequence((self._seed, self._number)).generate_state(len(prompts)).tolist()
        completions = self._worker.generate([prompt.tokens for prompt in prompts], seeds)
        self._add("rollout_seconds", time.perf_counter() - began)
        scores = scored(
            args,
            [prompt.content for prompt in prompts],
            self._contents(prompts, completions),
            [completion.tokens for completion in completions],
            _columns(prompts),
            self._state,
        )
        for name, value in (scores.metrics | _lengths(completions)).items():
            self._add(name, value)
        pairs = zip(prompts, completions, strict=True)
        ended = np.array([one.ended for one in completions])
        rollout = Rollout(
            rows_of([prompt.tokens for prompt in prompts], completions, self._length, 0),
            np.array([[len(prompt.tokens), len(one.tokens)] for prompt, one in pairs], np.int32),
            (ended | (not args.mask_truncated_completions)).astype(np.float32),
            scores.advantages,
        )
        return self._compared(rollout, completions)

    def _compared(self, rollout: Rollout, completions: list[Completion]) -> Rollout:
        """The rollout with the log-probabilities that the loss compares with, its rows shuffled over the updates."""
        args, worker = self._args, self._worker
        assert worker is not None
        old = ref = None
        if self._updates > 1 or args.importance_sampling_correction:
            old = worker.logprobs(rollout.plain(), self._rows // self._parts)
        if args.beta:
            ref = worker.logprobs(rollout.plain(), self._rows // self._parts, initial=True)
        rollout = replace(rollout, old_logprobs=old, ref_logprobs=ref)
        if args.importance_sampling_correction:
            importance, metrics = importance_ratios(args, completions, rollout)
            for name, value in metrics.items():
                self._add(name, value)
            rollout = replace(rollout, importance=importance, old_logprobs=old if self._updates > 1 else None)
        if self._slices == 1:
            return rollout
        return rollout.taken(np.random.default_rng((self._seed, self._number, 1)).permutation(len(rollout.tokens)))

    def _contents(self, prompts: list[Prompt], completions: list[Completion]) -> list[Any]:
        """Completions as texts, or as the assistant's messages."""
        texts = self._tokenizer.batch_decode([one.tokens for one in completions], skip_special_tokens=True)
        return [
            [{"role": "assistant", "content": text}] if prompt.conversational else text
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def _add(self, name: str, value: float) -> None:
        self._metrics.setdefault(name, []).append(value)


def _columns(prompts: list[Prompt]) -> dict[str, list[Any]]:
    """The columns of the data, a value for each completion; None where an example lacks one."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return {name: [prompt.columns.get(name) for prompt in prompts] for name in names}


def _lengths(completions: list[Completion]) -> dict[str, float]:
    """What the log says of the completions' lengths."""
    lengths = np.array([len(one.tokens) for one in completions], np.float64)
    ended = np.array([one.ended for one in completions])
    found = {"mean": lengths.mean(), "min": lengths.min(), "max": lengths.max()}
    metrics = {f"completions/{name}_length": float(value) for name, value in found.items()}
    metrics["completions/clipped_ratio"] = float(1 - ended.mean())
    if ended.any():
        metrics["completions/mean_terminated_length"] = float(lengths[ended].mean())
    return metrics
