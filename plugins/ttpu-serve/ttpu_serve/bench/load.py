"""Sends prompts at their arrival times and returns a timeline of each, in the same order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from ttpu_serve.bench.client import Client, Timeline
from ttpu_serve.bench.workload import Prompt

OnDone = Callable[[Timeline], None]


async def send_all(
    client: Client,
    prompts: Sequence[Prompt],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_done: OnDone | None = None,
) -> list[Timeline]:
    """Send each prompt at its arrival time (seconds from now), whether or not earlier requests have finished.

    Args:
        max_concurrency: maximum requests in flight; further ones are held back, which their `sent` shows.
        on_done: called with each finished timeline.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    for prompt in prompts:
        client.body(prompt)  # what cannot be sent is refused before anything is
    start = time.perf_counter()

    async def one(prompt: Prompt, due: float) -> Timeline:
        await asyncio.sleep(max(0.0, due - (time.perf_counter() - start)))
        async with places:
            line = await client.send(prompt, due, start)
        if on_done is not None:
            on_done(line)
        return line

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(prompt, due)) for prompt, due in zip(prompts, arrivals, strict=True)]
    return [task.result() for task in tasks]
