"""What the JAX backend reads of this machine's processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttpu_jax import platform
from ttpu_jax.runner import compilation_cache


@pytest.mark.parametrize(
    ("text", "has", "tiles"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16\n\nflags\t\t: fpu\n", True, False),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True, True),
        ("flags\t\t: fpu avx512f avx512_bf16x\n", False, False),
        ("model name\t: with avx512_bf16\nflags\t\t: fpu avx2\n", False, False),
        ("Features\t: fp asimd bf16\n", False, False),
        ("", False, False),
        (None, False, False),
    ],
)
def test_processors_that_multiply_bfloat16_are_known_by_their_flags(
    text: str | None, has: bool, tiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "CPU_INFO", tmp_path / "cpuinfo")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    platform.processor_features.cache_clear()
    try:
        assert platform.multiplies_bfloat16() == has
        assert platform.multiplies_bfloat16_tiles() == tiles
    finally:
        platform.processor_features.cache_clear()


def test_programs_of_processors_with_other_instructions_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = set()
    for features in ({"avx2"}, {"avx2", "avx512f"}):
        monkeypatch.setattr(compilation_cache, "processor_features", lambda features=features: frozenset(features))
        compilation_cache.host.cache_clear()
        hosts.add(compilation_cache.host())
    compilation_cache.host.cache_clear()
    assert len(hosts) == 2
