"""Llama configs in all the forms that checkpoints have, and tiny random models of them made by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    """Rope parameters in the new form."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 8},
    "mqa": {"num_key_value_heads": 1},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "wide_heads": {"head_dim": 24},
    "narrow_heads": {"head_dim": 4, "attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "one_layer": {"num_hidden_layers": 1},
    "gelu": {"hidden_act": "gelu"},
    "large_eps": {"rms_norm_eps": 1e-2},
    "theta_500000": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "rope_linear": rope("linear", factor=4.0),
    "rope_dynamic": rope("dynamic", factor=4.0) | {"max_position_embeddings": 24},
    "rope_yarn": rope("yarn", factor=4.0, original_max_position_embeddings=32),
    "rope_yarn_mscale": rope(
        "yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.9, beta_fast=16.0
    ),
    "rope_llama3": rope("llama3", **LLAMA3),
    "everything": {
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 24,
        "tie_word_embeddings": True,
        **rope("llama3", **LLAMA3),
    },
}


def make_model(name: str, seed: int = 0, dtype: str = "float32") -> Any:
    """A torch model of the variant whose norms and biases are random too, so that none can be forgotten unseen."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**BASE, **VARIANTS[name]})).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path:
                parameter.copy_(1.0 + 0.3 * torch.randn_like(parameter))
            elif path.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.12 * torch.randn_like(parameter))
    return model.to(getattr(torch, dtype))


def write_old_style_rope(directory: Path) -> None:
    """Rewrite a saved config as the Hub has it: `rope_theta` and `rope_scaling` instead of `rope_parameters`."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    # The oldest files say "type", newer ones "rope_type".
    name = "type" if kind in ("linear", "dynamic", "yarn") else "rope_type"
    config["rope_scaling"] = None if kind == "default" else {name: kind, **parameters}
    file.write_text(json.dumps(config))
