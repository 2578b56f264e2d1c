"""What each client's script is made of: functions that ask a server and check the answer. The environment that runs it
has the client, and nothing of TTPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

CASES: list[Callable[[], None]] = []
URL, MODEL, CHECKPOINT = sys.argv[1:4]
os.environ |= {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{URL}/v1", "HF_HUB_OFFLINE": "1"}


def case(asks: Callable[[], None]) -> Callable[[], None]:
    """Note a function, whose docstring says what it asks for."""
    CASES.append(asks)
    return asks


def main() -> None:
    """Run all cases, and print what was asked for as JSON in the last line."""
    for asks in CASES:
        asks()
    print(json.dumps([asks.__doc__ for asks in CASES]))
