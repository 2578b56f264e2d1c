"""Checkpoints whose heads classify texts or tokens, which no backend opens as a language model or a text encoder."""

from __future__ import annotations

from ttpu_core.checkpoint.checkpoint import Checkpoint
from ttpu_core.errors import UnsupportedError

HEADS = {
    "ForSequenceClassification": "classifies a text, or rewards it",
    "ForTokenClassification": "classifies each token",
    "ForQuestionAnswering": "finds where an answer is",
    "ForMultipleChoice": "chooses one of several texts",
}
"""The ends of the names of transformers' classes, and what their heads do."""


def refuse_classifier(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of a classifier, whose head would be left out. Files of sentence-transformers beside it say
    that it is used without one.

    Raises:
        UnsupportedError: it is one.
    """
    named = checkpoint.config.get("architectures")
    name = str(named[0]) if isinstance(named, list | tuple) and named else ""
    end = next((end for end in HEADS if name.endswith(end)), None)
    if end is None or (checkpoint.path / "modules.json").is_file():
        return
    advice = "use it with transformers"
    if end == "ForSequenceClassification":
        advice += ", name it in reward_funcs of Trainer(method='grpo'), or train it on with method='reward'"
    raise UnsupportedError(
        f"{checkpoint.source} holds a {name}, whose head {HEADS[end]}, but language models and text encoders are "
        f"opened here, without that head: {advice}."
    )
