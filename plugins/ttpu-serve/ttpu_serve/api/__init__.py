"""The engine's public interface: `LLM`, `AsyncEngine`, their settings and their outputs."""
