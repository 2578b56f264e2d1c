"""Parts that plugins implement themselves are found by import string, and what cannot be found is refused by name."""

from __future__ import annotations

import pytest

from ttpu_core.errors import PluginError, UnsupportedError
from ttpu_core.spec import CustomSpec
from ttpu_jax.model.custom import BUILT_IN, custom_class
from ttpu_jax.model.layers import DecoderLayer


def test_an_import_string_leads_to_its_class() -> None:
    assert custom_class(CustomSpec("mine", (("jax", "ttpu_jax.model.layers:DecoderLayer"),))) is DecoderLayer


@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_part_of_the_cores_vocabulary_needs_no_import_string(kind: type[CustomSpec]) -> None:
    assert custom_class(kind("mine")).__name__ == BUILT_IN[kind].partition(":")[2]


def test_a_part_without_an_implementation_for_this_backend_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'mamba' of this model has an implementation for torch_xla, but"):
        custom_class(CustomSpec("mamba", (("torch_xla", "a.b:C"),)))


@pytest.mark.parametrize("target", ["no_such_module:Mixer", "ttpu_jax.model.layers:Missing", "nonsense", ":"])
def test_an_import_string_that_leads_nowhere_is_refused(target: str) -> None:
    with pytest.raises(PluginError, match=r"'mamba' of this model is implemented by .* cannot be imported"):
        custom_class(CustomSpec("mamba", (("jax", target),)))


def test_an_import_string_that_leads_to_no_class_is_refused() -> None:
    with pytest.raises(PluginError, match="but that is no class"):
        custom_class(CustomSpec("mamba", (("jax", "ttpu_jax.model.custom:BUILT_IN"),)))
