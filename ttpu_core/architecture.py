"""Joins the answers of the family hooks for one config into an `Architecture`: the spec, the mapping, and the
plugins that described it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ttpu_core.config import ModelConfig
from ttpu_core.errors import ConfigError, RequestError
from ttpu_core.hook_calls import HookCalls
from ttpu_core.mapping import FlaxMapping
from ttpu_core.spec import NO_MLP, ArchitectureSpec, KernelChoice, LayerSpec, NormSpec


@dataclass(frozen=True)
class Architecture:
    """A described model.

    Args:
        spec: the architecture.
        mapping: the layout of its checkpoint.
        config: the normalised config.
        family: the family plugin.
        patch_packs: applied patch packs, in order.
    """

    spec: ArchitectureSpec
    mapping: FlaxMapping
    config: ModelConfig
    family: str
    patch_packs: tuple[str, ...] = ()


MOST_LAYERS = 2_000
"""More than any model has (DeepNet, arXiv 2203.00555, has 1,000). Each layer is described on its own: `ttpu info` of
10,000 of them takes 57 s of a core."""

LAYERS_OF_A_TENSOR = 64
"""More than share a weight in any model: ALBERT's 12 to 24 layers have one set of weights."""


def describe(
    hook: Any, config: ModelConfig, *, family: str, patch_packs: tuple[str, ...] = (), tensors: int | None = None
) -> Architecture:
    """Ask every hook once and join the answers.

    Args:
        hook: a pluggy hook caller that holds the core's defaults, the family and the patch packs.
        config: the model's config.
        family: the family plugin.
        patch_packs: applied patch packs, in order.
        tensors: number of tensors in the checkpoint; None if only the config is there.

    Raises:
        ConfigError: the config lacks a key, asks for more layers than there can be, or holds a value that the family
            does not support.
        MappingError: the mapping does not account for every parameter.
        PluginError: a hook raises another exception, or returns what it must not return.
    """
    hook = HookCalls(hook, family)
    source_config = config
    plain = config.to_dict()  # hooks may make a list with an entry for each layer
    for part in (plain, plain.get("text_config")):
        _refuse_depth(config, part.get("num_hidden_layers") if isinstance(part, dict) else None, tensors)
    config = hook.ttpu_config(config=config)
    norm = hook.ttpu_norm(config=config)
    layers = range(config.positive_int("num_hidden_layers"))
    _refuse_depth(config, len(layers), tensors)
    spec = ArchitectureSpec(
        model_type=source_config.model_type,
        embedding=hook.ttpu_embedding(config=config),
        layers=tuple(_layer(hook, config, index, norm) for index in layers),
        final_norm=hook.ttpu_final_norm(config=config) or norm,
        head=hook.ttpu_head(config=config),
        max_position_embeddings=config.positive_int("max_position_embeddings", default=2048),
        parameter_axes=tuple((pattern, tuple(axes)) for pattern, axes in _all(hook.ttpu_sharding_rules(config=config))),
        kernels=_last_wins(_all(hook.ttpu_kernels(config=config)), _kernel_key),
        torch_patches=_last_wins(_all(hook.ttpu_torch_patches(config=config)), lambda patch: patch.target),
    )
    try:
        hash(spec)
    except TypeError as error:
        raise ConfigError(
            f"the plugin for {spec.model_type!r} put a value into its spec that cannot be hashed ({error}): hooks must "
            "return frozen values, with tuples instead of lists."
        ) from error
    mapping = hook.ttpu_flax_mapping(config=config, spec=spec)
    mapping.check_parameters(spec.parameters)
    return Architecture(spec, mapping, config, family, patch_packs)


def refuse_undescribed(architecture: Any, use: str) -> None:
    """Refuse a loaded model that runs without a plugin, by a fallback, where its architecture is needed.

    Args:
        architecture: of the loaded model: an `Architecture`, or what a fallback has instead.
        use: what was to be done with the model, as in "trained".

    Raises:
        RequestError: no plugin describes the model.
    """
    if not isinstance(architecture, Architecture):
        raise RequestError(
            f"a model of type {architecture.spec.model_type!r} was to be {use}, but no plugin describes this type, and "
            "transformers' own code, which runs without one, cannot be: install a plugin, or begin one with `ttpu "
            "new-plugin --from CONFIG`."
        )


def _refuse_depth(config: ModelConfig, layers: object, tensors: int | None) -> None:
    """Refuse more layers than a checkpoint has tensors, or than any model has."""
    most = MOST_LAYERS if tensors is None else min(MOST_LAYERS, tensors * LAYERS_OF_A_TENSOR)
    if not isinstance(layers, int) or layers <= most:
        return
    found = f"at most {MOST_LAYERS:,} layers are described"
    if most < MOST_LAYERS:
        found = f"the checkpoint has {tensors:,} tensors, which so many layers cannot share"
    raise ConfigError(
        f"{config.source} asks for {layers:,} layers, but {found}: correct `num_hidden_layers`, or take the "
        "config.json that the checkpoint was published with."
    )


def _layer(hook: Any, config: ModelConfig, index: int, norm: NormSpec) -> LayerSpec:
    mixer = hook.ttpu_mixer(config=config, layer=index)
    if mixer is None:
        mixer = hook.ttpu_attention(config=config, layer=index)
        if mixer.rope is None:
            mixer = replace(mixer, rope=hook.ttpu_rope(config=config, layer=index, attention=mixer))
    mlp = hook.ttpu_mlp(config=config, layer=index)
    return LayerSpec(
        mixer=mixer,
        mlp=None if mlp == NO_MLP else mlp,
        norm=norm,
        block=hook.ttpu_block(config=config, layer=index),
    )


def _all(answers: Iterable[Iterable[Any] | None]) -> list[Any]:
    """The lists of all plugins, in the order of registration (pluggy asks the last registered plugin first)."""
    return [item for answer in reversed(list(answers)) for item in answer or ()]


def _last_wins(items: Iterable[Any], key: Any) -> tuple[Any, ...]:
    return tuple({key(item): item for item in items}.values())


def _kernel_key(choice: KernelChoice) -> tuple[str, str]:
    return choice.operation, choice.backend
