"""A stand-in for an OpenAI-compatible server, for tests of what measures one: in goes a request, whose prompt says how
to behave; out go bytes exactly as the behaviour says, so that streams, errors and broken connections can be tested."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

PAUSE = 0.02
"""Seconds before each piece of a slow answer."""
PROMPT_TOKENS = 7


class FakeServer:
    """Listens on `url`. `bodies` are those of all requests, `headers` of the last; `peak` is the most at once."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.running = self.peak = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            self.headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            path = head[0].split()[1]
            if path.endswith("/models"):
                await self._whole(writer, 200, json.dumps({"data": [{"id": "fake-model"}]}).encode())
            else:
                body = json.loads(await reader.readexactly(int(self.headers["content-length"])))
                self.bodies.append(body)
                self.running += 1
                self.peak = max(self.peak, self.running)
                try:
                    await self._answer(reader, writer, body, chat=path.endswith("/chat/completions"))
                finally:
                    self.running -= 1
        writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any], chat: bool
    ) -> None:
        asked = body["messages"][-1]["content"] if chat else body["prompt"]
        behaviour = asked.split()[0] if isinstance(asked, str) else "fine"
        if behaviour == "refuse":
            error = {"error": {"message": "too many requests wait", "type": "rate_limit", "code": None, "param": None}}
            await self._whole(writer, 429, json.dumps(error).encode())
        elif behaviour == "page":
            await self._whole(writer, 502, b"<html>\nbad gateway</html>")
        elif behaviour == "silent":
            await reader.read()  # until the client goes
        else:
            await self._start(writer)
            async for event in self._events(behaviour, body["max_tokens"], chat):
                await self._piece(writer, event)
            if behaviour != "cut":  # which closes the connection in the middle of the body
                await self._piece(writer, b"")

    async def _events(self, behaviour: str, number: int, chat: bool) -> AsyncIterator[bytes]:
        end = b"\r\n\r\n" if behaviour == "split" else b"\n\n"

        def event(value: Any) -> bytes:
            return b"data: " + json.dumps(value, ensure_ascii=False).encode() + end

        def choice(text: str, reason: str | None = None) -> bytes:
            said = {"delta": {"content": text}} if chat else {"text": text}
            return event({"choices": [{"index": 0, **said, "finish_reason": reason}]})

        if chat:
            opening = {"role": "assistant", "content": ""}
            yield event({"choices": [{"index": 0, "delta": opening, "finish_reason": None}]})
        told = max(1, number // 2) if behaviour in ("cut", "short", "wrong") else number
        for _ in range(told):
            if behaviour == "slow":
                await asyncio.sleep(PAUSE)
            if behaviour == "split":  # in the middle of a line's end, and of a character that Python takes for one
                text = choice("a\u2028b")
                for place in (text[:30], text[30:-3], text[-3:-1], text[-1:]):
                    yield place
                    await asyncio.sleep(0.002)
            else:
                yield choice("x")
        if behaviour in ("cut", "short"):
            return
        if behaviour == "wrong":
            yield event({"error": {"message": "the engine failed", "code": 500}})
        else:
            yield b": a comment" + end + choice("", "length")
            if behaviour != "uncounted":
                # As servers do that send two tokens in one piece.
                tokens = 2 * number if behaviour == "pairs" else number
                yield event({"choices": [], "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens}})
        yield b"data: [DONE]" + end

    @staticmethod
    async def _start(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n")
        writer.write(b"connection: close\r\n\r\n")
        await writer.drain()

    @staticmethod
    async def _piece(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await writer.drain()

    @staticmethod
    async def _whole(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} Told\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()


@contextmanager
def running() -> Iterator[FakeServer]:
    """A server in a thread of its own, so that code which runs its own event loop can be tested."""
    fake, ready = FakeServer(), threading.Event()
    stop: list[Callable[[], Any]] = []

    async def serve() -> None:
        done = asyncio.Event()
        server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(done.set))
        ready.set()
        await done.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield fake
    finally:
        stop[0]()
        thread.join(10)
