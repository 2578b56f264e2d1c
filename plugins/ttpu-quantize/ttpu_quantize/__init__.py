"""Makes quantized checkpoints (`ttpu quantize`) and measures models on text (`ttpu eval`)."""
