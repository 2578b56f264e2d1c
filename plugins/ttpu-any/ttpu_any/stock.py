"""Opens the stock transformers model on the meta device, and reads its weights. transformers finds, converts and checks
each parameter as it does for itself; each is put onto the devices and taken from the host before the next is read."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import torch
import transformers
from transformers import core_model_loading

from ttpu_core.checkpoint import Checkpoint
from ttpu_core.config import ModelConfig
from ttpu_core.errors import CheckpointError, MappingError, UnsupportedError

Put = Callable[[torch.nn.Module, str, np.ndarray], jax.Array]
"""Puts a tensor of a model, by its name, onto the devices."""

CODE = {"attn_implementation": "eager", "experts_implementation": "grouped_mm"}
"""The implementations that can be traced: masks as tensors, and experts without a loop over values."""


CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")
DEFAULT_CONTEXT = 2048


def stock_class(config: ModelConfig) -> tuple[type[Any], Any]:
    """The transformers class that runs a model, and its config: a causal language model, or an encoder without a head.

    Raises:
        UnsupportedError: transformers has neither, or the model has an encoder and a decoder.
        CheckpointError: transformers refuses the config.
    """
    model_type = config.model_type
    if model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedError(
            f"{config.source} has model_type {model_type!r}, for which no plugin is installed and which transformers "
            f"{transformers.__version__} does not know either: install a plugin, or update transformers."
        )
    raw = {key: value for key, value in config.to_dict().items() if key != "model_type"}
    raw = transformers.PreTrainedConfig._decode_special_floats(raw)  # as it reads config.json
    try:
        stock = transformers.CONFIG_MAPPING[model_type].from_dict(raw)
    except Exception as error:  # config classes raise many kinds for values that they refuse
        raise CheckpointError(
            f"{config.source} was to be read, but transformers {transformers.__version__} refuses it "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]}): correct it."
        ) from error
    if getattr(stock, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{config.source} of model_type {model_type!r} has an encoder and a decoder, but TTPU runs decoders and "
            "encoders alone: use transformers for it."
        )
    encoder = is_encoder(stock)
    mapping: Any = (transformers.AutoModel if encoder else transformers.AutoModelForCausalLM)._model_mapping
    if type(stock) not in mapping:
        raise UnsupportedError(
            f"{config.source} has model_type {model_type!r}, for which transformers {transformers.__version__} has no "
            "causal language model and no text encoder: take another model, or update transformers."
        )
    return mapping[type(stock)], stock


def is_encoder(stock: Any) -> bool:
    """Whether a transformers config is that of a text encoder: it has a head that fills in masked tokens, and nothing
    says that it is used as a decoder."""
    return type(stock) in transformers.AutoModelForMaskedLM._model_mapping and not getattr(stock, "is_decoder", False)


def empty_model(config: ModelConfig, dtype: torch.dtype) -> Any:
    """The model with its parameters on the meta device, and with the values of the buffers that no checkpoint holds.

    Raises:
        UnsupportedError, CheckpointError: see `stock_class`.
    """
    kind, stock = stock_class(config)
    with torch.device("meta"):
        model = kind._from_config(stock, dtype=dtype, **_code(kind)).eval()
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model._move_missing_keys_from_meta_to_device(set(), None, None, None)
    model._initialize_missing_keys(False)
    return model


def context_of(config: Any) -> int:
    """The most tokens that a sequence may have, as a transformers config says; 2048 if it says nothing."""
    for key in CONTEXT_KEYS:
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return DEFAULT_CONTEXT


def load_model(
    checkpoint: Checkpoint, dtype: torch.dtype, put: Put, on_load: Callable[[float, float], None] | None = None
) -> tuple[Any, dict[str, jax.Array]]:
    """The model with its tensors on the meta device, and name → array on the devices.

    Args:
        checkpoint: the files.
        dtype: of the weights.
        put: puts a tensor onto the devices.
        on_load: called with the bytes that are read and their number in all.

    Raises:
        UnsupportedError: transformers has no such model.
        CheckpointError: transformers cannot read the files.
        MappingError: tensors are missing, or have other shapes than the model's.
    """
    kind, _ = stock_class(checkpoint.config)
    arrays: dict[str, jax.Array] = {}
    read, total = 0.0, float(checkpoint.total_bytes)
    set_parameter = core_model_loading.set_param_for_module

    def take(model: Any, name: str, value: torch.Tensor, info: Any, quantizer: Any) -> None:
        nonlocal read
        set_parameter(model, name, value, info, quantizer)
        owner, _, own_name = name.rpartition(".")
        module = model.get_submodule(owner) if owner else model
        held = getattr(module, own_name)
        if not isinstance(held, torch.Tensor) or held.is_meta:
            return  # refused: the loader says why
        arrays[name] = put(model, name, host_array(held))
        empty = torch.empty_like(held, device="meta")
        kept = torch.nn.Parameter(empty, requires_grad=False) if isinstance(held, torch.nn.Parameter) else empty
        kept._is_hf_initialized = True  # type: ignore[attr-defined]
        setattr(module, own_name, kept)
        read += held.nbytes
        if on_load is not None:
            on_load(min(read, total), total)

    with _quiet(), _one_by_one(), mock.patch.object(core_model_loading, "set_param_for_module", take):
        try:
            model, info = kind.from_pretrained(
                str(checkpoint.path), dtype=dtype, output_loading_info=True, **_code(kind)
            )
        except Exception as error:  # transformers raises many kinds for what it cannot read
            raise CheckpointError(
                f"the weights of {checkpoint.source} were to be read, but transformers cannot "
                f"({type(error).__name__}: {' '.join(str(error).split())[:300]}): copy the files again."
            ) from error
    _refuse_incomplete(checkpoint, info)
    model.eval()
    arrays = _by_first_name(model, arrays)
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if name in arrays:
            continue
        if tensor.is_meta:
            raise MappingError(
                f"{checkpoint.source} has no values for {name!r} of {kind.__name__}: take a complete checkpoint."
            )
        arrays[name] = put(model, name, host_array(tensor))  # a buffer that no checkpoint holds
    if on_load is not None:
        on_load(total, total)
    return model, arrays


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor of the host, of any shape, as an array of the same shape, in 32 bits where it has 64."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype in (torch.int64, torch.float64):
        tensor = tensor.to(torch.int32 if tensor.dtype == torch.int64 else torch.float32)
    array: np.ndarray = tensor.numpy()
    return array


def _by_first_name(model: Any, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays by the first name of each parameter in its model; files may have tied ones under any name."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    return {names.get(name, name): array for name, array in arrays.items()}


def _code(kind: type[Any]) -> dict[str, Any]:
    """Arguments that choose the code of a model: what can be traced, and an encoder without its pooling layer, whose
    weights many checkpoints lack."""
    chosen: dict[str, Any] = dict(CODE)
    if not kind._can_set_experts_implementation():
        del chosen["experts_implementation"]
    if "add_pooling_layer" in inspect.signature(kind).parameters:
        chosen["add_pooling_layer"] = False
    return chosen


def _refuse_incomplete(checkpoint: Checkpoint, info: Any) -> None:
    missing = sorted(info["missing_keys"])
    other = sorted(str(each[0]) for each in info["mismatched_keys"])
    if missing or other:
        what = f"no tensor for {missing[0]!r}" if missing else f"a tensor of another shape for {other[0]!r}"
        raise MappingError(
            f"{checkpoint.source} has {what} ({len(missing)} missing, {len(other)} of another shape): take a complete "
            "checkpoint whose config.json belongs to it."
        )


@contextmanager
def _one_by_one() -> Iterator[None]:
    """While it is entered, transformers reads no tensor before it is wanted."""
    with mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """While it is entered, transformers shows no progress bar and prints no report: what is missing is refused here."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
