"""The text part of Gemma's multimodal models: its config, and its mapping without tensors that the text model never
uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ttpu_core import ModelConfig
from ttpu_core.config import text_part
from ttpu_core.mapping import FlaxMapping


def text_config(config: ModelConfig, parent: str, defaults: Mapping[str, Any]) -> ModelConfig:
    """The text model's config with its class's defaults: `config` itself, or the `text_config` of a multimodal
    `parent`.

    Raises:
        ConfigError: a parent without a `text_config`.
    """
    if config.model_type == parent:
        config.require("text_config", ModelConfig)
    return text_part.text_config(config, (f"{parent}_text",), tied=True).with_defaults(defaults)


def without_shared_keys(mapping: FlaxMapping, shared: Iterable[int]) -> FlaxMapping:
    """The mapping, ignoring keys and values that checkpoints hold for layers that read another layer's."""
    layers = "|".join(map(str, shared))
    unused = rf".*layers\.({layers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
    return replace(mapping, ignored=(*mapping.ignored, unused)) if layers else mapping
