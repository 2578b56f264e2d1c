"""The text part of multimodal Qwen3.5 checkpoints: its config, its head, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttpu_core import ModelConfig
from ttpu_core.config import text_part
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames
from ttpu_core.mapping.text_part import text_mapping
from ttpu_qwen.experts import SHARED_EXPERT

TEXT_TYPES = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_text": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_5_moe_text": "qwen3_5_moe_text",
}
SILU = ("silu", "swish")
# Keys of the vision part, of multi-token prediction, and names: they do not affect the text part.
OF_OTHER_PARTS = (
    "model_type", "language_model_only", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
)  # fmt: skip


def text_config(config: ModelConfig, defaults: Mapping[str, Any]) -> ModelConfig:
    """The text part with the class's defaults. A multimodal parent decides whether the head is tied, as in
    transformers.

    Raises:
        ConfigError: a gated norm with another activation than SiLU.
    """
    text = text_part.text_config(config, (TEXT_TYPES[config.model_type],), tied=False)
    for part in (config, text):
        part.does_not_matter(OF_OTHER_PARTS, because="they belong to other parts of the model")
    for form in ("rope_parameters", "rope_scaling"):
        rope = text.section(form)
        if rope is not None:
            why = "a text token has the same position along time, height and width"
            rope.does_not_matter(("mrope_section", "mrope_interleaved"), because=why)
    text.does_not_matter("mamba_ssm_dtype", because="the recurrent state is always float32")
    gate = text.text("output_gate_type", default="silu")
    if gate not in SILU:
        raise ConfigError(
            f"{config.source} asks for a gated norm with {gate!r} under 'output_gate_type', but transformers computes "
            f"{' (or '.join(SILU)}) there: correct it, or describe that model by a plugin of its own."
        )
    return text.with_defaults(defaults)


def base(model_type: str) -> str:
    """Prefix of the base model's tensors."""
    return "model." if model_type.endswith("_text") else "model.language_model."


def tensor_names(model_type: str) -> CheckpointNames:
    """Tensor names of the text part: below `model.language_model.` in a multimodal checkpoint."""
    return CheckpointNames(shared_gate_up_down=SHARED_EXPERT).below(base(model_type))


def either_prefix(mapping: FlaxMapping, model_type: str) -> FlaxMapping:
    """The mapping extended to checkpoints of the text part and of the whole model. Tensors of other parts are
    ignored."""
    return text_mapping(mapping, base(model_type))
