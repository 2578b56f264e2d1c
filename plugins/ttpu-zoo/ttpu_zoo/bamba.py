"""Bamba (`model_type` "bamba"): Mamba-2's state spaces, with attention in a few layers, and a gated MLP in each."""

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MixerSpec
from ttpu_core.spec.rope import RopeSpec, rope_from_config
from ttpu_core.spec.state_space import state_space
from ttpu_zoo.mamba2 import dt_limits

MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
CONFIG_DEFAULTS = MAMBA_DEFAULTS | {
    "vocab_size": 128_000,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 0.5,
}
NAMES = CheckpointNames(
    final_norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the defaults of `BambaConfig`. The sizes that define a model are required."""
    config.does_not_matter("mamba_chunk_size", because="the results do not depend on it")
    config.does_not_matter("attn_rotary_emb", because="half of a head's features are rotated")
    config.does_not_matter("num_logits_to_keep", because="it says which logits generation asks for")
    config.does_not_matter("z_loss_coefficient", because="only the loss that transformers computes has it")
    config.does_not_matter("layers_block_type", because="it follows from the indices of attention layers")
    config.get("partial_rotary_factor")
    return config.with_defaults(CONFIG_DEFAULTS).with_values({"partial_rotary_factor": 0.5})


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope on half of a head's features, unless the rope parameters say otherwise."""
    return rope_from_config(config, head_dim=attention.head_dim, partial=True)


@hookimpl
def ttpu_mixer(config: ModelConfig, layer: int) -> MixerSpec | None:
    """A state space, or attention in the layers of `attn_layer_indices`."""
    defaults.ttpu_attention(config)  # reads its keys for a model without attention, too
    mixer = mamba_mixer(config)
    return None if layer in config.int_list("attn_layer_indices", default=()) else mixer


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Names of its own."""
    return standard_mapping(spec, NAMES)


def mamba_mixer(config: ModelConfig) -> MixerSpec:
    """The state space that the keys `mamba_*` describe."""
    hidden, heads = config.positive_int("hidden_size"), config.positive_int("mamba_n_heads")
    expanded = config.positive_int("mamba_expand") * hidden // heads
    automatic = config.get("mamba_d_head", "auto") == "auto"
    return state_space(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=expanded if automatic else config.positive_int("mamba_d_head"),
        state_size=config.positive_int("mamba_d_state"),
        groups=config.positive_int("mamba_n_groups"),
        conv_kernel=config.positive_int("mamba_d_conv"),
        activation=defaults.activation(config).name,
        norm_eps=config.positive_number("rms_norm_eps"),
        bias=config.flag("mamba_proj_bias"),
        conv_bias=config.flag("mamba_conv_bias"),
        dt_limits=dt_limits(config),
    )
