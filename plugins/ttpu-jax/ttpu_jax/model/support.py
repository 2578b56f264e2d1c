"""What the shared decoder can run. In: an `ArchitectureSpec`; out: nothing, or an error that names what is missing."""

from __future__ import annotations

from collections.abc import Iterator

from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, LayerSpec, MLPSpec


def check_supported(spec: ArchitectureSpec) -> None:
    """Refuse an architecture of which something would be left out.

    Raises:
        UnsupportedError: naming the first layer and what it needs, or the operation that a patch pack would replace.
    """
    for choice in spec.kernels:
        if choice.backend == "jax" and choice.operation != "attention":
            raise UnsupportedError(
                f"{choice.source or 'a plugin'} replaces the operation {choice.operation!r} of this "
                f"{spec.model_type!r} model by {choice.implementation}, but this version of ttpu-jax lets only "
                "'attention' be replaced: leave that patch pack out, or update ttpu-jax."
            )
    for index, layer in enumerate(spec.layers):
        for need in _unsupported(layer):
            raise UnsupportedError(
                f"layer {index} of this {spec.model_type!r} model needs {need}, which this version of ttpu-jax "
                "cannot run: update ttpu-jax, or use another backend."
            )


def _unsupported(layer: LayerSpec) -> Iterator[str]:
    if layer.block.custom is not None:
        yield f"the custom block {layer.block.custom.name!r}"
    if not isinstance(layer.mixer, AttentionSpec):
        yield f"the custom mixer {layer.mixer.name!r}"
    else:
        if layer.mixer.alibi:
            yield "ALiBi position biases"
        if layer.mixer.kv_from_layer is not None:
            yield "keys and values shared between layers"
    if not isinstance(layer.mlp, MLPSpec | None):
        yield "a mixture of experts"
    elif layer.mlp is not None and layer.mlp.activation.name in ("xielu", "clamped_swiglu"):
        yield f"the activation {layer.mlp.activation.name!r}"
