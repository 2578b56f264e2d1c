"""What a run minimizes in place of the cross-entropy of the next tokens: one frozen dataclass for each method. Names
and defaults are those of TRL's configurations where the meaning is the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

DPOLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "sigmoid_norm",
]
KTOLoss = Literal["kto", "apo_zero_unpaired"]


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization (arXiv 2305.18290) on pairs of rows: chosen, then rejected.

    `Batch.extra` has `ref_logps`, float32 [rows], unless `reference_free`: the log-probability of each completion by
    the reference.

    Attributes:
        beta: how much a departure from the reference costs.
        loss_type: the loss of a pair, as TRL names them.
        label_smoothing: the share of pairs whose labels are taken to be wrong (sigmoid, robust, exo_pair).
        reference_free: compare with a reference by which all completions are equally likely.
    """

    method: ClassVar[str] = "dpo"
    rows_per_example: ClassVar[int] = 2
    beta: float = 0.1
    loss_type: DPOLoss = "sigmoid"
    label_smoothing: float = 0.0
    reference_free: bool = False


@dataclass(frozen=True)
class ORPO:
    """Odds ratio preference optimization (arXiv 2403.07691) on pairs of rows: chosen, then rejected. It needs no
    reference.

    Attributes:
        beta: what the loss of the odds ratio is multiplied by (lambda in the paper).
    """

    method: ClassVar[str] = "orpo"
    rows_per_example: ClassVar[int] = 2
    beta: float = 0.1


@dataclass(frozen=True)
class KTO:
    """Kahneman-Tversky optimization (arXiv 2402.01306) on completions that are desirable or not.

    `Batch.extra` has, float32 [rows]: `labels`, 1 for a desirable completion and 0 for an undesirable one, -1 for a
    filler row; and `ref_logps` as for DPO. Of loss_type "kto", every example has a second row with another example's
    completion, whose `labels` are -1: the divergence from the reference is estimated from these over the whole batch.

    Attributes:
        beta: how much a departure from the reference costs.
        loss_type: "kto", or "apo_zero_unpaired", which estimates no divergence.
        desirable_weight: of the losses of desirable completions.
        undesirable_weight: of the losses of undesirable completions.
    """

    method: ClassVar[str] = "kto"
    beta: float = 0.1
    loss_type: KTOLoss = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @property
    def rows_per_example(self) -> int:
        """Rows that belong together."""
        return 2 if self.loss_type == "kto" else 1


@dataclass(frozen=True)
class GRPO:
    """Group relative policy optimization (arXiv 2402.03300) on completions that were sampled and rewarded.

    `Batch.weights` is 1 for the tokens of completions. `Batch.extra` has, float32 [rows], `advantages`, `scales` (what
    the losses of a row's tokens are multiplied by) and `shares` (the row's part of what the sum of all losses is
    divided by); and float32 [rows, seq], `old_logprobs` (of the weights that were sampled with; left out, those of the
    update), `ref_logprobs` (of the weights before training, with beta) and `importance` (what token losses are
    multiplied by, if anything).

    Attributes:
        beta: coefficient of the divergence from the weights before training.
        epsilon: the ratio of probabilities is clipped at 1 - epsilon.
        epsilon_high: and at 1 + epsilon_high.
        delta: the greatest ratio where it is not clipped otherwise; None is none.
        importance_sampling_level: one ratio for each token, or for each sequence.
        temperature: that logits are divided by.
        use_bias_correction_kl: multiply the divergence by the ratio, so that its gradient has no bias.
    """

    method: ClassVar[str] = "grpo"
    rows_per_example: ClassVar[int] = 1
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    importance_sampling_level: Literal["token", "sequence"] = "token"
    temperature: float = 1.0
    use_bias_correction_kl: bool = True


@dataclass(frozen=True)
class Reward:
    """A reward model from preferences (Bradley and Terry's model; arXiv 2203.02155, equation 1) on pairs of rows:
    chosen, then rejected. A row's reward is a linear head's output for its last token.

    `Batch.extra` may have `margins`, float32 [rows]: by how much the reward of a chosen row is to be above its rejected
    one's; that of rejected rows is not read.

    Attributes:
        center_rewards_coefficient: of the squared sum of both rewards, which keeps them near 0 (arXiv 2312.09244,
            equation 2); None leaves it out.
        pad_token_id: of the tokenizer: the last token is the last that is another one, as in transformers.
    """

    method: ClassVar[str] = "reward"
    rows_per_example: ClassVar[int] = 2
    center_rewards_coefficient: float | None = None
    pad_token_id: int | None = None


@dataclass(frozen=True)
class Distill:
    """Learning a teacher's distribution of each next token (arXiv 2306.13649), where `Batch.weights` has weight.

    With P the teacher's distribution and Q the student's, the divergence of a token is KL(P|Q) with beta 0, KL(Q|P)
    with beta 1, and else beta KL(P|M) + (1 - beta) KL(Q|M) with M = beta P + (1 - beta) Q.

    Attributes:
        beta: which divergence.
        temperature: that the logits of both are divided by.
        cross_entropy_weight: the share of the loss that is the cross-entropy of the data's tokens, at temperature 1.
    """

    method: ClassVar[str] = "distill"
    rows_per_example: ClassVar[int] = 1
    beta: float = 0.5
    temperature: float = 1.0
    cross_entropy_weight: float = 0.0


Objective = DPO | ORPO | KTO | GRPO | Reward | Distill
