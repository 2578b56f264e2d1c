"""config.json as plugins read it: typed, checked for unread keys, with access to the text part of multimodal models."""

from ttpu_core.config.model_config import ModelConfig, parse_json_object

__all__ = ["ModelConfig", "parse_json_object"]
