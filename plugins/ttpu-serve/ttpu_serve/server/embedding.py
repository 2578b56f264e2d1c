"""Embeds the inputs of one request, for every endpoint that is about embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from contextlib import aclosing
from typing import Literal

import numpy as np

from ttpu_serve.scheduling.request import AskedPooling
from ttpu_serve.server.protocol import Prompt
from ttpu_serve.server.service import Service


async def embedded(
    service: Service,
    inputs: Sequence[Prompt],
    *,
    pooling: AskedPooling | None,
    model: str | None,
    special: bool = True,
    truncate: int | None = None,
    param: str = "input",
) -> tuple[list[np.ndarray], int]:
    """Return the embeddings of inputs, float32 [hidden] of unit length, and the number of their tokens.

    Args:
        service: the engine.
        inputs: texts or token ids.
        pooling: which hidden states; None is what the checkpoint declares.
        model: the model's or an adapter's name.
        special: add the special tokens that the checkpoint puts around texts.
        truncate: the most tokens of an input, of which the last are left out; -1 is the context; None refuses longer.
        param: the field that holds the inputs.

    Raises:
        ApiError, RequestError: there are too many inputs, or one cannot be embedded.
    """
    adapter = service.adapter_of(model)
    service.check_inputs(len(inputs))
    prompts = [
        await service.ids_of(one, special=special, param=param, room=0, truncate=truncate, keep="first")
        for one in inputs
    ]
    streams = await service.embed(prompts, pooling or "auto", adapter=adapter)
    found: dict[int, np.ndarray] = {}
    async with aclosing(streams.deltas()) as deltas:
        async for number, delta in deltas:
            if delta.embedding is not None:
                found[number] = delta.embedding
    return [found[number] for number in range(len(prompts))], streams.usage.prompt


def written(vector: np.ndarray, encoding: Literal["float", "base64"] | None) -> list[float] | str:
    """Return an embedding as a response has it.

    Args:
        vector: float32 [hidden].
        encoding: "base64" gives the bytes of the numbers, the lowest byte of each first; else the numbers are given.
    """
    if encoding != "base64":
        numbers: list[float] = vector.tolist()
        return numbers
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
