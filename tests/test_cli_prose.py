"""`ttpu info` must not keep quiet about what makes a model special: every field of the description that a family can
set changes the words."""

from dataclasses import fields, replace
from typing import Any

import pytest

from ttpu_core.cli.prose import architecture_lines, attention_words, layer_words, moe_words, norm_words, rope_words
from ttpu_core.spec import (
    NO_ROPE,
    ActivationSpec,
    AlibiSpec,
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    DifferentialSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    OutputGate,
    QueryTemperature,
    RopeSpec,
    RouterSpec,
    SharedSpec,
)

ROPE = RopeSpec(rotary_dim=64)
ATTENTION = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, rope=ROPE, q_norm=NormSpec())
MLP = MLPSpec(128)
MOE = MoESpec(8, 2, 64, router=RouterSpec(groups=4, renormalize=True), shared=MLP)
LAYER = LayerSpec(ATTENTION, MLP, NormSpec())
MODEL = ArchitectureSpec("test", EmbeddingSpec(1000, 256, positions=64), (LAYER,) * 2, NormSpec(), HeadSpec(), 2048)
LINEAR = MixerSpec("gated_delta_net", (("jax", "a.b:C"),), options=(("conv", 4),))

# Another value for each field; to a number that is not here 1 is added.
OTHERS: dict[type, dict[str, Any]] = {
    NormSpec: {"kind": "layer", "eps": 1e-5, "scale": False, "bias": True, "offset": 1.0},
    RopeSpec: {
        "type": "yarn", "rotary_dim": 32, "layout": "interleaved", "factor": 2.0, "original_max_position_embeddings": 9,
        "attention_factor": 2.0, "proportion": 0.5, "sign": -1.0, "fp32": True,
    },
    AttentionSpec: {
        "v_head_dim": 32, "rope": NO_ROPE, "qkv_bias": True, "output_bias": True, "scale": 0.5, "logit_softcap": 50.0,
        "causal": False, "window": 512, "chunk": 512, "sinks": True, "alibi": AlibiSpec(), "clip_qkv": 8.0,
        "q_norm": None,
        "k_norm": NormSpec(), "v_norm": NormSpec(), "qk_norm_scope": "full", "qk_norm_after_rope": True,
        "query_temperature": QueryTemperature(0.1, 8192.0), "output_gate": OutputGate(), "output_norm": NormSpec(),
        "value_scale": 2.0, "value_is_key": True, "kv_from_layer": 3,
        "differential": DifferentialSpec(0.2, NormSpec(scale=False)),
        "num_heads": 16, "num_kv_heads": 8,
    },
    ActivationSpec: {"name": "gelu", "alpha": 1.7, "limit": 7.0},
    MLPSpec: {
        "activation": ActivationSpec("relu2"), "gated": False, "bias": True, "inner_norm": NormSpec(), "sparsity": 0.95,
    },
    RouterSpec: {
        "score": "sigmoid", "renormalize": False, "correction_bias": True, "bias": True, "group_score": "top2_sum",
        "scaling_factor": 2.5, "weight_on": "input", "logit_softcap": 30.0, "norm": NormSpec(), "input_scale": 0.1,
        "expert_scale": True, "groups": 2, "fp32": True,
    },
    MoESpec: {
        "activation": ActivationSpec("gelu"), "gated": False, "router": RouterSpec(), "expert_bias": True,
        "shared": None, "shared_gate": True, "dense": MLP, "num_experts": 16, "experts_per_token": 1,
        "identity_experts": 4, "shortcut": True,
    },
    BlockSpec: {
        "placement": "sandwich", "residual_multiplier": 0.5, "mlp_residual_multiplier": 0.5,
        "skip_multipliers": (2.0, 1.0), "normed_residual": True, "layer_scalar": True, "beside": LINEAR,
        "reads_embedding": True, "shared": SharedSpec(0), "custom": LINEAR,
    },
    SharedSpec: {"qkv_rank": 8, "mlp_rank": 8},
    EmbeddingSpec: {"scale": 2.0, "norm": NormSpec(), "positions": None, "custom": LINEAR, "table_features": 64},
    MixerSpec: {
        "name": "mamba", "implementations": (), "options": (), "rope": ROPE,
    },
    HeadSpec: {"tied": True, "bias": True, "softcap": 30.0, "multiplier": 0.5},
    LayerSpec: {"mixer": LINEAR, "mlp": None, "norm": NormSpec("layer"), "block": BlockSpec("parallel")},
}  # fmt: skip

# Fields that only say how precisely something is computed, or the scale of constants already shown as a whole.
UNSAID = {
    NormSpec: {"scale_in_fp32", "offset_in_fp32"},
    RopeSpec: {
        "max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate", "short_factor", "long_factor",
        "long_attention_factor",
    },
    MixerSpec: {"parameters", "state"},  # counted elsewhere
    AttentionSpec: {"norm_features"},  # how a mesh pads it, which is not the model's own
    EmbeddingSpec: {"table_rows"},
}  # fmt: skip

SPOKEN = [
    (NormSpec(), norm_words),
    (ROPE, lambda rope: rope_words(rope, 64)),
    (ATTENTION, attention_words),
    (ActivationSpec(), lambda spec: layer_words(replace(LAYER, mlp=MLPSpec(128, spec)))),
    (MLP, lambda spec: layer_words(replace(LAYER, mlp=spec))),
    (MOE.router, lambda spec: moe_words(replace(MOE, router=spec))),
    (replace(MOE.router, score="sparsemixer"), lambda spec: moe_words(replace(MOE, router=spec))),
    (MOE, moe_words),
    (BlockSpec(), lambda spec: layer_words(replace(LAYER, block=spec))),
    (SharedSpec(0), lambda spec: layer_words(replace(LAYER, block=BlockSpec(shared=spec)))),
    (MODEL.embedding, lambda spec: architecture_lines(replace(MODEL, embedding=spec))),
    (HeadSpec(), lambda spec: architecture_lines(replace(MODEL, head=spec))),
    (LAYER, layer_words),
    (LINEAR, lambda spec: layer_words(replace(LAYER, mixer=spec))),
]
KNOBS = [
    pytest.param(spec, field.name, words, id=f"{type(spec).__name__}.{field.name}")
    for spec, words in SPOKEN
    for field in fields(spec)  # type: ignore[arg-type]
    if field.name not in UNSAID.get(type(spec), ())
    if field.name != "jitter" or spec.score == "sparsemixer"  # which no other score reads
]


@pytest.mark.parametrize(("spec", "name", "words"), KNOBS)
def test_every_knob_is_said(spec: Any, name: str, words: Any) -> None:
    others = OTHERS[type(spec)]
    other = others[name] if name in others else getattr(spec, name) + 1
    assert other != getattr(spec, name)
    assert words(replace(spec, **{name: other})) != words(spec)


def test_equal_layers_are_said_once_and_a_pattern_by_its_period() -> None:
    sliding = replace(LAYER, mixer=replace(ATTENTION, window=512))
    lines = architecture_lines(replace(MODEL, layers=(sliding, sliding, LAYER) * 3 + (sliding,)))
    assert lines[1] == "9 layers (from layer 0 on), 3 times these 3:"
    assert lines[2].startswith("  2 × grouped-query attention") and "sliding window of 512" in lines[2]
    assert lines[3].startswith("  1 × grouped-query attention") and "sliding" not in lines[3]
    assert lines[4].startswith("1 layer (from layer 9 on): ")


def test_a_plain_model_reads_like_its_paper() -> None:
    plain = replace(MODEL, layers=(replace(LAYER, mixer=replace(ATTENTION, q_norm=None)),) * 2)
    assert architecture_lines(plain)[1] == (
        "2 layers: grouped-query attention, 8 query / 2 key-value heads of 64, rope θ=10000, RMSNorm ε=1e-06 before "
        "each sub-layer, gated SiLU MLP 128"
    )
