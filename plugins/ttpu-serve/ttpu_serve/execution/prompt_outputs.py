"""What requests want of their prompts besides an answer. In: a step's residual stream; out: log-probabilities of prompt
tokens, and embeddings, noted in the answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ttpu_jax.runner.runner import InFlight, Runner
from ttpu_serve.execution.sequence_output import Answer

NOT_A_NUMBER = (
    "the model's output is not a number, or no token was allowed: the checkpoint is damaged, it overflows in this "
    "dtype (try float32), or the request forbids every token."
)


def read_prompts(done: InFlight, answers: Sequence[Answer | None], runner: Runner) -> None:
    """Note what a step says of the prompts that it computed; `answers` are those of the step's requests, None for ones
    that are gone. The stream is fetched once, and the head runs once, for all of them."""
    step = done.step
    begins = np.cumsum(step.counts) - step.counts
    scored: list[tuple[Answer, int, int, list[int]]] = []
    stream: np.ndarray | None = None
    assert done.hidden is not None
    for index, answer in enumerate(answers):
        if answer is None or not answer.wants_prompt:
            continue
        request, start, count = answer.request, int(step.starts[index]), int(step.counts[index])
        if start >= len(request.prompt):
            continue
        begin = int(begins[index])
        if request.pooling is None:
            if targets := request.prompt[start + 1 : start + 1 + count]:
                scored.append((answer, start, begin, targets))
            continue
        if stream is None:
            stream = np.asarray(done.hidden)
        _pool(answer, stream[begin : begin + count].astype(np.float32), start)
    if not scored:
        return
    wanted = np.zeros(done.hidden.shape[0], np.int32)
    for _, _, begin, targets in scored:
        wanted[begin : begin + len(targets)] = targets
    values = runner.prompt_logprobs(done.hidden, wanted)
    for answer, start, begin, targets in scored:
        part = {name: value[begin : begin + len(targets)] for name, value in values.items()}
        answer.add_prompt_logprobs(start + 1, targets, part)


def finish_pooling(answer: Answer) -> None:
    """End a request whose prompt is whole by its embedding, of length one."""
    assert answer.pooled is not None
    request = answer.request
    vector = answer.pooled / (len(request.prompt) if request.pooling == "mean" else 1)
    if not np.isfinite(vector).all():
        answer.fail(NOT_A_NUMBER)
        return
    answer.embedding = (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)
    answer.end("stop")


def _pool(answer: Answer, stream: np.ndarray, start: int) -> None:
    """Take in the part of a prompt that begins at `start`: its last token, or the sum of all."""
    if answer.request.pooling == "last":
        answer.pooled = stream[-1]
    else:
        before = 0 if start == 0 or answer.pooled is None else answer.pooled
        answer.pooled = stream.sum(0) + before
