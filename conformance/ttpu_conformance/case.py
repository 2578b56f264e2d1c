"""A case: one variant of one model type, described by one plugin, on one device. It makes the reference and our model
when a check first needs them, and keeps them for later checks."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np

from ttpu_conformance.declaration import (
    BASE,
    Declaration,
    ExpectedFailure,
    Published,
    Slice,
    Variant,
    declaration_for,
)
from ttpu_conformance.environment import Device
from ttpu_conformance.errors import NotProven
from ttpu_conformance.model_under_test import BackendUnderTest, ModelUnderTest, backend_name, backend_under_test
from ttpu_conformance.tiny import SEQUENCE, random_model, tiny_config, written_config
from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint, open_checkpoint
from ttpu_core.config import ModelConfig
from ttpu_core.errors import PluginError
from ttpu_core.plugin_records import ARCHITECTURES, PATCH_PACKS, PluginRecord
from ttpu_core.registry import Registry, default_registry

ROWS = 4
"""Sequences of a test batch."""

UNPUBLISHED = "unpublished"
"""The name of the published model that a type has not declared."""


@dataclass(frozen=True)
class Options:
    """The options of all cases of a run; `backend` None is the default backend."""

    device: Device = "cpu"
    patch_packs: tuple[str, ...] = ()
    attn_implementation: str = "auto"
    backend: str | None = None


class Reference:
    """A tiny transformers model, its saved checkpoint, and its results; independent of any plugin."""

    def __init__(self, declaration: Declaration, variant: Variant) -> None:
        self.declaration, self.variant = declaration, variant

    @cached_property
    def model(self) -> Any:
        """The torch model, float32."""
        return random_model(self.declaration, self.variant)

    @cached_property
    def path(self) -> Path:
        """The folder that `model.save_pretrained` wrote."""
        folder = Path(tempfile.mkdtemp(prefix="ttpu-conformance-"))
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.model.save_pretrained(folder)
        return folder

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json as transformers writes it; needs no weights."""
        return written_config(self.declaration, self.variant)

    @cached_property
    def transformers_config(self) -> Any:
        """The config as an object of its transformers class."""
        return tiny_config(self.declaration, self.variant)

    @cached_property
    def logits(self) -> np.ndarray:
        """float32 [ROWS, SEQUENCE, vocab] of `token_ids`."""
        return self.logits_of(self.model, self.token_ids)

    @cached_property
    def bfloat16_logits(self) -> np.ndarray:
        """The logits [ROWS, SEQUENCE, vocab] of the model loaded by `from_pretrained(dtype=bfloat16)`, which may keep
        parts in float32."""
        return self.logits_of(self.loaded(self.path, "bfloat16"), self.token_ids)

    def loaded(self, folder: Path, dtype: str = "float32") -> Any:
        """The reference model from a checkpoint, in evaluation mode, in float32 or bfloat16."""
        attention = self.declaration.attention
        return type(self.model).from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()

    @cached_property
    def token_ids(self) -> np.ndarray:
        """int64 [ROWS, SEQUENCE]."""
        text = self.transformers_config.get_text_config()
        return np.random.default_rng(0).integers(0, text.vocab_size, (ROWS, SEQUENCE))

    def logits_of(self, model: Any, ids: np.ndarray) -> np.ndarray:
        """Return a torch model's logits, float32 [batch, seq, vocab], of ids [batch, seq]."""
        import torch

        with torch.no_grad():
            return np.asarray(model(input_ids=torch.tensor(ids)).logits.float().numpy())

    def padded_logits(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the logits, float32 [batch, seq, vocab], of token ids [batch, seq] with padding where mask
        [batch, seq] is 0. A row's positions begin at its first real token."""
        import torch

        positions = np.maximum(mask.cumsum(-1) - 1, 0)
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        with torch.no_grad():
            output = self.model(**{name: torch.tensor(value) for name, value in given.items()})
        return np.asarray(output.logits.float().numpy())

    def clear(self) -> None:
        """Delete the model and its files."""
        if "path" in vars(self):
            self._remove()
        for name in ("model", "path", "config", "transformers_config", "logits", "bfloat16_logits", "token_ids"):
            vars(self).pop(name, None)


class Case:
    """One variant of one model type as one plugin describes it."""

    def __init__(
        self, registry: Registry, declaration: Declaration, variant: Variant, options: Options = Options()
    ) -> None:
        self.registry, self.declaration, self.variant, self.options = registry, declaration, variant, options
        self.reference = Reference(declaration, variant)
        self.record = plugin_record(registry, self.model_type)  # now, since a failing import makes it unusable

    @property
    def model_type(self) -> str:
        """The Hugging Face model type."""
        return self.declaration.model_type

    @property
    def name(self) -> str:
        """The case's name, as in `qwen3-sliding`."""
        return f"{self.model_type}-{self.variant.name}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names that an expected failure may give for this case."""
        return (self.variant.name,)

    def expected_failure(self, check: str) -> ExpectedFailure | None:
        """The declared failure of a check of this case on its backend; None without one."""
        return self.declaration.expected_failure(check, self.names, backend_name(self.options.backend))

    @property
    def is_base(self) -> bool:
        """Whether this is the declared base without changes."""
        return self.variant.name == BASE

    @property
    def wraps_text_model(self) -> bool:
        """Whether the type's config nests the text model's, which another model type has by itself."""
        return "text_config" in self.declaration.base

    @property
    def entry_points(self) -> list[EntryPoint]:
        """The entry points that describe this case: the family's, then those of the patch packs."""
        records = [self.record]
        for name in self.options.patch_packs:
            records += [r for r in self.registry.plugins(PATCH_PACKS) if r.name == name and r.usable]
        return [EntryPoint(record.name, record.value, record.group) for record in records]

    def config(self, **changes: Any) -> ModelConfig:
        """Return a fresh config, none of whose keys was read yet; `changes` replace or add keys."""
        return ModelConfig.from_dict({**self.reference.config, **changes})

    def describe(self, config: ModelConfig) -> Architecture:
        """Return the architecture that the plugin and the patch packs describe for a config."""
        return self.registry.architecture(config, self.options.patch_packs)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that transformers saved."""
        return open_checkpoint(self.reference.path)

    @cached_property
    def architecture(self) -> Architecture:
        """The architecture that the plugin describes for the config."""
        return self.describe(self.config())

    @property
    def backend(self) -> BackendUnderTest:
        """The backend that runs our models."""
        return backend_under_test(self.options.backend)

    @cached_property
    def model(self) -> ModelUnderTest:
        """Our model in float32, on one device."""
        return self.load()

    def load(
        self,
        *,
        dtype: str = "float32",
        mesh: str | None = None,
        architecture: Architecture | None = None,
        attn_implementation: str | None = None,
    ) -> ModelUnderTest:
        """Load our model of the checkpoint."""
        return self.backend.load(
            architecture or self.architecture,
            self.checkpoint,
            dtype=dtype,
            mesh=mesh,
            attn_implementation=attn_implementation or self.options.attn_implementation,
        )

    @cached_property
    def logits(self) -> np.ndarray:
        """Return our float32 logits [ROWS, SEQUENCE, vocab] of the reference's token ids."""
        return self.model.logits(self.reference.token_ids)

    def clear(self) -> None:
        """Drop models and compiled programs; they are made again when they are needed."""
        for name in ("model", "logits", "architecture", "checkpoint"):
            vars(self).pop(name, None)
        self.reference.clear()


class CompileCase(Case):
    """A published model of a model type, to be compiled for one TPU generation.

    Args:
        registry: where plugins are found.
        declaration: the plugin's conformance declaration.
        published: the published model; None where the plugin declares none, which the checks report.
        chip: the TPU generation, as in v5e.
        options: of the run.
    """

    def __init__(
        self,
        registry: Registry,
        declaration: Declaration,
        published: Published | None,
        chip: str,
        options: Options = Options(),
    ) -> None:
        name = UNPUBLISHED if published is None else published.name
        super().__init__(registry, declaration, Variant(f"{name}@{chip}"), options)
        self.published, self.chip = published, chip

    @property
    def names(self) -> tuple[str, ...]:
        """The model's name, with and without the generation."""
        return (self.variant.name,) if self.published is None else (self.variant.name, self.published.name)

    @property
    def slice(self) -> Slice:
        """The declared slice to compile for."""
        return Slice() if self.published is None else self.published.slices.get(self.chip, Slice())

    @cached_property
    def architecture(self) -> Architecture:
        """The architecture that the plugin describes for the published config.

        Raises:
            NotProven: there is none.
        """
        if self.published is None:
            raise NotProven(
                f"{self.declaration.source} declares no published model of type {self.model_type!r}, so that nothing "
                f'was compiled for {self.chip}: add [{self.model_type}.published."…"] with a real config.json.'
            )
        return self.describe(ModelConfig.from_file(self.published.config))


def plugin_record(registry: Registry, model_type: str) -> PluginRecord:
    """Return the usable plugin of a model type.

    Raises:
        PluginError: there is none, or more than one.
    """
    found = [record for record in registry.plugins(ARCHITECTURES) if record.name == model_type]
    usable = [record for record in found if record.usable]
    if len(usable) == 1:
        return usable[0]
    if found:
        reasons = " ".join(dict.fromkeys(f"{one.distribution} is {one.state}: {one.reason}" for one in found))
        raise PluginError(f"conformance of {model_type!r} was asked for, but {reasons}")
    known = ", ".join(registry.model_types()) or "none"
    raise PluginError(
        f"conformance of {model_type!r} was asked for, but no installed plugin describes it; those that are described "
        f"are {known}: install one (`ttpu list-plugins` shows what is installed)."
    )


def cases_of(
    model_type: str,
    options: Options = Options(),
    *,
    registry: Registry | None = None,
    declaration: Declaration | None = None,
    compile_for: Iterable[str] = (),
) -> list[Case]:
    """Return the cases of one model type: its variants, the base first, then its published models for each chip.

    Args:
        model_type: as in config.json.
        options: of the run.
        registry: where plugins are found; None is the default one.
        declaration: the plugin's conformance declaration; None reads its conformance.toml.
        compile_for: TPU generations, as in v5e.

    Raises:
        PluginError: no such plugin.
        DeclarationError: its conformance.toml holds something unknown.
    """
    registry = registry or default_registry()
    record = plugin_record(registry, model_type)
    declaration = declaration or declaration_for(model_type, record.value.partition(":")[0])
    return [
        *(Case(registry, declaration, variant, options) for variant in declaration.variants),
        *(
            CompileCase(registry, declaration, published, chip, options)
            for published in declaration.published or (None,)
            for chip in compile_for
        ),
    ]
