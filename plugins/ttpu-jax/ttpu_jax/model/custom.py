"""Custom mixers, blocks and embeddings, which the shared decoder does not know. This module imports the class that a
`CustomSpec` names and makes an instance of it; no other module does.

A mixer is a Flax NNX module `Mixer(spec: MixerSpec, values: Parameters, runtime: Runtime)`. Its call takes x [batch,
seq, hidden], the `Step`, and its state, name → array [batch, *shape] (None without a cache: it starts from zeros). It
returns [batch, seq, hidden] and the state after these tokens (None if it was given none). It does not see whether the
state lies in a contiguous cache or in an engine's slots. Tokens with a negative position are padding, which must leave
the state unchanged. Where `step.last_only`, a mixer may return the last token only. A mixer with the attribute
`resets_state = True` starts anew at the tokens of `step.starts`, where a row holds several sequences; rows of several
sequences are refused to others. A block is built and called as `ttpu_jax.model.layers.DecoderLayer`, an embedding as
`ttpu_jax.model.embedding.Embedding`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from ttpu_core.errors import PluginError, UnsupportedError
from ttpu_core.spec import CustomSpec, EmbeddingSpec, LayerSpec, MixerSpec
from ttpu_core.spec.latent_attention import LatentAttentionSpec
from ttpu_core.spec.selective_scan import SelectiveScanSpec
from ttpu_core.spec.short_convolution import ShortConvolutionSpec
from ttpu_core.spec.state_space import StateSpaceSpec
from ttpu_jax.model.modules import Parameters, Runtime, Step

if TYPE_CHECKING:
    from ttpu_jax.model.step_cache import StepCache

BUILT_IN: dict[type[CustomSpec], str] = {
    LatentAttentionSpec: "ttpu_jax.model.latent_attention:LatentAttention",
    SelectiveScanSpec: "ttpu_jax.model.selective_scan:SelectiveScan",
    ShortConvolutionSpec: "ttpu_jax.model.short_convolution:ShortConvolution",
    StateSpaceSpec: "ttpu_jax.model.state_space:StateSpace",
}
"""Parts of the core's vocabulary that this backend brings itself, by the type of their spec."""


class CachingMixer(nnx.Module):
    """A mixer that reads and writes its cache itself. Its call takes x, the `Step` and a
    `ttpu_jax.model.step_cache.StepCache`, and returns its output and the updated cache."""

    def __call__(self, x: jax.Array, step: Step, cache: StepCache) -> tuple[jax.Array, StepCache]:
        """x [batch, seq, hidden]: the same shape (or the last token's, [batch, 1, hidden]), and the cache."""
        raise NotImplementedError


def custom_mixer(spec: MixerSpec, values: Parameters, runtime: Runtime) -> Any:
    """The mixer of a layer."""
    return custom_class(spec)(spec, values, runtime)


def custom_block(spec: LayerSpec, values: Parameters, runtime: Runtime) -> Any:
    """The block of a layer that has its own."""
    assert spec.block.custom is not None
    return custom_class(spec.block.custom)(spec, values, runtime)


def custom_embedding(spec: EmbeddingSpec, values: Parameters, runtime: Runtime) -> Any:
    """The embedding of a model that has its own."""
    assert spec.custom is not None
    return custom_class(spec.custom)(spec, values, runtime)


def custom_class(spec: CustomSpec) -> Any:
    """The class that implements a part.

    Raises:
        UnsupportedError: there is none for this backend.
        PluginError: the import string leads to no class.
    """
    name = spec.implementation("jax") or BUILT_IN.get(type(spec))
    if name is None:
        others = ", ".join(backend for backend, _ in spec.implementations) or "no backend"
        raise UnsupportedError(
            f"the part {spec.name!r} of this model has an implementation for {others}, but the JAX backend needs one "
            f"of its own (it brings {', '.join(kind.__name__ for kind in BUILT_IN)}): update the plugin, or use "
            "another backend."
        )
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(
            f"the part {spec.name!r} of this model is implemented by {name!r}, but that cannot be imported ({error}): "
            "update the plugin, or correct its import string, which is written 'package.module:Class'."
        ) from error
    if not callable(found):
        raise PluginError(
            f"the part {spec.name!r} of this model is implemented by {name!r}, but that is no class: correct its "
            "import string, which is written 'package.module:Class'."
        )
    return found
