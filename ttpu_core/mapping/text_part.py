"""The checkpoint mapping of a multimodal model's text part. It finds the text model's tensors under every prefix
that multimodal checkpoints use."""

from __future__ import annotations

from dataclasses import replace

from ttpu_core.mapping.flax_mapping import FlaxMapping

PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
"""Prefixes of the text model's tensors: in multimodal checkpoints of transformers 5 and of transformers 4, in
text-only checkpoints, and in checkpoints of the base model alone."""

HEADS = ("lm_head.", "language_model.lm_head.")

OTHER_PARTS = (
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision|embed_audio)\..*"
)
"""Regular expression for the tensors of vision and audio towers and of the projectors between them and the text
model."""


def text_mapping(mapping: FlaxMapping, base: str = "model.", head: str = "lm_head") -> FlaxMapping:
    """Extend a text model's mapping to multimodal checkpoints: tensors are found below any of `PREFIXES`, and
    tensors of the vision and audio parts are ignored.

    `base` is the prefix of the mapping's own tensor names, `head` the name of its output head."""
    heads = tuple((other, f"{head}.") for other in HEADS if other != f"{head}.")
    bases = tuple((other, base) for other in PREFIXES if other != base)
    return replace(mapping, ignored=(*mapping.ignored, OTHER_PARTS), prefixes=(*heads, *bases))
