"""The text part of Qwen3.5 checkpoints, which are multimodal. In: a config with or without a `text_config`; out: the
config of the text part, its head, and the names and extras of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ttpu_core import ModelConfig, hookimpl
from ttpu_core.errors import ConfigError
from ttpu_core.layout import CheckpointNames
from ttpu_core.mapping import FlaxMapping
from ttpu_core.spec import HeadSpec
from ttpu_qwen.experts import SHARED_EXPERT

TIED_BY_PARENT = "tie_word_embeddings_of_parent"
SILU = ("silu", "swish")
TEXT, WHOLE = "model.", "model.language_model."
VISION = r"model\.visual\..*"
# Of the vision part, or of the heads that predict further tokens, or names: they leave the text part as it is.
OF_OTHER_PARTS = (
    "model_type", "language_model_only", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
)  # fmt: skip


def text_config(config: ModelConfig, defaults: Mapping[str, Any]) -> ModelConfig:
    """The text part with the class's defaults; a parent says whether the head is tied, as in transformers.

    Raises:
        ConfigError: a gated norm with another activation than SiLU.
    """
    text = config.section("text_config")
    if text is None:
        text = config
    else:
        _leave_out(config)
        defaults = {**defaults, TIED_BY_PARENT: config.flag("tie_word_embeddings", default=False)}
    _leave_out(text)
    for form in ("rope_parameters", "rope_scaling"):
        rope = text.section(form)
        if rope is not None:
            # A token of text has the same position along time, height and width, so that the sections do not matter.
            rope.get("mrope_section"), rope.get("mrope_interleaved")
    text.get("mamba_ssm_dtype")  # the recurrent state is in float32, whatever it says
    gate = text.text("output_gate_type", default="silu")
    if gate not in SILU:
        raise ConfigError(
            f"{config.source} asks for a gated norm with {gate!r} under 'output_gate_type', but transformers computes "
            f"{' (or '.join(SILU)}) there: correct it, or describe that model by a plugin of its own."
        )
    return text.with_defaults(defaults)


@hookimpl
def ttpu_head(config: ModelConfig) -> HeadSpec:
    """Tied as the parent says where there is one, else as the config itself does."""
    own = config.flag("tie_word_embeddings")
    return HeadSpec(tied=config.flag(TIED_BY_PARENT, default=own))


def tensor_names(model_type: str) -> CheckpointNames:
    """Where the tensors of the text part are: below `model.language_model.` in a multimodal checkpoint."""
    prefix = TEXT if model_type.endswith("_text") else WHOLE
    return CheckpointNames(
        layer=f"{prefix}layers.{{layer}}.",
        embedding=f"{prefix}embed_tokens.weight",
        final_norm=f"{prefix}norm",
        shared_gate_up_down=SHARED_EXPERT,
    )


def either_prefix(mapping: FlaxMapping, model_type: str) -> FlaxMapping:
    """The mapping, which reads checkpoints of the text part and of the whole alike, and leaves out what is not text."""
    other, own = (WHOLE, TEXT) if model_type.endswith("_text") else (TEXT, WHOLE)
    return replace(mapping, prefixes=((other, own), ("", own)), ignored=(*mapping.ignored, VISION))


def _leave_out(config: ModelConfig) -> None:
    for key in OF_OTHER_PARTS:
        config.get(key)
