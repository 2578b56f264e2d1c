"""`ttpu eval` measures checkpoints on a text and compares them with the first of them, as a table, JSON and a
picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli import options
from ttpu_core.cli.console import LoadProgress, in_bytes, note, print_json, stderr_console, stdout_console
from ttpu_core.cli.option_groups import with_option_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from ttpu_core.loading import LoadOptions
    from ttpu_quantize.evaluation import Evaluation, Text


@with_option_groups
def evaluate(
    checkpoints: Annotated[
        list[str],
        typer.Argument(metavar="CHECKPOINT...", help="Directories or Hub ids; the others are compared with the first."),
    ],
    text: Annotated[Path, typer.Option(metavar="FILE", help="A text file in UTF-8.")],
    scheme: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME,...", help="Also the first, quantized while it is loaded: w8a16,w4a16-g128,fp8 for three."
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a window. Without it the context, at most 2,048.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens from one window to the next. Without it half a window.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Windows at a time. Without it, by the size of the logits.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=2, metavar="N", help="Only the first N tokens of the text.")] = None,
    *,
    loading: options.Loading,
    backend: options.Backend = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the figures, by matplotlib.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure perplexity on a text, and what other checkpoints of the model lose against the first.

    Each token of the text but the first is predicted once. A window of N tokens moves over the text by the stride, and
    scores the tokens that no window scored before. Perplexity is e to the mean loss; KL is the mean divergence of the
    next-token distributions from the first checkpoint's, in nats; top-1 is how often the likeliest token is the same.

    Examples:

    \b
      ttpu eval ./llama ./llama-w4a16 --text book.txt
      ttpu eval ./llama --text book.txt --scheme w8a16,w4a16-g128 --plot loss.png
      ttpu eval ./llama --text book.txt --window 512 --stride 256 --json

    \f
    Raises:
        UnsupportedError: the backend gives no logits of texts.
        RequestError: the text cannot be read, or the checkpoints are not of one model.
    """
    from ttpu_core.backend import Scores
    from ttpu_core.errors import UnsupportedError
    from ttpu_core.pictures import check_picture
    from ttpu_core.registry import default_registry
    from ttpu_quantize.evaluation import check_comparable, evaluate_model, text_for
    from ttpu_quantize.picture import save_picture

    if plot is not None:
        check_picture(plot, (".png",))
    content = read_text(text)
    runs = default_registry().backend(backend)
    if not isinstance(runs, Scores):
        raise UnsupportedError(
            f"a text was to be measured, but the backend {runs.name!r} gives no logits of texts: use another --backend."
        )
    how = loading.options()
    asked = _asked(checkpoints, how, scheme)
    reference: Any = None
    cut: Text | None = None
    rows: list[Evaluation] = []
    for name, checkpoint, own in asked:
        model = _load(checkpoint, own, backend, quiet=quiet)
        if cut is None:
            cut = text_for(model, content, size=window, stride=stride, rows=batch, limit=limit)
        else:
            check_comparable(reference, model, name, content)
        with _bar(name, quiet=quiet) as progress:
            rows.append(evaluate_model(runs, name, model, cut, reference, progress))
        if reference is None:
            reference = model
        del model  # the next one takes its place
    assert cut is not None
    if as_json:
        print_json(_as_json(text, cut, rows))
    else:
        _print(text, cut, rows)
    if plot is not None:
        save_picture(rows, plot, f"{text.name}, {rows[0].tokens:,} tokens")
        note(f"drew {plot}")


def _asked(
    checkpoints: Sequence[str], how: LoadOptions, scheme: str | None
) -> list[tuple[str, str, LoadOptions]]:
    """What is measured: its name in the table, its checkpoint, and how it is loaded.

    Raises:
        RequestError: a scheme is unknown, or --quantization was given beside schemes.
    """
    from ttpu_core.errors import RequestError
    from ttpu_core.quantization.config import QuantizationConfig

    asked = [(name, name, how) for name in checkpoints]
    if scheme is None:
        return asked
    if how.quantization is not None:
        raise RequestError(
            f"--scheme {scheme} and --quantization {how.quantization} were both given, but schemes are compared with "
            "the first checkpoint as it is: leave --quantization out."
        )
    first = checkpoints[0]
    for one in scheme.split(","):
        config = QuantizationConfig.parse(one)
        asked.append((f"{first} in {config}", first, replace(how, quantization=config)))
    return asked


def read_text(path: Path) -> str:
    """The content of a text file.

    Raises:
        RequestError: it cannot be read, or is not UTF-8.
    """
    from ttpu_core.errors import RequestError

    try:
        return path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        found = f"cannot be read ({error.strerror or error})"
    except UnicodeDecodeError as error:
        found = f"is not UTF-8 (byte {error.start})"
    raise RequestError(f"{path} was asked for as a text, but it {found}: name a text file in UTF-8.")


def _load(name: str, how: LoadOptions, backend: str | None, *, quiet: bool) -> Any:
    from ttpu_core.loading import open_model

    with LoadProgress(quiet=quiet) as progress:
        return open_model(
            name,
            replace(how, progress=progress),
            backend=backend,
            warn=lambda sentence: note(f"warning: {sentence}."),
        )


@contextmanager
def _bar(name: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar over windows on stderr, if that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = stderr_console()
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(name, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _as_json(text: Path, cut: Text, rows: Sequence[Evaluation]) -> dict[str, Any]:
    return {
        "text": str(text),
        "tokens": len(cut.tokens),
        "window": cut.size,
        "stride": cut.stride if len(cut.cut) > 1 else None,
        "models": [{**asdict(row), "perplexity": row.perplexity} for row in rows],
    }


def _print(text: Path, cut: Text, rows: Sequence[Evaluation]) -> None:
    from rich import box
    from rich.table import Table

    how = "one window" if len(cut.cut) == 1 else f"windows of {cut.size:,} every {cut.stride:,}"
    title = f"{text.name}: {rows[0].tokens:,} tokens, {how}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("checkpoint", overflow="fold")
    compared = len(rows) > 1
    labels = ("perplexity", *(("change", "KL", "top-1") if compared else ()), "weights", "tokens/s")
    for label in labels:
        table.add_column(label, justify="right", no_wrap=True)
    for row in rows:
        cells = [row.name, f"{row.perplexity:.4f}"]
        if compared and row.divergence is not None and row.agreement is not None:
            change = row.perplexity / rows[0].perplexity - 1
            cells += [f"{change:+.2%}", f"{row.divergence:.5f}", f"{row.agreement:.2%}"]
        elif compared:
            cells += ["", "", ""]
        table.add_row(*cells, in_bytes(row.weight_bytes), f"{row.tokens_per_second:,.0f}")
    stdout_console().print(table)
