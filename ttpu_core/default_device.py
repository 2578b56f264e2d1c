"""torch_xla, which transformers imports wherever it is installed, logs as a warning that it takes the CPU where no
device is named. This leaves that one line out, which tells most users nothing: they did not ask for torch_xla."""

from __future__ import annotations

import logging

WORDS = "Defaulting to PJRT_DEVICE=CPU"


def leave_out_default_device() -> None:
    """Have the root logger, which torch_xla writes to, pass over the line. Calling it again changes nothing."""
    logging.getLogger().addFilter(_is_kept)


def _is_kept(record: logging.LogRecord) -> bool:
    return record.msg != WORDS
