"""A reply as a row of blocks, one after another: reasoning, text, and tool calls, for APIs that answer in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ttpu_serve.server.turn import New
from ttpu_serve.tool_parsers.protocol import Arguments, CallBegins, CallBreaks, CallEnds, Content

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """One block. text: of reasoning and text; the JSON text of a call's arguments. name, call_id: of a call."""

    kind: Kind
    text: str = ""
    name: str = ""
    call_id: str = ""


@dataclass(frozen=True)
class Step:
    """What happens to block number `place`: it begins, grows by `text`, or ends."""

    what: Literal["begins", "grows", "ends"]
    place: int
    block: Block
    text: str = ""


@dataclass
class Blocks:
    """The blocks of one reply while it grows."""

    blocks: list[Block] = field(default_factory=list)
    open: bool = False

    def read(self, new: New) -> Iterator[Step]:
        """Yield what a delta's additions do to the blocks."""
        if new.reasoning:
            yield from self._grow("reasoning", new.reasoning)
        for event in new.events:
            match event:
                case Content(text) if text:
                    yield from self._grow("text", text)
                case CallBegins(name, call_id):
                    yield from self._begin(Block("call", name=name, call_id=call_id))
                case Arguments(text) if text:
                    yield from self._grow("call", text)
                case CallEnds() | CallBreaks():
                    yield from self.end()

    def end(self) -> Iterator[Step]:
        """Yield the end of the last block, if it is open."""
        if self.open:
            self.open = False
            yield Step("ends", len(self.blocks) - 1, self.blocks[-1])

    def _begin(self, block: Block) -> Iterator[Step]:
        yield from self.end()
        self.blocks.append(block)
        self.open = True
        yield Step("begins", len(self.blocks) - 1, block)

    def _grow(self, kind: Kind, text: str) -> Iterator[Step]:
        if not self.open or self.blocks[-1].kind != kind:
            yield from self._begin(Block(kind))
        self.blocks[-1].text += text
        yield Step("grows", len(self.blocks) - 1, self.blocks[-1], text)
