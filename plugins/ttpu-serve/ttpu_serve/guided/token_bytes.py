"""The bytes of every token of a Hugging Face tokenizer, as its decoder writes them in the middle of a text, and which
tokens are special (`<|eot_id|>`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ttpu_core.errors import RequestError

_Written = Callable[[str], bytes]


@dataclass(frozen=True)
class TokenBytes:
    """tokens: the bytes of each id; empty for padding rows, unused ids, and bytes that UTF-8 never contains. Special
    tokens have their name's bytes. special: the ids of special tokens."""

    tokens: list[bytes]
    special: tuple[int, ...]


def token_bytes(tokenizer: Any, size: int) -> TokenBytes:
    """Return the bytes of tokens 0 to `size` - 1; further tokens of the tokenizer are left out.

    Special tokens are those marked as special and added tokens of the form <…>, as in llguidance, so that a grammar can
    name them.

    Raises:
        RequestError: the tokenizer is missing, is no fast tokenizer, or its decoder does not write tokens
            independently.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if tokenizer is None:
        raise _refusal("this checkpoint has none")
    if backend is None or backend.decoder is None:
        raise _refusal(f"this checkpoint's is {type(tokenizer).__name__}")
    write = _writer(_stages(json.loads(backend.decoder.__getstate__())))
    tokens, special = [b""] * size, []
    for text, token in backend.get_vocab(with_added_tokens=True).items():
        if token < size:
            tokens[token] = write(text)
    for token, added in backend.get_added_tokens_decoder().items():
        if token < size and (added.special or (added.content.startswith("<") and added.content.endswith(">"))):
            tokens[token] = added.content.encode()
            special.append(token)
    # 0xFF is llguidance's mark of a special token, and in no UTF-8 text.
    return TokenBytes([b"" if b"\xff" in written else written for written in tokens], tuple(sorted(special)))


def _stages(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [stage for part in decoder["decoders"] for stage in _stages(part)]
    return [decoder]


def _writer(stages: list[dict[str, Any]]) -> _Written:
    """Return the decoder as a function of one token. Stages after `Fuse` are ignored: a `Strip` there affects only the
    start and end of the whole text."""
    replaced: list[tuple[str, str]] = []
    fallback = False
    for stage in stages:
        kind = stage["type"]
        if kind == "ByteLevel":
            return _byte_level
        elif kind == "Replace" and "String" in stage["pattern"]:
            replaced.append((stage["pattern"]["String"], stage["content"]))
        elif kind == "Metaspace":
            replaced.append((stage["replacement"], " "))
        elif kind == "ByteFallback":
            fallback = True
        elif kind == "Fuse":
            break
        else:
            raise _refusal(f"this checkpoint's decodes with {kind}")

    def write(text: str) -> bytes:
        for old, new in replaced:
            text = text.replace(old, new)
        if fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                pass
        return text.encode()

    return write


def _byte_level(text: str) -> bytes:
    try:
        return bytes([_BYTES[letter] for letter in text])
    except KeyError:  # an added token, written as it is
        return text.encode()


def _byte_letters() -> dict[str, int]:
    """Return GPT-2's table: printable Latin-1 letters stand for themselves, other bytes for letters from 256
    upwards."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_letters()


def _refusal(found: str) -> RequestError:
    return RequestError(
        "guided decoding must know the bytes of each token, which a tokenizer.json with a byte-level or SentencePiece "
        f"decoder tells, but {found}: leave the guide out, or use a checkpoint with such a tokenizer."
    )
