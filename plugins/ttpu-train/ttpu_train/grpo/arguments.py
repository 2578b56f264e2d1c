"""`GRPOArguments`: how completions are sampled, rewarded and trained on. Names and meanings are those of TRL's
`GRPOConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_train.argument_kinds import among, check_fields, need

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
ScaleRewards = Literal["group", "batch", "none"]
Level = Literal["token", "sequence"]
Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
RewardFunction = Callable[..., Sequence[float | None]]
Judge = RewardFunction | str
"""A reward function, or the folder or Hub id of a reward model."""


@dataclass(frozen=True, kw_only=True)
class GRPOArguments:
    """How completions are sampled, rewarded and trained on.

    Args:
        reward_funcs: a function or several. Each is called with prompts, completions, completion_ids, trainer_state and
            the other columns of the data, all lists but the last but one, by keyword; it returns one number for each
            completion, or None where it does not judge it. A text is the folder or Hub id of a reward model.
        reward_weights: of the functions; None weighs all by 1.
        num_generations: completions of each prompt: the size of a group.
        max_completion_length: tokens of a completion.
        temperature: that completions are sampled at. Log-probabilities in the loss are of the same temperature.
        top_p, top_k, min_p, repetition_penalty: of sampling.
        steps_per_generation: parts of `per_device_train_batch_size` rows that are sampled at once, a multiple of
            gradient_accumulation_steps; None is gradient_accumulation_steps, the rows of one update.
        num_iterations: times that the sampled completions are trained on.
        beta: coefficient of the divergence from the model before training; 0 needs no second set of weights.
        use_bias_correction_kl: multiply the divergence by the ratio of probabilities, so that its gradient has no bias
            (arXiv 2512.02556).
        epsilon: the ratio of probabilities is clipped at 1 - epsilon.
        epsilon_high: and at 1 + epsilon_high; None is epsilon.
        delta: the ratio is clipped at this number where that makes the loss smaller (two-sided clipping, arXiv
            2505.07291); None does not.
        importance_sampling_level: "token", or "sequence" for one ratio of each completion (GSPO, arXiv 2507.18071).
        loss_type: how token losses are averaged: "grpo" over each completion and then over completions, "bnpo" over the
            tokens of an update, "dapo" over the tokens of all that was sampled at once, "dr_grpo" by
            max_completion_length.
        scale_rewards: the standard deviation that advantages are divided by: of the "group", of the "batch", or "none";
            True is "group" and False is "none".
        mask_truncated_completions: leave out completions that did not end by themselves.
        importance_sampling_correction: weigh tokens by the ratio of the trainer's probabilities to those that the
            engine sampled with. Needs temperature 1 and sampling without filters and penalties.
        importance_sampling_mode: what becomes of ratios outside of the limits: they are clipped ("truncate") or their
            tokens left out ("mask"), by token or by sequence.
        importance_sampling_clip_max: the upper limit.
        importance_sampling_clip_min: the lower limit; None is none.
        shuffle_dataset: prompts in another order in every epoch.
        engine_options: of the serving engine, as for `LLM`, such as max_num_seqs or kv_cache_dtype.
    """

    reward_funcs: Judge | Sequence[Judge]
    reward_weights: Sequence[float] | None = None
    num_generations: int = 8
    max_completion_length: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    steps_per_generation: int | None = None
    num_iterations: int = 1
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: Level = "token"
    loss_type: LossType = "dapo"
    scale_rewards: ScaleRewards | bool = "group"
    mask_truncated_completions: bool = False
    importance_sampling_correction: bool = False
    importance_sampling_mode: Correction = "sequence_mask"
    importance_sampling_clip_max: float = 3.0
    importance_sampling_clip_min: float | None = None
    shuffle_dataset: bool = True
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RequestError: one is out of range, or two contradict each other.
        """
        check_fields(self)
        functions = self.functions
        if not functions or not all(callable(one) or isinstance(one, str) for one in functions):
            raise RequestError(
                f"reward_funcs={self.reward_funcs!r} was given, but rewards come from functions and reward models: "
                "pass one, or a list of them; in a file write {import: package.module:name} or a model's folder."
            )
        if self.reward_weights is not None and len(self.reward_weights) != len(functions):
            raise RequestError(
                f"{len(self.reward_weights)} reward_weights were given for {len(functions)} reward_funcs: pass one for "
                "each."
            )
        need(self.num_generations >= 2, "num_generations", self.num_generations, "at least 2, which are compared")
        for name in ("max_completion_length", "num_iterations"):
            need(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        at_once = self.steps_per_generation
        need(at_once is None or at_once >= 1, "steps_per_generation", at_once, "1 or more, or None")
        self.sampling(0)
        need(self.temperature > 0, "temperature", self.temperature, "above 0: equal completions teach nothing")
        need(self.beta >= 0, "beta", self.beta, "0 or more")
        need(0 <= self.epsilon < 1, "epsilon", self.epsilon, "from 0 to below 1")
        need(self.high >= 0, "epsilon_high", self.epsilon_high, "0 or more")
        need(self.delta is None or self.delta > 1 + self.epsilon, "delta", self.delta, "above 1 + epsilon")
        among(self.loss_type, "loss_type", get_args(LossType))
        among(self.importance_sampling_level, "importance_sampling_level", get_args(Level))
        among(self.importance_sampling_mode, "importance_sampling_mode", get_args(Correction))
        among(self.scaling, "scale_rewards", get_args(ScaleRewards))
        plain = (self.temperature, self.top_p, self.top_k, self.min_p or 0, self.repetition_penalty) == (1, 1, 0, 0, 1)
        if self.importance_sampling_correction and not plain:
            raise RequestError(
                "importance_sampling_correction was asked for with a temperature, filters or penalties, but the engine "
                "reports the probabilities that tokens have without them: sample with temperature=1 alone, or leave it "
                "out."
            )

    def sampling(self, seed: int) -> SamplingParams:
        """How the engine samples a completion.

        Raises:
            RequestError: a value is out of range.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_completion_length,
            seed=seed,
            logprobs=0 if self.importance_sampling_correction else None,
            detokenize=False,
        )

    @property
    def functions(self) -> tuple[Judge, ...]:
        """The reward functions and models."""
        given = self.reward_funcs
        return (given,) if callable(given) or isinstance(given, str) else tuple(given)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each reward function."""
        return (1.0,) * len(self.functions) if self.reward_weights is None else tuple(map(float, self.reward_weights))

    @property
    def high(self) -> float:
        """`epsilon_high`, or `epsilon` where that is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def scaling(self) -> str:
        """`scale_rewards` as a word."""
        given = self.scale_rewards
        return {True: "group", False: "none"}[given] if isinstance(given, bool) else given
