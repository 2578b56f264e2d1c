"""Values that the runner reports to an engine: limits, devices, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Limits:
    """What a runner was built for; names are those of `ttpu_serve.runner.RunnerLimits`, which says what they mean."""

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


@dataclass(frozen=True)
class Devices:
    """Devices by their kind and platform, and over how many the model is sharded."""

    kind: str
    platform: str
    count: int

    @classmethod
    def of(cls, placement: Any) -> Devices:
        """Those of a placement."""
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
