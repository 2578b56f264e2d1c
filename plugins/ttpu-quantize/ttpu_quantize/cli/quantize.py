"""`ttpu quantize` writes a quantized copy of a checkpoint that TTPU, vLLM and transformers read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli import options
from ttpu_core.cli.console import counted, in_bytes, note, print_json, stderr_console, stdout_console

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ttpu_core.architecture import Architecture
    from ttpu_core.checkpoint import Checkpoint
    from ttpu_quantize.calibrated import Calibration
    from ttpu_quantize.making import Made

CALIBRATION = "Calibration"


class MethodChoice(StrEnum):
    """How weights are rounded."""

    rtn = "rtn"
    gptq = "gptq"
    awq = "awq"
    smoothquant = "smoothquant"


class OrderChoice(StrEnum):
    """The order in which GPTQ rounds inputs."""

    none = "none"
    static = "static"
    group = "group"


SAMPLES, DAMPING, ORDER, STRENGTH = 128, 0.01, OrderChoice.static, 0.5
"""What calibrated methods take where the options are not given."""


def quantize(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A directory with config.json and safetensors, or a Hub id.")
    ],
    scheme: Annotated[
        str,
        typer.Option(metavar="SCHEME", help="As in w8a16, w4a16-g128, w4a16-g32-asym, w8a8, w4a8-g128, fp8, w8a8-fp8."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder, or one that was begun with this request.")],
    method: Annotated[
        MethodChoice, typer.Option(help="Round to nearest, or by the inputs of the products.")
    ] = MethodChoice.rtn,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Kernels that stay as they are, as in mlp.down; repeat for more."),
    ] = None,
    lm_head: Annotated[bool, typer.Option("--lm-head", help="Quantize the output head too.")] = False,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text in UTF-8.", rich_help_panel=CALIBRATION)
    ] = None,
    num_samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help=f"Passages of the text, at most. Without it {SAMPLES}.",
            rich_help_panel=CALIBRATION,
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Tokens of a passage. Without it the context, at most 2,048.",
            rich_help_panel=CALIBRATION,
        ),
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help=f"GPTQ: share of the mean second moment. Without it {DAMPING}.",
            rich_help_panel=CALIBRATION,
        ),
    ] = None,
    actorder: Annotated[
        OrderChoice | None,
        typer.Option(
            help="GPTQ: inputs as they come, large ones first (the default), or also groups in that order.",
            rich_help_panel=CALIBRATION,
        ),
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option(
            metavar="X", help=f"SmoothQuant: from 0 to 1. Without it {STRENGTH}.", rich_help_panel=CALIBRATION
        ),
    ] = None,
    parallelism_strategy: Annotated[
        str | None,
        typer.Option(
            "--parallelism-strategy",
            "--sharding-strategy",
            "--mesh",
            metavar="STRATEGY",
            help="How to shard a layer over devices: fsdp, dp, mp, 2x4, or data=2,expert=4.",
            rich_help_panel=options.MODEL,
        ),
    ] = None,
    backend: options.Backend = None,
    patch_pack: options.PatchPacks = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a quantized copy of a checkpoint, in the compressed-tensors format.

    Rounding to nearest reads the files tensor by tensor and runs no model. GPTQ, AWQ and SmoothQuant run the model over
    a text, one layer at a time, each on what the quantized layers before it return. An interrupted run goes on where it
    stopped.

    Examples:

    \b
      ttpu quantize ./llama --scheme w8a16 --out ./llama-w8a16
      ttpu quantize ./llama --scheme w4a16-g128 --method gptq --calibrate book.txt --out ./llama-gptq

    \f
    Raises:
        RequestError: a calibrated method without a text, an option that the method does not read, or a request that
            contradicts the checkpoint.
    """
    from dataclasses import replace

    from ttpu_core.checkpoint import open_checkpoint
    from ttpu_core.config.key_audit import refuse_ignored
    from ttpu_core.loading import LoadOptions, describe_checkpoint
    from ttpu_core.quantization.config import QuantizationConfig
    from ttpu_quantize.making import check_original, make_checkpoint

    calibrated = tuple(one for one in MethodChoice if one is not MethodChoice.rtn)
    _refuse_unread(
        method,
        {
            "--damping": (damping, (MethodChoice.gptq,)),
            "--actorder": (actorder, (MethodChoice.gptq,)),
            "--strength": (strength, (MethodChoice.smoothquant,)),
            "--calibrate": (calibrate, calibrated),
            "--num-samples": (num_samples, calibrated),
            "--seq-len": (seq_len, calibrated),
            "--parallelism-strategy": (parallelism_strategy, calibrated),
            "--backend": (backend, calibrated),
        },
    )
    config = replace(QuantizationConfig.parse(scheme), skip=tuple(skip or ()), lm_head=lm_head)
    original = open_checkpoint(checkpoint)
    check_original(original)
    opened, architecture = describe_checkpoint(original, patch_pack or None)
    for sentence in refuse_ignored(opened.config):
        note(f"warning: {sentence}.")
    how = LoadOptions(parallelism_strategy=parallelism_strategy)
    chosen = _method(
        method,
        DAMPING if damping is None else damping,
        actorder or ORDER,
        STRENGTH if strength is None else strength,
    )
    calibration = None
    if chosen is not None:
        calibration = _calibration(
            chosen, method.value, opened, architecture, backend, how, calibrate, num_samples or SAMPLES, seq_len
        )
    with _bar(quiet=quiet) as progress:
        made = make_checkpoint(opened, architecture, config, out, calibration=calibration, progress=progress)
    if as_json:
        print_json(_as_json(made, str(config), method.value))
    else:
        _print(made, str(config), method.value)


def _refuse_unread(
    method: MethodChoice, options_read: Mapping[str, tuple[object, tuple[MethodChoice, ...]]]
) -> None:
    """Refuse options that the method does not read.

    Args:
        method: the method.
        options_read: option → its value, None if it was not given, and the methods that read it.

    Raises:
        RequestError: one was given.
    """
    from ttpu_core.errors import RequestError

    for option, (value, readers) in options_read.items():
        if value is not None and method not in readers:
            raise RequestError(
                f"{option} was given, but it has no effect with --method {method.value}: add --method "
                f"{' or '.join(one.value for one in readers)}, or leave {option} out."
            )


def _method(method: MethodChoice, damping: float, order: OrderChoice, strength: float) -> Any:
    """The calibrated method, None for rounding to nearest.

    Raises:
        RequestError: a number is out of range.
    """
    from ttpu_core.errors import RequestError
    from ttpu_quantize.gptq import GPTQ
    from ttpu_quantize.scaling import AWQ, SmoothQuant

    if not 0 < damping <= 1:
        raise RequestError(f"--damping {damping:g} was given, but it is above 0 and at most 1: pass 0.01, for one.")
    if not 0 <= strength <= 1:
        raise RequestError(f"--strength {strength:g} was given, but it is from 0 to 1: pass 0.5, for one.")
    if method is MethodChoice.gptq:
        return GPTQ(damping, order.value)
    return {MethodChoice.rtn: None, MethodChoice.awq: AWQ(), MethodChoice.smoothquant: SmoothQuant(strength)}[method]


def _calibration(
    method: Any,
    name: str,
    checkpoint: Checkpoint,
    architecture: Architecture,
    backend: str | None,
    how: Any,
    calibrate: Path | None,
    samples: int,
    length: int | None,
) -> Calibration:
    """The method with its text.

    Args:
        method: GPTQ or a scaling.
        name: what users call it.
        checkpoint: the original.
        architecture: of the checkpoint.
        backend: the name of an installed backend, None for the default one.
        how: where the model runs.
        calibrate: the text file.
        samples: most passages of the text.
        length: tokens of a passage; None for the context, at most 2,048.

    Raises:
        RequestError: there is no text, or it is too short, or the checkpoint has no tokenizer.
        UnsupportedError: the backend cannot run a model layer by layer.
    """
    from ttpu_core.backend import Calibrates
    from ttpu_core.errors import RequestError, UnsupportedError
    from ttpu_core.registry import default_registry
    from ttpu_quantize.calibrated import Calibration, calibration_tokens
    from ttpu_quantize.cli.evaluate import read_text
    from ttpu_quantize.evaluation import tokenized

    if calibrate is None:
        raise RequestError(
            f"--method {name} was given without a text, but it looks at the inputs of products: pass --calibrate FILE, "
            "or --method rtn."
        )
    runs = default_registry().backend(backend)
    if not isinstance(runs, Calibrates):
        raise UnsupportedError(
            f"--method {name} was given, but the backend {runs.name!r} cannot run a model layer by layer: use another "
            "--backend, or --method rtn."
        )
    ids = tokenized(runs.tokenizer(checkpoint), read_text(calibrate))
    context = architecture.spec.context
    if length is not None and length > context:
        raise RequestError(
            f"--seq-len {length:,} was given, but this model's context holds {context:,} tokens: lower it."
        )
    length = min(context, 2048, len(ids)) if length is None else length
    tokens = calibration_tokens(ids, samples, length)
    return Calibration(method, runs, how.suited_to(runs.options), tokens)


@contextmanager
def _bar(*, quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress bar over layers on stderr, with the time that is left, if that is a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = stderr_console()
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("quantizing {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda what, done, total: shown.update(task, description=what, completed=done, total=total)


def _by_kind(made: Made) -> dict[str, tuple[float, float]]:
    """Kind of matrix → mean relative errors of rounding to nearest and of the method, over layers and experts."""
    import re

    kinds: dict[str, list[tuple[float, float]]] = {}
    for layer in made.errors:
        for name, error in layer.method.items():
            kind = re.sub(r"\.\d+(?=\.|$)", ".*", name.removesuffix(".weight"))
            kinds.setdefault(kind, []).append((layer.rounding[name], error))
    return {
        kind: (sum(one[0] for one in each) / len(each), sum(one[1] for one in each) / len(each))
        for kind, each in kinds.items()
    }


def _as_json(made: Made, scheme: str, method: str) -> dict[str, Any]:
    errors = {kind: {"rounding": rounding, method: error} for kind, (rounding, error) in _by_kind(made).items()}
    return {
        "folder": str(made.folder),
        "scheme": scheme,
        "method": method,
        "bytes_before": made.before,
        "bytes_after": made.after,
        "matrices": made.linears,
        "notes": list(made.notes),
        "errors": errors,
    }


def _print(made: Made, scheme: str, method: str) -> None:
    from rich import box
    from rich.table import Table

    console = stdout_console()
    kinds = _by_kind(made)
    if kinds:
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, title="relative error of the products, mean of layers",
            title_justify="left",
        )  # fmt: skip
        table.add_column("matrix", overflow="fold")
        for label in ("rounding to nearest", method):
            table.add_column(label, justify="right", no_wrap=True)
        for kind, (rounding, error) in kinds.items():
            table.add_row(kind, f"{rounding:.4f}", f"{error:.4f}")
        console.print(table)
    for line in made.notes:
        print(line)
    print(
        f"{made.folder}: {counted(made.linears, 'matrix') if made.linears == 1 else f'{made.linears:,} matrices'} in "
        f"{scheme} by {method}, {in_bytes(made.before)} are now {in_bytes(made.after)}"
    )
