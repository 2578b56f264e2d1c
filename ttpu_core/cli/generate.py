"""`ttpu generate`: a checkpoint and a prompt come in, the continuation goes to stdout as it is generated, and the
timings to stderr."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli import options
from ttpu_core.cli.console import counted, note, print_json, stderr_console
from ttpu_core.cli.option_groups import with_option_groups
from ttpu_core.cli.options import Decoding
from ttpu_core.cli.session import Prompt, Session, checkpoint_name, open_session
from ttpu_core.errors import RequestError

if TYPE_CHECKING:
    from ttpu_core.backend import StreamingModel
    from ttpu_core.generation.events import StreamEvent, Timings


@with_option_groups
def generate(
    checkpoint: options.CheckpointPath = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="What to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the prompt from a file (- is stdin) instead.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's turn of a chat.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Show each token's log-probability beside those of the N likeliest."),
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before its continuation.")] = False,
    quiet: options.Quiet = False,
    *,
    decoding: Decoding,
    weights_dir: options.WeightsDir = None,
    loading: options.Loading,
    backend: options.Backend = None,
) -> None:
    """Continue a prompt, and print the text as it comes.

    The likeliest token is taken unless a temperature above 0, --top-k, --top-p
    or --min-p asks for sampling, or the checkpoint's generation_config.json does.
    Without --max-new-tokens the checkpoint decides, else 128. Without a prompt it
    is read from stdin, less one newline at its end. Options may be spelled with
    underscores.

    Examples:

      ttpu generate ./llama --prompt "The with statement"
      ttpu generate ./llama -p "Once" --temperature 0.8 --top-p 0.95 --seed 1
      ttpu generate ./llama-instruct --chat -p "Name three rivers."
      git diff | ttpu generate ./llama --json --max-new-tokens 64 | jq -r .text
      ttpu generate --weights_dir ./llama --prompt Hi --deterministic
    """
    name = checkpoint_name(checkpoint, weights_dir)
    text = read_prompt(prompt, prompt_file)
    asked: Prompt = [{"role": "user", "content": text}] if chat else text
    session = open_session(name, loading.options(), backend=backend, chat=chat, quiet=quiet)
    with session.progress:
        shown = session.speaks and not as_json
        events = _collect(session, asked, decoding, logprobs, (text if echo else "") if shown else None)
    if not session.speaks:
        return
    timings = session.model.timings
    if as_json:
        print_json(_as_json(events, timings, logprobs is not None))
        return
    if logprobs is not None:
        _print_logprobs(events, session.model)
    if not quiet:
        note(timings_line(timings, len(events)))


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Read the prompt from the one place where it was given: the option, the file, or stdin if it is not a terminal.

    Raises:
        RequestError: no prompt, both options, or a file that cannot be read.
    """
    if prompt is not None and prompt_file is not None:
        raise RequestError("--prompt and --prompt-file were both given, but there is one prompt: leave one out.")
    if prompt is not None:
        return prompt
    if prompt_file is not None and str(prompt_file) != "-":
        try:
            return prompt_file.read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text, at byte {error.start}"
            raise RequestError(
                f"the prompt file {prompt_file} cannot be read ({reason}): pass a readable text file."
            ) from error
    text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")
    if not text:
        raise RequestError(
            "no prompt was given: pass --prompt TEXT or --prompt-file FILE, or pipe text into the command."
        )
    return text


def timings_line(timings: Timings, generated: int) -> str:
    """One line of timings. The generation rate counts the tokens after the first, which the prompt's pass gives."""
    parts = [
        f"prompt {counted(timings.prefill_tokens, 'token')} in {timings.prefill_seconds:.2f} s"
        f"{_rate(timings.prefill_tokens_per_second)}",
        f"generated {counted(generated, 'token')} in {timings.decode_seconds:.2f} s"
        f"{_rate(timings.decode_tokens_per_second)}",
        f"load {timings.load_seconds:.2f} s",
        f"compile {timings.compile_seconds:.2f} s",
    ]
    return ", ".join(parts)


def _rate(rate: float | None) -> str:
    return "" if rate is None else f" ({rate:.1f} tokens/s)"


def _collect(
    session: Session, prompt: Prompt, decoding: Decoding, logprobs: int | None, heading: str | None
) -> list[StreamEvent]:
    """All events of the output; its text goes to stdout after `heading`, unless that is None."""
    events = []
    written = ""
    try:
        for event in session.stream(prompt, decoding, logprobs=logprobs):
            events.append(event)
            if heading is not None and event.text:
                written = heading + event.text
                heading = ""
                sys.stdout.write(written)
                sys.stdout.flush()
    finally:  # an error or a Ctrl-C in mid-line starts on a line of its own
        if written and not written.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
    return events


def _as_json(events: list[StreamEvent], timings: Timings, with_logprobs: bool) -> dict[str, Any]:
    """`token_ids` and `logprobs` have one entry per generated token, the end-of-sequence token included."""
    result: dict[str, Any] = {
        "text": "".join(event.text for event in events),
        "token_ids": [event.token_id for event in events],
        "finish_reason": events[-1].finish_reason if events else None,
    }
    if with_logprobs:
        result["logprobs"] = [
            {
                "token_id": event.token_id,
                "logprob": _finite(event.logprob),
                "top": [{"token_id": token, "logprob": _finite(value)} for token, value in _top(event)],
            }
            for event in events
        ]
    names = ("load_seconds", "compile_seconds", "prefill_seconds", "prefill_tokens", "prefill_tokens_per_second",
             "decode_seconds", "decode_tokens", "decode_tokens_per_second")  # fmt: skip
    result["timings"] = {name: getattr(timings, name) for name in names}
    return result


def _finite(value: float | None) -> float | None:
    """JSON has no infinity, which is the log-probability of what cannot happen."""
    return value if value is not None and math.isfinite(value) else None


def _top(event: StreamEvent) -> list[tuple[int, float]]:
    return sorted((event.top_logprobs or {}).items(), key=lambda pair: -pair[1])


def _print_logprobs(events: list[StreamEvent], model: StreamingModel) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    def shown(token: int) -> str:
        return str(token) if model.tokenizer is None else f"{token} {model.tokenizer.decode([token])!r}"

    table = Table("token", "log-probability", "likeliest", box=box.SIMPLE_HEAD, pad_edge=False)
    for event in events:
        top = ", ".join(f"{shown(token)} {value:.3f}" for token, value in _top(event))
        logprob = "" if event.logprob is None else f"{event.logprob:.3f}"
        table.add_row(Text(shown(event.token_id)), logprob, Text(top))
    stderr_console().print(table)
