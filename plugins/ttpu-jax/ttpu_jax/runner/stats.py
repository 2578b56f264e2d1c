"""Values that the runner reports to an engine: limits, devices, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Limits:
    """The limits that a runner was built for; `ttpu_serve.runner.RunnerLimits` documents the fields."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefills: int | None
    draft_tokens: int
    page_size: int
    recurrent: bool
    vocab_size: int
    logit_columns: int
    sampling_level: str
    penalties: bool
    prompt_logprobs: bool
    max_logprobs: int
    whole_prompts: bool = False
    hidden_states: bool = True
    generates: bool = True


@dataclass(frozen=True)
class Devices:
    """The kind and platform of the devices, and how many of them the model is sharded over."""

    kind: str
    platform: str
    count: int

    @classmethod
    def of(cls, placement: Any) -> Devices:
        """Return the devices of a placement."""
        device = first_device(placement)
        count = 1 if placement.mesh is None else int(np.prod(placement.mesh.devices.shape))
        return cls(device.device_kind, device.platform, count)


@dataclass(frozen=True)
class MemoryStats:
    """weight_bytes: of all weights over all devices. kv_itemsize: of one number of a cached key or value."""

    weight_bytes: int
    kv_itemsize: float


def first_device(placement: Any) -> jax.Device:
    """A placement's first device."""
    device: jax.Device = jax.local_devices()[0] if placement.mesh is None else placement.mesh.devices.flat[0]
    return device
