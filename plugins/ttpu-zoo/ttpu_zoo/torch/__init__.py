"""Replacements for functions of transformers on XLA devices, which the torch_xla backend alone imports."""
