"""The kind of attention of a layer, and its window."""

from __future__ import annotations

from ttpu_core import ModelConfig
from ttpu_core.defaults import layer_type
from ttpu_core.errors import ConfigError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def window_size(config: ModelConfig) -> int | None:
    """Tokens in the window of sliding layers, or None if the config does not use windows."""
    if not config.flag("use_sliding_window"):
        config.does_not_matter("sliding_window", because="windows are not used")
        return None
    return config.positive_int("sliding_window", default=None)


def sliding_window(config: ModelConfig, layer: int, *, assumed: bool) -> int | None:
    """The window of one layer, or None. `layer_types` decides whether the layer slides; `assumed` decides without
    that list.

    Raises:
        ConfigError: a sliding layer without a window.
    """
    kind = layer_type(config, layer, assumed=SLIDING if assumed else FULL)
    window = window_size(config)
    if kind == FULL:
        return None
    if window is None:
        raise ConfigError(
            f"{config.source} makes layer {layer} a {SLIDING} layer, but gives no window: set 'sliding_window' to a "
            "number of tokens and 'use_sliding_window' to true, or make the layer full."
        )
    return window
