"""What a training run refuses of a model and its settings, and what it warns of."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ttpu_core.architecture import refuse_undescribed
from ttpu_core.config import ModelConfig
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_jax.train.remat import REMATS
from ttpu_jax.train.score_head import HasScore

if TYPE_CHECKING:
    from ttpu_jax.causal_lm import JaxCausalLM
    from ttpu_train.runner import StepSettings

DROPOUT = (
    "attention_dropout", "hidden_dropout", "dropout", "activation_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "ffn_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "router_jitter_noise",
)  # fmt: skip
"""Keys of a config by which transformers' models are random in training."""


def warn_of_dropout(config: ModelConfig) -> None:
    """Warn of what transformers would drop in training: the decoder drops nothing."""
    asked = [f"{key}={config.get(key)}" for key in DROPOUT if config.get(key)]
    if asked:
        warnings.warn(
            f"the checkpoint's config has {', '.join(asked)}, but the JAX backend trains without dropout and noise: "
            "train with backend='torch_xla' if they matter",
            stacklevel=4,
        )


def check_settings(model: JaxCausalLM, settings: StepSettings) -> None:
    """Check that a model can be trained with these settings.

    Raises:
        RequestError: settings that contradict the model or each other, or a model that no plugin describes.
        UnsupportedError: the model is quantized or served by an engine.
    """
    refuse_undescribed(model.architecture, "trained")
    if model.programs.spec.kernel_formats and settings.adapters is None:
        raise UnsupportedError(
            "a quantized model was to be trained, but updates are smaller than the steps between its numbers: train "
            "adapters beside it with peft_config={'target_modules': 'all-linear'}, or load it without quantization."
        )
    rewards = settings.objective is not None and settings.objective.method == "reward"
    if rewards != isinstance(model, HasScore):
        raise RequestError(
            f"{model.name} was to be trained {'as a reward model' if rewards else 'as a language model'}, but it was "
            f"opened {'with a language model head' if rewards else 'as a reward model'}: pass Trainer the folder of "
            "the checkpoint."
        )
    if rewards and settings.adapters is not None:
        raise UnsupportedError(
            "peft_config was given with method='reward', but the weights of a reward model are trained themselves: "
            "leave it out, or choose some of them with trainable."
        )
    if model.engine is not None:
        raise UnsupportedError(
            "a model with a serving engine was to be trained, but the engine holds the weights: load it without "
            "enable_paged_attention."
        )
    if not model.params:
        raise RequestError(
            "a model without weights was to be trained, but another trainer has taken them over: load it again."
        )
    if settings.remat not in (*REMATS, "auto"):
        raise RequestError(
            f"remat={settings.remat!r} was asked for, but what is computed again is one of {', '.join(REMATS)} and "
            "auto: use one of these."
        )
    if settings.accumulation < 1:
        raise RequestError(
            f"an accumulation of {settings.accumulation} parts was asked for, but a batch has at least 1: raise it."
        )
