"""What a config.json promises its readers: typed values, hashable content, and a record of what was read."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ttpu_core.config import ModelConfig
from ttpu_core.errors import ConfigError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": [1, 2],
    "head_dim": None,
    "rope_parameters": {"rope_type": "llama3", "factor": 8.0},
}


def llama(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(LLAMA | changes)


def refusal(read: Any) -> str:
    """The message of the ConfigError that `read` raises: one sentence that ends in a full stop."""
    with pytest.raises(ConfigError) as caught:
        read()
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message and ": " in message
    return message


def test_typed_readers_return_plain_python_values() -> None:
    config = llama()
    assert config.model_type == "llama"
    assert config.positive_int("hidden_size") == 64
    assert config.number("rope_theta") == 10000.0 and type(config.number("rope_theta")) is float
    assert config.flag("tie_word_embeddings") is False
    assert config.text("hidden_act") == "silu"
    assert config.int_list("eos_token_id") == config.items("eos_token_id") == (1, 2)
    assert config.require("hidden_size", int) == 64
    assert config.require("rope_theta", float) == 10000.0
    assert config.require("eos_token_id", tuple) == (1, 2)
    rope = config.section("rope_parameters")
    assert rope is not None and rope.number("factor") == 8.0


def test_null_counts_as_absent() -> None:
    config = llama()
    assert "head_dim" not in config and "hidden_size" in config
    assert config.get("head_dim", 16) == 16 and config.get("nothing") is None
    assert config.positive_int("head_dim", 16) == 16
    assert config.positive_int("head_dim", default=None) is None
    assert config.section("head_dim") is None
    assert "'head_dim' to null" in refusal(lambda: config.require("head_dim", int))


def test_a_missing_key_names_file_key_and_model_type() -> None:
    message = refusal(lambda: llama().require("num_hidden_layers", int))
    assert "config.json of model_type 'llama' has no 'num_hidden_layers', but an integer is needed" in message
    assert "config.json has no 'model_type'" in refusal(lambda: ModelConfig.from_dict({}).model_type)
    assert "'model_type'" in refusal(lambda: ModelConfig.from_dict({"model_type": ""}).model_type)


def test_a_missing_key_in_a_section_is_dotted_and_keeps_the_model_type() -> None:
    rope = llama().section("rope_parameters")
    assert rope is not None
    message = refusal(lambda: rope.number("rope_theta"))
    assert "model_type 'llama' has no 'rope_parameters.rope_theta'" in message


@pytest.mark.parametrize("value", ["64", True, 0, -1, 64.0, [64], {"a": 1}])
def test_a_size_is_an_integer_above_zero(value: Any) -> None:
    message = refusal(lambda: llama(hidden_size=value).positive_int("hidden_size", default=4))
    assert json.dumps(value) in message and "positive integer" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, "1e4", True])
def test_a_number_is_finite(value: Any) -> None:
    assert "finite number" in refusal(lambda: llama(rope_theta=value).number("rope_theta"))
    assert "finite number" in refusal(lambda: llama(rope_theta=value).require("rope_theta", float))


def test_wrong_types_are_refused_and_described() -> None:
    assert 'the string "yes"' in refusal(lambda: llama(flag="yes").flag("flag"))
    assert "the number 1," in refusal(lambda: llama(flag=1).flag("flag"))
    assert "true" in refusal(lambda: llama(count=True).require("count", int))
    assert "the number 5" in refusal(lambda: llama(hidden_act=5).text("hidden_act"))
    assert "the list [1, true]" in refusal(lambda: llama(eos_token_id=[1, True]).int_list("eos_token_id"))
    assert "an object is needed" in refusal(lambda: llama(rope_parameters="x").section("rope_parameters"))
    assert 'the object {"a": 1}' in refusal(lambda: llama(items={"a": 1}).items("items"))
    assert len(refusal(lambda: llama(hidden_act=["x" * 10_000]).text("hidden_act"))) < 400


def test_values_that_json_cannot_hold_are_refused() -> None:
    assert "'dtype' to a builtins.complex" in refusal(lambda: llama(dtype=1j))
    assert "'a.0.b' to a builtins.object" in refusal(lambda: llama(a=[{"b": object()}]))


def test_equality_and_hash_are_by_content() -> None:
    config = llama()
    reordered = ModelConfig.from_dict(dict(reversed(LLAMA.items())), source="elsewhere.json")
    config.get("hidden_size")
    assert config == reordered and hash(config) == hash(reordered)
    assert {config: 1}[reordered] == 1
    assert config != llama(hidden_size=65)
    assert config != LLAMA


def test_equality_tells_true_from_one_and_a_list_from_an_object() -> None:
    assert llama(x=True) != llama(x=1)
    assert llama(x=[]) != llama(x={})
    assert llama(x=float("nan")) == llama(x=float("nan"))
    assert llama(x=(1, 2)) == llama(x=[1, 2])


def test_a_config_does_not_change() -> None:
    source: dict[str, Any] = {"model_type": "llama", "eos_token_id": [1], "rope_parameters": {"factor": 1.0}}
    config = ModelConfig.from_dict(source)
    source["eos_token_id"].append(2)
    source["rope_parameters"]["factor"] = 2.0
    fresh = config.to_dict()
    fresh["model_type"] = "gemma"
    unchanged = {"model_type": "llama", "eos_token_id": [1], "rope_parameters": {"factor": 1.0}}
    assert config.to_dict() == unchanged
    with pytest.raises(AttributeError):
        config._values = {}  # type: ignore[misc]
    assert hash(config.get("rope_parameters")) is not None


def test_values_stand_in_for_what_is_written_and_reads_count_for_both() -> None:
    parent = ModelConfig.from_dict({"part": {"tied": False, "size": None, "other": 1}})
    part = parent.section("part")
    assert part is not None
    changed = part.with_values({"tied": True, "size": 4})
    assert (changed.flag("tied"), changed.positive_int("size"), part.flag("tied")) == (True, 4, False)
    assert parent.keys_unread() == ("part.other",)


def test_other_names_of_keys_win_over_the_usual_ones_and_count_as_read() -> None:
    config = ModelConfig.from_dict({"n_embd": 8, "hidden_size": 4, "n_layer": None, "num_hidden_layers": 2})
    renamed = config.with_renamed({"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "heads"})
    assert [renamed.get(key) for key in ("hidden_size", "num_hidden_layers", "heads")] == [8, 2, None]
    assert config.keys_unread() == ()


def test_defaults_fill_only_what_is_not_written() -> None:
    config = llama().with_defaults({"hidden_size": 4096, "head_dim": 128, "rms_norm_eps": 1.0, "bias": True})
    assert config.positive_int("hidden_size") == 64
    assert config.flag("bias") is True
    assert config.get("head_dim") is None  # written as null, which transformers lets win over its default
    assert config == llama(bias=True)
    assert "model_type 'opt'" in refusal(
        lambda: ModelConfig.from_dict({}).with_defaults({"model_type": "opt"}).require("x")
    )


def test_keys_read_are_shared_with_sections_and_derived_configs() -> None:
    config = llama()
    assert config.keys_read == frozenset()
    rope = config.with_defaults({"bias": True}).section("rope_parameters")
    assert rope is not None
    rope.get("factor")
    assert "hidden_size" in config
    assert config.keys_read == {"rope_parameters", "rope_parameters.factor", "hidden_size"}
    assert rope.keys_read == {"factor"}


def test_keys_unread_are_those_that_nobody_honoured() -> None:
    config = llama(layers=[{"kind": "full", "window": 4}])
    for key in LLAMA.keys() - {"eos_token_id", "head_dim", "rope_parameters"}:
        config.require(key)
    assert config.keys_unread() == ("eos_token_id", "layers", "rope_parameters")  # head_dim is null
    config.items("layers")[0].get("kind")
    config.require("rope_parameters", ModelConfig).get("rope_type")
    assert config.keys_unread() == ("eos_token_id", "layers.0.window", "rope_parameters.factor")


def test_copies_and_pickles_are_equal() -> None:
    config = llama()
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


def test_repr_is_short_and_names_the_source() -> None:
    assert repr(llama()).startswith("ModelConfig(model_type='llama', hidden_size=64, ")
    assert repr(llama()).endswith("and 3 more; from config.json)")


def test_from_file_reads_json_and_names_the_path(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert ModelConfig.from_file(file) == llama()
    assert str(file) in refusal(lambda: ModelConfig.from_file(str(file)).require("missing"))


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"", "is not valid JSON (line 1 column 1"),
        (b'{"a": 1', "is not valid JSON"),
        (b"[1]", "holds the list [1] where a JSON object is needed"),
        (b"\xff", "is not UTF-8 text (byte 0)"),
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', 'writes the key "c" twice'),
        (b'{"a": ' + b"[" * 100_000, "is nested too deeply"),
        (b'{"a": ' + b'{"b": ' * 900 + b"1" + b"}" * 901, "is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, raw: bytes, found: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(raw)
    message = refusal(lambda: ModelConfig.from_file(file))
    assert found in message and str(file) in message


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(lambda: ModelConfig.from_file(tmp_path / "config.json"))
    assert "Is a directory" in refusal(lambda: ModelConfig.from_file(tmp_path))


def test_importing_the_checkpoint_reader_imports_nothing_heavy() -> None:
    script = (
        "import sys, ttpu_core.checkpoint\n"
        "heavy = {'numpy', 'torch', 'jax', 'transformers', 'safetensors', 'huggingface_hub'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
