"""One factory makes every model, and what it makes fits the core's protocol."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tiny import llama_checkpoint

from ttpu_core import default_registry, open_checkpoint
from ttpu_core.backend import CausalModel
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.params.initialize import random_parameters
from ttpu_jax.params.placement import local_placement

ROOT = Path(__file__).parents[3]
FLOAT32 = np.dtype(np.float32)


def test_nobody_but_the_factory_makes_a_decoder() -> None:
    sources = [path for folder in ("plugins", "conformance", "examples") for path in (ROOT / folder).rglob("*.py")]
    makers = [path.name for path in sources if re.search(r"(?<![\w\"])Decoder\(", path.read_text()) is not None]
    assert sorted(makers) == ["causal_model.py", "decoder.py"]  # the call and the class


@pytest.mark.parametrize("stacked", [False, True])
def test_parameters_and_placements_name_the_same_paths_and_the_model_runs_on_them(
    tmp_path: Path, stacked: bool
) -> None:
    spec = default_registry().architecture(open_checkpoint(llama_checkpoint(tmp_path / "llama")).config).spec
    placement = local_placement("fsdp=8")
    runtime = Runtime(placement, ropes=different_ropes(spec.layers))
    model: CausalModel = causal_model(spec, runtime, stacked=stacked)
    params = random_parameters(model.parameters, placement, FLOAT32)
    assert {path: array.sharding for path, array in params.items()} == dict(model.placements)
    tokens = np.arange(6, dtype=np.int32)[None]
    whole, none = model.forward(params, tokens, tokens)
    cached, cache = model.forward(params, tokens, cache=model.empty_cache(1, 8, FLOAT32))
    assert none is None and int(cache.length) == 6
    np.testing.assert_allclose(whole, cached, atol=1e-5)
