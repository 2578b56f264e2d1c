"""A patch pack whose hooks return the parts of a given spec. By it the kit gets a family's own mapping for a changed
architecture through the ordinary registry."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from ttpu_conformance.case import Case
from ttpu_core.architecture import Architecture
from ttpu_core.hookspecs import hookimpl
from ttpu_core.plugin_records import PATCH_PACKS
from ttpu_core.registry import Registry
from ttpu_core.spec import NO_MLP, ArchitectureSpec, AttentionSpec, MixerSpec

NAME = "conformance-hypothesis"


class Overlay:
    """Answers every hook that describes a model from `spec`."""

    def __init__(self, spec: ArchitectureSpec) -> None:
        self.spec = spec

    @hookimpl
    def ttpu_embedding(self, config: Any) -> Any:
        return self.spec.embedding

    @hookimpl
    def ttpu_head(self, config: Any) -> Any:
        return self.spec.head

    @hookimpl
    def ttpu_norm(self, config: Any) -> Any:
        return self.spec.layers[0].norm

    @hookimpl
    def ttpu_final_norm(self, config: Any) -> Any:
        return self.spec.final_norm

    @hookimpl
    def ttpu_block(self, config: Any, layer: int) -> Any:
        return self.spec.layers[layer].block

    @hookimpl
    def ttpu_attention(self, config: Any, layer: int) -> Any:
        mixer = self.spec.layers[layer].mixer
        return mixer if isinstance(mixer, AttentionSpec) else None

    @hookimpl
    def ttpu_mixer(self, config: Any, layer: int) -> Any:
        mixer = self.spec.layers[layer].mixer
        return mixer if isinstance(mixer, MixerSpec) else None

    @hookimpl
    def ttpu_mlp(self, config: Any, layer: int) -> Any:
        return self.spec.layers[layer].mlp or NO_MLP


current: Overlay | None = None
"""What the entry point below finds when the registry loads it."""


def described_as(case: Case, spec: ArchitectureSpec) -> Architecture:
    """Return what the case's plugin describes for its config if every other hook answers from `spec`.

    Raises:
        TTPUError: the plugin has no mapping for such an architecture.
    """
    global current
    point = EntryPoint(NAME, f"{__name__}:current", PATCH_PACKS)
    current = Overlay(spec)
    try:
        return Registry([*case.entry_points, point]).architecture(case.config(), (*case.options.patch_packs, NAME))
    finally:
        current = None
