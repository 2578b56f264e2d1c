"""What the registry promises about plugins that others publish. Every plugin here is a real distribution, installed by
pip into a folder of its own and found by a fresh Python process."""

from pathlib import Path
from typing import Any

import pytest
from throwaway import Distribution, Environment, family, patch_pack

from ttpu_core import ModelConfig, Registry
from ttpu_core.errors import MissingDependencyError, PluginError, UnsupportedError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}


def model(model_type: str, **changes: Any) -> str:
    """Code for a small config of a model type."""
    return f"ModelConfig.from_dict({LLAMA | {'model_type': model_type} | changes})"


RESOLVE_LLAMA = f"""
config = {model("llama")}
llama = default_registry().architecture
"""

LEAVES_A_TRACE = """
    from pathlib import Path
    Path(__file__).with_name("imported").touch()
"""

TOY = '''
    """A family as a third party writes it: another norm, a window on every second layer, other checkpoint names."""
    from dataclasses import replace
    from ttpu_core import ModelConfig, defaults, hookimpl
    from ttpu_core.mapping import layout
    from ttpu_core.defaults import ttpu_attention as usual_attention

    NAMES = layout.CheckpointNames(
        layer="blocks.{layer}.", embedding="wte.weight", final_norm="ln_f", head="out", query="attn.q",
        key="attn.k", value="attn.v", output="attn.o", gate="ff.g", up="ff.u", down="ff.d", input_norm="n1",
        mlp_norm="n2",
    )

    @hookimpl
    def ttpu_norm(config):
        return replace(defaults.ttpu_norm(config), offset=1.0, scale_in_fp32=True)

    @hookimpl
    def ttpu_attention(config, layer):
        return replace(usual_attention(config), window=config.positive_int("window") if layer % 2 else None)

    @hookimpl
    def ttpu_flax_mapping(spec):
        return layout.standard_mapping(spec, NAMES)
'''

WIDE_WINDOW = """
    from dataclasses import replace
    from ttpu_core import defaults, hookimpl
    from ttpu_core.spec import KernelChoice

    @hookimpl
    def ttpu_attention(config):
        return replace(defaults.ttpu_attention(config), window={window})

    @hookimpl
    def ttpu_kernels():
        return [KernelChoice("attention", "{kernel}", "jax", source="{kernel}")]
"""


# Plugins that go wrong, and what the reason says. Distribution, module and model type have the same name.
BROKEN = {
    "raises": ("raise OSError('no such driver')", "failed with OSError: no such driver."),
    "lonely": ("import nobody_wrote_this", "ModuleNotFoundError: No module named 'nobody_wrote_this'."),
    "exits": ("import sys; sys.exit(3)", "failed with SystemExit: 3."),
    "typo": ("def broken(:", "failed with SyntaxError:"),
}
MISFIT = {
    "signature": ("@hookimpl\ndef ttpu_norm(config, hidden_size): ...", "hidden_size"),
    "unknown": ("@hookimpl\ndef ttpu_normalisation(config): ...", "unknown hook 'ttpu_normalisation'"),
    "unmarked": ("def ttpu_norm(config): ...", "'ttpu_norm' is not marked as a hook: write @hookimpl above it"),
}


def states(env: Environment, code: str = "report(records())", **variables: str) -> dict[tuple[str, str], str]:
    """(distribution, name) → state."""
    return {(distribution, name): state for _, name, distribution, state, _ in env.run(code, **variables)}


@pytest.fixture(scope="module")
def with_misfits(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment in which every plugin but llama's is wrong in another way."""
    sources = {name: source for name, (source, _) in BROKEN.items()}
    sources |= {name: f"from ttpu_core import hookimpl\n{hook}\n" for name, (hook, _) in MISFIT.items()}
    return Environment.install(tmp_path_factory.mktemp("misfits"), *(family(*item) for item in sources.items()))


def test_finding_and_listing_plugins_imports_none_of_them(tmp_path: Path) -> None:
    env = Environment.install(
        tmp_path,
        family("ttpu-traced", LEAVES_A_TRACE),
        patch_pack("traced-pack", LEAVES_A_TRACE),
        Distribution(
            "traced-rest",
            {"rest.py": LEAVES_A_TRACE},
            {"ttpu.backends": {"b": "rest:B"}, "ttpu.commands": {"c": "rest:c"}},
        ),
    )
    found = states(env, RESOLVE_LLAMA + "llama(config); default_registry().model_types(); report(records())")
    assert found["ttpu-traced", "ttpu_traced"] == found["traced-rest", "b"] == found["traced-rest", "c"] == "available"
    assert found["traced-pack", "traced-pack"] == "available"
    assert not (env.site / "imported").exists()
    env.run(RESOLVE_LLAMA + "llama(config, ['traced-pack']); report(None)")
    assert (env.site / "imported").exists()  # so importing would have left a trace


def test_a_plugin_is_loaded_for_the_model_type_that_names_its_entry_point(tmp_path: Path) -> None:
    env = Environment.install(tmp_path, family("ttpu-toy", TOY, model_type="toy-2", version="3.1"))
    got = env.run(
        f"""
        registry = default_registry()
        types = registry.model_types()
        toy = registry.architecture({model("toy-2", window=3)})
        report([types, toy.family, toy.spec.model_type, records()])
        """
    )
    assert {"llama", "toy-2"} <= set(got[0]) and got[1:3] == ["ttpu-toy 3.1", "toy-2"]
    assert ["ttpu.architectures", "toy-2", "ttpu-toy", "loaded", ""] in got[3]


def test_a_third_partys_family_says_where_it_differs_and_the_core_answers_the_rest(tmp_path: Path) -> None:
    env = Environment.install(tmp_path, family("toy", TOY))
    got = env.run(
        f"""
        toy = default_registry().architecture({model("toy", window=3)})
        report({{
            "windows": [layer.mixer.window for layer in toy.spec.layers],
            "offsets": [toy.spec.final_norm.offset] + [layer.norm.offset for layer in toy.spec.layers],
            "rope": toy.spec.layers[1].mixer.rope.theta,
            "tensors": sorted(toy.mapping.tensors),
            "groups": [[g.start, len(g.unit), g.repeats] for g in toy.spec.groups()],
        }})
        """
    )
    assert got["windows"] == [None, 3] and got["offsets"] == [1.0, 1.0, 1.0] and got["rope"] == 10_000.0
    parts = ("attn.k", "attn.o", "attn.q", "attn.v", "ff.d", "ff.g", "ff.u", "n1", "n2")
    layers = [f"blocks.{layer}.{part}.weight" for layer in (0, 1) for part in parts]
    assert got["tensors"] == [*layers, "ln_f.weight", "out.weight", "wte.weight"]
    assert got["groups"] == [[0, 1, 1], [1, 1, 1]]


def test_a_default_that_a_plugin_imports_to_call_is_not_its_answer(tmp_path: Path) -> None:
    pack = patch_pack("borrower", "from ttpu_core.defaults import ttpu_norm, ttpu_mlp as usual_mlp")
    env = Environment.install(tmp_path, family("toy", TOY), pack)
    got = env.run(
        f"""
        config = {model("toy", window=3)}
        report([default_registry().architecture(config, ["borrower"]).spec.final_norm.offset, records()])
        """
    )
    assert got[0] == 1.0  # toy's norm, not the default's
    assert ["ttpu.patch_packs", "borrower", "borrower", "loaded", ""] in got[1]


def test_a_plugin_that_fails_to_import_is_broken_with_its_reason(with_misfits: Environment) -> None:
    assert {states(with_misfits)[name, name] for name in BROKEN} == {"available"}  # nobody has looked yet
    listed = {row[2]: row for row in with_misfits.run("report(records(group='ttpu.architectures', check=True))")}
    for name, (_, why) in BROKEN.items():
        assert listed[name][3] == "broken" and why in listed[name][4]
        assert listed[name][4].endswith(".") and "\n" not in listed[name][4]


def test_a_plugin_whose_hooks_do_not_fit_is_incompatible_with_its_reason(with_misfits: Environment) -> None:
    listed = {row[2]: row for row in with_misfits.run("report(records(group='ttpu.architectures', check=True))")}
    for name, (_, why) in MISFIT.items():
        assert listed[name][3] == "incompatible" and why in listed[name][4]
        assert listed[name][4].endswith(".") and "\n" not in listed[name][4]


def test_misfits_never_stop_llama(with_misfits: Environment) -> None:
    layers, listed, types = with_misfits.run(
        RESOLVE_LLAMA
        + "default_registry().plugins('ttpu.architectures', check=True)\n"
        + "report([llama(config).spec.num_layers, records(), default_registry().model_types()])"
    )
    assert layers == 2 and {row[2]: row[3] for row in listed}["ttpu-llama"] == "loaded"
    assert "llama" in types and not {*BROKEN, *MISFIT} & set(types)


def test_asking_for_a_misfit_names_the_distribution_the_reason_and_the_way_out(with_misfits: Environment) -> None:
    code = f"names = {[*BROKEN, *MISFIT]}\n" + RESOLVE_LLAMA
    code += "ask = lambda name: error(lambda: llama(ModelConfig.from_dict({'model_type': name})))\n"
    first, again = with_misfits.run(code + "report([{name: ask(name) for name in names} for _ in range(2)])")
    for name, (_, why) in (BROKEN | MISFIT).items():
        assert first[name].startswith("PluginError: ") and why in first[name]
        assert again[name].startswith(f"PluginError: model type {name!r} was asked for, but {name} is ")
        assert why in again[name]
    for name in BROKEN:
        assert f"{name!r} needs the plugin {name} 1.0" in first[name] and f"TTPU_DISABLE_PLUGINS={name}" in first[name]
    for name in MISFIT:
        assert f"the plugin {name} 1.0 for {name!r} cannot be used" in first[name]


def test_a_plugin_built_for_another_core_is_incompatible_without_an_import(tmp_path: Path) -> None:
    unmet = ("ttpu-core>=99", "ttpu-core<0.0.1", "TTPU-Core==2.*; python_version>='3'", "ttpu-core==77")
    malformed = "ttpu-core = = 1"  # newer pips refuse to install it, so it is written in afterwards
    met = ("ttpu-core-extras>=99", "ttpu-core>=99; extra == 'dev'", "ttpu-core>=99; python_version<'3'", "ttpu-core")
    other = [family(f"other{i}", LEAVES_A_TRACE, requires=("numpy", text)) for i, text in enumerate(unmet)]
    same = [family(f"same{i}", requires=("numpy", text)) for i, text in enumerate(met)]
    env = Environment.install(tmp_path, *other, *same)
    metadata = env.site / "other3-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace(unmet[3], malformed))
    assert malformed in metadata.read_text()
    check = "records(group='ttpu.architectures', check=True)"
    listed, layers = env.run(RESOLVE_LLAMA + f"report([{check}, llama(config).spec.num_layers])")
    rows = {row[2]: row for row in listed}
    for i, text in enumerate(unmet):
        state, why = rows[f"other{i}"][3:]
        assert state == "incompatible" and "ttpu-core" in why.lower().replace("_", "-") and why.endswith("."), text
    assert not (env.site / "imported").exists() and layers == 2
    for i, text in enumerate(met):
        assert rows[f"same{i}"][3] == "loaded", text


def test_a_distribution_without_metadata_does_not_hide_the_others(tmp_path: Path) -> None:
    env = Environment.install(tmp_path, family("halfgone"))
    (env.site / "halfgone-1.0.dist-info" / "METADATA").unlink()  # what an interrupted uninstall leaves
    got = env.run(RESOLVE_LLAMA + "report([records(), llama(config).spec.num_layers])")
    assert ["ttpu.architectures", "halfgone"] in [row[:2] for row in got[0]] and got[1] == 2


def test_two_distributions_that_claim_a_name_conflict_until_the_user_excludes_one(tmp_path: Path) -> None:
    env = Environment.install(
        tmp_path, family("toy-a", TOY, model_type="toy"), family("toy-b", TOY, model_type="toy"), family("toy-c", TOY)
    )
    ask = f"toy = {model('toy', window=3)}\n"
    got = env.run(ask + "report([records(), error(lambda: default_registry().architecture(toy))])")
    conflicting = [row for row in got[0] if row[3] == "conflict"]
    assert [row[2] for row in conflicting] == ["toy-a", "toy-b"]
    for text in (got[1], *(row[4] for row in conflicting)):
        assert "toy-a and toy-b" in text and "TTPU_DISABLE_PLUGINS=toy-" in text
    assert got[1].startswith("PluginError: model type 'toy' was asked for")
    assert states(env)["toy-c", "toy_c"] == "available"
    for excluded, kept in (("toy-a", "toy-b"), ("toy-b", "toy-a")):
        chosen = env.run(ask + "report(default_registry().architecture(toy).family)", TTPU_DISABLE_PLUGINS=excluded)
        assert chosen == f"{kept} 1.0"


def test_a_conflict_with_one_of_ttpus_own_distributions_advises_to_exclude_the_other(tmp_path: Path) -> None:
    env = Environment.install(tmp_path, family("another-llama", TOY, model_type="llama"))
    conflicting = [row for row in env.run("report(records())") if row[3] == "conflict"]
    assert [row[2] for row in conflicting] == ["another-llama", "ttpu-llama"]
    assert all("for example TTPU_DISABLE_PLUGINS=another-llama, or uninstall it." in row[4] for row in conflicting)


def test_a_collections_plugin_yields_to_another_distributions_own_for_the_same_type(tmp_path: Path) -> None:
    collected = {"ttpu.architectures.collection": {"shared": "collected", "rare": "collected"}}
    env = Environment.install(
        tmp_path,
        Distribution("collected", {"collected.py": TOY}, collected),
        family("toy-own", TOY, model_type="shared"),
    )
    ask = f"asked = [{model('shared', window=3)}, {model('rare', window=3)}]\n"
    answer = ask + "report([[default_registry().architecture(one).family for one in asked], records()])"
    families, listed = env.run(answer)
    assert families == ["toy-own 1.0", "collected 1.0"]
    assert {tuple(row) for row in listed if row[2] in ("collected", "toy-own")} == {
        ("ttpu.architectures", "shared", "toy-own", "loaded", ""),
        ("ttpu.architectures", "rare", "collected", "loaded", ""),
        (
            "ttpu.architectures", "shared", "collected", "superseded",
            "toy-own has a plugin of its own for this model type.",
        ),
    }  # fmt: skip
    assert env.run(answer, TTPU_DISABLE_PLUGINS="toy-own")[0] == ["collected 1.0", "collected 1.0"]


def test_plugins_are_denied_by_distribution_by_entry_point_or_by_pattern(tmp_path: Path) -> None:
    pack = patch_pack("fast-pack", "")
    env = Environment.install(tmp_path, family("toy-one", model_type="one"), family("toy_two", model_type="two"), pack)
    names = {("toy-one", "one"), ("toy-two", "two"), ("fast-pack", "fast-pack")}

    def disabled(text: str) -> set[tuple[str, str]]:
        found = states(env, TTPU_DISABLE_PLUGINS=text)
        assert found["ttpu-llama", "llama"] == "available"
        return {name for name in names if found[name] == "disabled"}

    assert disabled("") == set()
    assert disabled("Toy_One") == disabled("one") == {("toy-one", "one")}  # distribution names are compared as pip does
    assert disabled("toy-*, fast-pack") == names
    assert disabled("ttpu.architectures:o*, ttpu.backends:two, ttpu.patch_packs:toy-two") == {("toy-one", "one")}
    asked = env.run(
        f"report(error(lambda: default_registry().architecture({model('one')})))",
        TTPU_DISABLE_PLUGINS="toy-one",
    )
    assert asked == (
        "PluginError: model type 'one' was asked for, but toy-one is disabled: excluded by TTPU_DISABLE_PLUGINS."
    )


def test_an_allow_list_keeps_out_everything_that_it_does_not_name(tmp_path: Path) -> None:
    env = Environment.install(tmp_path, family("toy-one", model_type="one"), family("toy-two", model_type="two"))
    found = states(env, TTPU_PLUGINS="ttpu-llama,two")
    assert found["toy-one", "one"] == "disabled"
    assert found["toy-two", "two"] == found["ttpu-llama", "llama"] == "available"
    both = states(env, TTPU_PLUGINS="two", TTPU_DISABLE_PLUGINS="toy-two")
    assert both["toy-two", "two"] == "disabled"  # what is denied is not allowed


def test_an_unknown_model_type_names_the_plugins_that_exist_and_the_pip_command(tmp_path: Path) -> None:
    env = Environment.install(tmp_path, family("toy-one", model_type="one"))
    ask = "report(error(lambda: default_registry().architecture(ModelConfig.from_dict({'model_type': '%s'}))))"
    message = env.run(ask % "llama9")
    assert message.startswith("PluginError: model type 'llama9' was asked for")
    assert " llama," in message and " one," in message and "`pip install ttpu-llama`" in message
    message = env.run(ask % "nobody_knows")
    assert "'nobody_knows'" in message and " one," in message and "`pip install`" in message


def test_a_patch_pack_changes_a_family_only_when_it_is_asked_for_and_the_last_one_wins(tmp_path: Path) -> None:
    env = Environment.install(
        tmp_path,
        patch_pack("narrow", WIDE_WINDOW.format(window=4, kernel="narrow_kernel"), version="1.1"),
        patch_pack("wide", WIDE_WINDOW.format(window=8, kernel="wide_kernel"), version="2.2"),
    )
    code = (
        RESOLVE_LLAMA
        + """
def seen(packs):
    described = llama(config, packs)
    return [described.spec.layers[0].mixer.window, [k.implementation for k in described.spec.kernels],
            list(described.patch_packs), described.family]
report([seen(None), seen([]), seen(["narrow"]), seen(["narrow", "wide"]), seen(["wide", "narrow"]),
        seen(["wide", "narrow", "wide"]), seen("narrow"), seen("narrow, wide"), records()])
"""
    )
    plain, none, narrow, wide, reversed_, thrice, one, two, listed = env.run(code)
    assert (one, two) == (narrow, wide)  # a string is a name, or names with commas
    assert plain[:3] == none[:3] == [None, [], []]
    assert narrow[:3] == [4, ["narrow_kernel"], ["narrow (narrow 1.1)"]]
    assert wide[:3] == thrice[:3] == [8, ["wide_kernel"], ["narrow (narrow 1.1)", "wide (wide 2.2)"]]
    assert reversed_[:3] == [4, ["narrow_kernel"], ["wide (wide 2.2)", "narrow (narrow 1.1)"]]
    assert len({described[3] for described in (plain, narrow, wide)}) == 1  # the family stays who it was
    assert {(row[0], row[1]) for row in listed if row[2] in ("narrow", "wide")} == {
        ("ttpu.patch_packs", "narrow"),
        ("ttpu.patch_packs", "wide"),
    }
    asked = env.run(code, TTPU_PATCH_PACKS="narrow, wide")
    assert asked[0] == wide and asked[1] == none  # an argument, even an empty one, wins over the variable


def test_an_unknown_patch_pack_is_refused(tmp_path: Path) -> None:
    env = Environment.install(tmp_path, patch_pack("wide", ""))
    code = "report([error(lambda: llama(config, packs)) for packs in (['wider'], 'wider')])"
    messages = env.run(RESOLVE_LLAMA + code)
    for message in messages:
        assert message.startswith("PluginError: patch pack 'wider' was asked for") and "wide;" in message


def test_hooks_run_once_per_config_and_once_per_layer_where_they_take_a_layer(tmp_path: Path) -> None:
    source = """
    from ttpu_core import hookimpl
    CALLS = {}
    def count(name, layer=None):
        CALLS[name] = CALLS.get(name, []) + [layer]
    """
    for hook in ("config", "embedding", "head", "norm", "sharding_rules", "torch_patches", "kernels"):
        source += f"""
    @hookimpl
    def ttpu_{hook}(config):
        count("{hook}")
    """
    for hook in ("block", "attention", "rope", "mixer", "mlp"):
        source += f"""
    @hookimpl
    def ttpu_{hook}(config, layer):
        count("{hook}", layer)
    """
    source += """
    @hookimpl
    def ttpu_flax_mapping(config, spec):
        count("flax_mapping")
    """
    env = Environment.install(tmp_path, family("counting", source))
    calls = env.run(
        f"""
        import counting
        default_registry().architecture({model("counting", num_hidden_layers=3)})
        report(counting.CALLS)
        """
    )
    per_layer = {"block", "attention", "rope", "mixer", "mlp"}
    assert len(calls) == 13
    for hook, layers in calls.items():
        assert layers == ([0, 1, 2] if hook in per_layer else [None]), hook


def test_a_spec_that_cannot_be_hashed_is_refused_with_the_plugin_named(tmp_path: Path) -> None:
    source = """
    from ttpu_core import hookimpl
    @hookimpl
    def ttpu_sharding_rules():
        return [("embed.embedding", ("vocab", ["embed"]))]
    """
    env = Environment.install(tmp_path, family("listy", source))
    ask = f"lambda: default_registry().architecture({model('listy')})"
    assert env.run(f"report(error({ask}))").startswith("ConfigError: the plugin for 'listy' put a value")


def test_a_third_partys_backend_is_found_by_its_entry_point(tmp_path: Path) -> None:
    source = """
    from ttpu_core.loading import LoadOptions
    class Abacus:
        name = "abacus"
        options = LoadOptions
        def open(self, architecture, checkpoint, options): ...
        def doctor(self): return {"beads": 100}
        def kernels(self, architecture): return {}
    """
    wood = Distribution("wood", {"wood.py": source}, {"ttpu.backends": {"abacus": "wood:Abacus"}})
    env = Environment.install(tmp_path, wood)
    got = env.run(
        """
        from ttpu_core.backend import Backend
        abacus = default_registry().backend("abacus")
        report([abacus.doctor(), isinstance(abacus, Backend), error(lambda: default_registry().backend("slide_rule"))])
        """
    )
    assert got[:2] == [{"beads": 100}, True]
    assert got[2].startswith("MissingDependencyError: ") and "abacus" in got[2]


def test_a_missing_backend_names_the_pip_command() -> None:
    with pytest.raises(MissingDependencyError, match=r"installed backends are: none") as caught:
        Registry(entry_points=[]).backend("jax")
    assert '`pip install "ttpu-core[jax]"`' in str(caught.value)


def test_without_any_plugin_an_error_still_says_what_to_do() -> None:
    with pytest.raises(PluginError, match=r"'llama' was asked for.*none.*`pip install ttpu-llama`"):
        Registry(entry_points=[]).architecture(ModelConfig.from_dict(LLAMA))


def test_a_missing_service_names_the_pip_command() -> None:
    with pytest.raises(MissingDependencyError, match=r"the planner was asked for, but .* `pip install ttpu-plan`"):
        Registry(entry_points=[]).service("planner")


def test_a_service_is_found_denied_and_conflicts_like_any_plugin(tmp_path: Path) -> None:
    sources = {"one": "PLANNER = 'one'", "two": "PLANNER = 'two'"}
    env = Environment.install(
        tmp_path,
        *(
            Distribution(name, {f"{name}.py": source}, {"ttpu.services": {"soothsayer": f"{name}:PLANNER"}})
            for name, source in sources.items()
        ),
    )
    asked = 'report(error(lambda: default_registry().service("soothsayer")))'
    assert "'soothsayer' is claimed by one and two; choose one by excluding the other" in env.run(asked)
    found = 'report([default_registry().service("soothsayer"), records()])'
    service, records = env.run(found, TTPU_DISABLE_PLUGINS="two")
    assert service == "one"
    assert ["ttpu.services", "soothsayer", "one", "loaded", ""] in records
    assert "soothsayer" in env.ttpu("list-plugins")


def test_the_default_backend_is_the_only_one_or_one_that_offers_itself(tmp_path: Path) -> None:
    offer = {"zeal": "eager:B"}
    env = Environment.install(
        tmp_path,
        Distribution("eager", {"eager.py": LEAVES_A_TRACE}, {"ttpu.backends": offer, "ttpu.default_backends": offer}),
        Distribution("shy", {"shy.py": LEAVES_A_TRACE}, {"ttpu.backends": {"a-shy-one": "shy:B"}}),
    )
    default = "report(default_registry().default_backend())"
    assert env.run(default, TTPU_PLUGINS="eager,shy") == "zeal"
    assert env.run(default, TTPU_PLUGINS="shy") == "a-shy-one"
    assert not (env.site / "imported").exists()
    assert env.run(default, TTPU_DISABLE_PLUGINS="eager") == Registry().default_backend()


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_a_model_with_an_encoder_and_a_decoder_is_refused_by_name(model_type: str) -> None:
    config = ModelConfig.from_dict({"model_type": model_type, "is_encoder_decoder": True})
    with pytest.raises(UnsupportedError, match=f"{model_type!r} has an encoder and a decoder"):
        Registry().architecture(config)


def test_a_model_that_only_a_fallback_runs_is_told_what_works_without_a_plugin() -> None:
    pytest.importorskip("ttpu_any")
    with pytest.raises(PluginError, match=r"'xglm'.*own code generates, is served and is planned.*new-plugin --from"):
        Registry().architecture(ModelConfig.from_dict({"model_type": "xglm"}))
