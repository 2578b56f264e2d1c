"""The text part of Mistral 3's multimodal models (Mistral Small 3.1 to 4, Ministral 3). It is a model of another
type of this family, and the hooks of `model_type` "mistral3" forward to that type's module."""

from dataclasses import replace
from inspect import signature
from types import ModuleType
from typing import Any

from ttpu_core import ModelConfig, hookimpl
from ttpu_core.config.text_part import text_config
from ttpu_core.mapping import Concat, Expression, FlaxMapping, Stack, Tensor
from ttpu_core.mapping.layout import standard_mapping
from ttpu_core.mapping.text_part import text_mapping
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MixerSpec, MLPSpec, MoESpec
from ttpu_mistral import ministral3, mistral, mistral4

Rules = tuple[tuple[str, Expression], ...]
BELOW = "language_model."
TEXT_TYPES: dict[str, ModuleType] = {
    "mistral": mistral,
    "ministral": mistral,
    "ministral3": ministral3,
    "mistral4": mistral4,
}

# The text part that `Mistral3Config` assumes if the config has none: Mistral Small 3.1.
TEXT_DEFAULTS = {
    "model_type": "mistral",
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 32_768,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000_000.0,
    "sliding_window": None,
    "vocab_size": 131_072,
}


@hookimpl
def ttpu_config(config: ModelConfig) -> ModelConfig:
    """The text part. The parent decides whether the head is tied. If the parent does not say so, the text part
    decides.

    Raises:
        ConfigError: a text part of another family.
    """
    if "text_config" not in config:
        config = config.with_values(TEXT_DEFAULTS)
    text = text_config(config, TEXT_TYPES).with_defaults({"model_type": "mistral"})
    filled: ModelConfig = _ask("ttpu_config", text)
    return filled


@hookimpl
def ttpu_mixer(config: ModelConfig, layer: int) -> MixerSpec | None:
    """The answer of the text part's module."""
    return _ask("ttpu_mixer", config, layer=layer)


@hookimpl
def ttpu_attention(config: ModelConfig, layer: int) -> AttentionSpec | None:
    """The answer of the text part's module."""
    return _ask("ttpu_attention", config, layer=layer)


@hookimpl
def ttpu_mlp(config: ModelConfig, layer: int) -> MLPSpec | MoESpec | None:
    """The answer of the text part's module."""
    return _ask("ttpu_mlp", config, layer=layer)


@hookimpl
def ttpu_flax_mapping(config: ModelConfig, spec: ArchitectureSpec) -> FlaxMapping:
    """The text part's mapping below `language_model`, extended to the prefixes of transformers 4 and 5. Vision
    tensors are ignored."""
    mapping: FlaxMapping = _ask("ttpu_flax_mapping", config, spec=spec) or standard_mapping(spec)
    mapping = replace(
        mapping,
        rules=_below(mapping.rules),
        tied=tuple(f"{BELOW}{name}" for name in mapping.tied),
        alternatives=tuple(map(_below, mapping.alternatives)),
    )
    return text_mapping(mapping, f"{BELOW}model.", f"{BELOW}lm_head")


def _below(rules: Rules) -> Rules:
    """The rules with all tensors below `language_model`."""

    def below(rule: Expression) -> Expression:
        if isinstance(rule, Tensor):
            return replace(rule, name=f"{BELOW}{rule.name}")
        return replace(rule, parts=tuple(map(below, rule.parts))) if isinstance(rule, Concat | Stack) else rule

    return tuple((path, below(rule)) for path, rule in rules)


def _ask(hook: str, config: ModelConfig, **arguments: Any) -> Any:
    """The answer of a hook of the text part's module, or None if it lacks the hook."""
    function = getattr(TEXT_TYPES[config.model_type], hook, None)
    if function is None:
        return None
    given = {"config": config, **arguments}
    return function(**{name: given[name] for name in signature(function).parameters})
