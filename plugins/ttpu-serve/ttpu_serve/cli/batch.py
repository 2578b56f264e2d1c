"""`ttpu batch`: answers the requests of a file, one a line, without a server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ttpu_core.cli import options
from ttpu_core.cli.commands import CONTEXT_SETTINGS
from ttpu_core.cli.console import counted, note, print_json
from ttpu_core.cli.option_groups import with_option_groups
from ttpu_core.errors import RequestError
from ttpu_serve.cli.answer_options import AnswerOptions, Guides, GuidesChoice, check_processes, opened
from ttpu_serve.cli.bench_options import Bar
from ttpu_serve.cli.engine_options import EngineOptions
from ttpu_serve.cli.shared_file import SharedFileCommand

NO_ANSWER = 1
"""The exit status if no request was answered as it asked."""


@with_option_groups
def batch(
    checkpoint: options.CheckpointPath = None,
    *,
    input_file: Annotated[
        str, typer.Option("--input-file", "-i", metavar="FILE", help="Requests, one a line, as for OpenAI's batches.")
    ],
    output_file: Annotated[
        str, typer.Option("--output-file", "-o", metavar="FILE", help="Gets the answers, in the same order.")
    ],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the answers of a run that was interrupted.")
    ] = False,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Sequences at once; twice --max-num-seqs if left out."),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="The YAML file of options that ttpu serve takes.")
    ] = None,
    answers: AnswerOptions,
    guides: Guides = GuidesChoice.isolated,
    engine: EngineOptions,
    weights_dir: options.WeightsDir = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Another checkpoint, for its tokenizer.", rich_help_panel=options.MODEL),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A branch, tag or commit on the Hub.", rich_help_panel=options.MODEL),
    ] = None,
    loading: options.Loading,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Answer the requests of a file without a server, as vllm run-batch does.

    Each line is a JSON object with custom_id, method (POST), url (one of those
    that batches of ttpu serve can ask) and body. Each line of the output has the
    custom_id and the response; a request that is refused has its error there.
    Takes vLLM's flags and the options of ttpu serve. The output appears when all
    requests are answered. Until then answers are in OUTPUT.partial, with which
    --resume goes on after an interruption. Exit status 1: no request succeeded.

    Examples:

    \b
      ttpu batch ./llama -i requests.jsonl -o answers.jsonl
      ttpu batch ./llama -i requests.jsonl -o answers.jsonl --resume --json
      ttpu batch ./llama -i openai.jsonl -o answers.jsonl --served-model-name gpt-4o-mini
    \f
    Raises:
        RequestError: a file or an option is invalid.
        Exit: no request succeeded.
    """
    import asyncio

    from ttpu_core.cli.session import checkpoint_name
    from ttpu_serve.server.batches.offline import OfflineWork, answer_file
    from ttpu_serve.server.settings import ServerSettings

    assert config is None, "its options stand on the command line"
    name = checkpoint_name(checkpoint, weights_dir)
    check_processes("ttpu batch")
    settings = ServerSettings(**answers.settings(name, revision))
    arguments = engine.arguments() | loading.arguments() | {"guides": guides.value, "compile_meanwhile": True}
    arguments |= {} if revision is None else {"revision": revision}
    with OfflineWork(_path(input_file), _path(output_file), resume=resume) as work:
        core = opened(name, settings, arguments, quiet=quiet, tokenizer=tokenizer)
        at_once = concurrency or 2 * core.scheduler.config.max_num_seqs
        began = time.monotonic()
        try:
            with Bar("requests", work.total, done=work.resumed, shown=not quiet) as work.on_answer:
                asyncio.run(answer_file(core, settings, work, at_once))
            work.finish()
        except BaseException:
            answered = work.resumed + work.succeeded + work.failed
            if answered:
                note(f"{answered:,} of {counted(work.total, 'answer')} are in {work.partial}: --resume goes on there.")
            raise
    summary = _summary(work, input_file, output_file, time.monotonic() - began)
    if as_json:
        print_json(summary)
    elif not quiet:
        _print(summary)
    if not work.succeeded + work.resumed:
        raise typer.Exit(NO_ANSWER)


def _path(text: str) -> Path:
    """Return a file on this machine.

    Raises:
        RequestError: it is a URL.
    """
    if "://" in text:
        raise RequestError(f"{text} was given, but requests and answers are files of this machine: fetch it first.")
    return Path(text).expanduser()


def _summary(work: Any, source: str, output: str, seconds: float) -> dict[str, Any]:
    usage = work.usage.as_json()
    return {
        "input": source,
        "output": output,
        "requests": work.total,
        "succeeded": work.succeeded + work.resumed,
        "failed": work.failed,
        "resumed": work.resumed,
        "seconds": round(seconds, 3),
        "usage": usage,
        "output_tokens_per_second": round(usage["output_tokens"] / seconds, 1),
    }


def _print(summary: dict[str, Any]) -> None:
    told = f"{counted(summary['requests'], 'request')}: {summary['succeeded']:,} answered, {summary['failed']:,} failed"
    if summary["resumed"]:
        told += f", {summary['resumed']:,} of them by an earlier run"
    usage = summary["usage"]
    print(
        f"{told}\n{usage['input_tokens']:,} prompt tokens, {usage['output_tokens']:,} output tokens in "
        f"{summary['seconds']:.1f} s ({summary['output_tokens_per_second']:,.1f} a second)\n"
        f"answers: {summary['output']}"
    )


app = typer.Typer(add_completion=False, context_settings=CONTEXT_SETTINGS, pretty_exceptions_enable=False)
app.command("batch", cls=SharedFileCommand)(batch)
