"""Maps checkpoint tensors to Flax parameters, and back."""

from ttpu_core.mapping.expressions import Concat, Expression, Padded, Shape, Stack, Tensor, gather, scatter
from ttpu_core.mapping.flax_mapping import FlaxMapping, pad_mapping, stack_layers

__all__ = [
    "Concat",
    "Expression",
    "FlaxMapping",
    "Padded",
    "Shape",
    "Stack",
    "Tensor",
    "gather",
    "pad_mapping",
    "scatter",
    "stack_layers",
]
