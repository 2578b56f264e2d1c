"""The names of logical axes. A logical axis states the meaning of a dimension of a parameter or an activation.

A family and the shared decoder name logical axes only; a strategy (`ttpu_core.sharding.strategy`) maps them to mesh
axes."""

from typing import Final

# Parameters
VOCAB: Final = "vocab"  # rows of the embedding table and of the output head
LOOKED_UP: Final = "looked_up"  # rows of an embedding table that is not the head's too
EMBED: Final = "embed"  # the residual stream, `hidden_size`
KV_HEADS: Final = "kv_heads"  # key/value heads; query heads are stored grouped by the KV head they read
Q_PER_KV: Final = "q_per_kv"  # query heads of one KV head
Q_HEADS: Final = "q_heads"  # query heads where they are not grouped
QKV: Final = "qkv"  # the fused group of one KV head: its query heads, then its key, then its value
HEAD_DIM: Final = "head_dim"
MLP: Final = "mlp"  # the MLP's inner dimension, or the channels of a convolution
GATE_UP: Final = "gate_up"  # the pair (gate, up) of a gated MLP, or the inputs of a convolution, fused
EXPERT: Final = "expert"
ROUTED: Final = "routed"  # the experts between which a router chooses
LAYERS: Final = "layers"  # the leading axis of parameters stacked over layers
LATENT: Final = "latent"  # the compressed queries, or keys and values, of latent attention; an update of low rank
NORM: Final = "norm"  # scale and bias of a normalisation over the residual stream
POSITION: Final = "position"  # rows of a learned position table

# Activations and caches
BATCH: Final = "batch"
SEQUENCE: Final = "sequence"

PARAMETER_AXES: Final = frozenset(
    {VOCAB, LOOKED_UP, EMBED, KV_HEADS, Q_PER_KV, Q_HEADS, QKV, HEAD_DIM, MLP, GATE_UP}
    | {EXPERT, ROUTED, LAYERS, LATENT, NORM, POSITION}
)
ACTIVATION_AXES: Final = frozenset({BATCH, SEQUENCE})
LOGICAL_AXES: Final = PARAMETER_AXES | ACTIVATION_AXES
