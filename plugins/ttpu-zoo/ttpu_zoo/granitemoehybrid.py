"""Granite 4 (`model_type` "granitemoehybrid"): granite with Mamba-2's state spaces in most layers, and in each layer
experts beside a shared one, or one MLP."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import fused_gate_up, replace_rules
from ttpu_core.spec import NO_ROPE, ArchitectureSpec, AttentionSpec, MixerSpec, MLPSpec, MoESpec
from ttpu_core.spec.rope import RopeSpec
from ttpu_zoo import bamba, granite, granitemoe

CONFIG_DEFAULTS = {**granitemoe.CONFIG_DEFAULTS, **bamba.MAMBA_DEFAULTS, "shared_intermediate_size": 1024}
NAMES = replace(granitemoe.NAMES, down="shared_mlp.output_linear")
MAMBA, FULL = ("linear_attention", "mamba"), ("full_attention", "attention")

ttpu_embedding, ttpu_attention = granite.ttpu_embedding, granite.ttpu_attention  # hooks of this module too
ttpu_block, ttpu_head = granite.ttpu_block, granite.ttpu_head


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `GraniteMoeHybridConfig`. The sizes that define a model are
    required."""
    config.does_not_matter("mamba_chunk_size", because="the results do not depend on it")
    config.does_not_matter(
        ("intermediate_size", "num_experts_per_tok"), because="they are sizes of experts, of which there may be none"
    )
    return config.with_renamed({"layers_block_type": "layer_types"}).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """None, unless the config asks for rope."""
    rope = defaults.ttpu_rope(config, attention)
    return rope if config.text("position_embedding_type", default="none") == "rope" else NO_ROPE


@hookimpl
def ttpu_mixer(config: ModelConfig, layer: int) -> MixerSpec | None:
    """A state space in all layers that `layer_types` does not give attention to."""
    granite.ttpu_attention(config)  # reads its keys for a model without attention, too
    kind, mixer = defaults.layer_type(config, layer, (*MAMBA, *FULL), assumed=MAMBA[0]), bamba.mamba_mixer(config)
    return mixer if kind in MAMBA else None


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MLPSpec | MoESpec:
    """Experts with a shared one, or an MLP of the shared one's size."""
    if config.require("num_local_experts", int):
        return granitemoe.ttpu_mlp(config)
    return MLPSpec(config.positive_int("shared_intermediate_size"), defaults.activation(config))


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Granite MoE's tensors. The one MLP is stored as a shared expert is."""
    gate_up = fused_gate_up(spec, NAMES, "shared_mlp.input_linear.weight")
    return replace_rules(granitemoe.mapping(spec, NAMES), gate_up)
