"""Rotary embeddings turn by the angles that transformers computes, whichever of its two JSON forms a config has, and a
config that leaves an angle undefined is refused."""

from typing import Any

import numpy as np
import pytest

from ttpu_core import ModelConfig
from ttpu_core.config.key_audit import refuse_ignored
from ttpu_core.errors import ConfigError, PluginError, UnsupportedError
from ttpu_core.spec.rope import NO_ROPE, ROPE_TYPES, RopeSpec, dynamic_base, inverse_frequencies, rope_from_config

HEAD_DIM, MAX_POSITIONS = 64, 4096
FACTORS = {
    "short_factor": [1.0 + 0.05 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [1.5 + 0.25 * i for i in range(HEAD_DIM // 2)],
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}

# What `rope_parameters` holds beside rope_type and rope_theta. Top-level keys start with "^".
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {},
    "default, half of the head": {"partial_rotary_factor": 0.5},
    "linear": {"factor": 4.0},
    "linear, a quarter of the head": {"factor": 4.0, "partial_rotary_factor": 0.25},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn from the longest position": {"factor": 4.0},
    "yarn, gpt_oss": {
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn, deepseek": {
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 16,
        "original_max_position_embeddings": 1024,
    },
    "yarn with an attention factor": {
        "factor": 4.0,
        "attention_factor": 0.9,
        "original_max_position_embeddings": 1024,
    },
    "longrope": {**FACTORS, "original_max_position_embeddings": 1024},
    "longrope with a factor": {**FACTORS, "factor": 2.0, "original_max_position_embeddings": 1024},
    "longrope, phi3": {**FACTORS, "^original_max_position_embeddings": 1024},
    "longrope with an attention factor": {
        **FACTORS,
        "attention_factor": 1.2,
        "original_max_position_embeddings": 1024,
    },
    "llama3": LLAMA3,
    "llama3 with other bounds": LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 16.0},
    "llama3 with equal bounds": LLAMA3 | {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
    "proportional": {"partial_rotary_factor": 0.25},
    "proportional with a factor": {"partial_rotary_factor": 0.5, "factor": 8.0},
}


def rope_type(name: str) -> str:
    return name.split(",")[0].split(" ")[0]


def new_style(name: str, **changes: Any) -> dict[str, Any]:
    """A config as transformers 5 writes it: everything about rope under `rope_parameters`."""
    inner = {"rope_type": rope_type(name), "rope_theta": 5e5, **PARAMETERS[name], **changes}
    top = {key.removeprefix("^"): inner.pop(key) for key in list(inner) if key.startswith("^")}
    return {"max_position_embeddings": MAX_POSITIONS, "head_dim": HEAD_DIM, "rope_parameters": inner, **top}


def old_style(name: str) -> dict[str, Any]:
    """The same config as the Hub has it: bases and shares outside, the rest under `rope_scaling` with `type`."""
    config = new_style(name)
    inner = config.pop("rope_parameters")
    inner["type"] = inner.pop("rope_type")
    outside = {key: inner.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in inner}
    scaling = {} if inner["type"] == "default" else {"rope_scaling": inner}
    return {**config, **outside, **scaling}


def rope_of(config: dict[str, Any], **options: Any) -> RopeSpec:
    options = {"partial": True, **options}
    return rope_from_config(ModelConfig.from_dict({"model_type": "llama", **config}), head_dim=HEAD_DIM, **options)


def refusal(config: dict[str, Any], **options: Any) -> str:
    """The message of the ConfigError that reading the config raises: one sentence."""
    with pytest.raises(ConfigError) as caught:
        rope_of(config, **options)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message and ": " in message
    return message


# -- against transformers --------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("style", [new_style, old_style])
@pytest.mark.parametrize("length", [None, 1000, 6000])
@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_equal_transformers(name: str, length: int | None, style: Any) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

    config = style(name)
    functions = ROPE_INIT_FUNCTIONS | {"default": PhiRotaryEmbedding.compute_default_rope_parameters}
    expected, factor = functions[rope_type(name)](LlamaConfig(**config), device="cpu", seq_len=length)
    found, found_factor = inverse_frequencies(rope_of(config), length)
    assert found.dtype == np.float32 and found.shape == expected.shape
    # torch's and numpy's powers differ by a float32 ulp (1.2e-7), which llama3's differences magnify a few times.
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=0)
    assert found_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.torch
def test_every_rope_type_of_transformers_is_known() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert set(ROPE_TYPES) == {"default", *ROPE_INIT_FUNCTIONS}
    assert {rope_type(name) for name in PARAMETERS} == set(ROPE_TYPES)


@pytest.mark.torch
def test_a_config_with_both_forms_is_read_as_transformers_reads_it() -> None:
    from transformers import LlamaConfig

    both = new_style("linear") | {"rope_scaling": {"type": "linear", "factor": 16.0}, "rope_theta": 1e4}
    theirs: Any = LlamaConfig(**both).rope_parameters
    ours = rope_of(both)
    assert (ours.factor, ours.theta) == (theirs["factor"], theirs["rope_theta"])


# -- the two forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
def test_both_forms_give_the_same_spec(name: str) -> None:
    assert rope_of(old_style(name)) == rope_of(new_style(name))


def test_without_rope_parameters_a_family_gives_the_base() -> None:
    assert rope_of({"max_position_embeddings": 128}).theta == 10_000.0
    assert rope_of({"max_position_embeddings": 128}, theta=1e6).theta == 1e6
    assert rope_of({"rope_theta": 7.0, "rope_scaling": None}, theta=1e6).theta == 7.0
    assert rope_of({}).rotary_dim == HEAD_DIM and rope_of({}).type == "default"


def test_overrides_set_what_a_family_knows() -> None:
    rope = rope_of(new_style("linear"), layout="interleaved", sign=-1.0, fp32=True)
    assert (rope.layout, rope.sign, rope.fp32, rope.factor) == ("interleaved", -1.0, True, 4.0)


def test_an_override_that_is_no_field_is_refused_with_the_fields() -> None:
    with pytest.raises(PluginError) as caught:
        rope_of(new_style("default"), partial_rotary_factor=0.5)
    message = str(caught.value)
    assert message.startswith("rope_from_config was asked to set 'partial_rotary_factor', but the fields of RopeSpec")
    assert "rotary_dim, layout" in message
    assert message.endswith("partial=True for a model that turns a part of each head.")


def test_parameters_may_be_nested_by_layer_type() -> None:
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "no_attention": None,
    }
    config = {"max_position_embeddings": 128, "rope_parameters": nested}
    sliding, full = (rope_of(config, layer_type=f"{kind}_attention") for kind in ("sliding", "full"))
    assert (sliding.type, sliding.theta, sliding.factor) == ("default", 1e4, None)
    assert (full.type, full.theta, full.factor) == ("linear", 1e6, 8.0)
    assert rope_of(config, layer_type="no_attention") == NO_ROPE
    flat = new_style("linear")
    assert rope_of(flat, layer_type="full_attention") == rope_of(flat)  # flat parameters are every layer's


@pytest.mark.parametrize("layer_type", ["chunked_attention", None])
def test_a_layer_type_without_an_entry_is_refused(layer_type: str | None) -> None:
    nested = {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "default"}}
    message = refusal({"rope_parameters": nested}, layer_type=layer_type)
    assert "sliding_attention, full_attention" in message and repr(layer_type) in message


# -- what is refused -------------------------------------------------------------------------------------------------


def test_an_unknown_rope_type_is_refused_with_the_known_ones() -> None:
    message = refusal({"rope_scaling": {"type": "spiral", "factor": 2.0}})
    assert "'spiral'" in message and ", ".join(ROPE_TYPES) in message


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("yarn from the longest position", "factor"),
        ("llama3", "factor"),
        ("llama3", "low_freq_factor"),
        ("llama3", "high_freq_factor"),
        ("longrope", "short_factor"),
        ("longrope", "long_factor"),
    ],
)
def test_a_parameter_that_its_type_needs_is_asked_for_by_name(name: str, key: str) -> None:
    config = new_style(name)
    del config["rope_parameters"][key]
    assert repr(f"rope_parameters.{key}") in refusal(config)


def test_yarn_without_a_factor_extends_from_the_original_length() -> None:
    config = new_style("yarn")
    del config["rope_parameters"]["factor"]
    assert rope_of(config).factor == MAX_POSITIONS / 1024


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("linear", {"factor": "4"}, "factor"),
        ("linear", {"factor": 0.0}, "'factor' to 0, but a number above 0"),
        ("dynamic", {"factor": -2}, "'factor' to -2, but a number above 0"),
        ("default", {"rope_theta": 0}, "'rope_theta' to 0, but a number above 0"),
        ("yarn", {"attention_factor": -1.0}, "'attention_factor' to -1, but a number above 0"),
        ("llama3", {"low_freq_factor": 0.0}, "'low_freq_factor' to 0"),
        ("longrope", {"long_factor": [1.0] * 31}, "31 values as the rope parameter 'long_factor'"),
        ("longrope", {"short_factor": [1.0] * 31 + [0]}, "positive numbers"),
        ("longrope", {"short_factor": [1.0] * 31 + [True]}, "positive numbers"),
        ("longrope", {"short_factor": [1.0] * 31 + ["1"]}, "positive numbers"),
        ("longrope", {"short_factor": [1.0] * 31 + [float("inf")]}, "positive numbers"),
        ("default", {"partial_rotary_factor": 0.4}, "rotates 25 of 64 features"),
        ("default", {"partial_rotary_factor": 0.01}, "rotates 0 of 64 features"),
        ("default", {"partial_rotary_factor": 0.0}, "'partial_rotary_factor' to 0, but it must be above 0"),
        ("default", {"partial_rotary_factor": 1.5}, "'partial_rotary_factor' to 1.5, but it must be above 0"),
        ("dynamic", {"partial_rotary_factor": 2 / 64}, "rotates 2 features per head by dynamic rope"),
        ("yarn", {"rope_theta": 1.0}, "'rope_theta' to 1"),
        ("yarn", {"rope_theta": 0.5}, "'rope_theta' to 0.5, but yarn divides by its logarithm"),
        ("yarn", {"beta_fast": -32}, "'beta_fast' to -32, but a number above 0"),
        ("yarn", {"beta_fast": 0}, "'beta_fast' to 0, but a number above 0"),
        ("yarn", {"beta_slow": -1.0}, "'beta_slow' to -1, but a number above 0"),
        ("yarn", {"beta_slow": 0.0}, "'beta_slow' to 0, but a number above 0"),
        ("yarn", {"beta_fast": 1, "beta_slow": 32}, "'beta_slow' to 32 and 'beta_fast' to 1, but the first must not"),
        ("yarn", {"mscale": -1.0, "mscale_all_dim": 1.0}, "'mscale' to -1, but 0 or more"),
        ("yarn", {"mscale": 1.0, "mscale_all_dim": -1.0}, "'mscale_all_dim' to -1, but 0 or more"),
        ("llama3", {"low_freq_factor": -1}, "'low_freq_factor' to -1, but a number above 0"),
        ("llama3", {"high_freq_factor": 0}, "'high_freq_factor' to 0, but a number above 0"),
        ("llama3", {"high_freq_factor": 0.5}, "'low_freq_factor' to 1 and 'high_freq_factor' to 0.5"),
        ("linear", {"factor": 1e-50}, "'factor' to 1e-50, but a number above 0 that float32 can hold"),
        ("default", {"rope_theta": 1e300}, "'rope_theta' to 1e+300, but a number above 0 that float32 can hold"),
        ("llama3", {"original_max_position_embeddings": 0}, "original_max_position_embeddings' to the number 0"),
        ("yarn", {"original_max_position_embeddings": -1}, "original_max_position_embeddings' to the number -1"),
        ("longrope", {"original_max_position_embeddings": 0}, "original_max_position_embeddings' to the number 0"),
        ("longrope, phi3", {"^original_max_position_embeddings": 0}, "original_max_position_embeddings' to the number"),
        ("proportional", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("proportional", {"partial_rotary_factor": -0.5}, "partial_rotary_factor"),
    ],
)
def test_a_value_without_angles_is_refused(name: str, changes: dict[str, Any], words: str) -> None:
    assert words in refusal(new_style(name, **changes))


def test_a_share_of_the_head_is_read_only_where_the_model_rotates_one() -> None:
    """Most classes of transformers rotate whole heads, whatever a file says; `refuse_ignored` then speaks."""
    config = ModelConfig.from_dict({"model_type": "llama", **new_style("default", partial_rotary_factor=0.5)})
    assert rope_from_config(config, head_dim=HEAD_DIM).rotary_dim == HEAD_DIM
    with pytest.raises(UnsupportedError, match=r"'rope_parameters\.partial_rotary_factor' to 0\.5"):
        refuse_ignored(config)


def test_the_older_base_of_some_layers_has_a_key_of_its_own() -> None:
    config = ModelConfig.from_dict({"model_type": "x", "rope_theta": 5e5, "local": 2e4, "rope_parameters": {"a": {}}})
    assert rope_from_config(config, head_dim=8, layer_type="a", theta_key="local").theta == 2e4


def test_longrope_over_a_context_of_one_token_is_refused() -> None:
    config = new_style("longrope", original_max_position_embeddings=1, attention_factor=None)
    assert "divides by its logarithm" in refusal(config)


def test_a_layer_without_rope_has_no_frequencies() -> None:
    with pytest.raises(ConfigError, match="'none' has no frequencies"):
        inverse_frequencies(NO_ROPE)


# -- what follows from the formulas ----------------------------------------------------------------------------------


def test_frequencies_fall_from_one_to_the_inverse_of_the_base() -> None:
    frequencies, factor = inverse_frequencies(rope_of({"rope_theta": 100.0}))
    assert frequencies[0] == 1.0 and factor == 1.0
    np.testing.assert_allclose(frequencies[1:] / frequencies[:-1], 100.0 ** (-2 / HEAD_DIM), rtol=1e-6)


def test_dynamic_scaling_begins_beyond_the_trained_length() -> None:
    rope = rope_of(new_style("dynamic"))
    plain, _ = inverse_frequencies(rope_of(new_style("default")))
    for length in (None, 1, MAX_POSITIONS):
        np.testing.assert_array_equal(inverse_frequencies(rope, length)[0], plain)
    beyond, _ = inverse_frequencies(rope, 2 * MAX_POSITIONS)
    assert beyond[0] == 1.0 and (beyond[1:] < plain[1:]).all()
    assert dynamic_base(rope, MAX_POSITIONS) == rope.theta


def test_longrope_takes_the_long_factors_beyond_the_original_length() -> None:
    rope = rope_of(new_style("longrope"))
    short, long = inverse_frequencies(rope, 1024)[0], inverse_frequencies(rope, 1025)[0]
    np.testing.assert_allclose(short / long, np.divide(FACTORS["long_factor"], FACTORS["short_factor"]), rtol=1e-6)


def test_only_dynamic_and_longrope_depend_on_the_length() -> None:
    dependent = {name for name in PARAMETERS if rope_of(new_style(name)).depends_on_length}
    assert {rope_type(name) for name in dependent} == {"dynamic", "longrope"}
    for name in set(PARAMETERS) - dependent:
        rope = rope_of(new_style(name))
        np.testing.assert_array_equal(inverse_frequencies(rope)[0], inverse_frequencies(rope, 10**6)[0])


def test_proportional_rope_spans_the_head_and_leaves_the_later_pairs_unturned() -> None:
    rope = rope_of(new_style("proportional"))
    frequencies, _ = inverse_frequencies(rope)
    assert rope.rotary_dim == HEAD_DIM and frequencies.shape == (HEAD_DIM // 2,)
    assert (frequencies[:8] > 0).all() and (frequencies[8:] == 0).all()
