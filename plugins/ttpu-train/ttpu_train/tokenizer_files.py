"""Writes the tokenizer that a trainer was given into a checkpoint, in place of the one that the model came with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip
"""Files in which transformers keeps a tokenizer and its chat template."""


def replace_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Write a tokenizer's files, and remove those of another one, whose chat template would be read beside them.

    Args:
        folder: of the checkpoint.
        tokenizer: one of transformers. One that cannot be saved leaves the folder as it is.
    """
    if not hasattr(tokenizer, "save_pretrained"):
        return
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    # Several templates would become a folder of files, which checkpoints do not hold.
    several = isinstance(getattr(tokenizer, "chat_template", None), dict)
    tokenizer.save_pretrained(str(folder), **({"save_jinja_files": False} if several else {}))
