"""Adapters in peft's files, adapter_config.json and adapter_model.safetensors: written from a run, read to begin one,
and merged into the checkpoint of their base model."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from safetensors.numpy import save_file

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import open_checkpoint
from ttpu_core.checkpoint.header import TensorInfo, TensorReader, read_header
from ttpu_core.errors import CheckpointError, RequestError, UnsupportedError
from ttpu_core.mapping import FlaxMapping, gather, pad_mapping, stack_layers
from ttpu_core.sharding.padding import Paddings
from ttpu_core.spec import ArchitectureSpec
from ttpu_jax.params.adapter_sites import is_transposed
from ttpu_jax.params.dtypes import stored_dtype
from ttpu_jax.params.export import Deferred, export_tensors, staging_folder, wait_for_all
from ttpu_jax.train.adapters import MAGNITUDE, PREFIX, A, Adapters, B

if TYPE_CHECKING:
    from ttpu_jax.causal_lm import JaxCausalLM

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WITHIN = re.compile(r"(?:.*\.)?language_model\.(?:model\.)?layers\.(\d+)\.(.+)")
_SUFFIX = re.compile(r"(.+?)(?:\.base_layer)?\.(?:(lora_.+)|([^.]+))")
"""What follows a module's name in peft's files: of an adapter, or of the base model."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Of each file of a base model, how many places the fingerprint reads, and how much of each."""


def identity_of_adapters(adapters: Adapters, model: JaxCausalLM) -> dict[str, Any]:
    """What JSON holds of a run's adapters.

    Returns:
        peft_config: the content of adapter_config.json.
        modules: name of a trained array → its names in peft's files, one for each layer.
        whole: the stacked paths of the base model's parameters that are trained too.
        base: a digest of the base model's files, and of how it is quantized.
        files: a digest of its files alone; None if it was not read from files.
        base_path: where these were.
    """
    modules: dict[str, list[str]] = {}
    for name, _, stored in adapters.modules():
        modules.setdefault(name, []).append(stored)
    return {
        "peft_config": _peft_config(adapters),
        "modules": modules,
        "whole": sorted(adapters.whole),
        "base": _fingerprint(model),
        "files": None if model.files is None else _of_files(model.files),
        "base_path": model.source,
    }


def write_adapter(
    folder: Path,
    identity: Mapping[str, Any] | None,
    arrays: Mapping[str, np.ndarray],
    architecture: Architecture,
    kind: np.dtype[Any],
    beside: Iterable[Path] = (),
) -> Path:
    """Write an adapter that peft and the serving engine read; return its folder. The files are written
    beside those of an adapter that was there, and then take their places one by one. All processes must call this.

    Args:
        folder: to write.
        identity: of the adapters.
        arrays: stacked path or name → array without padding, on the host.
        architecture: of the base model.
        kind: the dtype of the written tensors.
        beside: files that are copied, as those of the tokenizer.
    """
    assert identity is not None
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = _low_rank_tensors(identity, arrays)
        for name, value in _whole_tensors(identity, arrays, architecture).items():
            tensors[_name_beside_adapters(name, tensors)] = value
        written = {name: np.ascontiguousarray(value.astype(kind)) for name, value in tensors.items()}
        config = {**identity["peft_config"], "base_model_name_or_path": identity["base_path"]}
        with staging_folder(folder) as staging:
            save_file(written, staging / WEIGHTS, metadata={"format": "pt"})
            (staging / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
            for file in beside:
                shutil.copyfile(file, staging / file.name)
    wait_for_all()
    return folder


def read_adapter(
    folder: str, adapters: Adapters, architecture: Architecture, padded: ArchitectureSpec, paddings: Paddings
) -> dict[str, np.ndarray]:
    """The arrays of an adapter in peft's format, by stacked path or name, float32 and padded for the mesh.

    Args:
        folder: of the adapter.
        adapters: that are trained.
        architecture: of the base model.
        padded: the architecture as the mesh needs it.
        paddings: of the parameters of single layers.

    Raises:
        RequestError: there is no such file.
        CheckpointError: it is another model's or another kind of adapter, or holds tensors that are not trained.
    """
    file = Path(folder).expanduser() / WEIGHTS
    if not file.is_file():
        raise RequestError(
            f"adapter_name_or_path={folder!r} was given, but there is no {WEIGHTS}: save it with peft's "
            "save_pretrained, or name the folder that `ttpu export` wrote."
        )
    tensors = _by_our_names(dict(_tensors(file)), architecture.mapping)
    found = adapters.from_files(tensors, folder)
    used = {stored for _, _, stored in adapters.modules()}

    def whole(name: str) -> np.ndarray:
        stored = _name_beside_adapters(name, tensors)
        used.add(stored)
        return tensors[stored]

    if adapters.whole:
        rules = dict(stack_layers(pad_mapping(architecture.mapping, paddings), padded).rules)
        for path in adapters.whole:
            found[path] = np.empty(rules[path].result_shape, np.float32)
            try:
                gather(rules[path], whole, found[path])
            except KeyError as missing:
                raise CheckpointError(
                    f"the adapter {folder} was to be trained on, but it has no {missing}, which peft_config's "
                    "modules_to_save and bias choose: use its own adapter_config.json."
                ) from missing
    _refuse_others([name for name in tensors if name not in used], folder, architecture.mapping)
    return found


def _by_our_names(tensors: Mapping[str, np.ndarray], mapping: FlaxMapping) -> dict[str, np.ndarray]:
    """The tensors of peft's files by the names that the mapping has for their modules: peft names them as the class of
    the base model does, and checkpoints of several classes hold the same model under other prefixes."""
    mapping = replace(mapping, tied=())  # a head in an adapter does not stand for the embedding
    split = {name: _SUFFIX.fullmatch(name.removeprefix(PREFIX)) for name in tensors}
    of_base = {name: f"{found[1]}.{'weight' if found[2] else found[3]}" for name, found in split.items() if found}
    ours = {actual: name for name, actual in mapping.canonical(of_base.values()).items()}
    found = {}
    for name, tensor in tensors.items():
        base = of_base.get(name)
        if base in ours:
            module = base.rpartition(".")[0]
            name = name.replace(f"{PREFIX}{module}.", f"{PREFIX}{ours[base].rpartition('.')[0]}.", 1)
        found[name] = tensor
    return found


def _refuse_others(names: list[str], folder: str, mapping: FlaxMapping) -> None:
    """Refuse an adapter with tensors that would not be trained on, and so be missing where it is written again; warn of
    those of parts that the model does not have here, such as towers for pictures."""
    def is_ignored(name: str) -> bool:
        module, adapter, _ = name.removeprefix(PREFIX).partition(".lora_")
        return mapping.is_ignored(f"{module}.weight" if adapter else module)

    chosen = sorted(name for name in names if not is_ignored(name))
    if chosen:
        raise CheckpointError(
            f"the adapter {folder} was to be trained on, but it holds {_some(chosen)}, which neither its config nor "
            "peft_config chooses and which would be lost: leave target_modules, exclude_modules, layers_to_transform, "
            "modules_to_save and bias out of peft_config, or save the adapter without them (peft's save_pretrained "
            "leaves out embeddings with save_embedding_layers=False)."
        )
    if names:
        warnings.warn(
            f"the adapter {folder} has {_some(sorted(names))} of parts that this model is loaded without, so that the "
            "trained one will not have them",
            stacklevel=5,
        )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"


def merged_tensors(
    identity: Mapping[str, Any], arrays: Mapping[str, np.ndarray], architecture: Architecture, kind: np.dtype[Any]
) -> dict[str, Deferred]:
    """Name → tensor of the base model's checkpoint with the adapter merged in float32, written in the dtype `kind`.

    Raises:
        CheckpointError: the base model's files are not there any more, or are others than those of the run.
        UnsupportedError: they hold quantized weights.
    """
    config = identity["peft_config"]
    source = identity["base_path"]
    try:
        base = open_checkpoint(source or "")
    except Exception as error:  # whatever says that it is gone: a folder, the Hub
        raise CheckpointError(
            f"adapters were to be merged into {source}, but that cannot be opened ({error}): put the base model there, "
            "or export without --merge."
        ) from error
    known = identity.get("files")  # which earlier versions did not record
    if known is not None and known != _of_files(base.path):
        raise CheckpointError(
            f"adapters were to be merged into {source}, but its files are not those that the run trained beside: put "
            "the run's base model there, or export without --merge."
        )
    if architecture.config.get("quantization_config"):
        raise UnsupportedError(
            f"adapters were to be merged into {source}, but its weights are quantized: export without --merge, and "
            "serve or merge the adapter with the checkpoint that is not quantized."
        )
    low_rank, whole = _low_rank_tensors(identity, arrays), _whole_tensors(identity, arrays, architecture)
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])

    turned = {leaf.name for _, rule in architecture.mapping.rules for leaf in rule.leaves() if is_transposed(leaf)}

    def merged(name: str, info: TensorInfo) -> np.ndarray:
        if name in whole:
            return whole[name].astype(np.float32)
        with TensorReader() as reader:
            stored = _read(info, reader)
        value = stored.T if name in turned else stored
        module = f"{PREFIX}{name.removesuffix('.weight')}"
        if f"{module}.{A}.weight" in low_rank:
            change = low_rank[f"{module}.{B}.weight"] @ low_rank[f"{module}.{A}.weight"]
            value = value + np.float32(scaling) * change
            if (magnitude := low_rank.get(f"{module}.{MAGNITUDE}")) is not None:
                value *= (magnitude / np.linalg.norm(value, axis=1))[:, None]
        return np.ascontiguousarray(value.T) if name in turned else value

    names = {name: base.tensors[stored] for name, stored in architecture.mapping.canonical(base.tensors).items()}
    return {name: Deferred(tuple(info.shape), kind, partial(merged, name, info)) for name, info in names.items()}


def _peft_config(adapters: Adapters) -> dict[str, Any]:
    settings = adapters.settings
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": settings.r,
        "lora_alpha": settings.lora_alpha,
        "lora_dropout": settings.lora_dropout,
        "target_modules": _target_names(adapters),
        "use_rslora": settings.use_rslora,
        "use_dora": settings.use_dora,
        "bias": settings.bias,
        "modules_to_save": list(settings.modules_to_save) or None,
        "init_lora_weights": settings.init_lora_weights,
        "inference_mode": True,
        "fan_in_fan_out": any(is_transposed(leaf) for t in adapters.targets for r in t.rules for leaf in r.leaves()),
    }


def _target_names(adapters: Adapters) -> str | list[str]:
    """What peft chooses the same modules by: the ends of names where all modules of this name have adapters. Of a text
    model within another one a pattern, because that one's towers may have modules of these names too."""
    chosen = {module for target in adapters.targets for block in target.blocks for module in block.modules}
    if (pattern := _pattern_within(chosen)) is not None:
        return pattern
    every = {
        tensor.removesuffix(".weight") for target in adapters.targets for each in target.tensors for tensor in each
    }
    tails = {module.rsplit(".", 1)[-1] for module in chosen}
    partly = {tail for tail in tails if any(m.endswith(f".{tail}") and m not in chosen for m in every)}
    full = {module for module in chosen if module.rsplit(".", 1)[-1] in partly}
    return sorted((tails - partly) | full)


def _pattern_within(modules: Iterable[str]) -> str | None:
    """The regular expression of these modules of a `language_model`'s layers, whatever a version of transformers puts
    before it and behind it; None for a model of its own."""
    layers: dict[str, list[int]] = {}
    for module in modules:
        found = _WITHIN.fullmatch(module)
        if found is None:
            return None
        layers.setdefault(found[2], []).append(int(found[1]))
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, numbers in sorted(layers.items()):
        alike.setdefault(tuple(sorted(numbers)), []).append(re.escape(name))
    parts = [rf"({'|'.join(map(str, numbers))})\.({'|'.join(names)})" for numbers, names in sorted(alike.items())]
    return rf"(.*\.)?language_model\.(model\.)?layers\.({'|'.join(parts)})"


def _fingerprint(model: JaxCausalLM) -> str:
    """A digest of the files that the base model was loaded from, and of how it is quantized."""
    return _of_files(model.files, repr(model.spec.kernel_formats))


def _of_files(folder: Path | None, words: str = "") -> str:
    """A digest of the weight files of a folder, read in places, and of words before them."""
    digest = hashlib.sha256(words.encode())
    for path in () if folder is None else sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(size * number // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _low_rank_tensors(identity: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        stored: np.asarray(arrays[name][place])
        for name, modules in identity["modules"].items()
        for place, stored in enumerate(modules)
    }


def _whole_tensors(
    identity: Mapping[str, Any], arrays: Mapping[str, np.ndarray], architecture: Architecture
) -> dict[str, np.ndarray]:
    """The base model's own tensors that are trained, by their names in its checkpoint."""
    stacked = stack_layers(architecture.mapping, architecture.spec)
    chosen = tuple((path, stacked[path]) for path in identity["whole"])
    return export_tensors(FlaxMapping(chosen), {path: arrays[path] for path, _ in chosen})


def _name_beside_adapters(name: str, tensors: Mapping[str, Any]) -> str:
    """What peft calls a tensor of the base model in a file of adapters. A module that has an adapter holds its own
    tensors, such as its bias, in `base_layer`."""
    module, _, kind = name.rpartition(".")
    return f"{PREFIX}{module}.base_layer.{kind}" if f"{PREFIX}{module}.{A}.weight" in tensors else f"{PREFIX}{name}"


def _tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    with TensorReader() as reader:
        for name, info in read_header(file).tensors.items():
            yield name, _read(info, reader)


def _read(info: TensorInfo, reader: TensorReader) -> np.ndarray:
    stored = np.empty(info.shape, stored_dtype(info.dtype, info.name))
    if stored.size:
        reader.read_into(info, stored.reshape(-1).view(np.uint8).data)
    return stored.astype(np.float32)
