"""Chooses a model's attention from the caller's argument, the layers, the platform and a plugin's choice. The result
names the implementation and states for each kind of layer which implementation computes prefill and decode, and
why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, KernelChoice, LayerSpec
from ttpu_core.spec.latent_attention import LatentAttentionSpec, latent_pages
from ttpu_jax.ops.attention import latent_decode
from ttpu_jax.ops.attention.api import DECODE, IMPLEMENTATIONS, REFERENCE, RING, implementation, serving
from ttpu_jax.ops.attention.context import AttentionContext, Implementation, Options

AUTO = "auto"
DEFAULT_ON_TPU = "splash_attention"
ABSORBED = "its own absorbed form"  # how latent attention reads its cache without the kernel for it
LENGTH = 2**31 - 128  # sequence length for `serves`: longer than any window, and whole blocks


@dataclass(frozen=True)
class KindChoice:
    """The implementations for layers of one kind (full, sliding, chunked, latent_attention), and the reason."""

    kind: str
    prefill: str  # used in training too
    decode: str
    reason: str

    def __str__(self) -> str:
        if self.prefill == self.decode:
            return f"{self.prefill}: {self.reason}"
        return f"{self.prefill} for prefill and training, {self.decode} for decode: {self.reason}"


@dataclass(frozen=True)
class AttentionChoice:
    """A model's attention: `name` is the argument of `attend`, `options` are its `attention_config`."""

    name: str
    reason: str
    options: Options
    kinds: tuple[KindChoice, ...]


def attention_choice(
    spec: ArchitectureSpec,
    asked: str,
    platform: str,
    config: Mapping[str, Any] | None = None,
    sequence_axes: tuple[str, ...] = (),
) -> AttentionChoice:
    """`choose` for an architecture, taking the choice of its plugin or patch packs into account.

    Args:
        spec: the architecture.
        asked: the caller's choice, see `choose`.
        platform: cpu, tpu or gpu.
        config: `attention_config`, settings of the implementation.
        sequence_axes: mesh axes that shard the sequence.
    """
    patches = [one for one in spec.kernels if one.backend == "jax" and one.operation == "attention"]
    return choose(asked, spec.layers, platform, patches[-1] if patches else None, config, sequence_axes)


def choose(
    asked: str,
    layers: Iterable[LayerSpec],
    platform: str,
    patch: KernelChoice | None = None,
    config: Mapping[str, Any] | None = None,
    sequence_axes: tuple[str, ...] = (),
) -> AttentionChoice:
    """Choose the attention of a model.

    Args:
        asked: "auto", one of `IMPLEMENTATIONS`, or an import string `package.module:function`.
        layers: the model's layers.
        platform: cpu, tpu or gpu.
        patch: the choice of a plugin or a patch pack. "auto" takes it; without it, splash on a TPU, else ring attention
            if the sequence is sharded, else the reference.
        config: `attention_config`, settings of the implementation.
        sequence_axes: mesh axes that shard the sequence.

    Raises:
        PluginError: no such implementation.
        RequestError: settings that the implementation does not have.
        UnsupportedError: the implementation was asked for by name, but serves no layer.
    """
    mixers = tuple(dict.fromkeys(found for layer in layers if (found := _attention_in(layer)) is not None))
    options = canonical_options(config)
    context = AttentionContext(platform=platform, sequence_axes=sequence_axes)
    if asked != AUTO:
        chosen, reason = implementation(asked), "asked for"
        chosen.check_options(options)
    elif patch is not None:
        chosen, reason = implementation(patch.implementation), patch.reason or f"chosen by {patch.source or 'a plugin'}"
        chosen.check_options(options)
    else:
        splash = IMPLEMENTATIONS[DEFAULT_ON_TPU]
        splash.check_options(options)  # also if it is not chosen: a misspelt setting would fail on a TPU
        served = platform == "tpu" and any(
            splash.serves(mixer, context, LENGTH, LENGTH) is None for _, mixer, _ in mixers
        )
        if served:
            chosen, reason = splash, "the default on a TPU"
            if sequence_axes:
                reason += f"; the keys of the sequence, which is sharded along {sequence_axes[0]}, are gathered"
        elif sequence_axes:
            chosen, reason = RING, f"the sequence is sharded along {sequence_axes[0]}"
        else:
            chosen, reason = REFERENCE, "the reference implementation, compiled by XLA"
    kinds = tuple(dict.fromkeys(_kind(*found, chosen, context, reason) for found in mixers))
    if asked not in (AUTO, REFERENCE.name) and not any(chosen.name in (kind.prefill, kind.decode) for kind in kinds):
        why = _objection(chosen, mixers[0][1], context) if mixers else "its mixers are of other kinds"
        raise UnsupportedError(
            f"attention implementation {asked!r} was asked for, but it serves no layer of this model on a {platform} "
            f"({why}): use auto or {REFERENCE.name}."
        )
    return AttentionChoice(chosen.name, reason, options if chosen is not REFERENCE else (), kinds)


def canonical_options(config: Mapping[str, Any] | None) -> Options:
    """`attention_config` as a hashable value. Values of None are left to the implementation.

    Raises:
        RequestError: it is not a mapping from names to numbers, switches and words.
    """
    if config is None:
        return ()
    if not isinstance(config, Mapping):
        raise RequestError(
            f"attention_config is the {type(config).__name__} {str(config)[:60]!r}, but a mapping from names to values "
            "is needed: pass for example {'sa_block_q': 1024}."
        )
    for name, value in config.items():
        if not isinstance(name, str) or not isinstance(value, bool | int | float | str | None):
            raise RequestError(
                f"attention_config has {name!r}: {value!r}, but it maps names to numbers, switches and words: correct "
                "it or leave it out."
            )
    return tuple(sorted((name, value) for name, value in config.items() if value is not None))


def _attention_in(layer: LayerSpec) -> tuple[str, AttentionSpec, AttentionSpec | None] | None:
    """The kind of a layer, its attention over a sequence, and over a cache if that is in another form. None for a layer
    without attention."""
    mixer = layer.mixer
    if isinstance(mixer, AttentionSpec):
        return mixer.kind, mixer, None
    if not isinstance(mixer, LatentAttentionSpec):
        return None
    dim = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
    expanded = AttentionSpec(mixer.num_heads, mixer.num_heads, dim, v_head_dim=mixer.v_head_dim)
    return mixer.kind, expanded, latent_pages(mixer)


def _objection(chosen: Implementation, mixer: AttentionSpec, context: AttentionContext) -> str | None:
    """Why an implementation serves a layer neither in prefill nor in decode; the same reason is not given twice."""
    of_cache = replace(context, own_keys=False)
    found = chosen.serves(mixer, context, LENGTH, LENGTH), chosen.serves(mixer, of_cache, 1, LENGTH)
    return "; ".join(dict.fromkeys(why for why in found if why)) or None


def _kind(
    kind: str,
    mixer: AttentionSpec,
    absorbed: AttentionSpec | None,
    chosen: Implementation,
    context: AttentionContext,
    reason: str,
) -> KindChoice:
    on_sequence = chosen.serves(mixer, context, LENGTH, LENGTH)
    of_cache = replace(context, own_keys=False)
    on_cache = chosen.serves(mixer, of_cache, 1, LENGTH)
    prefill = serving(chosen, mixer, context, LENGTH, LENGTH).name
    decode = serving(chosen, mixer, of_cache, 1, LENGTH).name
    if absorbed is not None:
        on_kernel = latent_decode.chosen(chosen.name, absorbed, of_cache, 1, LENGTH)
        decode, on_cache = DECODE.name if on_kernel else ABSORBED, None
    objections = tuple(dict.fromkeys(why for why in (on_sequence, on_cache) if why))
    if objections:
        reason = f"{reason}; {'; '.join(objections)}"
    return KindChoice(kind, prefill, decode, reason)
