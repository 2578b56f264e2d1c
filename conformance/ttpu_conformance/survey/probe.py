"""Runs the tiny model of one type, and compares it with torch: the survey's row of that type."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ttpu_conformance.declaration import Variant
from ttpu_conformance.survey.rows import ALLOWED, Row
from ttpu_conformance.survey.types import surveyed_types, tiny_declaration
from ttpu_conformance.tiny import SEQUENCE, random_model
from ttpu_core.auto import AutoModelForTPU
from ttpu_core.errors import RequestError, TTPUError, UnsupportedError
from ttpu_core.registry import default_registry

PROMPTS = (20, 13)
"""Lengths of the prompts that are generated from together; a model that cannot be padded gets two of the first."""
NEW_TOKENS = 24
TIE = 1e-4
"""How far below torch's largest logit the logit of a generated token may be, in standard deviations."""
SLICE = "v5e:1x1"
FIRST_TOKEN = 3
"""Those before are special in some configs."""


def probe(model_type: str) -> Row:
    """Make the tiny model of a type, run it, and compare it with torch."""
    began = time.perf_counter()
    row = Row(model_type, surveyed_types()[model_type], "refused")
    with tempfile.TemporaryDirectory() as folder:
        row = _run(row, Path(folder))
    return replace(row, seconds=round(time.perf_counter() - began, 1))


def _run(row: Row, folder: Path) -> Row:
    import torch

    texts = np.random.default_rng(0).integers(FIRST_TOKEN, _vocab(), (2, SEQUENCE))
    try:
        reference = random_model(tiny_declaration(row.model_type), Variant("base"))
        with torch.no_grad():
            expected = reference(input_ids=torch.tensor(texts)).logits.float().numpy()
        reference.save_pretrained(folder)
    except Exception as error:  # transformers' code for any type
        return replace(row, way="not tried", reason=f"no tiny model of it could be made: {_told(error)}")
    try:
        model: Any = AutoModelForTPU.from_pretrained(folder, backend="jax", dtype="float32")
    except Exception as error:
        row = replace(row, reason=_told(error).replace(str(folder), "the model"))
        return _on_torch_xla(row, folder, reference, texts, expected)
    row = replace(row, way="native" if default_registry().is_described(row.model_type) else "fallback")
    programs = _Programs(model.programs)
    scale = max(1.0, float(expected.std()))
    try:
        apart = float(np.abs(np.asarray(model(texts).logits, np.float32) - expected).max()) / scale
        row = replace(row, error=apart if np.isfinite(apart) else 1e9)
        tokens, padded = _generated(model, texts)
    except Exception as error:
        return replace(row, reason=_told(error), decodes=False if row.error is not None else None)
    below = max(_below_best(reference, each, length) for each, length in tokens)
    row = replace(row, decodes=below <= TIE, padded=padded)
    if not row.equal:
        row = replace(row, reason=f"logits differ from torch's by {row.error:.1e}; {ALLOWED[row.way]:.0e} is allowed")
    elif not row.decodes:
        row = replace(row, reason=f"generated a token whose logit is {below:.1e} below torch's largest")
    reason = programs.refused()
    return replace(row, compiles=not reason, compile_reason=reason)


def _on_torch_xla(row: Row, folder: Path, reference: Any, texts: np.ndarray, expected: np.ndarray) -> Row:
    """The row of a type that is refused on JAX, if torch_xla runs it; else the row as it is."""
    import torch

    ids = torch.tensor(texts[:, : PROMPTS[0]])
    asked: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None,
    }  # fmt: skip
    try:
        model: Any = AutoModelForTPU.from_pretrained(folder, backend="torch_xla", dtype="float32")
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(texts).to(model.device)).logits.float().cpu().numpy()
        same = torch.equal(model.generate(ids, **asked), reference.generate(ids, **asked))
    except Exception:  # why JAX refuses it is the better reason
        return row
    apart = float(np.abs(logits - expected).max()) / max(1.0, float(expected.std()))
    reason = f"on JAX: {row.reason}"
    return replace(row, way="torch_xla", error=apart if np.isfinite(apart) else 1e9, decodes=same, reason=reason)


def _vocab() -> int:
    from ttpu_conformance.tiny import SIZES

    return int(SIZES["vocab_size"]) - FIRST_TOKEN  # the last ones stand for pictures in some configs


def _generated(model: Any, texts: np.ndarray) -> tuple[list[tuple[np.ndarray, int]], bool]:
    """Continued prompts with the lengths of the prompts, and whether these were padded."""
    try:
        return _continued(model, [text[:length] for text, length in zip(texts, PROMPTS, strict=True)]), True
    except (RequestError, UnsupportedError):
        return _continued(model, [text[: PROMPTS[0]] for text in texts]), False


def _continued(model: Any, prompts: Sequence[np.ndarray]) -> list[tuple[np.ndarray, int]]:
    found = model.generate([list(map(int, each)) for each in prompts], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    longest = max(len(each) for each in prompts)
    return [
        (np.concatenate([prompt, np.asarray(row)[longest:]]), len(prompt))
        for row, prompt in zip(found, prompts, strict=True)
    ]


def _below_best(reference: Any, tokens: np.ndarray, start: int) -> float:
    """How far the logits of tokens [seq] from `start` on are below torch's largest ones, at most."""
    import torch

    with torch.no_grad():
        logits = reference(input_ids=torch.tensor(tokens)[None]).logits.float().numpy()[0, start - 1 : -1]
    chosen = np.take_along_axis(logits, tokens[start:, None], 1)[:, 0]
    return float((logits.max(1) - chosen).max()) / max(1.0, float(logits.std()))


class _Programs:
    """Notes the functions that a model compiles, so that they can be compiled for a TPU too."""

    def __init__(self, programs: Any) -> None:
        self._params, self._compile = programs._params, programs._get
        self._found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        programs._get = self._noted

    def _noted(self, key: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        from jax import ShapeDtypeStruct, tree

        abstract = tree.map(lambda array: ShapeDtypeStruct(array.shape, array.dtype), arguments)
        self._found[str(key[0])] = function, abstract
        return self._compile(key, function, *arguments)

    def refused(self) -> str:
        """Why the TPU compiler takes the prefill or the decoding not; empty if it takes both."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        from ttpu_jax.aot.compile import compile_for
        from ttpu_jax.aot.topology import make_mesh, tpu_topology

        try:
            topology = tpu_topology(SLICE)
            sharding = NamedSharding(make_mesh(topology, {"data": 1}), PartitionSpec())
            for name in ("prefill", "decode"):
                function, arguments = self._found[name]
                placed = jax.tree.map(
                    lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
                    (dict(self._params), *arguments),
                )
                compile_for(topology, function, *placed)
        except Exception as error:  # whatever the compiler says
            return _told(error)
        return ""


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())[:600]
    return text if isinstance(error, TTPUError) else f"{type(error).__name__}: {text}"
