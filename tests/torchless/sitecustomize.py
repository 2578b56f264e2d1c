"""Hides torch from a process that a test starts with this folder in PYTHONPATH; Python imports this module when it
starts. transformers, which reads the tokenizer, imports torch and torch_xla where they are installed."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]  # which imports as if it were not installed
