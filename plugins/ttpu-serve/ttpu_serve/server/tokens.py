"""The tokenizer as a server needs it. In: texts and ids; out: ids, texts, and the bytes that a token stands for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_serve.guided.token_bytes import token_bytes


class Tokens:
    """Encodes and decodes off the event loop, in one thread: a tokenizer is not made to be used from several."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ttpu-tokenizer")
        self._special: frozenset[int] = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._bytes: list[bytes] | None = None
        self._longest: int | None = None  # characters of a token

    async def run(self, work: Any, *arguments: Any) -> Any:
        """`work(*arguments)` in the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text; `special` adds what the checkpoint puts around every text, such as <s>."""
        ids: list[int] = await self.run(self.encode_now, text, special)
        return ids

    async def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of ids."""
        text: str = await self.run(self.decode_now, ids, skip_special)
        return text

    async def pieces(self, ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary writes them."""
        found: list[str] = await self.run(lambda: [self.piece(token) for token in ids])
        return found

    def check_size(self, text: str, most: int, param: str) -> None:
        """That a text may have as few as `most` tokens, before time is spent on reading it.

        Raises:
            RequestError: even if all of it were the longest token, it would have more.
        """
        if self._longest is None:
            self._longest = max(map(len, self._needed().get_vocab()), default=1)
        if len(text) > most * self._longest:
            raise RequestError(
                f"{param} has {len(text):,} characters, which is more than the {most:,} tokens that this server reads "
                "can hold: shorten it.",
                param=param,
                code="context_length_exceeded",
            )

    def encode_now(self, text: str, special: bool) -> list[int]:
        """The same as `encode`, in this thread."""
        try:
            return [
                int(token) for token in self._needed()(text, add_special_tokens=special, verbose=False)["input_ids"]
            ]
        except (UnicodeError, TypeError, OverflowError) as error:
            raise RequestError(f"prompt is no text that the tokenizer takes ({error}): correct it.") from error

    def decode_now(self, ids: Sequence[int], skip_special: bool) -> str:
        """The same as `decode`, in this thread."""
        try:
            text: str = self._needed().decode(
                list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )
        except (TypeError, OverflowError, IndexError, ValueError) as error:
            raise RequestError(f"tokens holds ids that the tokenizer does not know ({error}): correct it.") from error
        return text

    def piece(self, token: int) -> str:
        """A token as the vocabulary writes it."""
        return str(self._needed().convert_ids_to_tokens(token))

    def is_special(self, text: str) -> bool:
        """Whether a text is a special token, which is left out of answers unless they are asked to hold it."""
        vocabulary = self._needed().get_vocab()
        return vocabulary.get(text) in self._special

    def ends(self, token: int) -> bool:
        """Whether it is a special token, as those that end a sequence are."""
        return token in self._special

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def text_of(self, token: int) -> str:
        """A token's text; bytes that are no whole character are U+FFFD."""
        return self.bytes_of(token).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for; of a special token its name's."""
        if self._bytes is None:
            self._bytes = self._table()
        if token < len(self._bytes) and (known := self._bytes[token]):
            return known
        return str(self._needed().convert_ids_to_tokens(token)).encode()

    def _table(self) -> list[bytes]:
        try:
            return token_bytes(self.tokenizer, len(self._needed())).tokens
        except RequestError:  # a decoder that does not write token by token: pieces are the best there is
            return []

    def _needed(self) -> Any:
        if self.tokenizer is None:
            raise MissingDependencyError(
                "the request has or wants text, but the checkpoint has no tokenizer: copy tokenizer.json into it, or "
                "send token ids."
            )
        return self.tokenizer
