"""The options for loading a model with the JAX backend."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, get_args

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_core.loading import NOT_FOR_ENGINES, LoadOptions, refuse_unknown
from ttpu_core.registry import default_registry
from ttpu_jax.ops.few_tokens import ExpertsForm
from ttpu_jax.ops.matmul.rings import StreamForm, stream_form
from ttpu_jax.optimizations import read_without

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class JaxLoadOptions(LoadOptions):
    """`LoadOptions`, where `mesh` may also be a jax Mesh, and `attn_implementation` is "auto", "eager",
    "xla_flash_attention", "splash_attention" or an import string `package.module:function`; what it does not serve
    (decode, for the two kernels) is "eager".

    Args:
        task: "inference"; there is no other yet.
        experts: the form in which mixtures of experts are computed: "grouped" (on tokens sorted by expert), "few" (each
            expert that a token chose is read once and multiplies all tokens, where these fit on the chip), "exchanged"
            ("grouped", and devices send tokens to those of their experts where both lie along the same mesh axes), or
            "auto", which takes "few" on a TPU for at most 128 tokens a device, else "exchanged" where that is faster.
        enable_paged_attention: `generate` and `stream` use the serving engine: a paged KV cache, continuous batching,
            prefix caching, programs compiled ahead.
        engine_config: the engine's settings, with `enable_paged_attention`; None is its defaults. Callers of
            `from_pretrained` pass each setting by its own name, such as max_num_seqs.
        residual_stream: "auto" cuts the tokens of long inputs over the devices that share heads and MLPs, on v5e and
            v6e, so that products exchange them while they multiply; "rings" wherever these devices divide the tokens;
            "whole" nowhere (docs/parallelism.md).
        without: optimizations that are left out for comparison, by name, as a text with commas or a collection: see
            `ttpu_jax.optimizations`.
    """

    task: str = "inference"
    experts: ExpertsForm = "auto"
    enable_paged_attention: bool = field(default=False, metadata=NOT_FOR_ENGINES)
    engine_config: EngineConfig | None = field(default=None, metadata=NOT_FOR_ENGINES)
    residual_stream: StreamForm = "auto"
    without: str | Collection[str] = ()

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RequestError: an unknown purpose, form of experts, residual stream or optimization, or a `task` that is not
                "inference".
        """
        super().__post_init__()
        if self.task != "inference":
            raise RequestError(
                f"task={self.task!r} was asked for, but this version of the JAX backend loads models for inference: "
                "leave it out."
            )
        if self.experts not in get_args(ExpertsForm):
            raise RequestError(
                f"experts={self.experts!r} was asked for, but experts are computed in one of the forms "
                f"{', '.join(get_args(ExpertsForm))}: write one of them."
            )
        stream_form(self.residual_stream)
        object.__setattr__(self, "without", tuple(sorted(one.value for one in read_without(self.without))))

    @classmethod
    def read(cls, given: Mapping[str, Any], backend: str) -> Self:
        """Read the options that a caller of `from_pretrained` gave by name, settings of the engine included.

        Raises:
            MissingDependencyError: paged attention is enabled, but the engine is not installed.
            RequestError: a name that is not known, or a value that is refused.
        """
        enabled = bool(given.get("enable_paged_attention", False))
        engine: Any = None
        # Without the engine it is only asked which names it would take.
        with suppress(*(() if enabled else (MissingDependencyError,))):
            engine = default_registry().service("engine") if enabled or set(given) - set(cls.names()) else None
        settings = () if engine is None else engine.option_names
        misplaced = not enabled and any(name in settings for name in given)
        advice = ", or pass enable_paged_attention=True with it" if misplaced else ""
        known = (*cls.names(), *settings) if enabled else cls.names()
        refuse_unknown(given, known, "from_pretrained()", f"the {backend} backend", advice)
        own = {name: value for name, value in given.items() if name not in settings}
        if enabled and "engine_config" not in own:
            own["engine_config"] = engine.config({name: given[name] for name in given if name in settings})
        return cls(**own)
