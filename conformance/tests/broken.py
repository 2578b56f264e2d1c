"""Family plugins for tests, right and deliberately wrong. In: Python source of hooks; out: cases that describe a model
type by it, found as an installed plugin would be."""

from __future__ import annotations

import sys
import textwrap
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from ttpu_conformance.case import Case, cases_of
from ttpu_conformance.declaration import Declaration, parse_declaration
from ttpu_core.plugin_records import ARCHITECTURES
from ttpu_core.registry import Registry

IMPORTS = """
from dataclasses import replace
from ttpu_core import defaults, hookimpl
from ttpu_core.mapping import layout
from ttpu_core.spec.rope import NO_ROPE, RopeSpec, rope_from_config
from ttpu_core.spec import ActivationSpec, BlockSpec, CustomSpec, MLPSpec, NormSpec
"""

PART_IMPORTS = """
import random
from dataclasses import replace
import jax
import jax.numpy as jnp
from ttpu_jax.model.layers import DecoderLayer
"""

LLAMA = ""

QWEN2 = """
@hookimpl
def ttpu_config(config):
    return config.does_not_matter(("use_sliding_window", "max_window_layers"), because="layer_types follows from them")

@hookimpl
def ttpu_attention(config, layer):
    sliding = config.items("layer_types")[layer] == "sliding_attention"
    window = config.positive_int("sliding_window") if sliding else None
    return replace(defaults.ttpu_attention(config), qkv_bias=True, window=window)
"""

MISTRAL = """
@hookimpl
def ttpu_attention(config):
    return replace(defaults.ttpu_attention(config), window=config.positive_int("sliding_window", default=None))
"""

GEMMA2 = """
from ttpu_gemma.gemma2 import CONFIG_DEFAULTS

@hookimpl
def ttpu_config(config):
    return config.with_defaults(CONFIG_DEFAULTS)

@hookimpl
def ttpu_norm(config):
    return NormSpec(eps=config.number("rms_norm_eps"), offset=1.0, scale_in_fp32=True)

@hookimpl
def ttpu_embedding(config):
    plain = defaults.ttpu_embedding(config)
    return replace(plain, scale=plain.hidden_size**0.5)

@hookimpl
def ttpu_attention(config, layer):
    assumed = "full_attention" if layer % 2 else "sliding_attention"
    sliding = defaults.layer_type(config, layer, assumed=assumed) == "sliding_attention"
    return replace(
        defaults.ttpu_attention(config),
        scale=config.number("query_pre_attn_scalar") ** -0.5,
        logit_softcap=config.number("attn_logit_softcapping", default=None),
        window=config.positive_int("sliding_window") if sliding else None,
    )

@hookimpl
def ttpu_mlp(config):
    return MLPSpec(config.positive_int("intermediate_size"), defaults.activation(config, "hidden_activation"))

@hookimpl
def ttpu_head(config):
    return replace(defaults.ttpu_head(config), softcap=config.number("final_logit_softcapping", default=None))

@hookimpl
def ttpu_block():
    return BlockSpec(placement="sandwich")

@hookimpl
def ttpu_flax_mapping(spec):
    return layout.standard_mapping(
        spec,
        layout.CheckpointNames(
            post_attention_norm="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            post_mlp_norm="post_feedforward_layernorm",
        ),
    )
"""

MIXTRAL = "from ttpu_mistral.mixtral import *"

# A block of the plugin's own, whose class is in another module than the hooks.
OWN_BLOCK = """
@hookimpl
def ttpu_block():
    return BlockSpec(custom=CustomSpec("own", implementations=(("jax", __name__ + "_part:Block"),)))
"""

RIGHT = {"llama": LLAMA, "qwen2": QWEN2, "mistral": MISTRAL, "gemma2": GEMMA2}

# Small numbers, so that soft caps bend and windows cut.
DECLARED: dict[str, dict[str, Any]] = {
    "gemma2": {"base": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5, "query_pre_attn_scalar": 20}},
}


def declaration(model_type: str, **section: Any) -> Declaration:
    """What a conformance.toml with this section would declare."""
    return parse_declaration(model_type, DECLARED.get(model_type, {}) | section, "conformance.toml", Path())


def cases(
    folder: Path, model_type: str, source: str, name: str = "plugin", *, part: str = "", **section: Any
) -> list[Case]:
    """The cases of a model type as a plugin with these hooks describes it; `section` is what it declares, and `part`
    the source of classes that its hooks name."""
    module = f"conformance_test_{name}_{model_type}"
    sys.path.insert(0, str(folder))
    for file, content in ((module, IMPORTS + textwrap.dedent(source)), (f"{module}_part", PART_IMPORTS + part)):
        (folder / f"{file}.py").write_text(content)
        sys.modules.pop(file, None)
    registry = Registry([EntryPoint(model_type, module, ARCHITECTURES)])
    return cases_of(model_type, registry=registry, declaration=declaration(model_type, **section))
