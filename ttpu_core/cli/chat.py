"""`ttpu chat`: a conversation in the terminal, or one turn per line of a pipe, with a model whose checkpoint has a chat
template. Replies are printed as they are generated."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

import typer

from ttpu_core.cli import options
from ttpu_core.cli.console import note
from ttpu_core.cli.option_groups import with_option_groups
from ttpu_core.cli.options import Decoding
from ttpu_core.cli.session import Message, Session, checkpoint_name, open_session
from ttpu_core.errors import TTPUError

DEFAULT_NEW_TOKENS = 1024
"""A reply's limit where neither the user nor the checkpoint sets one; what is left of the context bounds it too."""

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops a reply, /help shows this."


@with_option_groups
def chat(
    checkpoint: options.CheckpointPath = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="Instructions before the first turn.")] = None,
    quiet: options.Quiet = False,
    *,
    decoding: Decoding,
    weights_dir: options.WeightsDir = None,
    loading: options.Loading,
    backend: options.Backend = None,
) -> None:
    """Talk with an instruction-tuned checkpoint.

    In a terminal: /reset forgets the conversation, /exit or Ctrl-D leaves,
    Ctrl-C stops a reply, /help shows this. If stdin is a pipe, each line is a
    turn and only replies are printed. Without --max-new-tokens the checkpoint
    decides, else 1024.

    Examples:

      ttpu chat ./llama-instruct
      ttpu chat ./llama-instruct --system "Answer in French." --temperature 0.7
      printf 'Hello\\nAnd now?\\n' | ttpu chat ./llama-instruct
    """
    name = checkpoint_name(checkpoint, weights_dir)
    session = open_session(name, loading.options(), backend=backend, chat=True, quiet=quiet)
    interactive = sys.stdin.isatty()
    if interactive and not quiet:
        note(HELP)
    with session.progress:
        Conversation(session, decoding, system, interactive=interactive).run()


class Conversation:
    """The turns so far. A turn whose reply fails is forgotten, so that the next one can be asked."""

    def __init__(self, session: Session, decoding: Decoding, system: str | None, *, interactive: bool) -> None:
        self._session = session
        self._decoding = decoding
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._interactive = interactive

    def run(self) -> None:
        """Answer until the input ends or /exit."""
        for line in _typed_lines() if self._interactive else sys.stdin:
            turn = line.strip()
            if turn == "/exit":
                return
            if turn == "/reset":
                self._messages = list(self._opening)
            elif re.fullmatch(r"/\w*", turn):  # a single word, so that "/etc/hosts is ..." is a turn
                note(HELP if turn == "/help" else f"there is no command {turn}: {HELP}")
            elif turn:
                self._take_turn(turn)

    def _take_turn(self, turn: str) -> None:
        before = len(self._messages)
        self._messages.append({"role": "user", "content": turn})
        try:
            self._messages.append({"role": "assistant", "content": self._reply()})
        except TTPUError as error:
            if not self._interactive:
                raise
            del self._messages[before:]
            note(f"error: {error} (/reset forgets the conversation.)")

    def _reply(self) -> str:
        """Stream a reply to stdout; in a terminal Ctrl-C ends it, and what was said until then is part of the talk."""
        said = ""
        try:
            for event in self._session.stream(self._messages, self._limited()):
                said += event.text
                sys.stdout.write(event.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            if not self._interactive:
                raise
        finally:
            if not said.endswith("\n"):
                sys.stdout.write("\n")
            sys.stdout.flush()
        return said

    def _limited(self) -> Decoding:
        """The user's choices, with the default length of a reply as a total that the backend cuts at the context's
        end, where neither the user nor the checkpoint sets one."""
        from ttpu_core.generation.chat_template import chat_tokens

        tokens = len(chat_tokens(self._session.model.tokenizer, self._messages))
        chosen = (self._decoding.max_new_tokens, self._decoding.max_length)
        if chosen != (None, None) or "max_new_tokens" in self._session.checkpoint.generation_config:
            return self._decoding
        return replace(self._decoding, max_length=tokens + DEFAULT_NEW_TOKENS)


def _typed_lines() -> Iterator[str]:
    """Lines typed at a prompt, with history where readline is there; Ctrl-C drops the line, Ctrl-D ends."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() its editing and history)
    while True:
        try:
            yield input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")
