"""What conformance.toml may say, and what of it is refused with one sentence."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from ttpu_conformance.declaration import Declaration, declaration_for, parse_declaration, read_declaration
from ttpu_conformance.errors import DeclarationError
from ttpu_conformance.selection import all_checks


def parse(text: str, folder: Path = Path()) -> Declaration:
    return parse_declaration("olive", tomllib.loads(text)["olive"], "conformance.toml", folder)


def test_a_type_without_a_section_has_the_base_variant(tmp_path: Path) -> None:
    file = tmp_path / "conformance.toml"
    file.write_text("[other]\n")
    assert [variant.name for variant in read_declaration("olive", file).variants] == ["base"]


def test_a_plugin_without_a_file_has_the_kits_defaults() -> None:
    assert declaration_for("olive", "json").source == "the kit's defaults"


def test_everything_that_can_be_declared(tmp_path: Path) -> None:
    (tmp_path / "olive.json").write_text("{}")
    declared = parse(
        """
        [olive]
        transformers = "OliveForCausalLM"
        heavy = ["sliding"]
        not_proven = "its pictures need timm"
        [olive.base]
        head_dim = 16
        [olive.variants.sliding]
        sliding_window = 5
        [olive.published."Olive-8B"]
        config = "olive.json"
        v5e = { slice = "v5e:2x4", mesh = "tensor=8", train_slice = "v5e:4x4" }
        [[olive.expected_failures]]
        check = "bfloat16_logits"
        variant = "sliding"
        reason = "rounds twice"
        [[olive.expected_failures]]
        check = "gradients"
        backend = "torch_xla"
        reason = "is slow"
        """,
        tmp_path,
    )
    assert declared.transformers == "OliveForCausalLM"
    assert declared.not_proven == "its pictures need timm"
    assert [(variant.name, dict(variant.keys)) for variant in declared.variants] == [
        ("base", {}),
        ("sliding", {"sliding_window": 5}),
    ]
    assert declared.published[0].slices["v5e"].train_slice == "v5e:4x4"
    expected = declared.expected_failure("bfloat16_logits", ("sliding",), "jax")
    assert expected is not None and expected.reason == "rounds twice"
    assert declared.expected_failure("bfloat16_logits", ("base",), "jax") is None
    assert declared.expected_failure("float32_logits", ("sliding",), "jax") is None
    assert declared.expected_failure("gradients", ("sliding",), "jax") is None
    assert declared.expected_failure("gradients", ("sliding",), "torch_xla") is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[olive]\nvariant = {}", r"key 'variant' in \[olive\], but the keys there are transformers, base, variants"),
        ("[olive.variants.base]\nhead_dim = 8", "'base' of 'olive', but that is the name of the base itself"),
        ("[olive]\nheavy = ['sliding']", r"\['sliding'\] as heavy in \[olive\], but the variants are base"),
        ("[olive]\nnot_proven = true", r"not_proven in \[olive\] to True, but a sentence is needed"),
        ("[olive]\nbase = 3", "sets .* base to 3, but a table is needed"),
        ("[olive.published.A]\nconfig = 'a.json'", "the config 'a.json', but there is no a.json"),
        (
            "[olive.published.A]\nconfig = 'a.json'\nv7 = {}",
            "key 'v7' in .*published.A, but the keys there are config, v4",
        ),
        ("[[olive.expected_failures]]\ncheck = 'x'", "'x' in .* to fail without saying why: give a reason"),
        (
            "[[olive.expected_failures]]\ncheck = 'x'\nreason = 'y'\nvariant = 'z'",
            "variant 'z' in .*, but there is no such variant; there are base",
        ),
        ("[[olive.expected_failures]]\nid = 'x'", "key 'id' in .* expected_failures"),
    ],
)
def test_what_is_not_known_is_refused(text: str, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        parse(text)


def test_an_expected_failure_of_an_unknown_check_is_refused_with_the_ids_that_exist() -> None:
    declared = parse("[[olive.expected_failures]]\ncheck = 'float31_logits'\nreason = 'a typo'")
    with pytest.raises(DeclarationError, match=r"'float31_logits' .* no such check; the checks are .*float32_logits"):
        declared.check_ids(all_checks())


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "conformance.toml").write_text("[olive")
    with pytest.raises(DeclarationError, match=r"conformance.toml .* cannot be read"):
        read_declaration("olive", tmp_path / "conformance.toml")


def test_every_check_has_a_promise_and_a_level() -> None:
    for check in all_checks().values():
        assert check.promise.endswith(".") and check.promise[0].isupper(), check.id
        assert check.level in ("contract", "numerics", "sharded", "compile", "device")


def test_the_documentation_lists_every_check_with_its_promise() -> None:
    text = (Path(__file__).parents[2] / "docs" / "conformance-kit.md").read_text()
    for check in all_checks().values():
        assert f"| {check.level} | `{check.id}` | {check.promise} |" in text
