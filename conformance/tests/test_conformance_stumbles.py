"""What raises by itself is explained: a hook by its name, file and line, transformers by the sizes that clash, and a
plugin that cannot be used by its real reason. What a hook prints harms nothing."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from broken import LLAMA, cases, declaration

from ttpu_conformance.case import cases_of
from ttpu_conformance.runner import Result, run
from ttpu_conformance.selection import checks_for
from ttpu_conformance.stumbles import clashing_sizes, explained
from ttpu_core.errors import PluginError
from ttpu_core.plugin_records import ARCHITECTURES
from ttpu_core.registry import Registry

KEY_ERROR = """
def sizes(config):
    return {"small": 1}[config.text("model_type")]

@hookimpl
def ttpu_mlp(config):
    return sizes(config)
"""
LACKING = """
@hookimpl
def ttpu_attention(config):
    return replace(defaults.ttpu_attention(config), window=config.positive_int("no_such_key"))
"""
OTHER_ANSWER = """
@hookimpl
def ttpu_mlp(config):
    return {"intermediate_size": 112}
"""
PRINTS = """
print("imported")

@hookimpl
def ttpu_config(config):
    print("config:", config)
    return config
"""
OWN_BLOCK = """
@hookimpl
def ttpu_block():
    return BlockSpec(custom=CustomSpec("own", implementations=(("jax", __name__ + "_part:Block"),)))
"""
RAISING_BLOCK = """
class Block(DecoderLayer):
    def __call__(self, x, *rest):
        raise KeyError("heads")
"""


def only(folder: Path, source: str, check: str, *, part: str = "", **section: object) -> Result:
    (result,) = run(checks_for(cases(folder, "llama", source, "stumbles", part=part, **section), only=[check]))
    return result


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (KEY_ERROR, r"`ttpu_mlp` of .* layer 0, .* KeyError: 'llama' \(conformance_test_stumbles_llama.py:\d+\)"),
        (OTHER_ANSWER, "`ttpu_mlp` of .* returned a dict, but it must return a MLPSpec or MoESpec or None"),
        (
            "@hookimpl\ndef ttpu_block():\n    return BlockSpec(placement='sandwhich')\n",
            r"`ttpu_block` .* returned BlockSpec\(placement='sandwhich'\), but placement is one of .*`ttpu_block`",
        ),
        (
            "@hookimpl\ndef ttpu_attention(config):\n    return ttpu_norm(config)\n",
            "`ttpu_attention` of .* raised NameError: .*'ttpu_norm' is not defined .*: correct `ttpu_norm`",
        ),
        (LACKING, "has no 'no_such_key', .* Raised in `ttpu_attention` \\(conformance_test_stumbles_llama.py:\\d+\\)"),
    ],
)
def test_what_a_hook_raises_names_hook_file_and_line(tmp_path: Path, source: str, message: str) -> None:
    result = only(tmp_path, source, "logical_axes")
    assert result.status == "failed"
    assert re.search(message, result.reason), result.reason


def test_what_a_hook_prints_harms_no_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = cases(tmp_path, "llama", PRINTS, "stumbles")
    only = ["imports_no_framework", "description_is_deterministic", "config_keys_are_read"]
    results = list(run(checks_for(made, levels=["contract"], only=only)))
    assert {f"{one.check}: {one.reason}" for one in results if one.status == "failed"} == set()
    assert "imported" in capsys.readouterr().out


@pytest.mark.torch
def test_what_transformers_raises_says_so_and_which_sizes_clash(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (case,) = cases(tmp_path, "llama", LLAMA, "stumbles", base={"num_key_value_heads": 3})
    with pytest.raises(RuntimeError) as failure:
        _ = case.reference.logits
    reason = explained(failure.value, case)
    assert reason.startswith("transformers itself raised RuntimeError: ") and "num_key_value_heads=3" in reason
    assert "[llama.base] in conformance.toml" in reason


@pytest.mark.torch
def test_what_an_implementation_raises_is_the_plugins_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = only(tmp_path, OWN_BLOCK, "batch_invariance", part=RAISING_BLOCK)
    assert "the plugin's own code raised KeyError: 'heads' (conformance_test_stumbles_llama_part.py:" in result.reason
    assert "correct the implementation that `ttpu_mixer` or `ttpu_block`" in result.reason


@pytest.mark.torch
def test_an_implementation_with_another_signature_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = only(tmp_path, OWN_BLOCK, "batch_invariance", part=RAISING_BLOCK.replace("*rest", "step"))
    assert "calling conformance_test_stumbles_llama_part:Block, which `ttpu_block` names, raised" in result.reason


def test_sizes_clash_by_name_or_by_value() -> None:
    config = {"hidden_size": 64, "num_heads": 3, "layers": 2, "rope": {"dim": 7}, "tied": True}
    assert clashing_sizes(config, "hidden_size must divide by 3") == {"hidden_size": 64, "num_heads": 3}
    assert clashing_sizes(config, "size of tensor a (7) and b (64)") == {"hidden_size": 64, "dim": 7}
    assert clashing_sizes(config, "2 of 2.64") == {}


UNKNOWN_HOOK = """
@hookimpl
def ttpu_mpl(config):
    return None
"""


def test_a_plugin_whose_hooks_do_not_fit_gives_its_reason_in_every_check(tmp_path: Path) -> None:
    made = cases(tmp_path, "llama", UNKNOWN_HOOK, "stumbles")
    results = list(run(checks_for(made, levels=["contract"], only=["logical_axes", "spec_is_frozen"])))
    assert {one.status for one in results} == {"failed"}
    assert all("its hooks do not fit ttpu-core" in one.reason and "ttpu_mpl" in one.reason for one in results)


def test_a_plugin_that_is_known_to_be_unusable_gives_its_reason_when_it_is_asked_for(tmp_path: Path) -> None:
    cases(tmp_path, "llama", UNKNOWN_HOOK, "stumbles")
    registry = Registry([EntryPoint("llama", "conformance_test_stumbles_llama", ARCHITECTURES)])
    registry.plugins(check=True)
    with pytest.raises(PluginError, match=r"was asked for, but .* is incompatible: its hooks do not fit .*ttpu_mpl"):
        cases_of("llama", registry=registry, declaration=declaration("llama"))


