"""Runs a graph of ATen operations, traced from a PyTorch model, on JAX arrays."""
