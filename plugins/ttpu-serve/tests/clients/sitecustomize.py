"""Keeps torch_xla of the test lane away from clients: accelerate would import it, which takes seconds."""

import sys

sys.modules["torch_xla"] = None  # type: ignore[assignment]
