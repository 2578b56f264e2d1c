"""Pairs for examples/train/reward.yaml: sentences of Python's documentation, chosen as they are written and rejected
with their words in another order."""

from __future__ import annotations

import random
import re

SENTENCE = re.compile(r"[A-Z][^.:;*\n]{20,90}\.")


def pairs() -> list[dict[str, str]]:
    """Up to three sentences of each topic of the documentation inside every Python."""
    from pydoc_data.topics import topics

    draw, found = random.Random(0), []
    for name in sorted(topics):
        text = topics[name].replace("\n", " ")
        for sentence in SENTENCE.findall(text)[:3]:
            words = sentence.split()
            draw.shuffle(words)
            found.append({"prompt": f"About {name}: ", "chosen": sentence, "rejected": " ".join(words)})
    draw.shuffle(found)
    return found
