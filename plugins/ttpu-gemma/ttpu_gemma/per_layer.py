"""Per-layer embeddings (gemma 3n and 4): each token has a second, narrow embedding per layer, which is added to the
residual stream there. This module describes their parameters and mapping rules."""

from __future__ import annotations

from dataclasses import dataclass

from ttpu_core import ModelConfig
from ttpu_core.mapping import Tensor
from ttpu_core.mapping.layout import Rules
from ttpu_core.spec import ActivationSpec, CustomSpec, NormSpec, Parameter, axes

Parameters = tuple[tuple[str, Parameter], ...]


@dataclass(frozen=True)
class PerLayerSpec:
    """Sizes of the per-layer embeddings, and the norm and activation around them."""

    vocab_size: int
    features: int
    layers: int
    hidden_size: int
    norm: NormSpec
    activation: ActivationSpec

    def embedding_parameters(self) -> Parameters:
        """The packed table, and the projection of the usual embedding that is added to its rows."""
        packed = self.layers * self.features
        return (
            ("per_layer.embedding", Parameter((self.vocab_size, packed), (axes.VOCAB, axes.EMBED))),
            ("per_layer.projection.kernel", Parameter((packed, self.hidden_size), (None, axes.EMBED))),
            ("per_layer.norm.scale", Parameter((self.features,), (None,), "ones")),
        )

    def layer_parameters(self) -> Parameters:
        """A layer's gate and projection. They are too narrow for tensor parallelism: its exchange would cost more
        than it saves."""
        return (
            ("per_layer.gate.kernel", Parameter((self.features, self.hidden_size), (None, axes.EMBED))),
            ("per_layer.projection.kernel", Parameter((self.hidden_size, self.features), (axes.EMBED, None))),
            ("per_layer.norm.scale", Parameter((self.hidden_size,), (axes.NORM,), "ones")),
        )

    def rules(self, base: str) -> Rules:
        """Mapping rules for all of these parameters. `base` is the prefix of the text model's tensors."""
        names = {
            "embedding": "embed_tokens_per_layer.weight",
            "projection.kernel": "per_layer_model_projection.weight",
            "norm.scale": "per_layer_projection_norm.weight",
        }
        yield from tensors("embed.", self.embedding_parameters(), "per_layer.", names, base)
        names = {
            "gate.kernel": "per_layer_input_gate.weight",
            "projection.kernel": "per_layer_projection.weight",
            "norm.scale": "post_per_layer_input_norm.weight",
        }
        for layer in range(self.layers):
            where = f"layers.{layer}."
            yield from tensors(where, self.layer_parameters(), "per_layer.", names, base + where)


def tensors(path: str, parameters: Parameters, group: str, names: dict[str, str], base: str) -> Rules:
    """Mapping rules for parameters that are stored as one tensor of the same shape.

    Args:
        path: prefix of the parameters' Flax paths.
        parameters: candidates; only those whose name is `group` followed by a key of `names` get a rule.
        group: prefix within the names of `parameters`.
        names: rest of the parameter's name → tensor name.
        base: prefix of the tensor names.
    """
    for name, parameter in parameters:
        if name.startswith(group) and name.removeprefix(group) in names:
            yield path + name, Tensor(base + names[name.removeprefix(group)], parameter.shape)


def per_layer_spec(config: ModelConfig, norm: NormSpec, activation: ActivationSpec) -> PerLayerSpec | None:
    """The config's per-layer embeddings, or None if it has none."""
    features, _ = config.get("hidden_size_per_layer_input"), config.get("vocab_size_per_layer_input")
    if not features:
        return None
    return PerLayerSpec(
        vocab_size=config.positive_int("vocab_size_per_layer_input"),
        features=config.positive_int("hidden_size_per_layer_input"),
        layers=config.positive_int("num_hidden_layers"),
        hidden_size=config.positive_int("hidden_size"),
        norm=norm,
        activation=activation,
    )


def part(name: str, implementation: str, parameters: Parameters, **options: object) -> CustomSpec:
    """A part of a gemma model whose implementation is in `ttpu_gemma.jax`."""
    return CustomSpec(name, (("jax", f"ttpu_gemma.jax.{implementation}"),), parameters, tuple(options.items()))
