"""Every strategy on every number of devices, in a process that has 32: run as a script. For each family it loads a tiny
checkpoint cut as the strategy says, and holds its logits against those of one device."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

DEVICES = {"llama": (1, 2, 4, 8, 32), "gemma": (8,), "qwen": (8,), "mistral": (8, 32)}
"""Numbers of devices by family. Meshes follow from a strategy and a number whatever the family: one has all of them."""
STRATEGIES = ("fsdp", "dp", "mp", "2d", "3d", "auto")
MESHES = ("2x4", "1x8", "fsdp=2,sequence=4", "data=2,sequence=2,tensor=2", "dcn.data=2,fsdp=2,tensor=2")
OF_FAMILY = {"mistral": ("expert=4,tensor=2", "data=2,expert=4")}
RULES: tuple[dict[str, Any], ...] = (
    {"sequence": "tensor"},  # also what cuts heads
    {"mlp": ["fsdp", "tensor"], "embed": None},
    {"kv_heads": None},
)
GENERATE = ("3d", "fsdp=2,sequence=4", "expert=4,tensor=2")  # also greedy tokens, on 8 devices
GENERATING = ("llama", "mistral")  # families that do: dense, and with experts
WITH_RULES = ("llama", "mistral")  # families under a user's rules, which name axes that all families share
IMPOSSIBLE = {("2d", 2), ("3d", 2), ("3d", 4)}
TOLERANCE = 2e-5
LARGE = 2048  # elements from which a parameter may not lie whole on every device
SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 8}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}  # which no number of devices above 2 divides
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES, **HEADS},
    "gemma": {
        "model_type": "gemma3_text",
        **SIZES,
        **HEADS,
        "num_hidden_layers": 2,
        "sliding_window": 5,
        "sliding_window_pattern": 2,  # a layer of each kind
    },
    "qwen": {"model_type": "qwen3", **SIZES, **HEADS},
    "mistral": {"model_type": "mixtral", **SIZES, **HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """Random weights for a config."""
    import numpy as np

    from ttpu_core import ModelConfig, default_registry
    from ttpu_jax.params.export import save_checkpoint
    from ttpu_jax.params.initialize import random_parameters
    from ttpu_jax.params.placement import local_placement

    architecture = default_registry().architecture(ModelConfig.from_dict(config))
    params = random_parameters(
        architecture.spec.parameters, local_placement(), np.dtype(np.float32), standard_deviation=0.2
    )
    return save_checkpoint(folder, architecture.mapping, params, config)


def main() -> None:
    """Print one JSON object: family → strategy@devices → error, share of bytes that are cut, or the refusal."""
    import jax
    import numpy as np

    from ttpu import AutoModelForTPU
    from ttpu_core.errors import UnsupportedError

    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (32, 12))
    everything = jax.devices
    report: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for family, config in FAMILIES.items():
            path = checkpoint(Path(folder) / family, config)
            alone = AutoModelForTPU.from_pretrained(path)
            expected = np.asarray(alone(tokens).logits)
            greedy = alone.generate(tokens[:2], max_new_tokens=6)
            rows = report[family] = {}
            for count in DEVICES[family]:
                of_mesh: dict[Any, dict[str, Any]] = {}  # several strategies may mean one mesh
                jax.devices = lambda *_, count=count: everything()[:count]  # type: ignore[assignment]
                asked = STRATEGIES + (MESHES + OF_FAMILY.get(family, ()) if count == 8 else ())
                for strategy in asked:
                    try:
                        model = AutoModelForTPU.from_pretrained(path, parallelism_strategy=strategy)
                    except UnsupportedError as error:
                        rows[f"{strategy}@{count}"] = {"refused": str(error)}
                        continue
                    mesh = model.programs.runtime.placement.mesh
                    cuts = () if mesh is None else tuple(axis for axis in mesh.shape.items() if axis[1] > 1)
                    same = cuts, b"" if mesh is None else mesh.device_ids.tobytes()
                    if same in of_mesh:
                        rows[f"{strategy}@{count}"] = of_mesh[same]
                        continue
                    logits = np.asarray(model(tokens).logits)
                    whole = {p: a.size for p, a in model.params.items() if a.sharding.is_fully_replicated}
                    total = sum(array.size for array in model.params.values())
                    row = of_mesh[same] = rows[f"{strategy}@{count}"] = {
                        "error": float(np.abs(logits - expected).max() / np.abs(expected).max()),
                        "share": 1 - sum(whole.values()) / total,
                        "large_and_whole": [path for path, size in whole.items() if size >= LARGE],
                    }
                    if count == 8 and strategy in GENERATE and family in GENERATING:
                        row["same_tokens"] = bool((model.generate(tokens[:2], max_new_tokens=6) == greedy).all())
                jax.devices = everything
            for number, rules in enumerate(RULES if family in WITH_RULES else ()):
                model = AutoModelForTPU.from_pretrained(
                    path, parallelism_strategy="fsdp=2,tensor=2", sharding_rules=rules
                )
                logits = np.asarray(model(tokens).logits)
                error = float(np.abs(logits - expected).max() / np.abs(expected).max())
                rows[f"rules {number}"] = {"rules_error": error}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
