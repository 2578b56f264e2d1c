"""Which tokens of a mixture devices exchange, where they lie along the same mesh axes as the experts; where devices
that have the same tokens gather the rows of their own experts only; and for how many rows a device has room
(docs/parallelism.md)."""

from __future__ import annotations

from math import ceil

FEW = 128
"""Tokens of which all are multiplied by each expert that is read; on a TPU they are gathered. On v5e an expert's
products with so many take half as long as to read it in bfloat16, and the rows of one block of the grouped product are
as many."""
MANY_TOKENS = 512
"""Tokens from which on devices gather the rows of their own experts only. To choose these rows and to add them up takes
a dozen operations, which take as long as all rows of few tokens: with 256, decode steps of Qwen3-30B-A3B on v5e and v6e
are longer by it, with 512 about as long, and prompts of 512 tokens 4 to 6 % shorter."""
ROOM = 1.5
"""Rows of a device's buffer, as a multiple of those that it receives on average."""
SUBLANES = 8


def exchanges(tokens: int, devices: int) -> bool:
    """Return whether TPUs exchange tokens by default: two of them gather as many rows as they would have room for.

    Args:
        tokens: of all devices that would exchange them.
        devices: that would exchange their tokens.
    """
    return tokens > FEW and devices > 2


def gathers_own_rows(tokens: int, devices: int) -> bool:
    """Return whether TPUs that have the same tokens each gather the rows of their own experts only, by default: of two,
    each would have room for three quarters of all rows.

    Args:
        tokens: that all of them have.
        devices: that divide the experts.
    """
    return tokens >= MANY_TOKENS and devices > 2


def most_rows(tokens: int, choices: int, experts: int, devices: int) -> int:
    """Return the most rows that a device can receive.

    Args:
        tokens: of a device.
        choices: of experts, of each token.
        experts: of a device.
        devices: that exchange their tokens.
    """
    return devices * tokens * min(choices, experts)


def room_for_rows(tokens: int, choices: int, experts: int, devices: int, same: float) -> int:
    """Return the rows of a device's buffer.

    Args:
        tokens: of a device.
        choices: of experts, of each token.
        experts: of a device.
        devices: that exchange their tokens.
        same: devices that have the same tokens, and other experts. Where some experts return their input, all that
            tokens choose from over the experts of a device.
    """
    wanted = ceil(ROOM * tokens * choices / same / SUBLANES) * SUBLANES
    return min(most_rows(tokens, choices, experts, devices), wanted)
