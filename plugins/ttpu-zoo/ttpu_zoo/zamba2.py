"""Zamba2 (`model_type` "zamba2"; arXiv 2411.15242): Mamba-2's state spaces, some of which also read what a transformer
block makes of the stream and the tokens' embedding. Layers use a few such blocks in turn, each with low-rank updates of
its own."""

import math
from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import Expression, FlaxMapping, Stack, Tensor
from ttpu_core.mapping.layout import CheckpointNames, replace_rules, standard_mapping
from ttpu_core.spec import (
    NO_MLP,
    NO_ROPE,
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    CustomSpec,
    MixerSpec,
    MLPSpec,
    Parameter,
    SharedSpec,
    axes,
)
from ttpu_core.spec.rope import RopeSpec
from ttpu_core.spec.state_space import state_space

MAMBA, HYBRID = "linear_attention", "hybrid"
KINDS = [MAMBA] + ([MAMBA] * 5 + [HYBRID]) * 7 + [MAMBA] * 4 + [HYBRID] + [MAMBA] * 3 + [HYBRID] + [MAMBA] * 2
CONFIG_DEFAULTS = {
    "vocab_size": 32_000, "max_position_embeddings": 4096, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_ngroups": 1, "n_mamba_heads": 8, "time_step_min": 0.001, "add_bias_linear": False, "hidden_act": "gelu",
    "num_mem_blocks": 1, "use_shared_attention_adapter": False, "adapter_rank": 128, "use_mem_rope": False,
    "use_long_context": False, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
DERIVED = ("attention_head_dim", "head_dim", "attention_hidden_size", "kv_channels", "num_query_groups",
           "hybrid_layer_ids", "mamba_headdim")  # fmt: skip
UNREAD = ("use_conv_bias", "chunk_size", "use_mem_eff_path", "use_mamba_kernels", "num_logits_to_keep",
          "use_shared_mlp_adapter", "time_step_max", "time_step_floor")  # fmt: skip
SHARED = "shared_transformer."
NAMES = CheckpointNames(final_norm="model.final_layernorm")
HYBRID_NAMES = replace(
    NAMES,
    query=f"{SHARED}self_attn.q_proj",
    key=f"{SHARED}self_attn.k_proj",
    value=f"{SHARED}self_attn.v_proj",
    output=f"{SHARED}self_attn.o_proj",
    down=f"{SHARED}feed_forward.down_proj",
    input_norm=f"{SHARED}input_layernorm",
    mlp_norm=f"{SHARED}pre_ff_layernorm",
    state_space="mamba_decoder.mamba.",
)


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names, defaults and derived sizes of `Zamba2Config`. The sizes that define a model are
    required."""
    config.does_not_matter(DERIVED, because="it follows from other keys")
    config.does_not_matter(UNREAD, because="transformers does not read it, or it does not change the results")
    config = config.with_renamed({"layer_types": "layers_block_type"}).with_defaults(CONFIG_DEFAULTS)
    kinds = [MAMBA if kind == "mamba" else kind for kind in config.items("layers_block_type", default=KINDS)]
    heads = config.positive_int("num_attention_heads")
    context = 16_384 if config.flag("use_long_context") else config.positive_int("max_position_embeddings")
    return config.with_values(
        {
            "layer_types": kinds,
            "head_dim": 2 * config.positive_int("hidden_size") // heads,
            "max_position_embeddings": context,
        }
    )


@hookimpl
def ttpu_mixer(config: ModelConfig, layer: int) -> MixerSpec | None:
    """A state space, or None in hybrid layers, which have attention and a state space beside it."""
    ttpu_rope(config, ttpu_attention(config))  # reads their keys for a model without hybrid layers, too
    mixer = _state_space(config)
    return None if _is_hybrid(config, layer) else mixer


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention without biases, whose scores are scaled as those of heads of half the size."""
    usual = defaults.ttpu_attention(config)
    return replace(usual, qkv_bias=False, output_bias=False, scale=(usual.head_dim / 2) ** -0.5)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """None, unless the config asks for rope."""
    rope = defaults.ttpu_rope(config, attention)
    return rope if config.flag("use_mem_rope") else NO_ROPE


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec:
    """A gated MLP in hybrid layers."""
    inner = config.positive_int("intermediate_size", default=4 * config.positive_int("hidden_size"))
    mlp = MLPSpec(inner, defaults.activation(config), bias=config.flag("add_bias_linear"))
    return mlp if _is_hybrid(config, layer) else NO_MLP


@hookimpl
def ttpu_block(config: ModelConfig, layer: int) -> BlockSpec:
    """In hybrid layers a shared block, a projection of what it gives, and the state space that reads that."""
    hidden = config.positive_int("hidden_size")
    own = (
        ("projection.kernel", Parameter((hidden, hidden), (None, axes.EMBED))),
        ("mixer_norm.scale", Parameter((hidden,), (axes.NORM,), "ones")),
    )
    hybrid = BlockSpec(
        beside=_state_space(config),
        reads_embedding=True,
        shared=_shared(config, layer),
        custom=CustomSpec("zamba2_block", (("jax", "ttpu_zoo.jax.zamba2:Block"),), own),
    )
    return hybrid if _is_hybrid(config, layer) else BlockSpec()


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Names of its own. A block lies in the first layer that uses it, with the updates of all that do."""
    uses = {index: layer.block.shared for index, layer in enumerate(spec.layers) if layer.block.shared is not None}
    first = {shared.block: index for index, shared in reversed(uses.items())}
    rules: dict[str, Expression] = {}
    for number, (index, shared) in enumerate(uses.items()):
        layer, block = f"model.layers.{index}.", f"model.layers.{first[shared.block]}.{SHARED}"
        own, hidden = f"layers.{index}.", spec.hidden_size
        rules[f"{own}projection.kernel"] = Tensor(f"{layer}linear.weight", (hidden, hidden))
        rules[f"{own}mixer_norm.scale"] = Tensor(f"{layer}mamba_decoder.input_layernorm.weight", (hidden,))
        gate_up, path = f"{block}feed_forward.gate_up_proj", f"shared.{shared.block}.mlp.gate_up."
        _, inner, _ = spec.parameters[f"{path}kernel"].shape
        rules[f"{path}kernel"] = Tensor(f"{gate_up}.weight", (2 * inner, hidden)).reshape(2, inner, hidden)
        if f"{path}bias" in spec.parameters:
            rules[f"{path}bias"] = Tensor(f"{gate_up}.bias", (2 * inner,)).reshape(2, inner)
        a, b, rank = f"_adapter_list.{number}.0.weight", f"_adapter_list.{number}.1.weight", shared.mlp_rank or 0
        rules[f"{own}mlp.gate_up.update.a"] = Tensor(gate_up + a, (rank, hidden)).reshape(1, rank, hidden)
        rules[f"{own}mlp.gate_up.update.b"] = Tensor(gate_up + b, (2 * inner, rank)).reshape(2, inner, rank)
        if shared.qkv_rank:
            path, names = f"{own}attention.qkv.update.", [f"{block}self_attn.linear_{part}" for part in "qkv"]
            heads, _, dim, _ = spec.parameters[f"{path}b"].shape
            outputs = [Tensor(name + b, (heads * dim, rank)).reshape(heads, dim, rank) for name in names]
            rules[f"{path}a"] = Stack(tuple(Tensor(name + a, (rank, 2 * hidden)) for name in names))
            rules[f"{path}b"] = Stack(tuple(outputs), axis=1)
    mapping = replace_rules(standard_mapping(spec, NAMES, dict.fromkeys(uses, HYBRID_NAMES)), rules)
    repeated = (
        name.replace(f"layers.{first[shared.block]}.", f"layers.{index}.")
        for index, shared in uses.items()
        for name in mapping.tensors
        if name.startswith(f"model.layers.{first[shared.block]}.{SHARED}") and index != first[shared.block]
    )
    return replace(mapping, tied=(*mapping.tied, *repeated))


def _is_hybrid(config: ModelConfig, layer: int) -> bool:
    return defaults.layer_type(config, layer, (MAMBA, HYBRID)) == HYBRID


def _shared(config: ModelConfig, layer: int) -> SharedSpec:
    """The block of a layer: the hybrid ones use all blocks in turn.

    Raises:
        ConfigError: keys that have updates have another size than queries, or transformers would share no block.
    """
    heads, rank = config.positive_int("num_attention_heads"), config.positive_int("adapter_rank")
    kv_heads, updates = config.positive_int("num_key_value_heads", default=heads), "use_shared_attention_adapter"
    if config.flag(updates) and kv_heads != heads:
        raise ConfigError(
            f"{config.source} sets {updates!r} for {heads} query and {kv_heads} key/value heads, but these updates "
            f"have one size: set `num_key_value_heads` to {heads}."
        )
    kinds, blocks = config.items("layer_types"), config.positive_int("num_mem_blocks")
    if not config.flag("tie_word_embeddings") and kinds.count(HYBRID) > blocks:
        raise ConfigError(
            f"{config.source} sets 'tie_word_embeddings' to false, for which transformers gives each of the "
            f"{kinds.count(HYBRID)} hybrid layers a block of its own: set it to true, or use backend='torch_xla'."
        )
    return SharedSpec(kinds[:layer].count(HYBRID) % blocks, rank if config.flag(updates) else None, rank)


def _state_space(config: ModelConfig) -> MixerSpec:
    hidden, heads = config.positive_int("hidden_size"), config.positive_int("n_mamba_heads")
    return state_space(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=config.positive_int("mamba_expand") * hidden // heads,
        state_size=config.positive_int("mamba_d_state"),
        groups=config.positive_int("mamba_ngroups"),
        conv_kernel=config.positive_int("mamba_d_conv"),
        bias=config.flag("add_bias_linear"),
        dt_limits=(config.number("time_step_min"), math.inf),
    )
