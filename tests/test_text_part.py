"""The text model as a part of a multimodal one."""

import pytest

from ttpu_core import ModelConfig
from ttpu_core.config.text_part import text_config
from ttpu_core.errors import ConfigError
from ttpu_core.mapping import FlaxMapping, Tensor
from ttpu_core.mapping.text_part import OTHER_PARTS, text_mapping

KERNEL = "layers.0.self_attn.q_proj.weight"


def parent(**keys: object) -> ModelConfig:
    return ModelConfig.from_dict({"model_type": "whole", **keys})


def test_a_config_without_a_text_part_is_the_text_model_s_own() -> None:
    config = parent(tie_word_embeddings=True, hidden_size=8)
    assert text_config(config, ("part",), tied=False) is config


@pytest.mark.parametrize(
    ("whole", "part", "otherwise", "tied"),
    [
        (True, False, None, True),
        (False, True, True, False),
        (None, True, False, False),  # the parent's class decides
        (None, True, None, True),  # the text model decides
        (None, None, None, None),
    ],
)
def test_the_parent_decides_whether_the_head_is_tied(
    whole: bool | None, part: bool | None, otherwise: bool | None, tied: bool | None
) -> None:
    config = parent(tie_word_embeddings=whole, text_config={"model_type": "part", "tie_word_embeddings": part})
    assert text_config(config, ("part",), tied=otherwise).get("tie_word_embeddings") == tied
    assert config.keys_unread() == ("model_type",)  # the parent's own, which nobody asked for here


def test_the_parent_s_special_tokens_hold_and_the_text_model_s_where_it_has_none() -> None:
    text = text_config(parent(eos_token_id=[1, 106], text_config={"eos_token_id": 1, "bos_token_id": 2}), ("part",))
    assert (text.get("eos_token_id"), text.get("bos_token_id")) == ((1, 106), 2)


def test_a_text_part_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="'text_config' to the string \"llama\", but an object is needed"):
        text_config(parent(text_config="llama"), ("part",))


def test_a_text_part_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="a text part of type 'other', but the known types are part, third"):
        text_config(parent(text_config={"model_type": "other"}), ("part", "third"))


@pytest.mark.parametrize("base", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("found", ["model.", "model.language_model.", "language_model.model.", ""])
@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
def test_tensors_are_found_below_any_prefix(base: str, found: str, head: str) -> None:
    own_head = "language_model.lm_head" if base == "language_model.model." else "lm_head"
    rules = (("kernel", Tensor(base + KERNEL, (2, 2))), ("head", Tensor(f"{own_head}.weight", (4, 2))))
    mapping = text_mapping(FlaxMapping(rules), base, own_head)
    towers = {f"{tower}.0.weight": (3,) for tower in ("model.visual", "vision_tower", "model.embed_audio")}
    names = mapping.resolve({found + KERNEL: (2, 2), head: (4, 2)} | towers)
    assert names == {base + KERNEL: found + KERNEL, f"{own_head}.weight": head}
    assert mapping.ignored == (OTHER_PARTS,)
