"""Chooses the attention of a stock model from the caller's option, the architecture and the platform. The result has
the name that the model gets, the kernel's settings, and for `ttpu info` the implementation of each kind of layer, and
why."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata, util
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from ttpu_core.architecture import Architecture
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.spec import AttentionSpec
from ttpu_torch_xla.attention import KERNELS

AUTO, EAGER, SPLASH = "auto", "eager", "splash_attention"
Options = tuple[tuple[str, object], ...]


def attention_for(
    architecture: Architecture, asked: str, platform: str, config: Mapping[str, Any] | None = None
) -> tuple[str, Options]:
    """Choose the name of the model's attention, and the settings of its kernel.

    Args:
        asked: "auto", one of `KERNELS`, or a name that transformers knows; "auto" takes what a plugin or patch pack
            chose for torch_xla, else splash on a TPU where it serves a layer and libtpu is new enough for it, else the
            model's own code ("eager").
        platform: tpu or cpu.
        config: `attention_config`.

    Raises:
        RequestError: an unknown name, or settings that the kernel does not have.
        UnsupportedError: a kernel was asked for by name, but serves no layer, or is one of transformers for GPUs.
        MissingDependencyError: a kernel was asked for, but ttpu-jax is not installed.
    """
    chosen = [one for one in architecture.spec.kernels if (one.backend, one.operation) == ("torch_xla", "attention")]
    if asked == AUTO and chosen:
        asked = chosen[-1].implementation
    if asked == AUTO:
        _check_splash(config)
        usable = platform == "tpu" and _has_kernels() and libtpu_is_new_enough()
        if not usable or not any(_serves(SPLASH, layer) for layer in _layers(architecture)):
            return EAGER, ()
        asked = SPLASH
    if asked in KERNELS:
        from ttpu_torch_xla.bridge import require_kernels

        require_kernels()
        from ttpu_jax.ops.attention import choose

        # Its answer is for JAX's own models; what it checks and refuses is the same here.
        return asked, choose(asked, architecture.spec.layers, platform, config=config).options
    _check_name(asked)
    if config:
        raise RequestError(
            f"attention_config sets {', '.join(map(str, config))}, but {asked} attention is transformers' own and has "
            f"no settings: leave it out, or use {SPLASH}."
        )
    return asked, ()


def kernels(architecture: Architecture) -> Mapping[str, str]:
    """Return the implementation of each kind of attention under splash attention, and why, for `ttpu info`."""
    if not _has_kernels():
        return {"attention": 'eager: the kernels are not installed, `pip install "ttpu-torch-xla[kernels]"`'}
    from ttpu_jax.ops.attention import AttentionContext, implementation

    context, found = AttentionContext(platform="tpu"), {}
    for layer in _layers(architecture):
        why = implementation(SPLASH).serves(layer, context, 2**31 - 1, 2**31 - 1)
        found[f"{layer.kind} attention"] = (
            f"torch reference: {why}" if why else f"{SPLASH} for prefill and training on a TPU, torch reference for "
            "decode and for masks that are not causal, windowed, chunked, padded or packed"
        )
    return found


def libtpu_is_new_enough() -> bool:
    """Whether the installed libtpu can read the kernels of the installed JAX: it is at least the version that this JAX
    requires, which torch_xla's own is not."""
    asked = next((one for one in map(Requirement, metadata.requires("jax") or ()) if one.name == "libtpu"), None)
    try:
        installed = Version(metadata.version("libtpu"))
    except metadata.PackageNotFoundError:
        return False
    return asked is None or all(
        installed >= Version(one.version.removesuffix(".*")) for one in asked.specifier if one.operator in ("==", ">=")
    )


def _layers(architecture: Architecture) -> tuple[AttentionSpec, ...]:
    mixers = (layer.mixer for layer in architecture.spec.layers)
    return tuple(dict.fromkeys(mixer for mixer in mixers if isinstance(mixer, AttentionSpec)))


def _serves(name: str, layer: AttentionSpec) -> bool:
    from ttpu_jax.ops.attention import AttentionContext, implementation

    return implementation(name).serves(layer, AttentionContext(platform="tpu"), 2**31 - 1, 2**31 - 1) is None


def _check_splash(config: Mapping[str, Any] | None) -> None:
    """Also where splash is not taken: what is misspelt here would fail on a TPU."""
    if not config:
        return
    from ttpu_torch_xla.bridge import require_kernels

    require_kernels()
    from ttpu_jax.ops.attention import canonical_options, implementation

    implementation(SPLASH).check_options(canonical_options(config))


def _check_name(name: str) -> None:
    from transformers import AttentionInterface

    if (why := refused(name)) is not None:
        raise UnsupportedError(
            f"attn_implementation {name!r} was asked for, but {why}, which torch_xla does not run: use {SPLASH}, or "
            f"{AUTO}, which takes the fastest that the device has."
        )
    known = (EAGER, *(one for one in AttentionInterface().valid_keys() if refused(one) is None))
    if name not in known:
        raise RequestError(
            f"attn_implementation {name!r} was asked for, but there is none: use {AUTO}, {EAGER}, "
            f"{', '.join(KERNELS)}, or what transformers registers ({', '.join(known[1:])})."
        )


def refused(name: str) -> str | None:
    """Why one of transformers' own attentions cannot run on the device; None for all others."""
    if name.startswith("paged|"):
        return "that reads the paged cache of transformers' continuous batching"
    if name == "flex_attention":
        return "that is compiled for GPUs by torch.compile"
    if "/" in name or name.startswith("flash_attention"):
        return "that is a kernel for GPUs"
    return None


def _has_kernels() -> bool:
    return util.find_spec("jax") is not None and util.find_spec("ttpu_jax") is not None
