"""Names the `pip install` for a missing distribution. No other module knows distributions by name; installed ones are
found by entry points."""

from __future__ import annotations

FAMILIES = {
    "llama": "ttpu-llama",
    "gemma": "ttpu-gemma",
    "vaultgemma": "ttpu-gemma",
    "qwen": "ttpu-qwen",
    "mistral": "ttpu-mistral",
    "ministral": "ttpu-mistral",
    "mixtral": "ttpu-mistral",
    "apertus": "ttpu-zoo",
    "arcee": "ttpu-zoo",
    "bamba": "ttpu-zoo",
    "bitnet": "ttpu-zoo",
    "bloom": "ttpu-zoo",
    "cohere": "ttpu-zoo",
    "cwm": "ttpu-zoo",
    "deepseek_v2": "ttpu-zoo",
    "deepseek_v3": "ttpu-zoo",
    "dots1": "ttpu-zoo",
    "ernie4_5": "ttpu-zoo",
    "exaone4": "ttpu-zoo",
    "falcon": "ttpu-zoo",
    "flex_olmo": "ttpu-zoo",
    "glm": "ttpu-zoo",
    "gpt2": "ttpu-zoo",
    "gpt_bigcode": "ttpu-zoo",
    "gpt_neox": "ttpu-zoo",
    "gpt_oss": "ttpu-zoo",
    "gptj": "ttpu-zoo",
    "granite": "ttpu-zoo",
    "helium": "ttpu-zoo",
    "hunyuan_v1": "ttpu-zoo",
    "hyperclovax": "ttpu-zoo",
    "internlm3": "ttpu-zoo",
    "iquestcoder": "ttpu-zoo",
    "jais2": "ttpu-zoo",
    "jamba": "ttpu-zoo",
    "lfm2": "ttpu-zoo",
    "mamba": "ttpu-zoo",
    "minicpm3": "ttpu-zoo",
    "minimax": "ttpu-zoo",
    "mpt": "ttpu-zoo",
    "nemotron": "ttpu-zoo",
    "olmo": "ttpu-zoo",
    "opt": "ttpu-zoo",
    "phi": "ttpu-zoo",
    "seed_oss": "ttpu-zoo",
    "smollm3": "ttpu-zoo",
    "solar_open": "ttpu-zoo",
    "stablelm": "ttpu-zoo",
    "starcoder2": "ttpu-zoo",
    "youtu": "ttpu-zoo",
}
"""By the beginning of the model type."""

BACKENDS = {"jax": '"ttpu-core[jax]"', "torch_xla": '"ttpu-core[torch-xla]"'}

COMMANDS = {
    "bench": '"ttpu-serve[bench]"',
    "compile": '"ttpu-core[serve]"',
    "compile-report": '"ttpu-core[jax]"',
    "conformance": "ttpu-conformance",
    "eval": '"ttpu-core[quantize]"',
    "launch": "ttpu-launch",
    "new-plugin": "ttpu-conformance",
    "plan": "ttpu-plan",
    "quantize": '"ttpu-core[quantize]"',
    "export": '"ttpu-core[train]"',
    "inspect": '"ttpu-core[torch-xla]"',
    "serve": '"ttpu-core[serve]"',
    "train": '"ttpu-core[train]"',
}

SERVICES = {
    "planner": "ttpu-plan",
    "rendezvous": "ttpu-launch",
    "engine": '"ttpu-core[serve]"',
    "harness": '"ttpu-quantize[lm-eval]"',
}

PACKAGES = {
    "ttpu_serve": '"ttpu-core[serve]"',
    "ttpu_torch_xla": '"ttpu-core[torch-xla]"',
    "ttpu_train": '"ttpu-core[train]"',
}
"""By the package that `ttpu` exports a name from."""

A_FAMILY, A_BACKEND, A_FALLBACK = "ttpu-llama", '"ttpu-core[jax]"', '"ttpu-core[any]"'
"""For an environment that has none."""


def family_of(model_type: str) -> str | None:
    """The distribution that describes a model type, or None if none is known."""
    return next((name for prefix, name in FAMILIES.items() if model_type.startswith(prefix)), None)
