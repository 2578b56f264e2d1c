"""The tiny reference models: random in every tensor, equal in every process, and made only of keys that exist."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from broken import declaration

from ttpu_conformance.errors import DeclarationError

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def config(model_type: str, variant: str = "base", **section: Any) -> Any:
    from ttpu_conformance.tiny import tiny_config

    declared = declaration(model_type, **section)
    return tiny_config(declared, declared.variant(variant))


def test_sizes_are_tiny_and_optional_features_stay_off() -> None:
    llama = config("llama")
    assert (llama.hidden_size, llama.num_key_value_heads, llama.eos_token_id) == (64, 2, None)
    assert llama.head_dim == 16  # follows from the others, as the class's None asks for
    assert config("mistral").sliding_window == 13
    assert config("mixtral").sliding_window is None


def test_a_class_with_names_of_its_own_gets_the_sizes() -> None:
    gpt2 = config("gpt2")
    assert (gpt2.n_embd, gpt2.n_layer, gpt2.n_head, gpt2.n_positions) == (64, 2, 4, 128)


def test_a_variant_comes_over_the_base_and_null_takes_a_key_away() -> None:
    section: dict[str, Any] = {
        "base": {"head_dim": 32},
        "variants": {"whole": {"null": ["sliding_window"], "head_dim": 8}},
    }
    assert (config("mistral", **section).head_dim, config("mistral", **section).sliding_window) == (32, 13)
    whole = config("mistral", "whole", **section)
    assert (whole.head_dim, whole.sliding_window) == (8, None)


def test_a_parents_text_part_gets_the_sizes() -> None:
    assert config("gemma3").text_config.hidden_size == 64


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"base": {"slidng_window": 4}}, "sets 'slidng_window', but MistralConfig has no such key"),
        ({"base": {"hidden_size": "big"}}, "gives values that MistralConfig refuses"),
        ({"transformers": "NoSuchModel"}, None),
    ],
)
def test_keys_that_do_not_exist_are_refused(section: dict[str, Any], message: str | None) -> None:
    from ttpu_conformance.tiny import reference_class

    if message is None:
        with pytest.raises(DeclarationError, match="names the class 'NoSuchModel' for 'mistral'"):
            reference_class(declaration("mistral", **section))
    else:
        with pytest.raises(DeclarationError, match=message):
            config("mistral", **section)


def test_a_type_that_transformers_does_not_have_needs_a_class() -> None:
    from ttpu_conformance.tiny import reference_class

    with pytest.raises(DeclarationError, match="no causal language model of type 'olive'"):
        reference_class(declaration("olive"))


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_the_config_is_what_transformers_saves_with_the_model(model_type: str) -> None:
    from ttpu_conformance.case import Reference

    declared = declaration(model_type)
    reference = Reference(declared, declared.variant("base"))
    assert reference.config == json.loads((reference.path / "config.json").read_text())


def test_every_tensor_is_random_and_logits_are_of_order_one() -> None:
    from ttpu_conformance.case import Reference

    declared = declaration("gemma2")
    reference, again = (Reference(declared, declared.variant("base")) for _ in range(2))
    for name, tensor in reference.model.state_dict().items():
        assert tensor.std() > 0.01, name
        assert bool((tensor == again.model.state_dict()[name]).all()), name
    assert 0.1 < np.abs(reference.logits).max() < 100


def slopes(**section: Any) -> Any:
    """The buffers and weights of a tiny MiniMax whose second layer has lightning attention."""
    from ttpu_conformance.tiny import random_model

    declared = declaration("minimax", base={"num_hidden_layers": 2}, **section)
    return dict(random_model(declared, declared.variant("base")).state_dict())


def test_a_buffer_that_follows_from_the_config_keeps_its_values_where_it_is_declared() -> None:
    name = "model.layers.1.self_attn.slope_rate"
    kept = slopes(derived_buffers=[r".*\.slope_rate"])[name].flatten().numpy()
    factor = 1 - 1 / (1 + 1e-5) + 1e-5  # of the last of two layers
    np.testing.assert_allclose(kept, factor * 2.0 ** (-2.0 * np.arange(1, 5)), rtol=1e-6)
    assert not np.allclose(slopes()[name].flatten().numpy(), kept)


def test_derived_buffers_must_exist_and_hold_more_than_one_number() -> None:
    with pytest.raises(DeclarationError, match=r"'mask' .* saves no such buffer \(it saves model\.layers\.1"):
        slopes(derived_buffers=["mask"])
    from ttpu_conformance.tiny import random_model

    sparse = {"first_k_dense_replace": 0}
    declared = declaration("deepseek_v3", base=sparse, derived_buffers=[r".*\.e_score_correction_bias"])
    with pytest.raises(DeclarationError, match="holds the number 0 alone"):
        random_model(declared, declared.variant("base"))
