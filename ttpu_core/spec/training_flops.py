"""The FLOPs that an update on a token takes."""

from __future__ import annotations

from ttpu_core.spec import ArchitectureSpec
from ttpu_core.spec.arithmetic import attended_tokens, attention_flops, product_flops
from ttpu_core.spec.attention import AttentionSpec

FORWARD_AND_BACKWARD = 3
"""The backward pass multiplies each kernel twice: by the gradient for the inputs, and for the kernel itself."""


def training_flops(spec: ArchitectureSpec, length: int, *, head: bool = True) -> float:
    """FLOPs of one token in an update on rows of `length` tokens: three times those of a forward pass (Kaplan et al.,
    arXiv 2001.08361, table 1, with attention's own products; PaLM, arXiv 2204.02311, appendix B). Tokens attend to
    half of the row on average, or to their window. What is computed again in the backward pass is not counted, nor is
    the lookup of an embedding that is not the head too; `head` says whether logits are computed."""
    looked_up = 0 if spec.head.tied and head else spec.parameters["embed.embedding"].size
    forward = product_flops(spec.num_multiplied_parameters - looked_up, 1)
    for layer in spec.layers:
        if isinstance(layer.mixer, AttentionSpec):
            seen = attended_tokens(layer.mixer, length)
            pairs = seen - seen * (seen - 1) / (2 * length)  # the first tokens of a row see less than a window
            forward += attention_flops(layer.mixer.num_heads, layer.mixer, pairs)
    return FORWARD_AND_BACKWARD * forward
