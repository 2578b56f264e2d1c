"""config.json as plugins read it: typed, checked for unread keys, with access to the text part of multimodal models."""

from ttpu_core.config.json_object import parse_json_object
from ttpu_core.config.model_config import ModelConfig

__all__ = ["ModelConfig", "parse_json_object"]
