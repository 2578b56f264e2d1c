"""Training data: sources, tokens, packing, and the batches that a run reads."""
