"""Chooses the patches of a model: the backend's own, those of its attention, and those of its family. Each target is
patched once, and the family's patch takes precedence."""

from __future__ import annotations

from importlib.util import find_spec

from ttpu_core.architecture import Architecture
from ttpu_torch_xla.patches.defaults import ADAPTERS, DEFAULTS
from ttpu_torch_xla.patches.patch import Patch, from_family
from ttpu_torch_xla.runtime import runtime_class


def patches_for(
    architecture: Architecture, attention: str, *, optional: bool = True, quantized: bool = False
) -> tuple[Patch, ...]:
    """The patches of a model.

    Args:
        architecture: of the model.
        attention: its name; "eager" and "sdpa" are transformers' own, and need none.
        optional: False leaves out all that the model runs rightly without.
        quantized: it has quantized layers.
    """
    from ttpu_torch_xla.attention import patches as attention_patches

    own = tuple(patch for patch in (*DEFAULTS, *runtime_class().patches) if optional or patch.needed)
    kernels = attention_patches(attention)
    family = [from_family(patch, architecture.family) for patch in architecture.spec.torch_patches] if optional else []
    adapters = (ADAPTERS,) if quantized and find_spec("peft") else ()
    return tuple({patch.target: patch for patch in (*own, *adapters, *kernels, *family)}.values())
