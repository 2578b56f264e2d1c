"""Reads LoRA adapters in PEFT's format: a directory with `adapter_config.json` and `adapter_model.safetensors` becomes
one low-rank update per adapted module of the base model. Adapter features that are not supported are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ttpu_core.checkpoint.header import TensorInfo, TensorReader, read_header
from ttpu_core.config import parse_json_object
from ttpu_core.errors import CheckpointError, RequestError, UnsupportedError
from ttpu_serve.runner import AdapterWeights, LowRankUpdate

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WRAPPER = "base_model.model."
"""What PEFT puts before the names of the base model's modules."""

REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules that were trained (modules_to_save)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "lora_bias": "biases (lora_bias)",
    "layer_replication": "repeated layers (layer_replication)",
    "target_parameters": "parameters outside linear modules, such as fused experts (target_parameters)",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
"""Settings of PEFT that change what an adapter computes, by their name in its config."""
KEEPS_BASE = ("gaussian", "eva", "orthogonal")
"""Initialisations by name that leave the base model's weights alone; PiSSA, OLoRA, CorDA, LoftQ … change them."""

STORED: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
"""Dtypes of adapters' tensors, by their names in safetensors files."""

_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")


def read_adapter(directory: str | Path) -> AdapterWeights:
    """Read an adapter's low-rank updates, keyed by the base model's modules.

    Raises:
        RequestError: the directory does not exist or holds no adapter.
        CheckpointError: the adapter's files are malformed or contradict each other.
        UnsupportedError: the adapter is not a plain LoRA adapter.
    """
    if not isinstance(directory, str | Path):
        raise RequestError(f"the adapter {directory!r} was asked for, but an adapter's directory is needed: pass one.")
    path = Path(directory)
    try:
        config = _read_config(path)
    except OSError as error:  # a name that is too long, a directory that may not be read
        raise RequestError(
            f"the adapter {str(path)[:100]!r} was asked for, but it cannot be read ({error.strerror}): correct "
            "the path."
        ) from error
    _check_kind(config, path)
    factors: dict[str, dict[str, np.ndarray]] = {}
    with TensorReader() as reader:
        for name, info in read_header(path / WEIGHTS).tensors.items():
            match = _FACTOR.fullmatch(name.removeprefix(WRAPPER))
            if match is None:
                raise UnsupportedError(
                    f"the adapter in {path} holds {name!r}, but only lora_A and lora_B of linear modules are served: "
                    "train one without it."
                )
            factors.setdefault(match[1], {})[match[2]] = _read(info, reader)
    if not factors:
        raise CheckpointError(f"the adapter in {path} holds no tensors: save it again.")
    updates = {module: _update(module, pair, config, path) for module, pair in factors.items()}
    return AdapterWeights(str(directory), updates)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    if not file.is_file():
        raise RequestError(
            f"the adapter {str(path)!r} was asked for, but there is no {CONFIG}: pass a directory as PEFT's "
            "save_pretrained writes it."
        )
    if not (path / WEIGHTS).is_file():
        raise RequestError(
            f"the adapter {str(path)!r} was asked for, but there is no {WEIGHTS}: save it with safe_serialization=True."
        )
    try:
        return parse_json_object(file.read_bytes())
    except ValueError as problem:
        raise CheckpointError(f"{file} {problem}: save the adapter again.") from None


def _check_kind(config: Mapping[str, Any], path: Path) -> None:
    kind = config.get("peft_type", "LORA")
    found = [words for name, words in REFUSED.items() if config.get(name)]
    if kind != "LORA":
        found.insert(0, f"peft_type {kind!r}")
    if config.get("bias", "none") != "none":
        found.append(f"trained biases (bias={config['bias']!r})")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start not in KEEPS_BASE:
        found.append(f"base weights that its initialisation {start!r} changed")
    if found:
        raise UnsupportedError(
            f"the adapter in {path} uses {', '.join(found)}, but plain LoRA (and rsLoRA) is served: train or convert "
            "it to that."
        )


def _read(info: TensorInfo, reader: TensorReader) -> np.ndarray:
    stored = np.empty(info.shape, _stored_dtype(info))
    if stored.size:
        reader.read_into(info, stored.reshape(-1).view(np.uint8).data)
    return stored.astype(np.float32)


def _stored_dtype(info: TensorInfo) -> np.dtype[Any]:
    if info.dtype not in STORED:
        raise CheckpointError(
            f"tensor {info.name!r} is stored as {info.dtype}, but adapters are read in {', '.join(STORED)}: save it in "
            "one of those."
        )
    return np.dtype(STORED[info.dtype])


def _update(module: str, pair: Mapping[str, np.ndarray], config: Mapping[str, Any], path: Path) -> LowRankUpdate:
    def damaged(problem: str) -> CheckpointError:
        return CheckpointError(f"the adapter in {path} {problem} of {module!r}: save it again.")

    if len(pair) != 2:
        raise damaged(f"holds only lora_{next(iter(pair))}")
    a, b = pair["A"], pair["B"]
    if a.ndim != 2 or b.ndim != 2 or not a.size or not b.size:
        raise damaged(f"holds matrices of the shapes {a.shape} and {b.shape}")
    rank = _pattern(config, "rank_pattern", module, config.get("r"))
    alpha = _pattern(config, "alpha_pattern", module, config.get("lora_alpha"))
    if a.shape[0] != b.shape[1] or a.shape[0] != rank:
        raise damaged(f"holds the ranks {a.shape[0]} and {b.shape[1]}, and its config says {rank},")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise damaged(f"has lora_alpha {alpha!r} in place of a number")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        # A product with zero would carry it to requests of other adapters.
        raise damaged("holds values that are not finite")
    return LowRankUpdate(a, b * np.float32(alpha / (sqrt(rank) if config.get("use_rslora") else rank)))


def _pattern(config: Mapping[str, Any], name: str, module: str, default: Any) -> Any:
    """Return the value that a pattern mapping gives to a module: the first key that the module's name ends with wins,
    as in PEFT."""
    for key, value in (config.get(name) or {}).items():
        try:
            matches = re.match(rf"(.*\.)?({key})$", module)
        except re.error as error:
            raise CheckpointError(f"{name} of an adapter has the key {key!r}, but {error}: correct {CONFIG}.") from None
        if matches:
            return value
    return default
