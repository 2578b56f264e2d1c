"""The serving engine, its OpenAI-compatible server and its benchmark. It drives a model runner; it imports no
framework."""
