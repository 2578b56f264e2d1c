"""The bytes of an optimizer's state on one device, by the rules of `ttpu_jax.train.optimizers`."""

from __future__ import annotations

from math import prod

from ttpu_core.sharding.training_state import ADAMW, UpdateSettings
from ttpu_core.spec.arithmetic import BITS
from ttpu_plan.shards import ParameterShard, Shape, tiled_bytes

BLOCK = 256
"""Numbers of a block of adamw_8bit, which has a float32 scale; along an axis of fewer numbers, these."""
SMALLEST = 4096
"""Numbers of the smallest parameter whose moments adamw_8bit holds in 8 bits."""
LEAST_FACTORED = 128
"""Of the two largest axes of a parameter, the least size whose second moment adafactor keeps as means of rows and
columns (the default of `optax.scale_by_factored_rms`)."""


def state_bytes(shard: ParameterShard, layers: int, settings: UpdateSettings) -> int:
    """Bytes on one device that an optimizer keeps of a parameter between two updates, wherever they lie.

    Args:
        shard: of the parameter, as its master weight lies.
        layers: equal layers whose parameters are stacked; 1 for a parameter outside of layers too.
        settings: of the run.
    """
    moment = layers * tiled_bytes(shard.local, BITS[ADAMW.moment_dtype])
    if settings.optim == "adamw_8bit":
        return 2 * (moment if layers * prod(shard.parameter.shape) < SMALLEST else _in_blocks(shard, layers))
    if settings.optim == "adafactor":
        return _factored((layers, *shard.parameter.shape), moment)
    moments = {
        "adamw": ADAMW.moments,
        "lion": 1,
        "sgd": 1 if settings.momentum else 0,
        "muon": 1 if _is_muons(shard.path) else ADAMW.moments,
    }
    return moments[settings.optim] * moment


def _in_blocks(shard: ParameterShard, layers: int) -> int:
    """A moment of a byte for each number, and a float32 scale for each block along the last axis, which devices divide
    if they divide the blocks."""
    last, local = shard.parameter.shape[-1], shard.local[-1]
    blocks, devices = -(-last // min(BLOCK, last)), last // local
    own = blocks // devices if blocks % devices == 0 else blocks
    codes, scales = tiled_bytes((layers, *shard.local), 8), tiled_bytes((layers, *shard.local[:-1], own), 32)
    return codes + scales


def _factored(shape: Shape, moment: int) -> int:
    """Means of rows and columns in float32, whole on every device; where an axis is short, a `moment`."""
    second, largest = sorted(shape)[-2:]
    if second < LEAST_FACTORED:
        return moment
    return 4 * (prod(shape) // largest + prod(shape) // second)


def _is_muons(path: str) -> bool:
    """Whether muon updates a parameter, of which it keeps one moment; AdamW updates the others."""
    return path.endswith("kernel") and not path.endswith("conv.kernel") and not path.startswith("head.")
