"""Trains tiny random models of several types for 50 updates in float32, with this trainer and with transformers'
models, torch's AdamW, clipping and transformers' schedule, on the same rows in the same order; and prints how far the
losses are apart. So that a difference can be judged, torch also trains in float64: how far float32 drifts from that is
what rounding alone explains.

    python benchmarks/training_equality.py --output benchmarks/results/training_equality.json
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"llama": "ttpu_llama", "gemma3_text": "ttpu_gemma", "qwen3_moe": "ttpu_qwen", "mistral4": "ttpu_mistral"}
"""Model type → the plugin that declares its tiny config."""
STEPS, BATCHES, ROWS, LENGTH = 50, 4, 4, 24
BAR = 1e-5
RATE, DECAY, WARMUP, NORM = 1e-3, 0.01, 5, 1.0


def main() -> None:
    """Train each type three times and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    rows = []
    for model_type in options.types:
        rows.append(compare(model_type))
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "losses"}), flush=True)
    if options.output:
        versions = {name: metadata.version(name) for name in ("jax", "torch", "transformers", "optax")}
        report = {"python": platform.python_version(), "versions": versions, "bar": BAR, "rows": rows}
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def compare(model_type: str) -> dict[str, Any]:
    """The largest relative difference of the losses of one type."""
    from ttpu_conformance.declaration import declaration_for
    from ttpu_conformance.tiny import random_model

    declaration = declaration_for(model_type, TYPES[model_type])
    model = random_model(declaration, next(one for one in declaration.variants if one.name == "base"))
    data = tokens(model.config.get_text_config().vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        ours = trained(folder, data)
        theirs, exact = (by_torch(type(model), folder, data, dtype) for dtype in ("float32", "float64"))
    return {
        "model_type": model_type,
        "updates": STEPS,
        "first_loss": theirs[0],
        "last_loss": theirs[-1],
        "largest_difference": largest(ours, theirs),
        "ours_from_float64": largest(ours, exact),
        "torch_from_float64": largest(theirs, exact),
        "losses": {"ttpu": ours, "torch": theirs, "torch_float64": exact},
    }


def largest(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference."""
    return float(np.max(np.abs(np.array(ours) - np.array(theirs)) / np.abs(theirs)))


def tokens(vocabulary: int) -> np.ndarray:
    """Tokens [updates, rows, length]: a few batches again and again, so that the losses fall."""
    batches = np.random.default_rng(0).integers(0, vocabulary, (BATCHES, ROWS, LENGTH)).astype(np.int32)
    return batches[np.arange(STEPS) % BATCHES]


def trained(folder: str, data: np.ndarray) -> list[float]:
    """The losses of this trainer's updates."""
    from ttpu import AutoModelForTPU, TrainingArguments
    from ttpu_core.registry import default_registry
    from ttpu_train.runner import Batch

    arguments = TrainingArguments(
        learning_rate=RATE, weight_decay=DECAY, warmup_steps=WARMUP, max_grad_norm=NORM, lr_scheduler_type="cosine"
    )
    model = AutoModelForTPU.from_pretrained(folder, dtype="float32")
    runner = default_registry().backend("jax").train_runner(model, arguments.step_settings(STEPS))
    weights = np.ones((ROWS, LENGTH), np.float32)
    weights[:, 0] = 0
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    return [runner.step(Batch(rows, weights, positions)).values().loss for rows in data]


def by_torch(kind: Any, folder: str, data: np.ndarray, dtype: str) -> list[float]:
    """The losses of transformers' model."""
    import torch
    import transformers

    model = kind.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager", experts_implementation="eager"
    ).train()
    plain = [one for name, one in model.named_parameters() if one.ndim < 2]  # norms and biases have no weight decay
    groups = [
        {"params": [one for one in model.parameters() if one.ndim >= 2], "weight_decay": DECAY},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS)
    losses = []
    for rows in data:
        ids = torch.tensor(rows).long()
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
