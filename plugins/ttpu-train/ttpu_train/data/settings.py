"""The settings that turn a dataset into batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ttpu_core.errors import RequestError

Overlong = Literal["split", "truncate", "refuse"]


@dataclass(frozen=True)
class DataSettings:
    """How examples become rows of tokens, and in which order.

    Attributes:
        max_length: tokens in a row. Every batch has this width, so that one program serves them all.
        rows: rows of this process in one batch. A global batch has `rows` times the number of processes.
        packing: several sequences share a row; each attends to itself alone. Without it a row holds one sequence.
        shuffle: draw a new order for each epoch.
        seed: of the order.
        epochs: passes over the data; None never ends.
        drop_last: leave out an epoch's last rows if they do not fill a batch. Otherwise rows of weight 0 fill it.
        text_field: the field of plain text in JSONL, parquet and datasets.
        document_separator: splits a text file into documents; None makes each file one document.
        append_eos: end each text and each completion by the tokenizer's end-of-sequence token. A chat template alone
            decides how a conversation ends.
        assistant_only_loss: only the assistant's tokens of a conversation have weight.
        completion_only_loss: only the completion of a prompt has weight.
        chat_template: a Jinja template instead of the tokenizer's own.
        overlong: what becomes of more than `max_length` tokens: "split" makes several sequences, "truncate" leaves out
            the end, "refuse" is an error. None splits text, and token ids without labels; it truncates the rest.
        mixture_weights: the share of each source among the sequences, in the order of the sources; None takes every
            sequence of all sources once in an epoch.
        num_workers: threads that assemble batches ahead; 0 is the same as 1.
        prefetch: batches that are assembled ahead.
        vocab_size: of the model, which has no row for greater ids; None checks none.
        cache_dir: where tokens are kept; None is `$TTPU_CACHE/tokens`, or `~/.cache/ttpu/tokens`.
    """

    max_length: int = 1024
    rows: int = 8
    packing: bool = False
    shuffle: bool = True
    seed: int = 42
    epochs: int | None = 1
    drop_last: bool = False
    text_field: str = "text"
    document_separator: str | None = None
    append_eos: bool = True
    assistant_only_loss: bool = False
    completion_only_loss: bool = True
    chat_template: str | None = None
    overlong: Overlong | None = None
    mixture_weights: tuple[float, ...] | None = None
    num_workers: int = 0
    prefetch: int = 4
    vocab_size: int | None = None
    cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RequestError: one is out of range.
        """
        least = {"max_length": 2, "rows": 1, "seed": 0, "num_workers": 0, "prefetch": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise RequestError(
                    f"{name}={value!r} was given for the training data, but it must be a whole number of at least "
                    f"{minimum}: pass one.",
                    param=name,
                )
        if self.epochs is not None and self.epochs < 1:
            raise RequestError(
                f"epochs={self.epochs!r} was given for the training data, but it must be at least 1, or None for an "
                "endless run: pass one of them.",
                param="epochs",
            )
        if self.document_separator == "":
            raise RequestError(
                "document_separator='' was given, but an empty string splits nothing: pass a string such as '\\n\\n', "
                "or None to make each file one document.",
                param="document_separator",
            )
        if self.overlong not in (None, "split", "truncate", "refuse"):
            raise RequestError(
                f"overlong={self.overlong!r} was given, but it is 'split', 'truncate', 'refuse' or None: pass one.",
                param="overlong",
            )
        weights = self.mixture_weights
        if weights is not None and not (weights and all(math.isfinite(weight) and weight > 0 for weight in weights)):
            raise RequestError(
                f"mixture_weights={weights!r} was given, but each weight must be a finite number above 0: leave out "
                "sources that should not be read.",
                param="mixture_weights",
            )
