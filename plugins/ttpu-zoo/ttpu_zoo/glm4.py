"""GLM-4-0414 (`model_type` "glm4"): glm with norms after the sub-layers too."""

from ttpu_core import hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, fused_gate_up, replace_rules, standard_mapping
from ttpu_core.spec import ArchitectureSpec, BlockSpec
from ttpu_zoo import glm

# The norm called `post_attention_layernorm` stands before the MLP.
NAMES = CheckpointNames(
    mlp_norm="post_attention_layernorm",
    post_attention_norm="post_self_attn_layernorm",
    post_mlp_norm="post_mlp_layernorm",
)

ttpu_config, ttpu_attention, ttpu_rope = glm.ttpu_config, glm.ttpu_attention, glm.ttpu_rope  # hooks of this module too


@hookimpl
def ttpu_block() -> BlockSpec:
    """Norms before and after each sub-layer."""
    return BlockSpec(placement="sandwich")


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """GLM's names for the norms, and gate and up in one tensor."""
    return replace_rules(standard_mapping(spec, NAMES), fused_gate_up(spec))
