"""Types whose layers share keys, have sinks, subtract two maps or keep latents generate the same where the kernel for
decode steps writes their caches. Conformance runs on a CPU, which takes another way by default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ttpu import AutoModelForTPU
from ttpu_conformance.case import plugin_record
from ttpu_conformance.declaration import declaration_for
from ttpu_conformance.tiny import random_model
from ttpu_core.registry import default_registry
from ttpu_jax.generation import steps
from ttpu_jax.ops import attention
from ttpu_jax.ops.attention import decode_kernel, latent_decode


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gpt_oss", "diffllama", "deepseek_v3"])
def test_a_type_generates_the_same(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = plugin_record(default_registry(), model_type)
    declaration = declaration_for(model_type, record.value.partition(":")[0])
    random_model(declaration, declaration.variant("base")).save_pretrained(tmp_path)
    monkeypatch.setattr(steps, "cache_bucket", lambda slots, platform: 256)  # whole tiles, in two blocks
    monkeypatch.setattr(decode_kernel, "BLOCK_BYTES", 1)
    written: list[str] = []

    def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **more: Any) -> Any:
            written.append(name)
            return kernel(*given, **more)

        return run

    for module, name in ((attention, "write_and_attend"), (latent_decode, "latent_decode")):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    prompts = [list(np.random.default_rng(0).integers(3, 100, size)) for size in (100, 70)]
    found = []
    for attn_implementation in ("eager", "decode_attention"):
        model = AutoModelForTPU.from_pretrained(tmp_path, attn_implementation=attn_implementation)
        assert not written
        found.append(model.generate(prompts, max_new_tokens=4, ignore_eos=True))
    assert written
    np.testing.assert_array_equal(*found)
