"""From a checkpoint named on the command line to a loaded model: a `Session` that streams outputs, with progress shown
meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ttpu_core.cli.console import LoadProgress, note
from ttpu_core.cli.options import Decoding
from ttpu_core.errors import RequestError

if TYPE_CHECKING:
    from ttpu_core.backend import StreamingModel
    from ttpu_core.checkpoint import Checkpoint
    from ttpu_core.generation.events import StreamEvent
    from ttpu_core.loading import LoadOptions

Message = dict[str, str]
Prompt = str | list[Message]


@dataclass(frozen=True)
class Session:
    """A loaded model and what belongs to it."""

    model: StreamingModel
    checkpoint: Checkpoint
    progress: LoadProgress

    @property
    def speaks(self) -> bool:
        """Whether this process prints the output: of several, which all compute it, the first one does."""
        from ttpu_core.processes import is_first_process

        return is_first_process()

    def stream(self, prompt: Prompt, decoding: Decoding, *, logprobs: int | None = None) -> Iterator[StreamEvent]:
        """Events of one output, each with as many of the likeliest tokens as `logprobs` says; the progress disappears
        with the first text, which shares the terminal with it."""
        arguments = decoding.arguments(self.checkpoint.generation_config) | {"logprobs": logprobs}
        for event in self.model.stream(prompt, **arguments):
            if event.text:
                self.progress.close()
            yield event
        self.progress.close()


def checkpoint_name(checkpoint: str | None, weights_dir: str | None) -> str:
    """Return the one checkpoint that was named, as CHECKPOINT or as --weights-dir.

    Raises:
        RequestError: none or both were given.
    """
    named = [name for name in (checkpoint, weights_dir) if name]
    if len(named) != 1:
        found = f"both {named[0]} and --weights-dir {named[1]} were" if named else "none was"
        raise RequestError(f"one checkpoint is needed, but {found} given: pass a directory or a Hub id as CHECKPOINT.")
    return named[0]


def open_session(name: str, options: LoadOptions, *, backend: str | None, chat: bool, quiet: bool) -> Session:
    """Load a model for the command line.

    Args:
        name: a checkpoint's directory or Hub id.
        options: how it is loaded; progress is shown on a terminal.
        backend: the name of an installed backend, None for the default one.
        chat: a chat template is needed, which is looked for before the weights are read.
        quiet: show no progress.

    Raises:
        TTPUError: the checkpoint, its plugin or the backend cannot be used, and why.
        RequestError: there is no chat template.
        UnsupportedError: the backend's models cannot stream.
    """
    from ttpu_core.backend import Streams
    from ttpu_core.checkpoint import open_checkpoint
    from ttpu_core.errors import UnsupportedError
    from ttpu_core.generation.chat_template import has_chat_template
    from ttpu_core.loading import open_model
    from ttpu_core.registry import default_registry

    checkpoint = open_checkpoint(name, revision=options.revision)
    if chat and not has_chat_template(checkpoint):
        raise RequestError(
            f"a chat with {name} was asked for, but the checkpoint has no chat template (chat_template.jinja, or "
            f"`chat_template` in tokenizer_config.json), so it does not know turns: use `ttpu generate {name}` without "
            "--chat, or an instruction-tuned checkpoint."
        )
    progress = LoadProgress(quiet=quiet)
    try:
        model: Any = open_model(
            checkpoint,
            replace(options, progress=progress),
            backend=backend,
            warn=lambda sentence: note(f"warning: {sentence}."),
        )
        runs = default_registry().backend(backend)
        if isinstance(runs, Streams):
            model = runs.streaming(model)
        elif not hasattr(model, "stream"):
            raise UnsupportedError(
                f"text was to be streamed from {name}, but the models of the backend {runs.name!r} cannot: use another "
                "--backend, or call the model from Python."
            )
    except BaseException:  # also Ctrl-C: a bar that is left running would overwrite the error
        progress.close()
        raise
    return Session(model, checkpoint, progress)
