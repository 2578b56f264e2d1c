"""Names the `pip install` for a missing distribution. No other module knows distributions by name; installed ones are
found by entry points."""

from __future__ import annotations

import re

FAMILIES = {
    "llama": "ttpu-llama",
    "gemma": "ttpu-gemma",
    "vaultgemma": "ttpu-gemma",
    "qwen": "ttpu-qwen",
    "mistral": "ttpu-mistral",
    "ministral": "ttpu-mistral",
    "mixtral": "ttpu-mistral",
}
"""By the beginning of the model type, since a later release may describe the family's next one."""

ZOO = (
    "apertus arcee bamba bitnet bloom cohere cohere2 cwm deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe "
    "exaone4 falcon falcon_h1 falcon_mamba flex_olmo glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox "
    "gpt_oss gptj granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe "
    "hyperclovax internlm3 iquestcoder jais2 jamba lfm2 lfm2_moe longcat_flash mamba mamba2 minicpm3 minimax "
    "minimax_m2 mpt nemotron nemotron_h olmo olmo2 olmo3 olmoe opt phi phi3 phimoe seed_oss smollm3 solar_open "
    "stablelm starcoder2 youtu zamba2"
)
"""The model types that ttpu-zoo describes: many families, of which it has some types, between spaces."""

BACKENDS = {"jax": '"ttpu-core[jax]"', "torch_xla": '"ttpu-core[torch-xla]"'}

COMMANDS = {
    "batch": '"ttpu-core[serve]"',
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


def official() -> frozenset[str]:
    """The names of TTPU's own distributions, which no other may have. An extra of the core is named like the
    distribution that it brings."""
    tables = (FAMILIES, BACKENDS, COMMANDS, SERVICES, PACKAGES)
    named = {source.strip('"') for table in tables for source in table.values()}
    found = {"ttpu-core", "ttpu-zoo"}
    for source in (*named, A_FAMILY.strip('"'), A_BACKEND.strip('"'), A_FALLBACK.strip('"')):
        name, _, extra = re.sub(r"\]$", "", source).partition("[")
        found.add(f"ttpu-{extra}" if name == "ttpu-core" else name)
    return frozenset(found)


def family_of(model_type: str) -> str | None:
    """The distribution that describes a model type, or None if none is known."""
    if model_type in ZOO.split():
        return "ttpu-zoo"
    return next((name for prefix, name in FAMILIES.items() if model_type.startswith(prefix)), None)
