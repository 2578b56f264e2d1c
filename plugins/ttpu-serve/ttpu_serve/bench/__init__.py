"""Measures servers and engines: what `ttpu bench` runs."""
