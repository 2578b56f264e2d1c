"""Loads a stock transformers model from a checkpoint's directory onto the host. It does not depend on TPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ttpu_core.checkpoint import DTYPES, Checkpoint
from ttpu_core.errors import CheckpointError, MappingError, UnsupportedError
from ttpu_core.registry import default_registry
from ttpu_torch_xla.encoders import encoder_class, is_encoder, without_pooling

TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPES}


def stock_model(
    checkpoint: Checkpoint,
    dtype: str,
    attention: str,
    *,
    quiet: bool = False,
    swap: Callable[[Any], None] | None = None,
    tells_unread: bool = False,
) -> Any:
    """Load the model with transformers on the host, without its own report of tensors.

    Args:
        dtype: its name, see `ttpu_core.checkpoint.dtype_name`.
        attention: what transformers knows it by.
        quiet: without transformers' own progress bar.
        swap: replaces the layers whose weights the checkpoint stores quantized, in the model on the meta device. They
            are left without values.
        tells_unread: warn of tensors that the model does not read. Of a text encoder these are the heads.

    Raises:
        UnsupportedError: transformers has no causal language model of this type, or cannot build it here.
        CheckpointError: it refuses the files.
        MappingError: they lack tensors of the model.
    """
    transformers = _transformers()
    kind = model_class(transformers, checkpoint)
    logging = transformers.utils.logging
    hide, level = quiet and logging.is_progress_bar_enabled(), logging.get_verbosity()
    if hide:
        logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        settings = {} if swap is None else _swapping(kind, checkpoint, swap)
        model, info = kind.from_pretrained(
            str(checkpoint.path),
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=attention,
            output_loading_info=True,
            **settings,
            **without_pooling(kind),
        )
    except ImportError as error:
        raise UnsupportedError(
            f"{checkpoint.source} was to be loaded as {kind.__name__}, but transformers {transformers.__version__} "
            f"needs something for it that is not installed ({' '.join(str(error).split())[:200]}): install that, or "
            "use backend='jax'."
        ) from error
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint.source} was to be loaded as {kind.__name__}, but transformers {transformers.__version__} "
            f"refuses it ({type(error).__name__}: {' '.join(str(error).split())[:300]}): check config.json and the "
            "weight files, or use backend='jax'."
        ) from error
    finally:
        logging.set_verbosity(level)
        if hide:
            logging.enable_progress_bar()
    if swap is None and (missing := sorted(info["missing_keys"])):
        raise MappingError(
            f"{checkpoint.source} was to be loaded as {kind.__name__}, but it has no tensor for {missing[0]!r} "
            f"({len(missing)} missing), which would be left random: take a complete checkpoint whose config.json "
            "belongs to it."
        )
    if tells_unread and (unread := sorted(info["unexpected_keys"])):
        more = f" and {len(unread) - 1:,} more" if len(unread) > 1 else ""
        warnings.warn(
            f"{kind.__name__} does not read {unread[0]!r}{more} in {checkpoint.source}, so they have no effect: see "
            "whether config.json belongs to these files",
            stacklevel=2,
        )
    return model


def _swapping(kind: Any, checkpoint: Checkpoint, swap: Callable[[Any], None]) -> dict[str, Any]:
    """Arguments of `from_pretrained` that replace layers before weights are loaded."""
    from ttpu_torch_xla.quantization.quantizer import Swapped, without_quantization

    config = without_quantization(kind.config_class.from_pretrained(str(checkpoint.path)))
    return {"config": config, "quantization_config": Swapped(swap)}


def model_class(transformers: Any, checkpoint: Checkpoint) -> Any:
    """Return the transformers class that generates text from this checkpoint: the one that config.json names, else that
    of `AutoModelForCausalLM`. That of a text encoder is the one without a head.

    Raises:
        UnsupportedError: there is none.
        CheckpointError: transformers refuses the config.
    """
    encoder = is_encoder(checkpoint.config)
    for name in () if encoder else checkpoint.config.get("architectures") or ():
        named = getattr(transformers, str(name), None)
        if isinstance(named, type) and hasattr(named, "generate"):
            return named
    none = UnsupportedError(
        f"{checkpoint.source} has model_type {checkpoint.config.model_type!r}, for which transformers "
        f"{transformers.__version__} has no causal language model: update transformers, or "
        f"{other_way(checkpoint.config.model_type)}."
    )
    try:
        config = transformers.AutoConfig.from_pretrained(str(checkpoint.path))
    except Exception as error:  # config classes raise many kinds for values that they refuse
        if checkpoint.config.model_type not in transformers.CONFIG_MAPPING:
            raise none from error
        raise CheckpointError(
            f"the config of {checkpoint.source} was to be read, but transformers {transformers.__version__} refuses it "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]}): correct config.json, or use "
            "backend='jax'."
        ) from error
    if encoder:
        return encoder_class(config)
    mapping = transformers.AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise none
    return mapping[type(config)]


def other_way(model_type: str) -> str:
    """What to do with a model type that transformers has no causal language model of: the JAX backend runs what a
    plugin describes."""
    return "use backend='jax'" if default_registry().is_described(model_type) else "take another model"


def tokenizer_of(checkpoint: Checkpoint) -> Any:
    """The checkpoint's tokenizer, or None where it has no tokenizer files.

    Raises:
        CheckpointError: files that transformers cannot read.
    """
    if not checkpoint.has_tokenizer:
        return None
    try:
        return _transformers().AutoTokenizer.from_pretrained(str(checkpoint.path))
    except Exception as error:  # transformers raises many kinds for damaged files
        raise checkpoint.unreadable_tokenizer(error) from error


def _transformers() -> Any:
    import transformers

    return transformers
