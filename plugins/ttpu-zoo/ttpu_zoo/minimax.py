"""MiniMax-Text-01 (`model_type` "minimax"; arXiv 2501.08313): lightning attention in some layers and attention in the
others, experts in each, and residuals that start at the norms' outputs."""

from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.mapping import Expression, FlaxMapping, Tensor
from ttpu_core.mapping.layout import CheckpointNames, replace_rules, standard_mapping
from ttpu_core.spec import (
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    MixerSpec,
    MoESpec,
    Parameter,
    RouterSpec,
    StateSpec,
    axes,
)
from ttpu_core.spec.rope import RopeSpec, rope_from_config
from ttpu_zoo import minimax_m2

FACTORS = [f"{part}_{factor}_factor" for part in ("full_attn", "linear_attn", "mlp") for factor in ("alpha", "beta")]
CONFIG_DEFAULTS = dict.fromkeys(FACTORS, 1) | {
    "vocab_size": 32_000,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
NAMES = replace(minimax_m2.NAMES, correction_bias=CheckpointNames.correction_bias)
FULL, LINEAR = "full_attention", "linear_attention"
DECAYS = r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)"
"""Buffers of transformers, which follow from the number of heads and of layers."""


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `MiniMaxConfig`. The sizes that define a model are required."""
    config.does_not_matter("block_size", because="it changes in which order transformers adds, and no result")
    config.does_not_matter("router_jitter_noise", because="it disturbs training alone")
    return config.with_renamed({"num_experts": "num_local_experts"}).with_defaults(CONFIG_DEFAULTS)


def kind_of(config: ModelConfig, layer: int) -> str:
    """The layer's entry in `layer_types`; without that list every second layer has lightning attention."""
    return defaults.layer_type(config, layer, (FULL, LINEAR), assumed=LINEAR if layer % 2 else FULL)


@hookimpl
def ttpu_block(config: ModelConfig, layer: int) -> BlockSpec:
    """Each sub-layer adds beta times its output to alpha times the output of the norm before it."""
    mixer = "full_attn" if kind_of(config, layer) == FULL else "linear_attn"
    alphas, betas = ([config.number(f"{part}_{one}_factor") for part in (mixer, "mlp")] for one in ("alpha", "beta"))
    return BlockSpec(
        residual_multiplier=betas[0],
        mlp_residual_multiplier=betas[1],
        skip_multipliers=(alphas[0], alphas[1]),
        normed_residual=True,
    )


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention without biases, within a window if the config has one."""
    window = config.positive_int("sliding_window", default=None)
    return replace(defaults.ttpu_attention(config), window=window)


@hookimpl
def ttpu_rope(config: ModelConfig, attention: AttentionSpec) -> RopeSpec:
    """Rope on whole heads, with a base of a million where the config names none."""
    return rope_from_config(config, head_dim=attention.head_dim, theta=1_000_000.0)


@hookimpl
def ttpu_mixer(config: ModelConfig, layer: int) -> MixerSpec | None:
    """Lightning attention (arXiv 2401.04658) in linear layers. Head h of n decays by exp(-2^(-8 (h + 1) / n) f) a
    token, where f falls from 1 in the first layer to nearly 0 in the last."""
    attention = ttpu_attention(config)
    if kind_of(config, layer) == FULL:
        return None
    heads, dim, hidden = attention.num_heads, attention.head_dim, config.positive_int("hidden_size")
    layers = config.positive_int("num_hidden_layers")
    return MixerSpec(
        "lightning_attention",
        (("jax", "ttpu_zoo.jax.lightning_attention:LightningAttention"),),
        parameters=(
            ("qkv.kernel", Parameter((heads, 3 * dim, hidden), (axes.KV_HEADS, axes.QKV, axes.EMBED))),
            ("gate.kernel", Parameter((heads, dim, hidden), (axes.KV_HEADS, axes.QKV, axes.EMBED))),
            ("norm.scale", Parameter((heads * dim,), (None,), "ones")),
            ("output.kernel", Parameter((hidden, heads * dim), (axes.EMBED, axes.KV_HEADS))),
        ),
        options=(
            ("heads", heads),
            ("head_dim", dim),
            ("activation", defaults.activation(config).name),
            ("decay", 1 - layer / (layers - 1 + 1e-5) + 1e-5),
        ),
        state=(StateSpec("recurrent", (heads, dim, dim), (axes.KV_HEADS, None, None), "float32"),),
    )


@hookimpl
def ttpu_mlp(config: ModelConfig) -> MoESpec:
    """Experts as Mixtral's: the weights are the softmax of the chosen experts' scores."""
    return MoESpec(
        num_experts=config.positive_int("num_local_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=config.positive_int("intermediate_size"),
        activation=defaults.activation(config),
        router=RouterSpec(renormalize=True),
    )


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """Mixtral's names, and those of lightning attention, whose queries, keys and values are stored head by head."""
    rules: dict[str, Expression | None] = {}
    for index, layer in enumerate(spec.layers):
        if not isinstance(layer.mixer, MixerSpec):
            continue
        path, names = f"layers.{index}.mixer.", f"model.layers.{index}.self_attn."
        for kernel, tensor in (("qkv", "qkv_proj"), ("gate", "output_gate"), ("output", "out_proj")):
            shape = dict(layer.mixer.parameters)[f"{kernel}.kernel"].shape
            rows = (spec.hidden_size, shape[1]) if kernel == "output" else (shape[0] * shape[1], spec.hidden_size)
            rules[f"{path}{kernel}.kernel"] = Tensor(f"{names}{tensor}.weight", rows).reshape(*shape)
        rules[f"{path}norm.scale"] = Tensor(f"{names}norm.weight", dict(layer.mixer.parameters)["norm.scale"].shape)
    usual = replace_rules(standard_mapping(spec, NAMES), rules)
    return replace(usual, ignored=(*usual.ignored, DECAYS))
