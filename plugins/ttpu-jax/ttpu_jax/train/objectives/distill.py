"""The loss of distillation: the divergence of the student's distribution of each next token from the teacher's, with
the formulas of TRL's `GKDTrainer.generalized_jsd_loss`. The logits of a whole batch never exist at once, of neither."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ttpu_jax.model.causal_model import DecoderModel, Params
from ttpu_jax.model.loss import LossSums, TokenBatch, next_tokens, token_parts

if TYPE_CHECKING:
    from ttpu_train.objectives import Distill

TEACHER = "teacher"
"""Where `TokenBatch.shared` holds the teacher's parameters."""
NEVER = -1e30
"""The logit of what is no token. Not minus infinity, of which differences are NaN."""


def distill_sums(
    model: DecoderModel,
    params: Params,
    batch: TokenBatch,
    settings: Distill,
    tokens_at_once: int,
    teacher: DecoderModel,
) -> LossSums:
    """Sum the loss of the tokens of a batch, as `ttpu_train.objectives.Distill` describes it.

    Args:
        model: the student.
        params: path → weight of the student.
        batch: rows, with the teacher's weights among what they share.
        settings: of the method.
        tokens_at_once: tokens of each row whose logits exist at once; in the backward pass they are computed again.
        teacher: the decoder of the teacher.
    """
    of_teacher = batch.shared[TEACHER]
    hidden = model.hidden(params, batch.tokens, batch.positions, batch.segments)
    taught = jax.lax.stop_gradient(teacher.hidden(of_teacher, batch.tokens, batch.positions, batch.segments))
    targets, weights = next_tokens(batch)

    @jax.checkpoint
    def part_sums(x: jax.Array, y: jax.Array, target: jax.Array, weight: jax.Array) -> LossSums:
        logits = _of_tokens(model.logits(params, x), model.spec.vocab_size)
        theirs = _of_tokens(jax.lax.stop_gradient(teacher.logits(of_teacher, y)), model.spec.vocab_size)
        apart = divergence(logits / settings.temperature, theirs / settings.temperature, settings.beta)
        words = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        chosen = jnp.where(words == target[..., None], logits, 0.0).sum(-1)
        losses = jax.nn.logsumexp(logits, axis=-1) - chosen
        likeliest = (chosen >= logits.max(-1)).astype(jnp.float32)

        def summed(values: jax.Array) -> jax.Array:
            return jnp.where(weight != 0, weight * values, 0.0).sum()

        share = settings.cross_entropy_weight
        total = summed((1 - share) * apart + share * losses if share else apart)
        fixed = jax.lax.stop_gradient((summed(losses), summed(apart)))
        metrics = {"cross_entropy": (fixed[0], weight.sum()), "divergence": (fixed[1], weight.sum())}
        return LossSums(total, fixed[0], weight.sum(), summed(likeliest), metrics)

    parts = tuple(token_parts(x, tokens_at_once) for x in (hidden, taught, targets, weights))
    sums = jax.lax.map(lambda part: part_sums(*part), parts)
    return jax.tree.map(lambda each: each.sum(), sums)


def divergence(student: jax.Array, teacher: jax.Array, beta: float) -> jax.Array:
    """The generalized Jensen-Shannon divergence (arXiv 2306.13649, equation 1) of each token, float32 [...] in nats.

    Args:
        student: logits [..., vocab].
        teacher: logits [..., vocab].
        beta: 0 is KL(teacher|student), 1 is KL(student|teacher).
    """
    student, teacher = jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
    if beta == 0:
        return (jnp.exp(teacher) * (teacher - student)).sum(-1)
    if beta == 1:
        return (jnp.exp(student) * (student - teacher)).sum(-1)
    mixture = jnp.logaddexp(student + jnp.log1p(-beta), teacher + jnp.log(beta))
    of_teacher = (jnp.exp(teacher) * (teacher - mixture)).sum(-1)
    of_student = (jnp.exp(student) * (student - mixture)).sum(-1)
    return beta * of_teacher + (1 - beta) * of_student


def _of_tokens(logits: jax.Array, vocab: int) -> jax.Array:
    """logits [..., rows], of which those after the vocabulary, which a mesh pads, are `NEVER`."""
    if logits.shape[-1] == vocab:
        return logits
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) < vocab, logits, NEVER)
