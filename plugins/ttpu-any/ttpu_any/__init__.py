"""Runs transformers' causal language models that no plugin describes, as JAX programs."""

from ttpu_core.default_device import leave_out_default_device

leave_out_default_device()  # before a module imports transformers, and that torch_xla
