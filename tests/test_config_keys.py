"""A key of config.json is read, harmless, reported, or refused: never ignored in silence."""

from typing import Any

import pytest

from ttpu_core import ModelConfig, default_registry
from ttpu_core.config.key_audit import keys_ignored, refuse_ignored
from ttpu_core.errors import UnsupportedError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 24,
}  # fmt: skip


def read(**keys: Any) -> ModelConfig:
    config = ModelConfig.from_dict(LLAMA | keys)
    default_registry().architecture(config, [])
    return config


def test_a_key_that_nobody_knows_is_reported() -> None:
    assert refuse_ignored(read(novel_trick=3)) == (
        "nothing reads 'novel_trick' in config.json, so it has no effect",
    )


def test_a_dot_in_the_name_of_a_key_is_a_part_of_the_name() -> None:
    """It used to be taken for a section, in which reading the value failed."""
    config = read(**{"train.run": 1, "notes": {"by.hand": [1]}})
    assert config.section("notes") is not None
    assert config.paths_unread()[-2:] == (("notes", "by.hand"), ("train.run",))
    assert [sentence.split()[2] for sentence in refuse_ignored(config)] == ["'notes.by.hand'", "'train.run'"]
    config.does_not_matter("train.run", because="it is a note")
    assert keys_ignored(config) == ("notes.by.hand",)
    assert config.keys_without_effect == {"train.run": "it is a note"}


def test_a_key_of_training_or_of_the_tokenizer_is_not_worth_a_word() -> None:
    assert keys_ignored(read(attention_dropout=0.1, bos_token_id=1, architectures=["LlamaForCausalLM"])) == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [("attn_logit_softcapping", 50.0), ("num_experts", 8), ("logits_scaling", 8), ("use_qk_norm", True)],
)
def test_a_key_that_changes_what_the_model_computes_is_refused_if_the_plugin_does_not_read_it(
    key: str, value: Any
) -> None:
    with pytest.raises(UnsupportedError, match=f"sets '{key}' to {value}, which changes what the model computes"):
        refuse_ignored(read(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"), [("attn_logit_softcapping", None), ("num_experts", 0), ("logits_scaling", 1), ("alibi", False)]
)
def test_its_neutral_value_is_only_reported(key: str, value: Any) -> None:
    assert len(refuse_ignored(read(**{key: value}))) == (value is not None)


def test_quantized_weights_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no installed plugin reads quantized weights"):
        refuse_ignored(read(quantization_config={"quant_method": "gptq"}))


def test_a_key_that_cannot_matter_is_said_so_with_the_reason() -> None:
    config = ModelConfig.from_dict(LLAMA | {"derived": 3, "old": {"inside": 1}, "part": {"a": 1, "b": 2}, "both": 4})
    said = config.does_not_matter(("derived", "old", "absent"), because="it follows from others")
    assert said is config
    part = config.section("part")
    assert part is not None
    part.does_not_matter("a", because="no layer has it")
    config.with_defaults({"x": 1}).does_not_matter("both", because="usually").positive_int("both")
    assert set(keys_ignored(config)) == {"part.b", *LLAMA}
    assert config.keys_without_effect == {
        "derived": "it follows from others", "old": "it follows from others", "part.a": "no layer has it",
    }  # fmt: skip


def test_keys_of_a_section_may_be_said_not_to_matter_by_dotted_names() -> None:
    config = ModelConfig.from_dict({"part": {"a": 1, "b": 2}})
    config.does_not_matter("part.a", because="no layer has it").section("part")
    assert keys_ignored(config) == ("part.b",)
    assert config.keys_without_effect == {"part.a": "no layer has it"}


def test_a_key_cannot_be_said_not_to_matter_without_a_reason() -> None:
    with pytest.raises(ValueError, match="without a reason"):
        ModelConfig.from_dict(LLAMA).does_not_matter("derived", because=" ")
