"""The server's tokenizer: encoding, decoding, and the bytes of tokens."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Sequence
from typing import Any, Literal

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_core.generation.detokenizer import TextStream
from ttpu_serve.api.client_pace import ProcessorPace
from ttpu_serve.api.fair_executor import FairExecutor
from ttpu_serve.execution.bad_words import sequences_of
from ttpu_serve.guided.token_bytes import token_bytes
from ttpu_serve.server.events import CLIENT

LONG_BODY = 2**16
"""Bytes of a request's body from which its texts are tokenized beside those of shorter requests."""
PREFIX = 4
"""Characters per allowed token of the beginning of a long text that is tokenized first, to see whether it fits."""
SLACK = 64
"""Tokens that a text may be shorter than its beginning, for another token may end at the cut."""


def kept(ids: list[int], most: int, keep: Literal["first", "last"]) -> list[int]:
    """Return at most `most` of token ids, the first or the last ones."""
    return ids[:most] if keep == "first" else ids[max(len(ids) - most, 0) :]


class Tokens:
    """Encodes and decodes outside the event loop, in two threads, each with a tokenizer of its own, because tokenizers
    are not thread-safe: one for short requests, and one for long requests. In each, clients take turns."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._short = FairExecutor("ttpu-tokenizer")
        self._long = FairExecutor("ttpu-tokenizer-long", ProcessorPace())
        self._of_thread = threading.local()
        self._special: frozenset[int] = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._bytes: list[bytes] | None = None
        self._named: frozenset[int] = frozenset()  # tokens that a grammar has to name, once there are bytes

    async def run(self, work: Any, *arguments: Any) -> Any:
        """Run `work(*arguments)` in a tokenizer's thread and return its result. When the caller is cancelled, what
        waits is dropped, and `encode_now` ends early.

        Raises:
            Exception: of the work.
        """
        client, size = CLIENT.get()
        left = threading.Event()

        def called() -> Any:
            self._of_thread.left = left
            if size >= LONG_BODY and not hasattr(self._of_thread, "tokenizer"):
                self._of_thread.tokenizer = copy.deepcopy(self.tokenizer)
            return work(*arguments)

        executor = self._long if size >= LONG_BODY else self._short
        try:
            return await asyncio.wrap_future(executor.submit(client, called))
        finally:
            left.set()

    async def encode(
        self, text: str, *, special: bool = True, most: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Return the ids of a text.

        Args:
            text: the text.
            special: add the special tokens that the checkpoint puts around texts, such as <s>.
            most: the most tokens that it may have; None is any number. It may return a few more than that.
            param: the field that holds the text.

        Raises:
            RequestError: the tokenizer refuses the text, or it has many more than `most` tokens.
        """
        ids: list[int] = await self.run(self.encode_now, text, special, most, param)
        return ids

    async def encode_cut(
        self, text: str, cut: int, keep: Literal["first", "last"], *, special: bool, most: int, param: str = "prompt"
    ) -> list[int]:
        """Return at most `cut` ids of a text, special tokens among them: those of its beginning or of its end.

        Args:
            text: the text.
            cut: the most ids.
            keep: which of them are kept.
            special: add the special tokens that the checkpoint puts around texts.
            most: the most tokens that the text may have, for all of it is tokenized.
            param: the field that holds the text.

        Raises:
            RequestError: the tokenizer refuses the text, or it has many more than `most` tokens.
        """
        ids: list[int] = await self.run(self._encode_cut_now, text, cut, keep, special, most, param)
        return ids

    def _encode_cut_now(
        self, text: str, cut: int, keep: Literal["first", "last"], special: bool, most: int, param: str
    ) -> list[int]:
        ids = self.encode_now(text, special, most, param)
        if len(ids) <= cut:
            return ids
        around = len(self._encoded("", special))
        if not around or around >= cut:
            return kept(ids, cut, keep)
        tokenizer = self._needed()
        before = tokenizer.truncation_side
        tokenizer.truncation_side = {"first": "right", "last": "left"}[keep]
        try:
            read = tokenizer(text, add_special_tokens=special, truncation=True, max_length=cut)
            return [int(token) for token in read["input_ids"]]
        finally:
            tokenizer.truncation_side = before

    async def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of ids."""
        text: str = await self.run(self.decode_now, ids, skip_special)
        return text

    async def continued(self, prompt: Sequence[int], ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the text that ids add behind a prompt, as an engine would stream it."""

        def written() -> str:
            text = TextStream(self._needed(), prompt, (), skip_special_tokens=skip_special)
            return "".join([text.push(token) for token in ids]) + text.finish()

        text: str = await self.run(written)
        return text

    async def bad_words(self, words: Sequence[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Return the sequences of ids that write words which an output must not hold; see `sequences_of`.

        Raises:
            RequestError: a word has no ids, or too many.
        """
        found: tuple[tuple[int, ...], ...] = await self.run(lambda: sequences_of(words, self._needed()))
        return found

    async def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them."""
        found: list[str] = await self.run(lambda: [self.piece(token) for token in ids])
        return found

    def encode_now(self, text: str, special: bool, most: int | None = None, param: str = "prompt") -> list[int]:
        """Encode in the calling thread: see `encode`. A text that does not fit is recognized by its beginning, so
        that refusing it takes no longer than reading one that fits.

        Raises:
            RequestError: the tokenizer refuses the text, or it has many more than `most` tokens.
            MissingDependencyError: there is no tokenizer.
            asyncio.CancelledError: the caller of `run` was cancelled.
        """
        length = len(text) if most is None else PREFIX * (most + SLACK)
        while length < len(text) and most is not None:
            if len(self._encoded(text[:length], special)) > most + SLACK:
                raise RequestError(
                    f"{param} has {len(text):,} characters, which are more than the {most:,} tokens that this server "
                    "reads: shorten it.",
                    param=param,
                    code="context_length_exceeded",
                )
            length *= 2
        return self._encoded(text, special)

    def _encoded(self, text: str, special: bool) -> list[int]:
        left: threading.Event | None = getattr(self._of_thread, "left", None)
        if left is not None and left.is_set():
            raise asyncio.CancelledError
        try:
            return [
                int(token) for token in self._needed()(text, add_special_tokens=special, verbose=False)["input_ids"]
            ]
        except (UnicodeError, TypeError, OverflowError) as error:
            raise RequestError(f"prompt is no text that the tokenizer takes ({error}): correct it.") from error

    def decode_now(self, ids: Sequence[int], skip_special: bool) -> str:
        """Decode in the calling thread.

        Raises:
            RequestError: the tokenizer does not know an id.
            MissingDependencyError: there is no tokenizer.
        """
        known = len(self._needed())
        unknown = next((token for token in ids if not 0 <= token < known), None)
        if unknown is not None:
            raise RequestError(
                f"tokens holds the id {unknown}, but the tokenizer's are 0 to {known - 1}: correct it.", param="tokens"
            )
        try:
            text: str = self._needed().decode(
                list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )
        except (TypeError, OverflowError, IndexError, ValueError) as error:
            raise RequestError(f"tokens holds ids that the tokenizer does not know ({error}): correct it.") from error
        return text

    def info(self) -> dict[str, Any]:
        """Return what kind of tokenizer it is, and its special tokens.

        Raises:
            MissingDependencyError: there is no tokenizer.
        """
        tokenizer = self._needed()
        names = ("padding_side", "truncation_side", "add_bos_token", "add_eos_token")
        told = {name: getattr(tokenizer, name, None) for name in names}
        special = {name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        return {"tokenizer_class": type(tokenizer).__name__, "vocab_size": len(tokenizer), **told, **special}

    def piece(self, token: int) -> str:
        """Return a token as the vocabulary spells it."""
        return str(self._needed().convert_ids_to_tokens(token))

    def is_special(self, text: str) -> bool:
        """Whether a text is a special token, which output text leaves out by default."""
        vocabulary = self._needed().get_vocab()
        return vocabulary.get(text) in self._special

    def terminal(self, text: str) -> str:
        """Return a text as a terminal of llguidance's Lark, which names the token if it is a special one."""
        if self._bytes is None:
            self._bytes = self._table()
        token = self._needed().get_vocab().get(text)
        return f"<[{token}]>" if token in self._named else json.dumps(text, ensure_ascii=False)

    def ends(self, token: int) -> bool:
        """Whether the token is special, as end-of-sequence tokens are."""
        return token in self._special

    def close(self) -> None:
        """Stop the threads."""
        self._short.close()
        self._long.close()

    def text_of(self, token: int) -> str:
        """Return a token's text; incomplete characters are U+FFFD."""
        return self.bytes_of(token).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """Return a token's bytes; for a special token, those of its name."""
        if self._bytes is None:
            self._bytes = self._table()
        if token < len(self._bytes) and (known := self._bytes[token]):
            return known
        return str(self._needed().convert_ids_to_tokens(token)).encode()

    def _table(self) -> list[bytes]:
        try:
            written = token_bytes(self.tokenizer, len(self._needed()))
            self._named = frozenset(written.special)
            return written.tokens
        except RequestError:  # a decoder that does not write token by token: pieces are the best there is
            return []

    def _needed(self) -> Any:
        tokenizer = getattr(self._of_thread, "tokenizer", self.tokenizer)
        if tokenizer is None:
            raise MissingDependencyError(
                "the request has or wants text, but the checkpoint has no tokenizer: copy tokenizer.json into it, or "
                "send token ids."
            )
        return tokenizer
