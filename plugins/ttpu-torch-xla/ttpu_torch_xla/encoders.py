"""Text encoders on torch_xla, such as BERT: transformers' own model with the backend's general patches. It gives hidden
states, and generates nothing."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch

from ttpu_core.config import ModelConfig
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_torch_xla.runtime import TorchRuntime

LENGTH, PADDING = 16, 3
"""Tokens of the texts of the self-check, and how many of the first are padding."""


def is_encoder(config: ModelConfig) -> bool:
    """Whether a config is that of a text encoder: transformers has a head for it that fills in masked tokens, and
    nothing says that it is used as a decoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    decodes = config.flag("is_decoder", default=False) or config.flag("is_encoder_decoder", default=False)
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not decodes


def encoder_class(config: Any) -> Any:
    """The transformers class of an encoder without a head, by its transformers config."""
    import transformers

    mapping: Any = transformers.AutoModel._model_mapping
    return mapping[type(config)]


def without_pooling(kind: Any) -> dict[str, bool]:
    """Arguments that leave out an encoder's pooling layer, whose weights many checkpoints lack."""
    return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind).parameters else {}


def refuse_generation(name: str, *_: Any, **__: Any) -> NoReturn:
    """Stands for the `generate` of an encoder.

    Raises:
        RequestError: always.
    """
    raise RequestError(
        f"{name} was to generate text, but it is an encoder, which sees the tokens that follow: call it for "
        "`last_hidden_state`, or serve it for embeddings with the backend 'jax' (`ttpu serve`, LLM(...).embed)."
    )


def check_encoder(model: Any, runtime: TorchRuntime, tolerance: float) -> None:
    """Compare the hidden states of texts that are padded together with those of each text alone.

    Args:
        model: on the device.
        runtime: that it runs on.
        tolerance: of the largest difference, in standard deviations of the states.

    Raises:
        UnsupportedError: they differ, so that what is computed of a text would depend on what runs beside it.
    """
    config = model.config.get_text_config()
    vocab, pad = int(config.vocab_size), int(getattr(config, "pad_token_id", None) or 0)
    ids = torch.randint(0, vocab, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ids = torch.where(ids == pad, (ids + 1) % vocab, ids)
    mask = torch.ones_like(ids)
    mask[0, LENGTH - PADDING :], ids[0, LENGTH - PADDING :] = 0, pad
    device = runtime.device()
    with torch.no_grad():
        together = model(input_ids=ids.to(device), attention_mask=mask.to(device))[0].float().cpu()
        for row, length in enumerate((LENGTH - PADDING, LENGTH)):
            alone = model(input_ids=ids[row : row + 1, :length].to(device))[0][0].float().cpu()
            apart = float((together[row, :length] - alone).abs().max() / alone.std().clamp_min(1e-6))
            if not apart <= tolerance:
                raise UnsupportedError(
                    f"{type(model).__name__} was to be run without a plugin, but the hidden states of a text that is "
                    f"padded are {apart:.2g} standard deviations from those of the text alone, where {tolerance:g} may "
                    "be rounding: use transformers for it."
                )
