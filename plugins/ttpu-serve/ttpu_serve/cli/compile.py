"""`ttpu compile`: compiles the programs of `ttpu serve` for this machine or for TPU slices that need not be present,
caches them, and prints their memory and time."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.backend import CompilesAhead
from ttpu_core.cli import options
from ttpu_core.cli.commands import CONTEXT_SETTINGS
from ttpu_core.cli.console import LoadProgress, counted, in_bytes, print_json, stdout_console
from ttpu_core.cli.option_groups import with_option_groups
from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.verification import MEASURED_NOTE
from ttpu_serve.cli.engine_options import EngineOptions, words
from ttpu_serve.cli.shared_file import SharedFileCommand

if TYPE_CHECKING:
    from ttpu_core.architecture import Architecture
    from ttpu_serve.ahead import AheadSlice, ProgramFigures
    from ttpu_serve.execution.engine_core import EngineCore

NOTE = (
    "Figures of the TPU compiler (libtpu) for slices that were not there: nothing ran on a TPU. Bytes are of one "
    "device. Times are a walk through the compiler's own schedule, good for comparing programs; where they begin with "
    "≥, kernels count as no time, or loops over pages as one turn. After a + stands the least time of the kernels that "
    "state their FLOPs and bytes, with sequences as long as they may be. "
    f"{MEASURED_NOTE}"
)


@with_option_groups
def compile_programs(
    checkpoint: options.CheckpointPath = None,
    topology: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A TPU slice that need not be there, as in v5e:2x4; repeat for more. Else these devices.",
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="The YAML file of options that ttpu serve takes.")
    ] = None,
    *,
    engine: EngineOptions,
    weights_dir: options.WeightsDir = None,
    loading: options.Loading,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Compile what ttpu serve needs, and keep it, so that the server starts sooner.

    Give it the options that ttpu serve gets, vLLM's flags and --config as well.
    Without --topology the weights are loaded and programs are compiled for the
    devices of this machine. With it no TPU and no weights are needed: config.json
    says it all, and a program that does not fit is refused. Programs are kept
    under ~/.cache/ttpu/programs, or where TTPU_COMPILE_CACHE says; bring that
    folder to the machine with the TPU. It must have the same versions of jax and
    libtpu, or compiles anew.

    Examples:

    \b
      ttpu compile ./llama
      ttpu compile ./llama/config.json --topology v5e:2x4
      ttpu compile ./llama --topology v5e:2x4 --topology v6e:2x4 --max-model-len 8192 --json
      ttpu compile ./llama --topology v6e:2x4 --kv-cache-dtype int8 --speculative ngram:4
    """
    from ttpu_core.cli.session import checkpoint_name

    assert config is None, "its options stand on the command line"
    name = checkpoint_name(checkpoint, weights_dir)
    arguments = engine.arguments() | loading.arguments()
    backend = _compiler()
    folder = str(backend.compiled_folder(ahead=bool(topology)))
    if topology:
        found = [_ahead(backend, name, one, arguments, quiet) for one in topology]
        if as_json:
            slices = [_as_json(one) for one in found]
            print_json({"checkpoint": name, "note": NOTE, "kept_in": folder, "slices": slices})
        else:
            for one in found:
                _print_ahead(name, one, arguments, folder)
        return
    from ttpu_serve.api.open_engine import open_engine, read_options

    load, settings = read_options(name, arguments)
    with backend.cache_counts() as counts, LoadProgress(quiet=quiet) as progress:
        core = open_engine(name, load, settings, progress=progress)
    rows = _rows_here(core)
    core.close()
    if as_json:
        print_json({"checkpoint": name, "kept_in": folder, "from_cache": counts.hits, "programs": rows})
    else:
        _print_here(name, rows, counts, folder)


def _compiler() -> CompilesAhead:
    """Return the engine's backend, checked to compile ahead.

    Raises:
        UnsupportedError: the backend compiles nothing ahead.
    """
    from ttpu_serve.api.build_engine import serving_backend

    backend = serving_backend(None)
    if not isinstance(backend, CompilesAhead):
        raise UnsupportedError(
            f"programs were to be compiled ahead, but the backend {backend.name!r} does not do that: start `ttpu "
            "serve` right away."
        )
    return backend


# -- slices that are not there --


def _ahead(backend: CompilesAhead, name: str, topology: str, arguments: Mapping[str, Any], quiet: bool) -> AheadSlice:
    from ttpu_serve.api.open_engine import read_options

    load, config = read_options(name, arguments)
    architecture, dtype = _described(name, load.patch_packs, load.dtype)
    with LoadProgress(quiet=quiet) as progress:
        found: AheadSlice = backend.compile_ahead(
            architecture,
            topology,
            config,
            dtype=dtype,
            parallelism_strategy=load.parallelism_strategy,
            sharding_rules=load.sharding_rules,
            plan=load.plan,
            attn_implementation=load.attn_implementation or "auto",
            quantization=load.quantization,
            residual_stream=arguments.get("residual_stream", "auto"),
            progress=progress,
        )
    return found


def _described(name: str, patch_packs: Sequence[str] | None, dtype: str) -> tuple[Architecture, str]:
    """Return the architecture and the dtype with which the checkpoint would be loaded. A config.json alone does not
    show whether the checkpoint has an untied head.

    Raises:
        UnsupportedError: the weights are quantized, and only their files would say how.
    """
    from ttpu_core.checkpoint import Checkpoint, dtype_in_config, open_checkpoint, open_config
    from ttpu_core.errors import CheckpointError
    from ttpu_core.loading import describe_checkpoint
    from ttpu_core.quantization.stored import stored_architecture
    from ttpu_core.registry import default_registry

    path, registry = Path(name).expanduser(), default_registry()
    if path.exists() and not _has_weights(path):
        config = open_config(name)
        architecture = stored_architecture(registry.architecture(config, patch_packs), config)
        written = dtype_in_config(config) or "bfloat16"
        return architecture, written if dtype == "auto" else dtype
    checkpoint: Checkpoint = open_checkpoint(name)
    try:
        checkpoint, architecture = describe_checkpoint(checkpoint, patch_packs)
        stored = checkpoint.dtype
    except CheckpointError:  # some of its files are still to come
        architecture = stored_architecture(registry.architecture(checkpoint.config, patch_packs), checkpoint.config)
        stored = "bfloat16"
    else:
        architecture = stored_architecture(architecture, checkpoint.config, checkpoint)
    return architecture, stored if dtype == "auto" else dtype


def _has_weights(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.safetensors"))


def _as_json(found: AheadSlice) -> dict[str, Any]:
    return {
        "topology": found.topology_name,
        "mesh": dict(found.mesh),
        "num_pages": list(found.num_pages),
        "page_size": found.page_size,
        "weight_bytes": found.weight_bytes,
        "page_bytes": list(found.page_bytes),
        "hbm_bytes": found.hbm_bytes,
        "programs": [
            {
                "name": one.name,
                **one.figures.to_dict(),
                "cache_bytes": one.cache_bytes,
                "cache_in_place": one.cache_in_place if one.cache_bytes else None,
                "compiled_before": one.compiled_before,
            }
            for one in found.programs
        ],
    }


def _print_ahead(name: str, found: AheadSlice, arguments: Mapping[str, Any], folder: str) -> None:
    from rich import box
    from rich.table import Table

    hbm = found.hbm_bytes
    mesh = ", ".join(f"{axis}={size}" for axis, size in found.mesh.items())
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"{name} on {found.topology_name}, {mesh}: {in_bytes(hbm)} per device",
        title_justify="left",
    )
    table.add_column("program", no_wrap=True)
    for column in ("peak", "pages in place", "kernels"):
        table.add_column(column, justify="right")
    table.add_column("collectives")
    for column in ("predicted", "compiled in"):
        table.add_column(column, justify="right")
    for one in found.programs:
        figures = one.figures
        table.add_row(
            one.name,
            in_bytes(figures.peak_bytes),
            ("yes" if one.cache_in_place else "no") if one.cache_bytes else "–",
            f"{figures.kernels:,}",
            "; ".join(f"{count:,} {op}, {in_bytes(size)}" for op, count, size in figures.collectives) or "none",
            _predicted(figures),
            "before" if one.compiled_before else f"{figures.compile_seconds:.1f} s",
        )
    console = stdout_console()
    console.print(table)
    for line in (_pages(found), f"Programs are kept in {folder}.", f"Serve with: {_command(name, found, arguments)}"):
        console.print(line, soft_wrap=True)
    console.print(NOTE)


def _predicted(figures: ProgramFigures) -> str:
    """The compiler's prediction, plus the least time of kernels that state their cost."""
    kernels = f" + {figures.kernel_seconds * 1e3:.2f}" if figures.kernel_seconds else ""
    return f"{'' if figures.counts_all else '≥ '}{figures.seconds * 1e3:.2f}{kernels} ms"


def _pages(found: AheadSlice) -> str:
    """Describe the pages that fit beside the weights."""
    if not found.num_pages:
        return f"Weights take {in_bytes(found.weight_bytes)} per device; there are no pages."
    size, groups = found.page_size, found.page_groups
    parts = [
        f"{counted(pages, 'page')} of {size} tokens ({group.name}: {pages * size:,} tokens, "
        f"{in_bytes(pages * each)})"
        for group, pages, each in zip(groups, found.num_pages, found.page_bytes, strict=True)
    ]
    return f"Weights take {in_bytes(found.weight_bytes)} per device; beside them fit {' and '.join(parts)}."


def _command(name: str, found: AheadSlice, arguments: Mapping[str, Any]) -> str:
    """Return the `ttpu serve` command that uses these programs."""
    given = {"parallelism_strategy": ",".join(f"{axis}={size}" for axis, size in found.mesh.items()), **arguments}
    if "plan" in given:
        del given["parallelism_strategy"]
    return " ".join(["ttpu serve", shlex.quote(name), *words(given)])


# -- these devices --


def _rows_here(core: EngineCore) -> list[dict[str, Any]]:
    return [
        {"name": one.name, "peak_bytes": one.peak_bytes, "seconds": one.seconds} for one in core.runner.program_stats()
    ]


def _print_here(name: str, rows: Sequence[Mapping[str, Any]], counts: Any, folder: str) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=name, title_justify="left")
    table.add_column("program")
    table.add_column("peak", justify="right")
    table.add_column("took", justify="right")
    for row in rows:
        peak = "–" if row["peak_bytes"] is None else in_bytes(row["peak_bytes"])
        table.add_row(row["name"], peak, f"{row['seconds']:.2f} s")
    console = stdout_console()
    console.print(table)
    console.print(
        f"{counted(len(rows), 'program')}; {counted(counts.hits, 'program')} came from the cache and "
        f"{counts.written:,} went into it, those of loading included: {folder}",
        soft_wrap=True,
    )


app = typer.Typer(add_completion=False, context_settings=CONTEXT_SETTINGS, pretty_exceptions_enable=False)
app.command("compile", cls=SharedFileCommand)(compile_programs)
