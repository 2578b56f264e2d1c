"""Generation through the door that users take: greedy tokens of transformers, by programs that are compiled once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ttpu_conformance.case import Case
from ttpu_conformance.check import check, fail

NEW_TOKENS = 24
PROMPTS = (11, 8, 5)  # tokens; with the new ones they pass every tiny window
COMPILED = "/jax/core/compile/backend_compile_duration"
"""What JAX reports when it has compiled a program."""


@check("numerics", scope="heavy", quick="base")
def check_greedy_tokens(case: Case) -> None:
    """Greedy generation in float32, of prompts of several lengths at once, gives transformers' tokens."""
    import torch

    padded, mask = _prompts(case.architecture.spec.vocab_size)
    width = padded.shape[1]
    ours = _generate(case, padded, mask)
    for row, length in enumerate(PROMPTS):
        prompt = torch.tensor(padded[row : row + 1, width - length :])
        # Without a mask transformers takes real tokens that equal pad_token_id for padding.
        whole = case.reference.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        tokens = whole[0, length:].numpy()
        if not np.array_equal(ours[row], tokens):
            at = int(np.argmax(ours[row] != tokens))
            fail(
                f"after a prompt of {length} tokens the greedy token number {at + 1} is {ours[row][at]}, but "
                f"transformers generates {tokens[at]}: see float32_logits and cached_decode, which say what differs."
            )


@check("numerics", scope="heavy", quick="base")
def check_decode_compiles_once(case: Case) -> None:
    """Once a shape was generated with, generating with it again compiles nothing, whatever the tokens are."""
    import jax

    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if event == COMPILED:
            compiled.append(event)

    padded, mask = _prompts(case.architecture.spec.vocab_size)
    _generate(case, padded, mask)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        _generate(case, padded // 2, mask)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    if compiled:
        fail(
            f"generating again with the same shapes compiled {len(compiled)} programs: something in the model depends "
            "on the values of tokens, or makes a new function at each call (a mixer's implementation?)."
        )


def _generate(case: Case, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The new tokens [rows, NEW_TOKENS]."""
    return np.asarray(case.model.model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS))[:, ids.shape[1] :]


@lru_cache
def _prompts(vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Left-padded token ids and their mask."""
    width = max(PROMPTS)
    ids = np.random.default_rng(2).integers(0, vocab_size, (len(PROMPTS), width))
    mask = np.arange(width)[None] >= width - np.array(PROMPTS)[:, None]
    return np.where(mask, ids, 0), mask.astype(np.int64)
