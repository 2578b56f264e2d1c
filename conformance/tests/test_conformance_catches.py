"""Deliberately wrong plugins fail, with a message that names the hook to correct; right ones pass."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from broken import GEMMA2, LLAMA, MISTRAL, QWEN2, RIGHT, cases

from ttpu_conformance.diagnosis import first_difference
from ttpu_conformance.runner import run
from ttpu_conformance.selection import checks_for
from ttpu_zoo import gpt_oss, nemotron

pytestmark = [pytest.mark.torch, pytest.mark.slow]

ONLY = ("float32_logits", "config_keys_are_read")


def changed(source: str, old: str, new: str) -> str:
    assert old in source
    return source.replace(old, new)


def failures(folder: Path, model_type: str, source: str, *only: str, **section: Any) -> dict[str, str]:
    """Check id → reason, of those that fail; `section` is what the plugin declares."""
    results = run(checks_for(cases(folder, model_type, source, "wrong", **section), "quick", only=only))
    return {result.check: result.reason for result in results if result.status == "failed"}


@pytest.mark.parametrize(("model_type", "only"), [("gemma2", ()), *((one, ONLY) for one in RIGHT if one != "gemma2")])
def test_a_right_plugin_passes(tmp_path: Path, model_type: str, only: tuple[str, ...]) -> None:
    results = list(run(checks_for(cases(tmp_path, model_type, RIGHT[model_type], "right"), "quick", only=only)))
    assert {f"{result.check}: {result.reason}" for result in results if result.status == "failed"} == set()
    assert len(results) > (0 if only else 10)


HEAD_NORMS = """
@hookimpl
def ttpu_attention(config):
    norm = replace(defaults.ttpu_norm(config), scale_in_fp32=True)
    return replace(defaults.ttpu_attention(config), q_norm=norm, k_norm=norm)
"""
FLOAT32_ROPE = """
@hookimpl
def ttpu_rope(config, attention):
    return rope_from_config(config, head_dim=attention.head_dim, fp32=True)
"""
SWAPPED = """
from ttpu_core.mapping import Stack

@hookimpl
def ttpu_flax_mapping(spec):
    mapping = layout.standard_mapping(spec)
    swapped = {p: Stack(r.parts[::-1]) for p, r in mapping.rules if p.endswith("gate_up.kernel")}
    return layout.replace_rules(mapping, swapped)
"""
INTERLEAVED = """
@hookimpl
def ttpu_rope(config, attention):
    return rope_from_config(config, head_dim=attention.head_dim, layout="interleaved")
"""
WRONG = {
    "missing 1+w": ("gemma2", changed(GEMMA2, "offset=1.0, ", ""), "NormSpec(offset=1)", "ttpu_norm"),
    "wrong rope layout": ("llama", LLAMA + INTERLEAVED, "layout='half'", "ttpu_rope"),
    "gate and up swapped": ("llama", LLAMA + SWAPPED, "gate and up", "ttpu_flax_mapping"),
    "window off by one": (
        "mistral",
        changed(
            MISTRAL, 'config.positive_int("sliding_window", default=None)', 'config.positive_int("sliding_window") - 1'
        ),
        "window=13 instead of 12",
        "ttpu_attention",
    ),
    "forgotten bias": ("qwen2", changed(QWEN2, "qkv_bias=True", "qkv_bias=False"), "qkv_bias=True", "ttpu_attention"),
    "embedding not scaled": (
        "gemma2",
        changed(GEMMA2, "scale=plain.hidden_size**0.5", "scale=None"),
        "EmbeddingSpec(scale=8)",
        "ttpu_embedding",
    ),
    "wrong final softcap": (
        "gemma2",
        changed(GEMMA2, 'softcap=config.number("final_logit_softcapping", default=None))', "softcap=30.0)"),
        "HeadSpec(softcap=1.5)",
        "ttpu_head",
    ),
    "wrong attention softcap": (
        "gemma2",
        changed(GEMMA2, 'config.number("attn_logit_softcapping", default=None)', "50.0"),
        "logit_softcap=2",
        "ttpu_attention",
    ),
    "wrong activation": (
        "gemma2",
        changed(GEMMA2, 'defaults.activation(config, "hidden_activation")', 'ActivationSpec("gelu")'),
        "gelu_tanh",
        "ttpu_mlp",
    ),
    "two mistakes": (
        "gemma2",
        changed(changed(GEMMA2, "offset=1.0, ", ""), "scale=plain.hidden_size**0.5", "scale=None"),
        "EmbeddingSpec(scale=8) in `ttpu_embedding` and NormSpec(offset=1) in `ttpu_norm` the logits agree",
        "`ttpu_embedding`, `ttpu_norm`",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_caught_and_the_hook_to_correct_is_named(tmp_path: Path, mistake: str) -> None:
    model_type, source, change, hook = WRONG[mistake]
    reason = failures(tmp_path, model_type, source, "float32_logits")["float32_logits"]
    assert change in reason
    assert reason.rstrip(".").endswith(f"correct `{hook.strip('`')}`")


IGNORED = """
@hookimpl
def ttpu_flax_mapping(spec):
    mapping = layout.standard_mapping(spec)
    return replace(mapping, ignored=(*mapping.ignored, r"{pattern}"))
"""
UNMAPPED_BIAS = """
@hookimpl
def ttpu_flax_mapping(spec):
    mapping = layout.standard_mapping(spec)
    return replace(mapping, ignored=(*mapping.ignored, r".*_proj\\.bias"))
"""
NO_RULE = """
@hookimpl
def ttpu_flax_mapping(spec):
    mapping = layout.standard_mapping(spec)
    return replace(mapping, rules=tuple(rule for rule in mapping.rules if rule[0] != "layers.1.mlp.down.kernel"))
"""
AXES = """
@hookimpl
def ttpu_sharding_rules():
    return [({pattern!r}, {axes!r})]
"""
ROPE_OF_ANY_TYPE = """
@hookimpl
def ttpu_rope(config, attention):
    section = config.section("rope_parameters") or config
    section.get("rope_type")
    return RopeSpec(theta=section.number("rope_theta"), rotary_dim=attention.head_dim)
"""
ROPE_OF_NEW_JSON_ALONE = """
@hookimpl
def ttpu_rope(config, attention):
    section = config.section("rope_parameters")
    return rope_from_config(config, head_dim=attention.head_dim, theta=1.0) if section else NO_ROPE
"""
ROPE_STRETCHED_OTHERWISE = """
@hookimpl
def ttpu_rope(config, attention):
    rope = rope_from_config(config, head_dim=attention.head_dim)
    return replace(rope, factor=3.0) if rope.type == "dynamic" else rope
"""
OTHER_DEFAULT = """
@hookimpl
def ttpu_config(config):
    return config.with_defaults({"rms_norm_eps": 1e-5})
"""
MIXTRAL_OF_NEW_NAMES = """
from ttpu_mistral import mixtral
from ttpu_mistral.mixtral import *

@hookimpl
def ttpu_config(config):
    config.get("num_experts")
    return config.with_defaults(mixtral.CONFIG_DEFAULTS)
"""
EVERY_KEY_READ = """
@hookimpl
def ttpu_config(config):
    return config.with_defaults({key: config.get(key) for key in config})
"""
LIST_IN_MIXER = """
@hookimpl
def ttpu_norm(config):
    return NormSpec(eps=UnfrozenFloat(config.number("rms_norm_eps")))

class UnfrozenFloat:
    def __init__(self, value):
        self.value = value

    def __float__(self):
        return self.value
"""
LIST_IN_MAPPING = """
@hookimpl
def ttpu_flax_mapping(spec):
    mapping = layout.standard_mapping(spec)
    return replace(mapping, rules=list(mapping.rules))
"""
CACHED_DICT = """
from dataclasses import dataclass
from functools import cached_property

@dataclass(frozen=True)
class Norm(NormSpec):
    def __post_init__(self):
        self.names

    @cached_property
    def names(self):
        return {"eps": self.eps}

@hookimpl
def ttpu_norm(config):
    return Norm(eps=config.number("rms_norm_eps"))
"""
CHANGED_CONFIG = """
@hookimpl
def ttpu_config(config):
    config._values["rms_norm_eps"] = 1e-5
    return config
"""
ANOTHER_EACH_TIME = """
@hookimpl
def ttpu_norm(config):
    return NormSpec(eps=1e-6 + hash("the seed of string hashes changes") % 1000 * 1e-9)
"""


def dynamic_rope(context: int) -> dict[str, Any]:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return {"max_position_embeddings": context, "rope_parameters": rope}


BREACHES: dict[str, tuple[Any, ...]] = {
    "a tensor is dropped among the ignored": (
        "qwen2",
        changed(QWEN2, "qkv_bias=True", "qkv_bias=False") + UNMAPPED_BIAS,
        "ignored_tensors_do_not_matter",
        r"nothing reads model.layers.0.self_attn.k_proj.bias, .* map it in `ttpu_flax_mapping`",
    ),
    "a parameter has no rule": (
        "llama",
        NO_RULE,
        "float32_logits",
        "no rule for the parameter 'layers.1.mlp.down.kernel': add to `ttpu_flax_mapping`",
    ),
    "a logical axis does not exist": (
        "llama",
        AXES.format(pattern="head.kernel", axes=("vocabulary", "embed")),
        "logical_axes",
        "head.kernel .* correct `ttpu_sharding_rules`",
    ),
    "logical axes are changed over": (
        "llama",
        AXES.format(pattern="embed.embedding", axes=("embed", "vocab")),
        "logical_axes",
        "embed.embedding .* calls its dimension of 200 'embed', .* 64 in this model: correct `ttpu_sharding_rules`",
    ),
    "a large parameter is not sharded": (
        "llama",
        AXES.format(pattern=".*gate_up.kernel", axes=(None, None, None)),
        "sharded_fsdp",
        "lie whole on every device, .* `ttpu_sharding_rules`",
    ),
    "an unknown rope is taken": (
        "llama",
        ROPE_OF_ANY_TYPE,
        "unknown_rope_is_refused",
        "is accepted, .* use `rope_from_config` in `ttpu_rope`",
    ),
    "old rope JSON is not read": (
        "llama",
        ROPE_OF_NEW_JSON_ALONE,
        "old_rope_json",
        "instead of rope_parameters, layer 0 gets .* correct `ttpu_rope`",
    ),
    "a rope is stretched otherwise beyond its context": (
        "llama",
        ROPE_STRETCHED_OTHERWISE,
        "float32_logits",
        "layer 0, from token 1 on, so in what attention sees or how it is rotated",
        {"base": {**dynamic_rope(16), "num_hidden_layers": 1}},  # each correction that is tried compiles one layer
    ),
    "a context that the test never passes": (
        "llama",
        LLAMA,
        "windows_are_passed",
        "other angles beyond 40 tokens, .* declare a smaller max_position_embeddings",
        {"base": dynamic_rope(40)},
    ),
    "a default is not the config class's": (
        "llama",
        OTHER_DEFAULT,
        "raw_json",
        r"With .*no 'rms_norm_eps', .*norm.eps is 1e-05 instead of 1e-06: correct `ttpu_config`",
    ),
    "an absent list of layer types is taken otherwise": (
        "qwen2",
        changed(QWEN2, '("layer_types")', '("layer_types", default=("sliding_attention",) * 2)'),
        "raw_json",
        r"With only the keys that its author gave, .*window is 13 instead of None: correct `ttpu_attention`",
    ),
    "an old name is not read": (
        "mixtral",
        MIXTRAL_OF_NEW_NAMES,
        "raw_json",
        r"With 'num_experts' instead of 'num_local_experts', .* instead of 6: correct `ttpu_config`",
    ),
    "old rope JSON is read otherwise": (
        "llama",
        ROPE_OF_NEW_JSON_ALONE,
        "raw_json",
        r"With .*rope_theta and no rope_scaling, .*rope.type is 'none' instead of 'default': correct `ttpu_rope`",
    ),
    "every key counts as read": (
        "llama",
        EVERY_KEY_READ,
        "unknown_key_is_reported",
        "let hooks ask a config for the keys",
    ),
    "a key is not read": ("mistral", LLAMA, "config_keys_are_read", "nobody reads 'sliding_window' in the config"),
    "a framework is imported": (
        "llama",
        "import transformers",
        "imports_no_framework",
        "describing a 'llama' config imports transformers",
    ),
    "another process describes another model": (
        "llama",
        ANOTHER_EACH_TIME,
        "description_is_deterministic",
        "another process describes the same config by other values",
    ),
    "a value can change": ("llama", LIST_IN_MIXER, "spec_is_frozen", "eps is a UnfrozenFloat, which can change"),
    "what a value keeps can change": ("llama", CACHED_DICT, "spec_is_frozen", "norm.names is a dict, which can change"),
    "a declared tensor is not ignored": (
        "llama",
        LLAMA,
        "unwritten_tensors_are_ignored",
        r"declared as never_written is refused .*'mtp.fc.weight'",
        {"never_written": ["mtp.fc.weight"]},
    ),
    "more is ignored than is declared": (
        "llama",
        IGNORED.format(pattern=r"model\.layers\..*"),
        "unwritten_tensors_are_ignored",
        "is accepted in silence: narrow the patterns",
    ),
    "what is ignored was never seen": (
        "llama",
        IGNORED.format(pattern=r"mtp\..*"),
        "unwritten_tensors_are_ignored",
        "which matches no tensor of this model and none that is declared",
    ),
    "a norm casts after its weight": (
        "gemma2",
        changed(GEMMA2, ", scale_in_fp32=True", ""),
        "bfloat16_casts",
        r"differ .* with NormSpec\(scale_in_fp32=True\) they agree: correct `ttpu_norm`",
    ),
    "a norm adds its offset in another dtype": (
        "nemotron",
        changed(Path(nemotron.__file__).read_text(), ", offset_in_fp32=False", ""),
        "bfloat16_casts",
        r"differ .* with NormSpec\(offset_in_fp32=False\) they agree: correct `ttpu_norm`",
    ),
    "norms of queries and keys cast after their weights": (
        "qwen3",
        HEAD_NORMS,
        "bfloat16_keys",
        r"of the keys' numbers differ .* with NormSpec\(scale_in_fp32=False\) as k_norm.* correct `ttpu_attention`",
    ),
    "a rope that is said to be in float32": (
        "llama",
        FLOAT32_ROPE,
        "bfloat16_keys",
        r"transformers rounds cos.* RopeSpec\(fp32=False\) says so: correct `ttpu_rope`",
    ),
    "an old name of a key is not read": (
        "gpt_oss",
        changed(Path(gpt_oss.__file__).read_text(), '.with_renamed({"num_experts": "num_local_experts"})', ""),
        "raw_json",
        "With 'num_experts' instead of 'num_local_experts'.* the plugin refuses .*: correct `ttpu_config`",
    ),
    "an embedding is scaled in another dtype": (
        "gemma2",
        changed(GEMMA2, "scale=plain.hidden_size**0.5", "scale=8.1"),
        "bfloat16_casts",
        "of the embedding's numbers differ .* correct `ttpu_embedding`",
    ),
    "a rule list can change": (
        "llama",
        LIST_IN_MAPPING,
        "spec_is_frozen",
        "mapping.rules is a list, which can change",
    ),
    "a config is changed": (
        "llama",
        CHANGED_CONFIG,
        "spec_is_frozen",
        "describing a config changes its 'rms_norm_eps'",
    ),
    "a window that the test never passes": (
        "mistral",
        changed(MISTRAL, 'config.positive_int("sliding_window", default=None)', "4096"),
        "windows_are_passed",
        "layer 0 sees 4096 tokens and the test sequence has 40",
    ),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_broken_contract_is_caught_by_its_check(tmp_path: Path, breach: str) -> None:
    model_type, source, check, message, *section = BREACHES[breach]
    reasons = failures(tmp_path, model_type, source, check, **(section[0] if section else {}))
    assert re.search(message, reasons[check])


def test_a_published_file_that_is_read_otherwise_is_caught(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 200, "max_position_embeddings": 128}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **sizes}))
    published = {"one": {"config": str(file)}}
    reasons = failures(tmp_path, "llama", OTHER_DEFAULT, "published_json", published=published)
    expected = "With the file config.json, layers[0].norm.eps is 1e-05 instead of 1e-06: correct `ttpu_config`."
    assert expected in reasons["published_json"]


def test_what_is_declared_to_be_read_otherwise_is_no_failure_unless_it_is_read_alike(tmp_path: Path) -> None:
    declared = {"reads_otherwise": {"rms_norm_eps": "because"}}
    assert not failures(tmp_path, "llama", OTHER_DEFAULT, "raw_json", **declared)
    declared = {"reads_otherwise": {"rms_norm_eps": "because", "hidden_act": "because"}}
    reasons = failures(tmp_path, "llama", OTHER_DEFAULT, "raw_json", **declared)
    assert "declares under reads_otherwise that a config without hidden_act" in reasons["raw_json"]


def test_a_difference_is_looked_for_everywhere_where_the_reference_hides_its_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttpu_conformance.diagnosis._reference_streams", lambda case: None)
    source = changed(GEMMA2, "scale=plain.hidden_size**0.5", "scale=None")
    reason = failures(tmp_path, "gemma2", source, "float32_logits")["float32_logits"]
    assert "cannot be seen, since transformers does not show this model's residual stream" in reason
    assert "with EmbeddingSpec(scale=8) in `ttpu_embedding` the logits agree: correct `ttpu_embedding`" in reason


GEMMA3N_INTERLEAVED = """
from ttpu_gemma import gemma3n
from ttpu_gemma.gemma3n import *

@hookimpl
def ttpu_attention(config, layer):
    attention = gemma3n.ttpu_attention(config, layer)
    return replace(attention, rope=replace(attention.rope, layout="interleaved"))
"""
SMALL_GEMMA3N = {
    "head_dim": 8,
    "intermediate_size": [112, 112],
    "layer_types": ["full_attention", "full_attention"],
    "activation_sparsity_pattern": [0.0, 0.0],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 200,
    "laurel_rank": 8,
}


def test_a_difference_among_several_residual_streams_is_found(tmp_path: Path) -> None:
    (case,) = cases(tmp_path, "gemma3n_text", GEMMA3N_INTERLEAVED, "wrong", base=SMALL_GEMMA3N)
    place = first_difference(case, case.architecture)
    assert place is not None and "layer 0, from token 1 on" in place.sentence
    assert "ttpu_rope" in place.hooks
