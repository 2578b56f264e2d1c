"""Prompts and a toy reward for examples/train/grpo.yaml: the model learns to answer questions about Python in about
sixty characters."""

from __future__ import annotations

from typing import Any

LENGTH = 60


def questions() -> list[dict[str, Any]]:
    """A question about each topic of the documentation inside every Python."""
    from pydoc_data.topics import topics

    return [{"prompt": [{"role": "user", "content": f"What is {name}?"}]} for name in sorted(topics)]


def about_sixty_characters(completions: list[Any], **_: Any) -> list[float]:
    """0 for an answer of sixty characters, and less by one for each hundred characters more or less."""
    return [-abs(len(messages[0]["content"]) - LENGTH) / 100 for messages in completions]
