"""GLM-4.7-Flash (`model_type` "glm4_moe_lite"): DeepSeek-V3's latent attention and experts, in layers that a list
names."""

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import standard_mapping, without_further_layers
from ttpu_core.spec import ArchitectureSpec, MixerSpec, MLPSpec, MoESpec
from ttpu_zoo.deepseek_v3 import deepseek_attention, deepseek_experts

CONFIG_DEFAULTS = {
    "vocab_size": 154_880,
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_interleave": True,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
}
RENAMED = {"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `Glm4MoeLiteConfig`. The sizes that define a model are required."""
    config.does_not_matter(("qk_head_dim", "num_key_value_heads"), because="they follow from other keys")
    config.does_not_matter("num_nextn_predict_layers", because="layers that predict further tokens are ignored")
    config.does_not_matter("intermediate_size", because="it is the size of dense layers, of which there may be none")
    return config.with_renamed(RENAMED).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_mixer(config: ModelConfig) -> MixerSpec:
    """DeepSeek-V3's latent attention."""
    return deepseek_attention(config, interleaved=config.flag("rope_interleave"))


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """The kind that `mlp_layer_types` names; without it only the first layer is dense.

    Raises:
        ConfigError: the list has another length than the layers, or names another kind.
    """
    kinds, layers = config.items("mlp_layer_types", default=None), config.positive_int("num_hidden_layers")
    if kinds is not None and (len(kinds) < layers or not {*kinds} <= {"dense", "sparse"}):
        raise ConfigError(
            f"{config.source} has {list(kinds)} in 'mlp_layer_types' for {layers} layers, but one entry for each is "
            "needed, dense or sparse: correct `mlp_layer_types` or `num_hidden_layers`."
        )
    experts = deepseek_experts(config)
    dense = layer == 0 if kinds is None else kinds[layer] == "dense"
    return defaults.ttpu_mlp(config) if dense else experts


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names. The layer after the last one, which predicts a further token, is left out: transformers' config
    class has no key for it."""
    return without_further_layers(standard_mapping(spec), spec, 1)
