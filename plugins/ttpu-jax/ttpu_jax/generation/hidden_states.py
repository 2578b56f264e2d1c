"""The hidden states of what `generate` has written, in transformers' form. They are computed in one more pass over the
whole sequences, since the steps keep none."""

from __future__ import annotations

import numpy as np

from ttpu_jax.generation.call import Call
from ttpu_jax.generation.programs import Programs, cache_bucket
from ttpu_jax.generation.results import Completion, HiddenStates


def hidden_states(programs: Programs, call: Call, mask: np.ndarray, done: list[Completion]) -> HiddenStates:
    """Compute the hidden states of finished sequences.

    Args:
        programs: the model's compiled programs.
        call: with the prompts' ids.
        mask: bool [sequences, width], the real tokens of `call.heads`.
        done: the sequences.

    Returns:
        One entry per step. What stands at padding, and after a row's end, is undefined.

    Raises:
        UnsupportedError: a model that does not show them.
    """
    width, rows = call.heads.shape[1], len(done)
    new = [completion.all_ids for completion in done]
    steps = max(map(len, new))
    tokens = np.zeros((rows, cache_bucket(width + steps - 1)), np.int32)
    real = np.zeros(tokens.shape, np.bool_)
    tokens[:, :width], real[:, :width] = call.heads, mask
    for row, ids in enumerate(new):
        read = ids[:-1]  # the last token of a sequence is not read
        tokens[row, width : width + len(read)], real[row, width : width + len(read)] = read, True
    positions = np.where(real, np.cumsum(real, axis=1) - 1, -1).astype(np.int32)
    layers = [np.asarray(state) for state in programs.hidden_states(np.where(real, tokens, 0), positions)]
    ends = [width, *range(width + 1, width + steps)]
    return tuple(
        tuple(layer[:, begin:end] for layer in layers) for begin, end in zip([0, *ends[:-1]], ends, strict=True)
    )
