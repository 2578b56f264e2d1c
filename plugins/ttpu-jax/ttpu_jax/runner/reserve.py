"""Computes the memory of each device that serving needs beside weights and pages. It takes a runner and the compiler's
figures, and returns the bytes for the temporaries of steps, the outputs of steps, and the state of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ttpu_jax.model.paged import group_page_bytes, state_bytes
from ttpu_jax.params.placement import device_bytes
from ttpu_jax.runner.buckets import StepShape
from ttpu_jax.runner.compilation import Program, ProgramPool
from ttpu_jax.runner.memory import free_bytes, pages_per_group
from ttpu_jax.runner.page_count import steady_pages
from ttpu_jax.runner.programs import EnginePrograms
from ttpu_jax.runner.stats import first_device

STEPS_IN_FLIGHT = 2
"""Steps whose outputs are held at once: the device works on one while the host reads the other."""


def reserved_bytes(runner: EnginePrograms, temporaries: Callable[[Program], int]) -> int:
    """Bytes on each device: the temporaries of the largest program, the outputs of two steps, the sampling state, and
    recurrent states.

    Args:
        runner: with any number of pages, on which none of this depends.
        temporaries: the bytes that a program takes on each device while it runs, beside what it is given and gives.
    """
    shapes = runner.buckets.all()
    step = next(iter(runner.programs()))
    sampler = runner.sampler.program(max(shape.rows for shape in shapes), runner.sampler.highest_level)
    outputs = max(_output_bytes(runner, shape) for shape in shapes)
    states = state_bytes(runner.spec, runner.max_num_seqs, runner.runtime.placement, runner.state_dtype)
    return (
        max(temporaries(step), temporaries(sampler))
        + STEPS_IN_FLIGHT * outputs
        + device_bytes(runner.sampler.empty_state(abstract=True))
        + states
    )


def _output_bytes(runner: EnginePrograms, shape: StepShape) -> int:
    """Of a step's logits and the head's inputs, the latter whole on every device."""
    stream = runner._abstract((shape.tokens, runner.spec.embedding.features), runner.state_dtype)
    return device_bytes((runner.sampler.logits(shape.rows), stream))


def fitting_pages(
    runner: EnginePrograms, pool: ProgramPool, page_bytes: Sequence[int], draft: EnginePrograms | None = None
) -> tuple[int, ...]:
    """Return the pages per group: the requested number, or what fits beside weights and `reserved_bytes`.

    Args:
        pool: compiles the largest programs, whose temporaries are measured.
        page_bytes: of a page of each group on one device.
        draft: the draft model's programs. Its pages are counted with those of the largest group: the two follow the
            same tokens.
    """
    config, placement = runner.config, runner.runtime.placement
    if draft is not None:
        own = group_page_bytes(
            draft.spec, draft.layout, draft.config.page_size or 1, draft.runtime.placement, draft.cache_dtype
        )
        page_bytes = (page_bytes[0] + sum(own), *page_bytes[1:])
    if config.num_pages is not None or not page_bytes:
        return pages_per_group(config, runner.layout, page_bytes, None)
    if config.kv_cache_memory is not None:
        return pages_per_group(config, runner.layout, page_bytes, config.kv_cache_memory)
    assert config.max_num_seqs is not None
    device = first_device(placement)
    reserved = 0
    if device.platform != "cpu":

        def temporaries(program: Program) -> int:
            if program.key[0] == "step":  # type: ignore[index]
                compiled = pool.build(program)  # not to keep: the number of pages will be another
            else:
                pool.compile([program])
                compiled = pool.executable(program.key)
            return int(compiled.memory_analysis().temp_size_in_bytes)

        few = replace(config, num_pages=config.max_num_seqs + 2)
        runner.num_pages = pages_per_group(few, runner.layout, page_bytes, None)
        reserved = reserved_bytes(runner, temporaries)
        if draft is not None:  # the smaller of two models that take turns
            draft.num_pages = (2,) * len(draft.layout.groups)
            reserved += reserved_bytes(draft, lambda program: 0)
    free = free_bytes(device, reserved, config.memory_utilization)
    return steady_pages(pages_per_group(config, runner.layout, page_bytes, free), runner, page_bytes)
