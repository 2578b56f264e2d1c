"""The folder of a quantized checkpoint while it is made: one safetensors file per layer, each written whole or not at
all, so that an interrupted run goes on with the next layer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from ttpu_core.checkpoint import INDEX
from ttpu_core.errors import RequestError
from ttpu_core.files import write_whole, writing_model

STATE = ".ttpu-quantize.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")


class Output:
    """A folder that fills with the files of a checkpoint.

    Args:
        folder: the folder, which need not exist.
        request: what is made there, as plain JSON values; a folder in which something else was begun is refused.
        units: the number of weight files.

    Raises:
        RequestError: the folder holds something else.
        CheckpointError: here and in what writes, that a file cannot be written, as on a full disk.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any], units: int) -> None:
        self.folder, self.units = folder, units
        state = folder / STATE
        text = json.dumps({**request, "units": units}, indent=2, sort_keys=True)
        if folder.exists() and not folder.is_dir():
            raise RequestError(f"{folder} was asked for as the output, but it is a file: name a folder.")
        if state.is_file():
            if state.read_text() != text:
                raise RequestError(
                    f"{folder} was asked for as the output, but another quantization was begun there: remove it, name "
                    "another folder, or repeat that request to finish it."
                )
            return
        if folder.is_dir() and any(folder.iterdir()):
            raise RequestError(
                f"{folder} was asked for as the output, but it is not empty: remove it, or name another folder."
            )
        with writing_model(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(state, text)

    def file(self, unit: int) -> Path:
        """The weight file of a unit."""
        return self.folder / f"model-{unit + 1:05}-of-{self.units:05}.safetensors"

    def has(self, unit: int) -> bool:
        """Whether the unit was written."""
        return self.file(unit).is_file()

    def write(self, unit: int, tensors: Mapping[str, np.ndarray]) -> None:
        """Write the tensors of a unit."""
        held = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        with writing_model(self.folder), TemporaryDirectory(dir=self.folder, prefix=".writing-") as staging:
            unfinished = Path(staging) / "unit.safetensors"
            save_file(held, unfinished, metadata={"format": "pt"})
            unfinished.chmod((self.folder / STATE).stat().st_mode)  # safetensors lets only the owner read
            unfinished.replace(self.file(unit))

    def read(self, unit: int) -> dict[str, np.ndarray]:
        """The tensors of a unit that was written."""
        return load_file(self.file(unit))

    def finish(self, config: Mapping[str, Any], small_files: Iterable[Path]) -> int:
        """Write the index, config.json and copies of the small files, and return the bytes of all tensors.

        The marker of an unfinished folder disappears last.
        """
        placed: dict[str, str] = {}
        total = 0
        for unit in range(self.units):
            header = _header(self.file(unit))
            placed |= dict.fromkeys(header, self.file(unit).name)
            total += sum(end - begin for begin, end in header.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        with writing_model(self.folder):
            write_whole(self.folder / INDEX, json.dumps(index, indent=2) + "\n")
            for file in small_files:
                shutil.copyfile(file, self.folder / file.name)
            write_whole(self.folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
            (self.folder / STATE).unlink()
        return total


def small_files(source: Path) -> list[Path]:
    """The files of a checkpoint beside weights and config: tokenizer, generation config, licence."""
    return [
        file
        for file in sorted(source.iterdir())
        if file.is_file()
        and not file.name.startswith(".")
        and file.name != "config.json"
        and file.suffix not in WEIGHT_SUFFIXES
        and not file.name.endswith(".index.json")
    ]


def _header(file: Path) -> dict[str, tuple[int, int]]:
    """The tensors of a file with the ranges of their bytes."""
    from ttpu_core.checkpoint.header import read_header

    return {name: (info.start, info.start + info.nbytes) for name, info in read_header(file).tensors.items()}
