"""What the TPU compiler says of training steps, without a TPU: the bytes of a device for each ZeRO stage of
Llama-3.1-8B on 16 chips, with each optimizer, in parts, with less computed again and with the optimizer's state on the
host, and whole steps of models of 8, 70 and 235 billion parameters on slices of v5p and v6e, one of them two slices
that the data centre network joins.

A row has the compiler's peak beside the planner's, the part of it that is held between steps (master weights and
optimizer state) beside the planner's and the formula's for the stage, and the predicted time: the compiler's, kernels
added with their least time. All layers are compiled.

    python benchmarks/training_programs.py --output benchmarks/results/training_programs.json
    python benchmarks/training_programs.py --only zero
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import time
from dataclasses import dataclass
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ttpu_core.architecture import Architecture
from ttpu_core.config import ModelConfig
from ttpu_core.errors import TTPUError
from ttpu_core.registry import default_registry
from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.sharding.parallelism import resolve_parallelism
from ttpu_core.sharding.strategy import TRAINING_STRATEGY
from ttpu_core.sharding.training_state import ADAMW
from ttpu_core.spec import Parameter, axes
from ttpu_core.spec.parameters import LAYERS
from ttpu_core.spec.training_flops import training_flops
from ttpu_jax.aot.training import compile_update
from ttpu_train.arguments import TrainingArguments
from ttpu_train.planned import predicted_memory

GIB = 2**30
BATCH = dict(TRAINING_STRATEGY.rules)[axes.BATCH]
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama-3.1-8B": ("ttpu_llama", "llama-3.1-8b.json", {}),
    "Llama-3.1-70B": (
        "ttpu_llama",
        "llama-3.1-8b.json",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
    "Qwen3-235B-A22B": (
        "ttpu_qwen",
        "qwen3-30b-a3b.json",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "max_window_layers": 94,
        },
    ),
}
"""Name → plugin, a config that it ships, and what is different (the published configs' values)."""


@dataclass(frozen=True)
class Row:
    """One step to compile: `rows` for each device that rows are divided over, in each of the `accumulation` parts."""

    group: str
    model: str
    topology: str
    mesh: str
    zero_stage: int | None
    rows: int
    length: int
    offload: bool = False
    accumulation: int = 1
    schedule: str = "1f1b"
    optim: str = "adamw"
    remat: str = "full"


ROWS = (
    *(
        Row("zero", "Llama-3.1-8B", topology, "data=4,tensor=4", stage, 1, 2048)
        for topology in ("v5p:2x2x4", "v5e:4x4")
        for stage in (0, 1, 2, 3)
    ),
    Row("zero", "Llama-3.1-8B", "v5e:4x4", "fsdp", 3, 1, 2048),
    Row("offload", "Llama-3.1-8B", "v5e:4x4", "fsdp", 3, 1, 2048, offload=True),
    *(
        Row("settings", "Llama-3.1-8B", "v5e:4x4", "fsdp", 3, 1, 2048, optim=optim)
        for optim in ("lion", "sgd", "adamw_8bit", "adafactor", "muon")
    ),
    Row("settings", "Llama-3.1-8B", "v5e:4x4", "fsdp", 3, 1, 2048, accumulation=4),
    Row("settings", "Llama-3.1-8B", "v5p:2x2x4", "fsdp", 3, 1, 2048, remat="dots"),
    Row("settings", "Llama-3.1-8B", "v5p:2x2x4", "fsdp", 3, 1, 2048, remat="none"),
    Row("slices", "Llama-3.1-8B", "v5p:2x2x4", "fsdp", 3, 2, 4096),
    Row("slices", "Llama-3.1-8B", "v6e:4x4", "fsdp", 3, 1, 4096),
    Row("slices", "Llama-3.1-8B", "2*v5e:4x4", "dcn.data=2,fsdp=16", 3, 1, 2048),
    Row("pipeline", "Llama-3.1-8B", "2*v5e:4x4", "dcn.data=2,fsdp=16", 3, 1, 2048, accumulation=8),
    Row("pipeline", "Llama-3.1-8B", "2*v5e:4x4", "dcn.stage=2,fsdp=16", 3, 1, 2048, accumulation=16, schedule="gpipe"),
    Row("pipeline", "Llama-3.1-8B", "2*v5e:4x4", "dcn.stage=2,fsdp=16", 3, 1, 2048, accumulation=16),
    Row("slices", "Llama-3.1-70B", "v5p:4x4x4", "fsdp=64", 3, 1, 4096),
    Row("slices", "Llama-3.1-70B", "v6e:8x16", "fsdp=32,tensor=4", 3, 1, 4096),
    Row("slices", "Qwen3-235B-A22B", "v5p:4x4x8", "fsdp=16,expert=8", 3, 1, 4096),
    Row("slices", "Qwen3-235B-A22B", "v6e:16x16", "fsdp=32,expert=8", 3, 1, 4096),
)


def main() -> None:
    """Compile the rows, one after the other, and print each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted({row.group for row in ROWS}), help="rows of one group")
    parser.add_argument("--model", choices=CONFIGS, help="rows of one model")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    rows = [row for row in ROWS if options.only in (None, row.group) and options.model in (None, row.model)]
    found = []
    for row in rows:
        found.append(compiled(row))
        print(json.dumps(found[-1]), flush=True)
        if options.output:
            versions = {name: metadata.version(name) for name in ("jax", "libtpu", "optax")}
            options.output.write_text(json.dumps({"versions": versions, "rows": found}, indent=2) + "\n")


def compiled(row: Row) -> dict[str, Any]:
    """The figures of one row, or what the compiler refused it with."""
    architecture = architecture_of(row.model)
    asked = {"group": row.group, "model": row.model, "slice": row.topology, "mesh": row.mesh, "zero": row.zero_stage}
    if row.offload:
        asked["offload"] = True
    asked |= {"optim": row.optim, "remat": row.remat}
    asked |= {"accumulation": row.accumulation} | ({"schedule": row.schedule} if "stage" in row.mesh else {})
    arguments = TrainingArguments(
        zero_stage=row.zero_stage,
        bf16=True,
        remat=row.remat,
        optim=row.optim,
        max_length=row.length,
        gradient_accumulation_steps=row.accumulation,
        pipeline_schedule=row.schedule,
        offload_optimizer=row.offload,
    )
    settings = arguments.step_settings(1000)
    began = time.monotonic()
    try:
        step = compile_update(
            architecture,
            row.topology,
            settings,
            rows=row.rows,
            length=row.length,
            parallelism_strategy=row.mesh,
        )
    except TTPUError as error:
        return {**asked, "refused": str(error), "minutes": (time.monotonic() - began) / 60}
    mesh = resolve_parallelism(row.mesh, step.devices, usual=TRAINING_STRATEGY)
    plan = predicted_memory(arguments, architecture.spec, step.topology, mesh, step.rows)
    flops = step.rows * step.length * training_flops(architecture.spec, step.length)
    return {
        **asked,
        "rows": step.rows,
        "length": step.length,
        "peak_gib": step.peak_bytes / GIB,
        "held_gib": step.held_bytes / GIB,
        "formula_gib": held_by_formula(architecture, row) / GIB if row.optim == "adamw" else None,
        "plan_gib": None if plan["plan_bytes"] is None else plan["plan_bytes"] / GIB,
        "plan_held_gib": None if plan["plan_bytes"] is None else plan["plan_held_bytes"] / GIB,
        "seconds": step.seconds,
        "kernel_seconds": step.kernel_seconds,
        "dcn_seconds": step.dcn_seconds,
        "host_seconds": step.host_seconds,
        "mfu": flops / step.seconds / step.devices / step.peak_flops,
        "minutes": (time.monotonic() - began) / 60,
    }


def held_by_formula(architecture: Architecture, row: Row) -> float:
    """Bytes of master weights and moments of a device: 12 for each parameter, divided over the axis of tensors, over
    that of experts if it is one of theirs, and from stage 1 on over those of the batch (arXiv 1910.02054, figure 1). In
    stage 3 the axes fsdp and expert divide them alone; slices along another axis hold copies. Stages divide the layers,
    and hold the rest each. Moments that are offloaded do not count."""
    sizes = dict(resolve_parallelism(row.mesh, parse_topology(row.topology).num_devices).mesh)
    batch = prod(size for axis, size in sizes.items() if axis in BATCH)
    of_weights = prod(size for axis, size in sizes.items() if axis in ("fsdp", "expert"))
    over = of_weights if row.zero_stage == 3 and of_weights > 1 else batch if row.zero_stage else 1

    def parts(path: str, parameter: Parameter) -> int:
        stages = sizes.get("stage", 1) if path.startswith(LAYERS) else 1
        again = not row.zero_stage and axes.EXPERT in parameter.axes
        return over * sizes.get("tensor", 1) * stages * (sizes.get("expert", 1) if again else 1)

    each = np.dtype(ADAMW.master_dtype).itemsize if row.offload else ADAMW.held_bytes
    return sum(each * prod(one.shape) / parts(path, one) for path, one in architecture.spec.parameters.items())


def architecture_of(model: str) -> Architecture:
    """The architecture of a shipped config with changes."""
    package, name, changes = CONFIGS[model]
    config = json.loads((Path(str(importlib.resources.files(package))) / "configs" / name).read_text())
    return default_registry().architecture(ModelConfig.from_dict({**config, **changes}))


if __name__ == "__main__":
    main()
