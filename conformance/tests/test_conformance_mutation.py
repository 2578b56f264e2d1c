"""Mutants of families: each is one mistake, which hook it belongs to is known, and the kit is tried on them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from ttpu_conformance.mutants import mutants
from ttpu_conformance.mutation import Family, chosen, first_failure, hooks_named, summary

pytestmark = pytest.mark.torch

SOURCE = '''
"""A docstring."""
CONFIG_DEFAULTS = {"rms_norm_eps": 1e-6, "pad_token_id": 0}

@hookimpl
def ttpu_config(config):
    """Another docstring."""
    if config.get("heads") == 7:
        raise ConfigError("no seven heads")
    return config.with_defaults(CONFIG_DEFAULTS)

def shared(config, offset=True):
    return replace(plain(config), eps=2 * 3 if offset else 1)

@hookimpl
def ttpu_norm(config):
    return shared(config)
'''


def test_every_literal_flag_keyword_comparison_and_hook_is_changed_in_turn(tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text(SOURCE)
    made = list(mutants("family", tmp_path / "family.py"))
    assert {(one.kind, one.change, one.hooks) for one in made} == {
        ("entry", "a table without 'rms_norm_eps'", ("ttpu_config",)),
        ("text", "'rms_norm_eps_x' for 'rms_norm_eps'", ("ttpu_config",)),
        ("number", "2e-06 for 1e-06", ("ttpu_config",)),
        ("hook", "without ttpu_config", ("ttpu_config",)),
        ("comparison", "config.get('heads') != 7 for config.get('heads') == 7", ("ttpu_config",)),
        ("text", "'heads_x' for 'heads'", ("ttpu_config",)),
        ("number", "8 for 7", ("ttpu_config",)),
        ("flag", "False for True", ("ttpu_norm",)),
        ("keyword", "replace without eps", ("ttpu_norm",)),
        ("branch", "1 if offset else 2 * 3 for 2 * 3 if offset else 1", ("ttpu_norm",)),
        ("arithmetic", "2 / 3 for 2 * 3", ("ttpu_norm",)),
        ("number", "3 for 2", ("ttpu_norm",)),
        ("number", "4 for 3", ("ttpu_norm",)),
        ("number", "2 for 1", ("ttpu_norm",)),
        ("hook", "without ttpu_norm", ("ttpu_norm",)),
    }
    assert len({one.id for one in made}) == len({one.source for one in made}) == len(made)


def test_a_mutant_is_tried_in_place_of_its_module_and_leaves_nothing_behind() -> None:
    family = Family.named("ttpu_zoo")
    by_change = {one.change: one for one in family.mutants() if one.module == "ttpu_zoo.arcee"}
    before = dict(sys.modules)
    found = first_failure(family, by_change["2e-05 for 1e-05"])
    assert (found.check, found.case) == ("raw_json", "arcee-base")
    assert hooks_named(found.reason) == ("ttpu_config",)
    assert {name: sys.modules.get(name) for name in before if name.startswith("ttpu_zoo")} == {
        name: module for name, module in before.items() if name.startswith("ttpu_zoo")
    }


def test_mutants_come_from_every_module_in_turn_and_in_the_same_order() -> None:
    family = Family.named("ttpu_llama")
    order = [mutant.module for _, mutant in chosen([family], 0)][:4]
    assert order == ["ttpu_llama.llama", "ttpu_llama.llama4"] * 2
    assert [m.id for _, m in chosen([family], 0)] == [m.id for _, m in chosen([family], 0)]
    assert family.types_of("ttpu_llama.llama4") == ["llama4", "llama4_text"]


def test_the_hooks_that_a_failure_asks_to_correct_are_read_from_its_sentence() -> None:
    assert hooks_named("the models differ, look at `ttpu_norm`; then: correct `ttpu_mlp`.") == ("ttpu_mlp",)
    assert hooks_named("look at `ttpu_head`, `ttpu_flax_mapping`.") == ("ttpu_head", "ttpu_flax_mapping")
    assert hooks_named("nothing is said") == ()


def test_the_summary_counts_what_was_killed_and_named() -> None:
    killed = {"check": "raw_json", "named": True, "exact": False, "differs": "", "seconds": 1.0}
    counts = summary({"a": killed, "b": {**killed, "check": None, "named": False, "differs": "llama-base"}})
    assert json.loads(json.dumps(counts)) == {
        "mutants": 2, "killed": 1, "survived, and describes another model": 1, "hook named alone": 0, "hook named": 1,
        "by check": {"raw_json": 1}, "seconds": 2,
    }  # fmt: skip
