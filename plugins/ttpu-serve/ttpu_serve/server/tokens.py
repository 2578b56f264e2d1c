"""The server's tokenizer: encoding, decoding, and the bytes of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_serve.guided.token_bytes import token_bytes


class Tokens:
    """Encodes and decodes outside the event loop, in one thread, because tokenizers are not thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ttpu-tokenizer")
        self._special: frozenset[int] = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._bytes: list[bytes] | None = None
        self._longest: int | None = None  # characters of a token

    async def run(self, work: Any, *arguments: Any) -> Any:
        """Run `work(*arguments)` in the tokenizer's thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text; `special` adds the special tokens that the checkpoint puts around texts, such as
        <s>."""
        ids: list[int] = await self.run(self.encode_now, text, special)
        return ids

    async def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of ids."""
        text: str = await self.run(self.decode_now, ids, skip_special)
        return text

    async def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them."""
        found: list[str] = await self.run(lambda: [self.piece(token) for token in ids])
        return found

    def check_size(self, text: str, most: int, param: str) -> None:
        """Check that a text can have at most `most` tokens, before it is tokenized.

        Raises:
            RequestError: the text has more than `most` tokens even if all are the longest token.
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
        """Encode in the calling thread.

        Raises:
            RequestError: the tokenizer refuses the text.
            MissingDependencyError: there is no tokenizer.
        """
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

    def piece(self, token: int) -> str:
        """Return a token as the vocabulary spells it."""
        return str(self._needed().convert_ids_to_tokens(token))

    def is_special(self, text: str) -> bool:
        """Whether a text is a special token, which output text leaves out by default."""
        vocabulary = self._needed().get_vocab()
        return vocabulary.get(text) in self._special

    def ends(self, token: int) -> bool:
        """Whether the token is special, as end-of-sequence tokens are."""
        return token in self._special

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

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
