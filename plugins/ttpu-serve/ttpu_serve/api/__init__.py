"""The engine's public names: `LLM`, `AsyncEngine`, their settings and results."""
