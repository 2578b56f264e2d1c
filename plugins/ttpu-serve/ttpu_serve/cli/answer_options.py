"""Options of how requests are read and answered, which `ttpu serve` and `ttpu batch` share, and the engine that both
open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli.console import LoadProgress, note
from ttpu_core.errors import RequestError

if TYPE_CHECKING:
    from ttpu_serve.execution.engine_core import EngineCore

ANSWERS = "Answers"


class GenerationConfigChoice(StrEnum):
    """The source of the default sampling parameters."""

    auto = "auto"
    none = "none"


class GuidesChoice(StrEnum):
    """Where guided decoding is computed; see `ttpu_serve.guided.guides.PLACES`."""

    isolated = "isolated"
    inline = "inline"
    off = "off"


Guides = Annotated[
    GuidesChoice,
    typer.Option(
        help="Guided decoding: isolated in processes that survive any grammar, inline in this one, or off.",
        rich_help_panel=ANSWERS,
    ),
]


@dataclass(frozen=True)
class AnswerOptions:
    """What clients call the model, and how their requests become prompts and its outputs answers."""

    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What requests call the model; repeat for more. Else the name of CHECKPOINT's folder.",
            rich_help_panel=ANSWERS,
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A Jinja template, instead of the checkpoint's.", rich_help_panel=ANSWERS),
    ] = None
    default_chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="The template's variables where a request does not say: {\"enable_thinking\": false}.",
            rich_help_panel=ANSWERS,
        ),
    ] = None
    tool_call_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How the model writes tool calls: hermes, llama3_json, qwen3_coder, …, or auto: by the template.",
            rich_help_panel=ANSWERS,
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How the model writes reasoning, told apart as reasoning_content: think, gpt_oss, …; auto: by the "
            "template; none: it is content.",
            rich_help_panel=ANSWERS,
        ),
    ] = "auto"
    generation_config: Annotated[
        GenerationConfigChoice,
        typer.Option(help="Sampling's defaults: auto takes the checkpoint's.", rich_help_panel=ANSWERS),
    ] = GenerationConfigChoice.auto
    strict_fields: Annotated[
        bool,
        typer.Option(
            "--strict-fields",
            help="400 for every unknown field; else those without effect on an answer are named in a warning.",
            rich_help_panel=ANSWERS,
        ),
    ] = False

    def settings(self, checkpoint: str, revision: str | None) -> dict[str, Any]:
        """Return the fields of `ServerSettings`.

        Args:
            checkpoint: directory or Hub id.
            revision: its branch, tag or commit on the Hub.

        Raises:
            RequestError: an option is invalid.
        """
        from ttpu_serve.api.default_sampling import default_sampling
        from ttpu_serve.server.template import read_template

        samples = self.generation_config is GenerationConfigChoice.auto
        return {
            "model_names": tuple(self.served_model_name or ()),
            "chat_template": None if self.chat_template is None else read_template(self.chat_template),
            "chat_template_kwargs": _variables(self.default_chat_template_kwargs),
            "tool_call_parser": self.tool_call_parser,
            "reasoning_parser": self.reasoning_parser,
            "default_sampling": default_sampling(checkpoint, revision) if samples else {},
            "strict_fields": self.strict_fields,
        }


def check_processes(command: str) -> None:
    """Refuse several processes unless the backend's runner spans them.

    Raises:
        RequestError: the command was launched as several processes, which the backend's runner does not span.
    """
    from ttpu_core.processes import is_one_of_several
    from ttpu_serve.api.build_engine import serving_backend

    if is_one_of_several() and not (backend := serving_backend(None)).spans_processes:
        raise RequestError(
            f"`{command}` was launched as several processes, but the runner of the {backend.name} backend spans one "
            "only: start it without launch."
        )


def opened(
    checkpoint: str, settings: Any, arguments: Mapping[str, Any], *, quiet: bool, tokenizer: str | None
) -> EngineCore:
    """Load the model and compile its programs.

    Args:
        checkpoint: directory or Hub id.
        settings: the server's.
        arguments: options of loading and fields of `EngineConfig`.
        quiet: show nothing.
        tokenizer: another checkpoint, for its tokenizer.

    Raises:
        TTPUError: a parser is unknown, or the model cannot be opened.
    """
    from ttpu_serve.api.open_engine import open_engine, read_options
    from ttpu_serve.reasoning_parsers import installed as reasoning
    from ttpu_serve.tool_parsers import installed as tools

    tools.check_parser(settings.tool_call_parser)  # a wrong name is refused before a model is loaded
    reasoning.check_parser(settings.reasoning_parser)
    served = "" if Path(checkpoint).expanduser().exists() else checkpoint
    load, config = read_options(checkpoint, arguments)
    with LoadProgress(quiet=quiet) as progress:
        core = open_engine(checkpoint, load, config, progress=progress, served_name=served, tokenizer=tokenizer)
    if not quiet:
        stats = core.stats()
        cached = f" ({stats.programs_cached} of them from cache)" if stats.programs_cached else ""
        rest = f", {stats.programs_pending} more while it serves" if stats.programs_pending else ""
        note(
            f"{stats.programs} programs compiled in {stats.compile_seconds:.1f} s{cached}{rest}; "
            f"sequences of up to {core.max_model_len:,} tokens"
        )
    return core


def _variables(text: str | None) -> dict[str, Any]:
    """Return the chat template's variables of JSON.

    Raises:
        RequestError: it is no JSON object, or has a variable that requests have a field for.
    """
    from ttpu_serve.api.template_variables import OURS

    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or OURS & set(found):
        raise RequestError(
            f"--default-chat-template-kwargs {text} was given, but a JSON object of the template's own variables is "
            'needed, as in {"enable_thinking": false}: correct it.'
        )
    return found
