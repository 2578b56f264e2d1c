"""The parts that Qwen3-Next and Qwen3.5 share: three layers of Gated DeltaNet for each attention layer with a gated
output.

In checkpoints, one tensor holds the queries and the gates of all heads. In the parameters, one fused kernel per key
head holds the input projections of DeltaNet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ttpu_core import ModelConfig, hookimpl
from ttpu_core import defaults as core
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import Concat, Expression, FlaxMapping, Tensor
from ttpu_core.mapping.layout import CheckpointNames, Rules, norm_rules, replace_rules
from ttpu_core.spec import (
    ArchitectureSpec,
    AttentionSpec,
    MixerSpec,
    NormSpec,
    OutputGate,
    Parameter,
    StateSpec,
    axes,
)
from ttpu_core.spec.rope import rope_from_config
from ttpu_qwen.layer_types import FULL, LINEAR

CONFIG_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
IMPLEMENTATIONS = (("jax", "ttpu_qwen.jax.gated_delta_net:GatedDeltaNet"),)
PREDICTION_HEADS = r"mtp\..*"
"""Tensors of multi-token prediction, which are not part of the model itself."""

InputRules = Callable[[MixerSpec, int, str], Rules]


@hookimpl
def ttpu_norm(config: ModelConfig) -> NormSpec:
    """RMSNorm with a scale of 1 + w, multiplied in float32."""
    return replace(core.ttpu_norm(config), offset=1.0, scale_in_fp32=True)


@hookimpl
def ttpu_attention(config: ModelConfig) -> AttentionSpec:
    """Attention with norms on heads, and a sigmoid gate on each feature of its output.

    Raises:
        ConfigError: the config disables the gate, which would be another model.
    """
    if not config.flag("attn_output_gate", default=True):
        raise ConfigError(
            f"{config.source} sets 'attn_output_gate' to false, but {config.model_type} has a gate in every attention "
            "layer, as in transformers: remove the key, or describe that model by a plugin of its own."
        )
    plain, norm = core.ttpu_attention(config), ttpu_norm(config)
    rope = rope_from_config(config, head_dim=plain.head_dim, partial=True)
    return replace(plain, rope=rope, q_norm=norm, k_norm=norm, output_gate=OutputGate(bias=plain.qkv_bias))


@hookimpl
def ttpu_mixer(config: ModelConfig, layer: int) -> MixerSpec | None:
    """Gated DeltaNet in linear layers, None in the others.

    Raises:
        ConfigError: the key heads do not divide the value heads.
    """
    ttpu_attention(config)  # reads its keys for a model whose layers are all linear, too
    interval = config.positive_int("full_attention_interval")
    assumed = LINEAR if (layer + 1) % interval else FULL
    if core.layer_type(config, layer, (LINEAR, FULL), assumed=assumed) == FULL:
        return None
    heads, value_heads = (config.positive_int(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if value_heads % heads:
        raise ConfigError(
            f"{config.source} has {value_heads} value heads for {heads} key heads in its linear layers, but the first "
            "must be a multiple of the second: correct 'linear_num_value_heads' or 'linear_num_key_heads'."
        )
    dim, value_dim = (config.positive_int(f"linear_{kind}_head_dim") for kind in ("key", "value"))
    kernel, hidden = config.positive_int("linear_conv_kernel_dim"), config.positive_int("hidden_size")
    group, each_value = value_heads // heads, value_heads // heads * value_dim
    mixed = 2 * dim + each_value
    by_value_head = (axes.KV_HEADS, axes.Q_PER_KV)
    return MixerSpec(
        "gated_delta_net",
        IMPLEMENTATIONS,
        parameters=(
            ("qkvz.kernel", Parameter((heads, mixed + each_value, hidden), (axes.KV_HEADS, axes.QKV, axes.EMBED))),
            ("ba.kernel", Parameter((heads, 2, group, hidden), (axes.KV_HEADS, None, axes.Q_PER_KV, axes.EMBED))),
            ("conv.kernel", Parameter((kernel, heads, mixed), (None, axes.KV_HEADS, axes.QKV))),
            # Decay rates: rounding errors would add up over thousands of tokens.
            ("decay_log", Parameter((heads, group), by_value_head, "zeros", "float32")),
            ("decay_bias", Parameter((heads, group), by_value_head, "ones", "float32")),
            ("norm.scale", Parameter((value_dim,), (axes.HEAD_DIM,), "ones")),
            ("output.kernel", Parameter((hidden, heads * each_value), (axes.EMBED, axes.KV_HEADS))),
        ),
        options=(
            ("key_heads", heads),
            ("values_per_key", group),
            ("key_dim", dim),
            ("value_dim", value_dim),
            ("conv_kernel", kernel),
            ("activation", core.activation(config).name),
            ("norm_eps", config.positive_number("rms_norm_eps")),
        ),
        state=(
            StateSpec("conv", (kernel - 1, heads, mixed), (None, axes.KV_HEADS, None)),
            StateSpec("recurrent", (heads, group, dim, value_dim), (axes.KV_HEADS, None, None, None), "float32"),
        ),
    )


def with_mixer_rules(
    mapping: FlaxMapping, spec: ArchitectureSpec, names: CheckpointNames, input_rules: InputRules
) -> FlaxMapping:
    """The mapping with rules for gated attention and for Gated DeltaNet. `input_rules` yields the rules of
    DeltaNet's input projections."""
    rules: dict[str, Expression | None] = {}
    for index, layer in enumerate(spec.layers):
        prefix, path = names.layer.format(layer=index), f"layers.{index}."
        if isinstance(layer.mixer, MixerSpec):
            found = _delta_rules(layer.mixer, spec.hidden_size, prefix + "linear_attn.", input_rules)
        else:
            found = _gated_query_rules(layer.mixer, spec.hidden_size, names, prefix)
        rules.update({path + name: rule for name, rule in found})
    changed = replace_rules(mapping, rules)
    return replace(changed, ignored=(*changed.ignored, PREDICTION_HEADS))


def _gated_query_rules(spec: AttentionSpec, hidden: int, names: CheckpointNames, prefix: str) -> Rules:
    """Rules for `q_proj`, which holds for each head the rows of its query and then those of its gate."""
    kv, group, dim = spec.num_kv_heads, spec.q_per_kv, spec.head_dim
    features: list[tuple[str, tuple[int, ...]]] = [("kernel", (hidden,))] + [("bias", ())] * spec.qkv_bias
    for part, last in features:
        tensor = "weight" if part == "kernel" else part
        pairs = Tensor(f"{prefix}{names.query}.{tensor}", (kv * group * 2 * dim, *last)).reshape(
            kv, group, 2, dim, *last
        )
        own = [
            Tensor(f"{prefix}{name}.{tensor}", (kv * dim, *last)).reshape(kv, 1, dim, *last)
            for name in (names.key, names.value)
        ]
        yield f"attention.qkv.{part}", Concat((pairs[:, :, 0], *own), axis=1)
        yield f"attention.gate.{part}", pairs[:, :, 1]


def _delta_rules(spec: MixerSpec, hidden: int, prefix: str, input_rules: InputRules) -> Rules:
    heads, group, dim, value_dim, kernel = (
        spec.option(name) for name in ("key_heads", "values_per_key", "key_dim", "value_dim", "conv_kernel")
    )
    yield from ((f"mixer.{name}", rule) for name, rule in input_rules(spec, hidden, prefix))
    channels = 2 * heads * dim + heads * group * value_dim
    filters = Tensor(f"{prefix}conv1d.weight", (channels, 1, kernel)).reshape(channels, kernel)
    taps_first = [part.transpose(2, 0, 1) for part in queries_keys_values(filters, spec)]
    yield "mixer.conv.kernel", Concat(tuple(taps_first), axis=2)
    for name, tensor in (("decay_log", "A_log"), ("decay_bias", "dt_bias")):
        yield f"mixer.{name}", Tensor(prefix + tensor, (heads * group,)).reshape(heads, group)
    yield from norm_rules("mixer.norm", NormSpec(), prefix + "norm", value_dim)
    yield "mixer.output.kernel", Tensor(f"{prefix}out_proj.weight", (hidden, heads * group * value_dim))


def queries_keys_values(rows: Tensor, spec: MixerSpec) -> list[Tensor]:
    """Split rows [all queries | all keys | all values, last] into three parts [key_heads, rows of one head, last]."""
    heads, group, dim, value_dim = (
        spec.option(name) for name in ("key_heads", "values_per_key", "key_dim", "value_dim")
    )
    last, keys = rows.result_shape[-1], heads * dim
    return [
        rows[:keys].reshape(heads, dim, last),
        rows[keys : 2 * keys].reshape(heads, dim, last),
        rows[2 * keys :].reshape(heads, group * value_dim, last),
    ]
