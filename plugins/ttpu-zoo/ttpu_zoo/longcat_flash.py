"""LongCat-Flash (`model_type` "longcat_flash"; arXiv 2509.01322): a layer of transformers is two here, each with latent
attention and a dense MLP. The first has experts beside its MLP, of which some return their input. Their output is added
behind the second."""

from collections.abc import Iterable
from dataclasses import replace

from ttpu_core import ModelConfig, defaults, hookimpl
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.mapping.layout import CheckpointNames, standard_mapping
from ttpu_core.spec import ArchitectureSpec, MixerSpec, MLPSpec, MoESpec, RouterSpec, TorchPatch
from ttpu_zoo.deepseek_v3 import COMMON_DEFAULTS, FOLLOWING, deepseek_attention

CONFIG_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 131_072,
    "intermediate_size": 12_288,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000_000.0,
    "num_experts_per_tok": 12,
    "n_routed_experts": 512,
    "moe_intermediate_size": 2048,
    "zero_expert_num": 256,
    "routed_scaling_factor": 6.0,
}
RENAMED = {
    "ffn_hidden_size": "intermediate_size",
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "moe_topk": "num_experts_per_tok",
    "num_local_experts": "n_routed_experts",
}
ONLY = {"attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"}
"""What the code that Meituan publishes has other branches for, and transformers has not."""


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The config with the usual names, the defaults of `LongcatFlashConfig`, and twice the number of layers. The sizes
    that define a model are required.

    Raises:
        ConfigError: another kind of attention or of experts than the published models have.
    """
    for key, value in ONLY.items():
        if config.get(key, value) != value:
            raise ConfigError(
                f"{config.source} has {config.get(key)!r} as {key!r}, but only {value!r} is known: correct it."
            )
    config.does_not_matter(FOLLOWING, because="they follow from other keys")
    config.does_not_matter("router_bias", because="transformers makes this bias and does not add it")
    config = config.with_renamed(RENAMED).with_defaults(CONFIG_DEFAULTS)
    layers = config.positive_int("num_layers", default=config.positive_int("num_hidden_layers", default=56) // 2)
    return config.with_values({"num_hidden_layers": 2 * layers})


@hookimpl
def ttpu_mixer(config: ModelConfig) -> MixerSpec:
    """DeepSeek-V3's latent attention, with queries and latents scaled by the root of how much they are compressed."""
    hidden, query, latent = (config.positive_int(key) for key in ("hidden_size", "q_lora_rank", "kv_lora_rank"))
    scales = {"query_scale": (hidden / query) ** 0.5, "latent_scale": (hidden / latent) ** 0.5}
    return deepseek_attention(config, interleaved=True, **scales)


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec:
    """A dense MLP, beside experts on a shortcut in every other layer."""
    dense = defaults.ttpu_mlp(config)
    experts = MoESpec(
        num_experts=config.positive_int("n_routed_experts"),
        identity_experts=config.require("zero_expert_num", int),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=config.positive_int("moe_intermediate_size"),
        activation=dense.activation,
        router=RouterSpec(fp32=True, correction_bias=True, scaling_factor=config.number("routed_scaling_factor")),
        dense=dense,
        shortcut=True,
    )
    return dense if layer % 2 else experts


@hookimpl
def ttpu_flax_mapping(spec: ArchitectureSpec) -> FlaxMapping:
    """The usual names, with the number of a layer's half behind each module's. Layers that predict further tokens are
    left out, and what transformers writes for experts that return their input."""
    mapping = standard_mapping(spec, of_layers={index: _names(*divmod(index, 2)) for index in range(spec.num_layers)})
    moe = spec.layers[0].mlp
    assert isinstance(moe, MoESpec)
    unused = "|".join(map(str, range(moe.num_experts, moe.choices)))
    ignored = (rf"model\.layers\.\d+\.mlp\.experts\.({unused})\.(gate|up)_proj\.weight",) if unused else ()
    return replace(mapping, ignored=(*mapping.ignored, r"model\.mtp\..*", *ignored))


@hookimpl
def ttpu_torch_patches() -> Iterable[TorchPatch]:
    """Experts without shapes that depend on the router's choice."""
    yield TorchPatch(
        "transformers.models.longcat_flash.modeling_longcat_flash:LongcatFlashExperts.forward",
        "ttpu_zoo.torch.longcat_flash:experts",
        "It goes from expert to expert by the router's choice, which is read on the host at every layer.",
    )


def _names(layer: int, half: int) -> CheckpointNames:
    return CheckpointNames(
        layer=f"model.layers.{layer}.",
        query_down=f"self_attn.{half}.q_a_proj",
        query_down_norm=f"self_attn.{half}.q_a_layernorm",
        query_up=f"self_attn.{half}.q_b_proj",
        kv_down=f"self_attn.{half}.kv_a_proj_with_mqa",
        kv_down_norm=f"self_attn.{half}.kv_a_layernorm",
        kv_up=f"self_attn.{half}.kv_b_proj",
        output=f"self_attn.{half}.o_proj",
        gate=f"mlps.{half}.gate_proj",
        up=f"mlps.{half}.up_proj",
        down=f"mlps.{half}.down_proj",
        input_norm=f"input_layernorm.{half}",
        mlp_norm=f"post_attention_layernorm.{half}",
        router="mlp.router.classifier",
        correction_bias="mlp.router.e_score_correction_bias",
    )
