"""Benchmarks of servers and engines, which `ttpu bench` runs."""
