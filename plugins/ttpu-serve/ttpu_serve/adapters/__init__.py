"""LoRA adapters that requests select by name."""
