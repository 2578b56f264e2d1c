"""One reply of a chat while it grows: its reasoning, content and tool calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ttpu_serve.api.outputs import OutputDelta
from ttpu_serve.reasoning_parsers.protocol import ReasoningStream
from ttpu_serve.server.responses import TokenLogprobs
from ttpu_serve.tool_parsers.protocol import (
    Arguments,
    CallBegins,
    CallBreaks,
    CallEnds,
    Content,
    Event,
    ToolCallStream,
)

log = logging.getLogger("ttpu.server")


@dataclass
class MadeCall:
    """One tool call of a reply; `arguments` is JSON text."""

    name: str
    id: str
    arguments: str = ""


@dataclass(frozen=True)
class New:
    """The reasoning, and the content and calls in their order, that a delta added to a reply."""

    reasoning: str
    events: Sequence[Event]


@dataclass
class Turn:
    """One reply.

    parser: reads its calls; None reads none. named: the tool whose arguments the whole text is. most: maximum number of
    reported calls, if limited; those that break do not count. reasoning_parser: tells its reasoning apart. reasons:
    reasoning is reported, and not dropped. text, reasoning, calls: of the reply so far; a call that broke is text.
    begun, broken: number of calls that began, and of those among them that broke.
    """

    parser: ToolCallStream | None = None
    named: CallBegins | None = None
    most: int | None = None
    reasoning_parser: ReasoningStream | None = None
    reasons: bool = True
    text: str = ""
    reasoning: str = ""
    calls: list[MadeCall] = field(default_factory=list)
    begun: int = 0
    broken: int = 0
    logprobs: list[TokenLogprobs] | None = None
    ids: list[int] = field(default_factory=list)
    delta: OutputDelta | None = None

    def read(self, delta: OutputDelta) -> New:
        """Add a delta and return what it added. Calls beyond the maximum are left out."""
        self.delta = delta
        self.ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs if self.logprobs is not None else []
            self.logprobs += delta.logprobs
        ended = delta.finish_reason is not None
        reasoning, text = self._told_apart(delta.text, ended=ended)
        new = New(reasoning, [event for event in self._events(text, ended=ended) if self._reported(event)])
        self.reasoning += reasoning
        for event in new.events:
            self._add(event)
        return new

    def ended_by(self, reason: str) -> str:
        """Return OpenAI's finish_reason. As in OpenAI's API, a call of a named tool ends with stop."""
        return "tool_calls" if self.calls and self.named is None and reason == "stop" else reason

    def _told_apart(self, text: str, *, ended: bool) -> tuple[str, str]:
        """Return the (reasoning, content) of a text."""
        if self.reasoning_parser is None:
            return "", text
        try:
            reasoning, content = self.reasoning_parser.push(text)
            if ended:
                last = self.reasoning_parser.finish()
                reasoning, content = reasoning + last[0], content + last[1]
        except Exception:  # of a stranger's parser, which costs the answer its form and not itself
            log.exception("the reasoning parser failed; what follows is content")
            self.reasoning_parser = None
            return "", text
        return (reasoning if self.reasons else ""), content

    def _events(self, text: str, *, ended: bool) -> list[Event]:
        if self.named is not None:
            return [*(() if self.begun else (self.named,)), Arguments(text)] if text else []
        if self.parser is not None:
            try:
                return [*self.parser.push(text), *(self.parser.finish() if ended else ())]
            except Exception:
                log.exception("the tool call parser failed; what follows is content")
                self.parser = None
        return [Content(text)] if text else []

    def _reported(self, event: Event) -> bool:
        self.begun += isinstance(event, CallBegins)
        reported = isinstance(event, Content) or self.most is None or self.begun - self.broken <= self.most
        self.broken += isinstance(event, CallBreaks)
        return reported

    def _add(self, event: Event) -> None:
        match event:
            case Content(text):
                self.text += text
            case CallBegins(name, call_id):
                self.calls.append(MadeCall(name, call_id))
            case Arguments(text):
                self.calls[-1].arguments += text
            case CallBreaks(text):
                self.calls.pop()
                self.text += text
            case CallEnds():
                pass
