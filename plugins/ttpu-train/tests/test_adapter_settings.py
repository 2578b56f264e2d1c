"""Adapters are asked for by the names of peft's `LoraConfig`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_train.adapters import AdapterSettings, adapter_settings
from ttpu_train.arguments import TrainingArguments


def test_a_mapping_and_a_saved_config_give_settings(tmp_path: Path) -> None:
    given = {"r": 4, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"], "use_rslora": True}
    wanted = AdapterSettings(("q_proj", "v_proj"), r=4, lora_alpha=16, use_rslora=True)
    assert adapter_settings(given) == wanted and wanted.scaling == 8
    saved = {**given, "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "rank_pattern": {}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    found = TrainingArguments(adapter_name_or_path=tmp_path).step_settings(1).adapters
    assert found == AdapterSettings(("q_proj", "v_proj"), r=4, lora_alpha=16, use_rslora=True, start=str(tmp_path))
    assert TrainingArguments().step_settings(1).adapters is None
    assert adapter_settings({**given, "layers_to_transform": []}) == wanted  # all layers, as in peft


def test_an_adapter_to_begin_with_keeps_its_settings(tmp_path: Path) -> None:
    """Its file's were replaced, those that peft_config left out too, which changed what it computed."""
    held = {"r": 4, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"], "use_rslora": True, "lora_dropout": 0.1}
    (tmp_path / "adapter_config.json").write_text(json.dumps(held))
    own = AdapterSettings(
        ("q_proj", "v_proj"), r=4, lora_alpha=16, use_rslora=True, lora_dropout=0.1, start=str(tmp_path)
    )
    assert adapter_settings({}, tmp_path) == own
    assert adapter_settings({"r": 4, "use_rslora": True}, tmp_path) == own
    assert adapter_settings({"lora_dropout": 0.0}, tmp_path) == replace(own, lora_dropout=0.0)
    for start in ("eva", "orthogonal"):  # peft draws these, beside weights that it leaves alone
        (tmp_path / "adapter_config.json").write_text(json.dumps({**held, "init_lora_weights": start}))
        assert adapter_settings(None, tmp_path) == own
    for name, value in {"r": 8, "lora_alpha": 8, "use_rslora": False, "use_dora": True}.items():
        said = f"peft_config has {name}={value}, but the adapter '.*' of adapter_name_or_path was trained with {name}="
        with pytest.raises(RequestError, match=said):
            adapter_settings({name: value}, tmp_path)


def test_a_saved_config_beyond_what_is_trained_is_refused_beside_peft_config_too(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    for held, words in (
        ({"rank_pattern": {"q_proj": 2}}, "adapter_config.json of '.*' sets rank_pattern, but adapters"),
        ({"peft_type": "IA3"}, "adapter_config.json of '.*' has peft_type 'IA3'"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights='pissa', which changed the base model's weights"),
    ):
        file.write_text(json.dumps({"r": 8, "target_modules": ["q_proj"], **held}))
        with pytest.raises(UnsupportedError, match=words):
            adapter_settings({"r": 8, "init_lora_weights": True}, tmp_path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "names no target_modules"),
        ({"rank": 4, "target_modules": "all-linear"}, "was given rank, but it takes"),
        ({"r": 0}, "r=0, but it is a whole number from 1"),
        ({"lora_alpha": "8"}, "lora_alpha='8', but it is a number above 0"),
        ({"lora_dropout": 1.0}, "lora_dropout=1.0, but it is a number from 0 to below 1"),
        ({"bias": "some"}, "one of none, all, lora_only"),
        ({"init_lora_weights": "pissa"}, "'pissa' was given, but adapters begin with"),
        ({"use_dora": True, "lora_dropout": 0.1}, "lora_dropout=0.1 was given with use_dora"),
        ({"alpha_pattern": {"q_proj": 1}}, "sets alpha_pattern"),
        ({"target_modules": 5}, "target_modules=5, but it is a list of names"),
        ({"modules_to_save": [5]}, r"modules_to_save=\(5,\), but it is a list of names"),
        ({"modules_to_save": [""]}, r"modules_to_save=\('',\), but it is a list of names"),
        ({"target_modules": "(["}, r"target_modules='\(\[', but that is no regular expression \(unterminated"),
        ({"exclude_modules": "*.q"}, r"exclude_modules='\*.q', but that is no regular expression"),
        ({"use_dora": "no"}, "use_dora='no', but it is true or false"),
        ({"layers_to_transform": "all"}, "but it is a list of numbers from 0"),
        (7, "is a int, but a mapping or peft's LoraConfig"),
    ],
)
def test_what_is_not_trained_is_refused(given: Any, words: str) -> None:
    whole = {"target_modules": "all-linear", **given} if isinstance(given, dict) and given else given
    with pytest.raises((RequestError, UnsupportedError), match=words):
        adapter_settings(whole)


def test_adapters_leave_weights_alone(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="trainable was given with adapters"):
        TrainingArguments(peft_config={"target_modules": "all-linear"}, trainable=["*"])
    with pytest.raises(RequestError, match=r"adapter_config.json there cannot be read"):
        TrainingArguments(adapter_name_or_path=tmp_path)
