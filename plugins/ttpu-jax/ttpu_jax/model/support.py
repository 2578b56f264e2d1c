"""Checks that the shared decoder can run an architecture. Otherwise it raises an error that names the missing part."""

from __future__ import annotations

from collections.abc import Iterator

from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import NO_MIXER, ArchitectureSpec, CustomSpec, LayerSpec, MoESpec
from ttpu_jax.model.custom import custom_class


def check_supported(spec: ArchitectureSpec) -> None:
    """Refuse an architecture that the shared decoder cannot run completely.

    Raises:
        UnsupportedError: naming the first layer and what it needs, or the operation that a patch pack would replace.
        PluginError: a custom part cannot be imported.
    """
    for choice in spec.kernels:
        if choice.backend == "jax" and choice.operation != "attention":
            raise UnsupportedError(
                f"{choice.source or 'a plugin'} replaces the operation {choice.operation!r} of this "
                f"{spec.model_type!r} model by {choice.implementation}, but this version of ttpu-jax lets only "
                "'attention' be replaced: leave that patch pack out, or update ttpu-jax."
            )
    for custom in _customs(spec):
        custom_class(custom)
    for index, layer in enumerate(spec.layers):
        for need in (*_unsupported(layer), *_shortcut(spec.layers[index:])):
            raise UnsupportedError(
                f"layer {index} of this {spec.model_type!r} model needs {need}, which this version of ttpu-jax "
                "cannot run: update ttpu-jax, or use another backend."
            )


def _customs(spec: ArchitectureSpec) -> Iterator[CustomSpec]:
    """Every different part that is implemented outside the shared decoder."""
    mixers = (mixer for layer in spec.layers for mixer in layer.mixers)
    parts = [spec.embedding.custom, *(mixer for mixer in mixers if mixer != NO_MIXER)]
    parts += [layer.block.custom for layer in spec.layers]
    yield from dict.fromkeys(part for part in parts if part is not None)


def _unsupported(layer: LayerSpec) -> Iterator[str]:
    mlp = layer.mlp
    if mlp is not None and mlp.activation.name == "xielu" and (isinstance(mlp, MoESpec) or mlp.gated):
        yield "the activation 'xielu' in experts or a gated MLP"


def _shortcut(layers: tuple[LayerSpec, ...]) -> Iterator[str]:
    """What the first of these layers needs for its experts on a shortcut."""
    layer, after = layers[0], layers[1] if len(layers) > 1 else None
    if not _leaves(layer):
        return
    if layer.block.placement != "pre" or layer.block.normed_residual or layer.block.custom is not None:
        yield "experts on a shortcut beside norms that are not before sub-layers alone"
    if after is None or _leaves(after):
        yield "experts on a shortcut that a layer without another such shortcut follows"


def _leaves(layer: LayerSpec) -> bool:
    return isinstance(layer.mlp, MoESpec) and layer.mlp.shortcut
