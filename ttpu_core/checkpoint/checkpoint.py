"""Opens a local directory or a Hugging Face Hub id as a `Checkpoint`: its config and the location of each tensor's
bytes. No weights are loaded."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ttpu_core.checkpoint.dtypes import dtype_in_config
from ttpu_core.checkpoint.header import SafetensorsHeader, TensorInfo, read_header
from ttpu_core.config import ModelConfig, parse_json_object
from ttpu_core.errors import CheckpointError, MissingDependencyError

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
RUN_CHECKPOINTS = "checkpoints"
"""The folder of a training run with a folder for each saved step."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "*.txt"]
# Other formats of the same weights lie in folders (original/, onnx/) and in Mistral's consolidated files;
# fetching them would double the download.
HUB_IGNORED = ["*/*", "consolidated*.safetensors"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_PICKLE = re.compile(r".*\.(bin|pt|pth)(\.index\.json)?")
# Files that the trainers of transformers and accelerate write next to a model. They are pickles, but not weights.
_NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|random_states).*")
_HUB_REMEDIES = {  # by the name of huggingface_hub's error class, subclasses first
    "GatedRepoError": "accept its licence on its page, then run `hf auth login`",
    "RepositoryNotFoundError": "check the name, or run `hf auth login` if it is private",
    "RevisionNotFoundError": "pass a branch, tag or commit that the repository has as revision",
    "HFValidationError": "pass an id of the form org/name",
}


@dataclass(frozen=True)
class Checkpoint:
    """A directory with a config.json and safetensors files. The files are needed for tensors only, not for the
    config.

    `source` is the user's argument: the directory, or the Hub id that was downloaded to `path`."""

    path: Path
    config: ModelConfig
    source: str

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name. The headers are read once.

        Raises:
            CheckpointError: the files are missing or malformed.
        """
        weights = _find_weights(self)
        if weights.name == INDEX:
            return MappingProxyType(_read_index(weights))
        return read_header(weights).tensors

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def dtype(self) -> str:
        """The dtype for the weights: float32, bfloat16 or float16, from the config, or else from the stored tensors.

        Raises:
            CheckpointError: the config names none, and the files are missing or malformed.
            ConfigError: the config names what is no floating dtype.
        """
        written = dtype_in_config(self.config)
        if written is not None:
            return written
        stored = {info.dtype for info in self.tensors.values()} & {"F64", "F32", "F16", "BF16"}
        return "float32" if stored & {"F32", "F64"} else "float16" if stored == {"F16"} else "bfloat16"

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files with tensors, sorted."""
        return tuple(sorted({info.file for info in self.tensors.values()}))

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the directory's files, sorted. Symlinks of a Hub cache count, subdirectories do not."""
        return _file_names(self.path)

    @property
    def has_weights(self) -> bool:
        """Whether there are safetensors files, or an index of them; their contents are not checked."""
        return any(name.endswith((".safetensors", ".safetensors.index.json")) for name in self.files)

    @property
    def has_tokenizer(self) -> bool:
        """Whether there are files of a tokenizer."""
        return any(name in self.files for name in TOKENIZER_FILES)

    def unreadable_tokenizer(self, error: Exception) -> CheckpointError:
        """Return the refusal of tokenizer files that transformers cannot read, for which it raises many kinds."""
        reason = " ".join(str(error).split())[:200]
        return CheckpointError(
            f"the tokenizer of {self.source} cannot be read ({type(error).__name__}: {reason}): copy its tokenizer "
            "files again."
        )

    @property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json as a fresh dict, empty if there is no such file."""
        file = self.path / GENERATION_CONFIG
        return _read_json(file, "a generation config") if file.is_file() else {}


def open_checkpoint(path_or_id: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Open a local directory, or download a Hub repository named `org/name` at `revision` (default: main).

    Raises:
        CheckpointError: the path does not exist or is a file, the directory has no config.json, its weights are only
            pickle files (which are never loaded), or the download failed.
        MissingDependencyError: huggingface_hub is needed and not installed.
    """
    if not isinstance(path_or_id, str | PathLike):
        raise CheckpointError(
            f"{path_or_id!r} was asked for as a checkpoint, but a directory or a Hub id is needed: pass one of them."
        )
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"revision {revision!r} of {path} was asked for, but that is a local directory and only a "
                "Hub repository has revisions: leave revision out, or pass an id of the form org/name."
            )
    elif path.exists():
        raise CheckpointError(
            f"{path} was asked for as a checkpoint, but it is a file and a checkpoint is a directory with a "
            f"config.json and safetensors files: pass the directory {path.parent}."
        )
    elif path.suffix == ".json":
        raise CheckpointError(
            f"{path_or_id} was asked for as a checkpoint, but there is no such file: pass an existing directory with a "
            f"{CONFIG}, that file itself where no weights are needed, or a Hub id of the form org/name."
        )
    elif isinstance(path_or_id, str) and _HUB_ID.fullmatch(path_or_id):
        path = _download(path_or_id, revision)
    else:
        raise CheckpointError(
            f"{path_or_id} was asked for as a checkpoint, but there is no such directory: "
            "pass an existing directory with a config.json, or a Hub id of the form org/name."
        )
    checkpoint = Checkpoint(path, open_config(path), source=str(path_or_id))
    pickles = _pickled_weights(checkpoint.files)
    if pickles and not _safetensors(checkpoint.files):
        raise CheckpointError(
            f"{path_or_id} was asked for as a checkpoint, but its weights are pickle files "
            f"({_listed(pickles)}), which can run code when loaded, and only safetensors files are read: "
            f"if you trust it, convert it with {_conversion(checkpoint)}"
        )
    return checkpoint


def open_config(path: str | Path) -> ModelConfig:
    """The config of a checkpoint directory, or of any config.json file.

    Raises:
        CheckpointError: the directory has no config.json.
        ConfigError: the file is unreadable or malformed.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        return ModelConfig.from_file(path)
    if not (path / CONFIG).is_file():
        run = _training_run(path)
        if run is not None:
            step = f" --step {path.name}" if path.name.isdecimal() and run != path else ""
            raise CheckpointError(
                f"{path} was asked for as a checkpoint, but it is a training run, which has no {CONFIG}: write its "
                f"model by `ttpu export {shlex.quote(str(run))}{step} --out DIR`, and pass DIR."
            )
        hint = ""
        if (path / "adapter_config.json").is_file():
            hint = " (it is an adapter, which needs merging into its base model first)"
        raise CheckpointError(
            f"{path} was asked for as a checkpoint, but it has no {CONFIG}{hint} among "
            f"{_listed(_file_names(path))}: pass the directory that holds the model's {CONFIG}."
        )
    return ModelConfig.from_file(path / CONFIG)


def _training_run(path: Path) -> Path | None:
    """The output_dir of the run of ttpu's trainer that a folder is, or is a checkpoint of; None if it is neither."""
    if path.parent.name == RUN_CHECKPOINTS and path.name.isdecimal():
        return path.parent.parent
    folder = path if path.name == RUN_CHECKPOINTS else path / RUN_CHECKPOINTS
    if folder.is_dir() and any(each.name.isdecimal() for each in folder.iterdir()):
        return folder.parent
    return None


def _find_weights(checkpoint: Checkpoint) -> Path:
    """The single weight file or the index, searched in the same order as transformers does."""
    names = checkpoint.files
    for name in (WEIGHTS, INDEX):
        if name in names:
            return checkpoint.path / name
    alone = _safetensors(names)
    if len(alone) == 1:
        return checkpoint.path / alone[0]
    if alone:
        raise CheckpointError(
            f"the tensors of {checkpoint.source} were asked for, but it has {len(alone)} safetensors files "
            f"({_listed(alone)}) and no {INDEX} that says which tensor is where: download the index too, "
            f"or save the model as one {WEIGHTS}."
        )
    remedy = f"put {WEIGHTS} there."
    if not _is_local(checkpoint):  # pickle files are not downloaded, so they do not appear in `names`
        remedy = f"if its weights are pickle files that you trust, convert it with {_conversion(checkpoint)}"
    raise CheckpointError(
        f"the tensors of {checkpoint.source} were asked for, but {checkpoint.path} has no {WEIGHTS}, no "
        f"{INDEX} and no other safetensors file among {_listed(names)}: {remedy}"
    )


def _read_index(index: Path) -> dict[str, TensorInfo]:
    """The tensors of all shards. Tensors that a shard holds and the index does not list are included."""
    weight_map = _read_json(index, "a safetensors index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad_index(index, "has no weight_map from tensor names to shard files")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise _bad_index(index, f"places {tensor!r} in {shard!r}, not in a *.safetensors file beside it")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise _bad_index(index, f"names shard files that are not there ({_listed(missing)})")

    headers = {shard: read_header(index.parent / shard) for shard in shards}
    tensors = {}
    for tensor, shard in weight_map.items():
        if tensor not in headers[shard].tensors:
            raise _bad_index(index, f"places {tensor!r} in {shard}, which does not hold it")
        tensors[tensor] = headers[shard].tensors[tensor]
    return tensors | _unlisted(index, weight_map, headers)


def _unlisted(
    index: Path, weight_map: Mapping[str, str], headers: Mapping[str, SafetensorsHeader]
) -> dict[str, TensorInfo]:
    unlisted: dict[str, TensorInfo] = {}
    for header in headers.values():
        for name in header.tensors.keys() - weight_map.keys():
            if name in unlisted:
                twice = f"{unlisted[name].file.name} and {header.file.name}"
                raise _bad_index(index, f"does not list {name!r}, which is in both {twice}")
            unlisted[name] = header.tensors[name]
    return unlisted


def _is_plain_name(shard: str) -> bool:
    """Whether the name has no path, so that a downloaded index cannot make TTPU read other files."""
    return shard.endswith(".safetensors") and not any(mark in shard for mark in ("/", "\\", "..", ":", "\0"))


def _bad_index(index: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{index} was asked for as a safetensors index, but it {found}: download the checkpoint once more, "
        "complete with every shard."
    )


def _download(hub_id: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingDependencyError(
            f"{hub_id} was asked for as a checkpoint, but there is no such directory, and huggingface_hub, "
            "which downloads from the Hub, is not installed: pass a local directory, or run "
            '`pip install "ttpu-core[hub]"`.'
        ) from None
    try:
        return Path(
            snapshot_download(
                hub_id, revision=revision, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED
            )
        )
    except Exception as error:  # the HTTP client's own errors share no base class with huggingface_hub's
        ancestors = {kind.__name__ for kind in type(error).__mro__}
        remedy = next(
            (todo for name, todo in _HUB_REMEDIES.items() if name in ancestors),
            "check the network connection, or pass a local directory",
        )
        at = f" at revision {revision!r}" if revision else ""
        reason = next(iter(str(error).strip().splitlines()), "no reason given")  # further lines are advice
        reason = " ".join(reason.split()).partition(". ")[0][:200].rstrip(" .:")
        raise CheckpointError(
            f"{hub_id}{at} was asked for as a checkpoint, but there is no such directory and its download "
            f"from the Hub failed ({type(error).__name__}: {reason}): {remedy}."
        ) from error


def _conversion(checkpoint: Checkpoint) -> str:
    """A shell command that rewrites pickled weights as safetensors, in a directory beside them."""
    source = str(checkpoint.path.absolute()) if _is_local(checkpoint) else checkpoint.source
    target = (source if _is_local(checkpoint) else source.rpartition("/")[2]) + "-safetensors"
    here, there = (json.dumps(text, ensure_ascii=False) for text in (source, target))
    classes = ["AutoModelForCausalLM"]
    if any(name.startswith("tokenizer") or name == "vocab.json" for name in checkpoint.files):
        classes.append("AutoTokenizer")
    saves = [f"t.{name}.from_pretrained({here}).save_pretrained({there})" for name in classes]
    return "python -c " + shlex.quote("import transformers as t; " + "; ".join(saves))


def _is_local(checkpoint: Checkpoint) -> bool:
    return checkpoint.path == Path(checkpoint.source).expanduser()


def _read_json(file: Path, role: str) -> dict[str, Any]:
    try:
        return parse_json_object(file.read_bytes())
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
    except ValueError as problem:
        found = str(problem)
    raise CheckpointError(f"{file} was asked for as {role}, but it {found}: download or write it once more.")


def _file_names(path: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in path.iterdir() if entry.is_file()))


def _safetensors(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name.endswith(".safetensors") or name == INDEX]


def _pickled_weights(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if _PICKLE.fullmatch(name) and not _NOT_WEIGHTS.fullmatch(name)]


def _listed(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(names[:4]) or "no files"
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
