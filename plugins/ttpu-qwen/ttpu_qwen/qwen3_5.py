"""Qwen3.5, dense: `qwen3_5_text`, and the text part of the multimodal `qwen3_5`. It equals Qwen3-Next with a dense
MLP, and stores DeltaNet's input projections in separate tensors."""

from __future__ import annotations

from ttpu_core import ModelConfig, hookimpl
from ttpu_core.mapping import Concat, FlaxMapping, Tensor
from ttpu_core.mapping.layout import Rules, standard_mapping
from ttpu_core.spec import ArchitectureSpec, MixerSpec
from ttpu_qwen import hybrid, multimodal

CONFIG_DEFAULTS = hybrid.CONFIG_DEFAULTS | {"vocab_size": 248_320, "num_key_value_heads": 4}

# Hooks of this module too.
ttpu_norm, ttpu_mixer, ttpu_attention = hybrid.ttpu_norm, hybrid.ttpu_mixer, hybrid.ttpu_attention


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The text part, with the class's defaults."""
    return multimodal.text_config(config, CONFIG_DEFAULTS)


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names, below the prefix of the text part."""
    names = multimodal.tensor_names(spec.model_type)
    mapping = hybrid.with_mixer_rules(standard_mapping(spec, names), spec, names, split_inputs)
    return multimodal.either_prefix(mapping, spec.model_type)


def split_inputs(spec: MixerSpec, hidden: int, prefix: str) -> Rules:
    """Rules for DeltaNet's input projections: one tensor for queries, keys and values, and one each for output gate,
    beta and decay."""
    heads, pair, group, _ = dict(spec.parameters)["ba.kernel"].shape
    each, values = group * spec.option("value_dim"), heads * group * spec.option("value_dim")
    rows = 2 * heads * spec.option("key_dim") + values
    qkv = hybrid.queries_keys_values(Tensor(f"{prefix}in_proj_qkv.weight", (rows, hidden)), spec)
    z = Tensor(f"{prefix}in_proj_z.weight", (values, hidden)).reshape(heads, each, hidden)
    yield "qkvz.kernel", Concat((*qkv, z), axis=1)
    small = [Tensor(f"{prefix}in_proj_{name}.weight", (heads * group, hidden)) for name in ("b", "a")]
    assert len(small) == pair
    yield "ba.kernel", Concat(tuple(part.reshape(heads, 1, group, hidden) for part in small), axis=1)
