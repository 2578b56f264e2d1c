"""DeepSeek-V2 and V2-Lite (`model_type` "deepseek_v2"): latent attention, and experts chosen by softmax after the first
dense layers, among all or within the best groups."""

from collections.abc import Iterable

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.errors import ConfigError
from ttpu_core.spec import MixerSpec, MLPSpec, MoESpec, RouterSpec, TorchPatch
from ttpu_zoo.deepseek_v3 import FOLLOWING, deepseek_attention

CONFIG_DEFAULTS = {
    "vocab_size": 102_400,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "topk_method": "greedy",
    "n_group": None,
    "topk_group": None,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
}
METHODS = ("greedy", "group_limited_greedy")
OTHER_CODE = ("scoring_func", "norm_topk_prob", "moe_layer_freq", "ep_size", "aux_loss_alpha", "seq_aux", "auto_map")


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the names and defaults of `DeepseekV2Config`. The sizes that define a model are required."""
    config.does_not_matter(FOLLOWING, because="they follow from other keys")
    config.does_not_matter("intermediate_size", because="it is the size of dense layers, of which there may be none")
    config.does_not_matter(OTHER_CODE, because="the code that DeepSeek publishes reads them, and transformers does not")
    return config.with_renamed({"num_experts": "n_routed_experts"}).with_defaults(CONFIG_DEFAULTS)


@hookimpl
def ttpu_mixer(config: ModelConfig) -> MixerSpec:
    """Latent attention, whose scores yarn sharpens. Rotated features are pairs of neighbours."""
    return deepseek_attention(config, interleaved=True)


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """A dense MLP in the first layers, then experts with shared ones.

    Raises:
        ConfigError: an unknown `topk_method`.
    """
    method = config.require("topk_method", str)
    if method not in METHODS:
        raise ConfigError(
            f"config.json has topk_method={method!r}, but transformers knows {' and '.join(METHODS)}: correct it."
        )
    grouped = method == METHODS[1]
    activation, inner = defaults.activation(config), config.positive_int("moe_intermediate_size")
    groups, chosen = config.positive_int("n_group", default=None), config.positive_int("topk_group", default=None)
    experts = MoESpec(
        num_experts=config.positive_int("n_routed_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=inner,
        activation=activation,
        router=RouterSpec(
            groups=groups if grouped and groups else 1,
            top_groups=chosen if grouped and chosen else 1,
            scaling_factor=config.number("routed_scaling_factor"),
        ),
        shared=MLPSpec(inner * config.positive_int("n_shared_experts"), activation, bias=config.flag("mlp_bias")),
    )
    return defaults.ttpu_mlp(config) if layer < config.require("first_k_dense_replace", int) else experts


@hookimpl
def ttpu_torch_patches() -> Iterable[TorchPatch]:
    """Rope in real numbers. Both functions are replaced together, because one uses the other's result."""
    reason = "XLA devices have no torch.polar, so that it runs on the host and splits the program in two."
    for target, name in (("DeepseekV2RotaryEmbedding.forward", "rotary"), ("apply_rotary_emb", "apply_rotary")):
        stock = f"transformers.models.deepseek_v2.modeling_deepseek_v2:{target}"
        yield TorchPatch(stock, f"ttpu_zoo.torch.deepseek_v2:{name}", reason)
