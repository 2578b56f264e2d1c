"""Attention in blocks for every family that TTPU's JAX backend runs, as an opt-in patch pack."""
