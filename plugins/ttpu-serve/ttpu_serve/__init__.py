"""The serving engine, its OpenAI-compatible server and its benchmarks. The engine drives a model runner and imports no
framework itself."""
