"""LoRA adapters that requests choose."""
