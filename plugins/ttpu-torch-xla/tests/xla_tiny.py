"""Tiny stock models of every model type that the four families serve, from what the conformance kit declares of them;
with few layers, one of each kind, as each compiles its own programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from ttpu_conformance.declaration import BASE, Declaration, declaration_for
from ttpu_conformance.errors import NoReference
from ttpu_conformance.tiny import random_model, written_config
from ttpu_core import ModelConfig, default_registry
from ttpu_core.plugin_records import ARCHITECTURES
from ttpu_torch_xla.patches.choice import patches_for
from ttpu_torch_xla.patches.patch import Patch, applied
from ttpu_torch_xla.runtime import TorchRuntime, current

FAMILIES = ("ttpu_llama", "ttpu_gemma", "ttpu_qwen", "ttpu_mistral")
TOKENS, WINDOW = 40, 13  # the kit's windows and chunks are at most 16 long

_BOTH = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_SHARED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
_WIDER = {"num_kv_shared_layers": 1, "per_layer_config": {1: {"head_dim": 16}, 2: {"head_dim": 16}}}
FEWER_LAYERS: dict[str, dict[str, Any]] = {
    "gemma2": _BOTH,
    "gemma3_text": _BOTH,
    "vaultgemma": _BOTH,
    # image_token_id: transformers searches the prompt for one that is no token of the tiny vocabulary.
    "gemma3": {"image_token_id": 199, "text_config": _BOTH},
    "gemma3n_text": _SHARED
    | {"num_kv_shared_layers": 1, "intermediate_size": [112] * 3, "activation_sparsity_pattern": [0.9, 0.0, 0.0]},
    "gemma4": {"text_config": _SHARED | _WIDER},
    "gemma4_text": _SHARED | _WIDER,
    "llama4_text": {"num_hidden_layers": 2, "no_rope_layer_interval": 2},
    "ministral": _BOTH,
    "qwen3_next": _HYBRID,
    "qwen3_5_text": _HYBRID,
}


def _changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """With whole keys replaced, those of the text part one by one."""
    text = {"text_config": {**base["text_config"], **changes["text_config"]}} if "text_config" in changes else {}
    return {**base, **changes, **text}


def declared(model_type: str) -> Declaration:
    """What the family declares of a model type, with fewer layers and no variants but the base."""
    [record] = [one for one in default_registry().plugins(ARCHITECTURES) if one.name == model_type]
    whole = declaration_for(model_type, record.value)
    base = _changed(whole.base, FEWER_LAYERS.get(model_type, {}))
    return replace(whole, base=base, variants=(whole.variant(BASE),), heavy=(), published=(), expected_failures=())


def model_types() -> list[str]:
    """All model types of the four families."""
    records = default_registry().plugins(ARCHITECTURES)
    return sorted(record.name for record in records if record.value.split(".")[0] in FAMILIES)


@dataclass
class Tiny:
    """One model: the stock one on the host, whose results are the reference, and then the same on the device.

    Attributes:
        stock: what `on_host` was told to remember, by name.
    """

    model: Any
    runtime: TorchRuntime
    patches: tuple[Patch, ...]
    stock: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.runtime.device()

    def move(self) -> None:
        """To the device, with nothing counted so far."""
        self.model.to(self.device)
        self.runtime.sync(wait=True)
        self.runtime.reset_counters()

    def logits(self, **inputs: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, vocab] on the host, of inputs on the host."""
        with torch.no_grad():
            moved = {name: value.to(self.model.device) for name, value in inputs.items()}
            out = self.model(**moved).logits
            if self.model.device.type == "xla":
                self.runtime.sync()
            return out.cpu()


@contextmanager
def tiny(model_type: str, attention: str = "eager") -> Iterator[Tiny]:
    """A model on the host, in float32, with the patches that the backend chooses for it in place."""
    declaration = declared(model_type)
    variant = declaration.variant(BASE)
    try:
        model = random_model(declaration, variant)
    except NoReference as error:
        pytest.skip(str(error))
    model.set_attn_implementation(attention)
    model.generation_config.pad_token_id = 0
    architecture = default_registry().architecture(ModelConfig.from_dict(written_config(declaration, variant)))
    patches = patches_for(architecture, attention)
    with applied(patches):
        yield Tiny(model, current(), patches)


def prompt(rows: int, tokens: int, *, seed: int = 0, left: dict[int, int] | None = None) -> tuple[torch.Tensor, ...]:
    """Token ids [rows, tokens] and a mask with so many columns of padding on the left of each row."""
    ids = torch.randint(1, 180, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(rows, tokens, dtype=torch.long)
    for row, columns in (left or {}).items():
        ids[row, :columns], mask[row, :columns] = 0, 0
    return ids, mask


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, as a share of the reference's scale."""
    assert ours.isfinite().all()
    return float((ours - theirs).abs().max() / theirs.abs().max())
