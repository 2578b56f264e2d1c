"""Runs transformers' causal language models that no plugin describes, as JAX programs."""
