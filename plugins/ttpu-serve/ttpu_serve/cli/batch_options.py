"""Options of the files and batches that `ttpu serve` keeps and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

BATCHES = "Files and batches"
MIB = 2**20


def _option(metavar: str, text: str, **other: Any) -> Any:
    return typer.Option(metavar=metavar, help=text, rich_help_panel=BATCHES, **other)


@dataclass(frozen=True)
class BatchOptions:
    """What /v1/files and /v1/batches may take."""

    no_batches: Annotated[
        bool, typer.Option("--no-batches", help="No /v1/files and /v1/batches.", rich_help_panel=BATCHES)
    ] = False
    files_dir: Annotated[
        str | None, _option("DIR", "Keep files and batches here when the server ends; else they go with it.")
    ] = None
    batch_concurrency: Annotated[
        int | None, _option("N", "Sequences of batches at once; half of --max-num-seqs if left out.", min=1)
    ] = None
    max_batch_requests: Annotated[int, _option("N", "Lines of a batch.", min=1)] = 50_000
    max_file_mib: Annotated[float, _option("MIB", "Of an uploaded file; larger get 413.")] = 200.0
    max_files_mib: Annotated[float, _option("MIB", "Of all files of one key; more get 413.")] = 1024.0
    max_files: Annotated[int, _option("N", "Files of one key.", min=1)] = 1000

    def settings(self) -> dict[str, Any]:
        """Return the fields of `ServerSettings`.

        Raises:
            RequestError: the folder cannot be used.
        """
        from ttpu_serve.server.batches.file_store import open_folder

        if self.files_dir is not None and not self.no_batches:
            open_folder(self.files_dir)  # before a model is loaded
        return {
            "batches": not self.no_batches,
            "files_dir": None if self.no_batches else self.files_dir,
            "batch_concurrency": self.batch_concurrency,
            "max_batch_requests": self.max_batch_requests,
            "max_file_bytes": int(self.max_file_mib * MIB),
            "max_files_bytes": int(self.max_files_mib * MIB),
            "max_files": self.max_files,
        }
