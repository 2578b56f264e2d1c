"""A patch states what it replaces, is in place inside its context, and leaves nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from ttpu_core.errors import PluginError
from ttpu_core.spec import TorchPatch
from ttpu_torch_xla.patches.patch import Patch, active, applied, from_family

pytestmark = pytest.mark.torch


class Norm:
    """A stand-in for a class of transformers."""

    def forward(self) -> str:
        return "stock"


class OtherNorm(Norm):
    """One that inherits its forward."""


def stock() -> str:
    return "stock"


def patched(*_: object) -> str:
    return "patched"


def louder(original: object) -> object:
    """Wraps what it replaces."""
    assert callable(original)
    return lambda: original().upper()


louder.wraps_original = True  # type: ignore[attr-defined]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A module `stock_library` to be patched."""
    module = ModuleType("stock_library")
    vars(module).update(function=stock, Norm=Norm, OtherNorm=OtherNorm, patched=patched, louder=louder)
    vars(module)["TABLE"] = {"eager": stock}
    monkeypatch.setitem(sys.modules, "stock_library", module)
    yield module  # type: ignore[misc]
    assert active() == ()


def patch(target: str, replacement: str = "stock_library:patched", name: str = "one") -> Patch:
    return Patch(name, f"stock_library:{target}", replacement, "because")


def test_a_function_a_method_and_an_entry_are_replaced_inside_the_context_only(library: SimpleNamespace) -> None:
    before = Norm.__dict__["forward"]
    with applied([patch("function"), patch("Norm.forward"), patch("TABLE[eager]"), patch("TABLE[splash]")]):
        assert library.function() == Norm().forward() == "patched"
        assert library.TABLE["eager"]() == library.TABLE["splash"]() == "patched"
        assert len(active()) == 4
    assert library.function() == Norm().forward() == "stock"
    assert Norm.__dict__["forward"] is before
    assert list(library.TABLE.items()) == [("eager", stock)]


def test_a_replacement_that_wraps_is_given_the_original(library: SimpleNamespace) -> None:
    with applied([patch("function", "stock_library:louder")]):
        assert library.function() == "STOCK"
    assert library.function is stock


def test_an_inherited_method_is_inherited_again_afterwards(library: SimpleNamespace) -> None:
    with applied([patch("OtherNorm.forward")]):
        assert (OtherNorm().forward(), Norm().forward()) == ("patched", "stock")
    assert "forward" not in vars(OtherNorm)
    assert OtherNorm().forward() == "stock"


def test_a_patch_that_two_models_share_stays_until_the_last_is_done(library: SimpleNamespace) -> None:
    first, second = applied([patch("function")]), applied([patch("function")])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert library.function() == "patched"
    second.__exit__(None, None, None)
    assert library.function() == "stock"


def test_what_was_applied_is_undone_when_a_later_patch_fails(library: SimpleNamespace) -> None:
    with pytest.raises(PluginError, match="no such thing"), applied([patch("function"), patch("nothing")]):
        raise AssertionError("not reached")
    assert library.function() == "stock"


@pytest.mark.parametrize(
    ("target", "replacement", "message"),
    [
        ("absent.path", "stock_library:patched", "cannot be had"),
        ("function", "stock_library:absent", "cannot be imported"),
        ("function", "no_such_module:x", "cannot be imported"),
    ],
)
def test_a_patch_that_cannot_be_applied_says_which_and_what_to_do(
    library: SimpleNamespace, target: str, replacement: str, message: str
) -> None:
    with pytest.raises(PluginError, match=message) as caught, applied([patch(target, replacement, "norms")]):
        pass
    assert "'norms'" in str(caught.value)
    assert "update" in str(caught.value)


def test_two_replacements_of_one_thing_at_a_time_are_refused(library: SimpleNamespace) -> None:
    with (
        applied([patch("function")]),
        pytest.raises(PluginError, match="is replaced by stock_library:patched at the moment"),
        applied([patch("function", "stock_library:louder", "two")]),
    ):
        pass


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("transformers.models.llama.modeling_llama:LlamaRMSNorm", "module"),
        ("transformers.models.llama.modeling_llama:LlamaRMSNorm.forward", "monkey"),
        ("transformers.masking_utils:AttentionMaskInterface._global_mapping[splash]", "interface"),
    ],
)
def test_a_familys_patch_keeps_its_words_and_says_how_deep_it_cuts(target: str, kind: str) -> None:
    made = from_family(TorchPatch(target, "ttpu_x.torch:Y", "it syncs", "with experts"), "ttpu-x 1.0")
    assert (made.kind, made.reason, made.when, made.source) == (kind, "it syncs", "with experts", "ttpu-x 1.0")
