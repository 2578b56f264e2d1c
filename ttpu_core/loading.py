"""The one way to open a model: a checkpoint's name and `LoadOptions` come in, a model on a backend's devices goes
out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

from ttpu_core.errors import RequestError

if TYPE_CHECKING:
    from ttpu_core.architecture import Architecture
    from ttpu_core.backend import LoadedModel
    from ttpu_core.checkpoint import Checkpoint
    from ttpu_core.config import ModelConfig
    from ttpu_core.sharding.parallelism import Rules

Purpose = Literal["generate", "serve", "train"]
"""What a model is opened for: its own `generate`, one serving engine, or training."""


ProgressCallback = Callable[[str, float, float], None]
OwnOptions = TypeVar("OwnOptions", bound="LoadOptions")

NOT_FOR_ENGINES = {"for_engines": False}
"""Metadata of an option that who opens an engine does not give."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a checkpoint is loaded, as every backend understands it. A backend adds its own options in a subclass, which
    it names as `Backend.options`.

    Args:
        dtype: "auto" (as stored), "float32", "bfloat16", "float16", or a numpy, jax or torch dtype.
        revision: a branch, tag or commit of a Hub repository.
        patch_packs: names of installed patch packs, applied in order: a sequence, or one string with commas; None takes
            those of TTPU_PATCH_PACKS.
        parallelism_strategy: how the model is sharded over devices: "fsdp", "dp", "mp", "2d", "3d", "auto" (the planner
            chooses), a shape such as "2x4" (data × tensor) or a mesh such as "data=2,tensor=4". None is one device.
        sharding_strategy: the same.
        mesh: the same, or a mesh of the backend.
        plan: a plan, or the file that `ttpu plan --save` wrote, instead of a strategy.
        sharding_rules: logical axis → the mesh axes that shard it, or None, in place of the usual ones.
        attn_implementation: the attention that runs: "auto", or a name that the backend knows.
        attention_config: settings of that implementation, such as {"sa_block_q": 1024} for splash_attention.
        quantization: how the weights are quantized while they are loaded: a shorthand such as "w4a16-g128", a
            `ttpu_core.quantization.QuantizationConfig` or a mapping of its arguments. None leaves them as they are.
        random_seed: draw random weights from this seed in place of the checkpoint's, to train from scratch; the folder
            then needs only a config.json, and a tokenizer for text.
        purpose: what the model is opened for: "generate", "serve" (one serving engine) or "train"; a mesh is chosen for
            it by "auto", and a serving engine takes one replica of a plan.
        progress: called as progress("load", bytes done, bytes in all) and progress("compile", done, in all).
    """

    dtype: Any = "auto"
    revision: str | None = None
    patch_packs: str | Sequence[str] | None = None
    parallelism_strategy: Any = None
    sharding_strategy: Any = None
    mesh: Any = None
    plan: Any = None
    sharding_rules: Rules | None = None
    attn_implementation: str | None = "auto"
    attention_config: Mapping[str, Any] | None = None
    quantization: Any = None
    random_seed: int | None = None
    purpose: Purpose = field(default="generate", metadata=NOT_FOR_ENGINES)
    progress: ProgressCallback | None = field(default=None, metadata=NOT_FOR_ENGINES)

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RequestError: an unknown purpose.
        """
        if self.purpose not in get_args(Purpose):
            raise RequestError(
                f"purpose={self.purpose!r} was asked for, but a model is opened for one of "
                f"{', '.join(get_args(Purpose))}: write one of them."
            )

    @classmethod
    def read(cls, given: Mapping[str, Any], backend: str) -> Self:
        """The options that a caller of `from_pretrained` gave by name; `backend` is what errors call the backend.

        Raises:
            RequestError: a name that this backend does not know, or a value that it refuses.
        """
        refuse_unknown(given, cls.names(), "from_pretrained()", f"the {backend} backend")
        return cls(**given)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options, sorted."""
        return tuple(sorted(option.name for option in fields(cls)))

    @classmethod
    def names_for_engines(cls) -> tuple[str, ...]:
        """The names that who opens an engine may give, sorted: all but those whose metadata is `NOT_FOR_ENGINES`."""
        return tuple(sorted(option.name for option in fields(cls) if option.metadata != NOT_FOR_ENGINES))

    def suited_to(self, kind: type[OwnOptions]) -> OwnOptions:
        """These options as those of a backend, whose own ones keep their defaults.

        Raises:
            RequestError: they are another backend's.
        """
        if isinstance(self, kind):
            return self
        if type(self) is not LoadOptions:
            raise RequestError(
                f"the options are {type(self).__name__}, but this backend takes {kind.__name__}: pass those, or "
                "LoadOptions."
            )
        return kind(**{name: getattr(self, name) for name in self.names()})


def refuse_unknown(given: Iterable[str], known: Iterable[str], caller: str, taker: str, advice: str = "") -> None:
    """Refuse names of options that nobody knows, with the closest known name.

    Args:
        given: the names that a caller used.
        known: the names that there are.
        caller: what was called with them, as in "from_pretrained()".
        taker: what takes those that are known, as in "the engine".
        advice: what the error says beside "leave it out, or correct it".

    Raises:
        RequestError: a name is not known.
    """
    known = sorted(known)
    unknown = sorted(set(given) - set(known))
    if not unknown:
        return
    close = next((match for name in unknown for match in get_close_matches(name, known, n=1)), None)
    meant = f" (did you mean {close}?)" if close else ""
    raise RequestError(
        f"{caller} was given {', '.join(unknown)}{meant}, but {taker} takes {', '.join(known)}: leave it out, or "
        f"correct it{advice}."
    )


def describe_checkpoint(
    checkpoint: Checkpoint, patch_packs: str | Sequence[str] | None = None
) -> tuple[Checkpoint, Architecture]:
    """A checkpoint with weights and its architecture, in which the head is tied to the embedding only if the weights
    agree, whatever the config says: transformers too lets them decide.

    Raises:
        CheckpointError, ConfigError, MappingError, PluginError: what cannot be described, and why.
    """
    from ttpu_core.checkpoint.tied_head import has_own_head
    from ttpu_core.registry import default_registry

    registry, tensors = default_registry(), len(checkpoint.tensors)
    architecture = registry.architecture(checkpoint.config, patch_packs, tensors=tensors)
    if has_own_head(checkpoint, architecture.mapping):
        checkpoint = replace(checkpoint, config=checkpoint.config.with_values({"tie_word_embeddings": False}))
        architecture = registry.architecture(checkpoint.config, patch_packs, tensors=tensors)
    return checkpoint, architecture


def planned_architecture(name: str, patch_packs: str | Sequence[str] | None = None) -> Architecture:
    """The architecture of a checkpoint or of a config.json alone, beside which no weights have to lie, with the formats
    of weights that are quantized already. Where a folder with weights is named, they decide whether the head is tied,
    as in `open_model`: a head that is stored beside the embedding is compared with it. No other weights are read.

    Raises:
        CheckpointError, ConfigError, MappingError, PluginError: what cannot be described, and why.
        UnsupportedError: the weights are quantized in a scheme that is not read.
    """
    from ttpu_core.checkpoint import open_checkpoint, open_config
    from ttpu_core.quantization.stored import stored_architecture
    from ttpu_core.registry import default_registry

    path = Path(name).expanduser()
    alone = path.exists() and not (path.is_dir() and any(path.glob("*.safetensors")))
    checkpoint = None if alone else open_checkpoint(name)
    if checkpoint is None or not checkpoint.has_weights:
        config = open_config(name) if checkpoint is None else checkpoint.config
        return stored_architecture(default_registry().architecture(config, patch_packs), config)
    checkpoint, architecture = describe_checkpoint(checkpoint, patch_packs)
    return stored_architecture(architecture, checkpoint.config, checkpoint)


def undescribed_config(name: str) -> ModelConfig | None:
    """The config of a checkpoint, or of a config.json alone, whose model type no plugin describes; None if one does.

    Raises:
        CheckpointError, ConfigError: there is no such checkpoint, or its config.json is malformed.
        UnsupportedError: the model has an encoder.
    """
    from ttpu_core.checkpoint import open_checkpoint, open_config
    from ttpu_core.registry import default_registry, refuse_encoder

    config = open_config(name) if Path(name).expanduser().exists() else open_checkpoint(name).config
    if default_registry().is_described(config.model_type):
        return None
    refuse_encoder(config)
    return config


def open_model(
    source: str | Path | Checkpoint,
    options: LoadOptions,
    *,
    backend: str | None = None,
    warn: Callable[[str], None] | None = None,
) -> LoadedModel:
    """A model with a checkpoint's weights on a backend's devices. A model type that no plugin describes is run by the
    backend's fallback, if one is installed.

    Args:
        source: a checkpoint's directory, a Hub id of the form org/name, or an opened checkpoint.
        options: how it is loaded: `LoadOptions`, or the backend's own.
        backend: the name of an installed backend; None takes the default, see `Registry.default_backend`.
        warn: called with a sentence for each key in config.json that may matter and that no plugin reads, and with one
            for tensors that the plugin ignores; None warns.

    Raises:
        CheckpointError, ConfigError, MappingError: the checkpoint's files are missing or malformed.
        PluginError: no usable plugin describes its model type, or a patch pack is not installed.
        MissingDependencyError: the backend, or what it needs, is not installed.
        RequestError: an option has a value that the backend refuses.
        UnsupportedError: the backend cannot run this architecture, it is a classifier, or the weights are quantized.
    """
    from ttpu_core.checkpoint import Checkpoint, open_checkpoint
    from ttpu_core.checkpoint.classifier import refuse_classifier
    from ttpu_core.checkpoint.unread import unread_sentences
    from ttpu_core.config.key_audit import refuse_ignored
    from ttpu_core.quantization.schemes import quantization_of
    from ttpu_core.registry import default_registry, refuse_encoder

    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, revision=options.revision)
    refuse_classifier(checkpoint)
    if not default_registry().is_described(checkpoint.config.model_type):
        refuse_encoder(checkpoint.config)
        runs = default_registry().backend(backend)
        fallback = default_registry().fallback(runs.name)
        if fallback is not None:
            return fallback.open(checkpoint, options.suited_to(runs.options))
    if options.random_seed is None:
        checkpoint, architecture = describe_checkpoint(checkpoint, options.patch_packs)
    else:
        architecture = default_registry().architecture(checkpoint.config, options.patch_packs)
    quantization_of(checkpoint.config)
    held = checkpoint.tensors if options.random_seed is None else ()
    for sentence in (
        *refuse_ignored(checkpoint.config),
        *unread_sentences(architecture.mapping, held, checkpoint.source),
    ):
        warnings.warn(sentence, stacklevel=3) if warn is None else warn(sentence)
    runs = default_registry().backend(backend)
    return runs.open(architecture, checkpoint, options.suited_to(runs.options))
