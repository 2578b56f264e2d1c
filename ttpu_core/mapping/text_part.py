"""The mapping of a multimodal model's text part: it finds the text model's tensors wherever multimodal checkpoints have
had them."""

from __future__ import annotations

from dataclasses import replace

from ttpu_core.mapping.flax_mapping import FlaxMapping

PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
"""What stands before the text model's tensors: multimodal models in the forms that transformers 5 and 4 write, text
models, and their bases alone."""

HEADS = ("lm_head.", "language_model.lm_head.")

OTHER_PARTS = (
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision|embed_audio)\..*"
)
"""Tensors of the towers for pictures and sound, and of what leads from them to the text model."""


def text_mapping(mapping: FlaxMapping, base: str = "model.", head: str = "lm_head") -> FlaxMapping:
    """A text model's mapping, whose names lie below `base` and whose head is `head`, for multimodal checkpoints too:
    tensors are found below any of `PREFIXES`, and what pictures and sound need is left out."""
    heads = tuple((other, f"{head}.") for other in HEADS if other != f"{head}.")
    bases = tuple((other, base) for other in PREFIXES if other != base)
    return replace(mapping, ignored=(*mapping.ignored, OTHER_PARTS), prefixes=(*heads, *bases))
