"""The core is quick because of what it leaves alone: finding plugins and describing a model need no framework."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "jax", "jaxlib", "flax", "transformers", "numpy", "safetensors", "huggingface_hub")

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
}

LIST = "import ttpu_core; assert ttpu_core.default_registry().plugins()"
DESCRIBE = f"""
from ttpu_core import ModelConfig, default_registry
architecture = default_registry().architecture(ModelConfig.from_dict({LLAMA}), [])
assert architecture.spec.num_parameters and architecture.spec.groups() and architecture.mapping.tensors
"""


def loaded_after(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of `names` a fresh interpreter has imported once it has run `code`."""
    report = f"\nimport json, sys\nprint(json.dumps([name for name in {names} if name in sys.modules]))"
    finished = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, check=True, timeout=60
    )
    return list(json.loads(finished.stdout))


@pytest.mark.parametrize("code", ["import ttpu_core", LIST, DESCRIBE], ids=["import", "list plugins", "describe llama"])
def test_the_core_loads_no_framework_and_no_numpy(code: str) -> None:
    assert loaded_after(code, HEAVY) == []


def test_importing_the_core_loads_none_of_its_rooms() -> None:
    rooms = ("registry", "spec", "config", "mapping", "checkpoint", "cli")
    assert loaded_after("import ttpu_core", tuple(f"ttpu_core.{room}" for room in rooms)) == []
    assert loaded_after("import ttpu_core", ("pluggy", "packaging", "typer", "rich")) == []


def test_listing_plugins_loads_no_family_and_no_backend() -> None:
    assert loaded_after(LIST, ("ttpu_llama", "ttpu_llama.llama", "ttpu_jax", "typer", "rich")) == []


def test_every_public_name_can_be_imported() -> None:
    import ttpu_core

    for name in ttpu_core.__all__:
        assert getattr(ttpu_core, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ttpu_core.nothing
