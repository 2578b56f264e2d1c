"""Recognizes checkpoints that other programs wrote, so that errors can say what a folder is."""

from __future__ import annotations

from pathlib import Path

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors")
KINDS: tuple[tuple[str, str], ...] = (
    ("*mp_rank_*_model_states.pt", "a checkpoint of DeepSpeed"),
    ("global_step*/*_model_states.pt", "a folder with checkpoints of DeepSpeed"),
    ("zero_to_fp32.py", "a checkpoint of DeepSpeed"),
    ("identity/metadata", "a checkpoint of an earlier format of ttpu's trainer"),
    ("trainer_state.json", "a checkpoint of transformers' Trainer"),
    ("random_states_*.pkl", "a state that accelerate saved"),
    ("checkpoint-*/trainer_state.json", "a folder with checkpoints of transformers' Trainer"),
    ("adapter_config.json", "an adapter of peft, with which adapter_name_or_path begins"),
    ("model*.safetensors", "a model without optimizer state"),
    ("pytorch_model*.bin", "a model without optimizer state"),
    ("_CHECKPOINT_METADATA", "a checkpoint of orbax that another program wrote"),
    ("manifest.ocdbt", "a checkpoint of orbax that another program wrote"),
    ("*/manifest.ocdbt", "a checkpoint of orbax that another program wrote"),
    ("checkpoint", "a checkpoint of flax or TensorFlow"),
    ("*.ckpt", "a checkpoint of PyTorch Lightning"),
    ("*.distcp", "a distributed checkpoint of torch"),
    ("*.pt", "a folder with files of torch.save"),
)
"""A pattern of a file in a folder → what the folder is."""


def kind_of(path: Path) -> str | None:
    """What another program's checkpoint is, or None if it is not known."""
    if path.is_file():
        return f"a file {path.suffix}, as torch writes" if path.suffix in TORCH_SUFFIXES else "a file"
    if not path.is_dir():
        return None
    return next((kind for pattern, kind in KINDS if next(path.glob(pattern), None) is not None), None)
