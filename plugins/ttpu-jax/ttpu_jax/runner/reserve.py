"""What serving needs beside weights and pages. In: a runner, and what the compiler says of a program; out: bytes of
each device that must stay free for steps, what they leave there, and what requests carry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_jax.model.paged import state_bytes
from ttpu_jax.runner.buckets import StepShape
from ttpu_jax.runner.compilation import Program
from ttpu_jax.runner.runner import Runner

STEPS_IN_FLIGHT = 2
"""Steps whose outputs are held at once: the device works on one while the host reads the other."""


def reserved_bytes(runner: Runner, temporaries: Callable[[Program], int]) -> int:
    """Bytes on each device: the temporaries of the largest program, the outputs of two steps, the sampling state, and
    recurrent states.

    Args:
        runner: with any number of pages, on which none of this depends.
        temporaries: the bytes that a program takes on each device while it runs, beside what it is given and gives.
    """
    shapes = runner.buckets.all()
    step = next(iter(runner.programs()))
    sampler = runner._sampler_program(max(shape.rows for shape in shapes), runner.highest_level)
    outputs = max(_output_bytes(runner, shape) for shape in shapes)
    states = state_bytes(runner.spec, runner.max_num_seqs, runner.runtime.placement, runner.state_dtype)
    return (
        max(temporaries(step), temporaries(sampler))
        + STEPS_IN_FLIGHT * outputs
        + device_bytes(runner._empty_state(abstract=True))
        + states
    )


def device_bytes(arrays: Any) -> int:
    """Bytes of abstract arrays on one device, without the padding of tiles."""
    leaves: Iterable[Any] = jax.tree.leaves(arrays)
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)


def _output_bytes(runner: Runner, shape: StepShape) -> int:
    """Of a step's logits and residual stream, the latter whole on every device."""
    stream = runner._abstract((shape.tokens, runner.spec.hidden_size), runner.state_dtype)
    return device_bytes((runner._logits(shape.rows), stream))
