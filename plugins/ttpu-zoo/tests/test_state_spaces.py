"""What configs of models with state spaces say of steps and multipliers, and how a malformed value is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ttpu_core import Architecture, ModelConfig, default_registry
from ttpu_core.errors import ConfigError
from ttpu_zoo.mamba2 import dt_limits

CONFIGS: dict[str, dict[str, Any]] = {
    "mamba2": {"hidden_size": 64, "num_hidden_layers": 1, "num_heads": 8, "head_dim": 16},
    "bamba": {
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8, "mamba_n_heads": 8, "mamba_d_head": 16,
    },
    "falcon_h1": {
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8, "mamba_n_heads": 8, "mamba_d_head": 16,
    },
}  # fmt: skip


def described(model_type: str, **changes: Any) -> Architecture:
    config = {"model_type": model_type, "intermediate_size": 96, "vocab_size": 32} | CONFIGS[model_type]
    return default_registry().architecture(ModelConfig.from_dict(config | changes), [])


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize("limits", [3, "0, 1", [0.0], [0.0, 1.0, 2.0], [0.0, None], [0.0, "wide"], [0.0, {}], [2, 1]])
def test_malformed_limits_of_steps_are_refused_by_their_key(model_type: str, limits: Any) -> None:
    """They used to be reported as a fault of the plugin."""
    with pytest.raises(ConfigError, match=r"sets 'time_step_limit' to .* the least and the greatest step is needed"):
        described(model_type, time_step_limit=limits)


@pytest.mark.parametrize("infinity", [math.inf, {"__float__": "Infinity"}])
def test_a_step_may_have_no_limit(infinity: Any) -> None:
    config = ModelConfig.from_dict({"time_step_limit": [0.5, infinity]})
    assert dt_limits(config) == (0.5, math.inf)
    assert dt_limits(ModelConfig.from_dict({})) == (0.0, math.inf)


@pytest.mark.parametrize(
    ("key", "count", "value"), [("ssm_multipliers", 5, [1.0] * 4), ("mlp_multipliers", 2, [1.0])]
)
def test_multipliers_of_falcon_h1_are_as_many_as_there_are_uses(key: str, count: int, value: list[float]) -> None:
    with pytest.raises(ConfigError, match=rf"sets '{key}' to .*, but a list of {count} numbers is needed there"):
        described("falcon_h1", **{key: value})
