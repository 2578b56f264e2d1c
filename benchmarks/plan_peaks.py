"""Compiles the programs whose peak memory the planner's tests know again, writes what the compiler reports of them to
plugins/ttpu-plan/tests/plan_peaks.json, and the tables of docs/planner.md with it. Nothing runs on a TPU.

    python benchmarks/plan_peaks.py --task decode
    python benchmarks/plan_peaks.py --of served
    python benchmarks/plan_peaks.py --model gemma --task prefill --processes 4"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttpu_core.architecture import Architecture

ROOT = Path(__file__).parents[1]
PEAKS, DOCS = ROOT / "plugins/ttpu-plan/tests/plan_peaks.json", ROOT / "docs/planner.md"
COMPILED = ("published", "unseen", "shortened", "missed", "served")
DOCUMENTED = ("served", "published", "unseen", "shortened", "missed")


def peak_of(row: dict[str, Any]) -> int:
    """The peak memory of one device that the compiler reports of a program."""
    from importlib.util import find_spec

    from ttpu_core.config import ModelConfig
    from ttpu_core.registry import default_registry
    from ttpu_jax.aot.report import compile_report

    package, _, rest = row["config"].partition("/")
    found = find_spec(package)
    assert found is not None and found.origin is not None
    config = ModelConfig.from_file(Path(found.origin).parent / rest)
    architecture = shortened(default_registry().architecture(config), row)
    if "layers" not in row:
        return peak_of_step(architecture, row)
    known = {name: row[name] for name in ("task", "batch", "context", "layers", "mesh")}
    return compile_report(architecture, row["topology"], **known).peak_bytes


def shortened(architecture: Architecture, row: dict[str, Any]) -> Architecture:
    """The architecture with as many layers and words as a row says."""
    from dataclasses import replace

    spec = architecture.spec
    if "num_layers" in row:
        spec = replace(spec, layers=spec.layers[: row["num_layers"]])
    if "vocab_size" in row:
        spec = replace(spec, embedding=replace(spec.embedding, vocab_size=row["vocab_size"]))
    return replace(architecture, spec=spec)


def peak_of_step(architecture: Architecture, row: dict[str, Any]) -> int:
    """The same of an engine's step."""
    from ttpu_core.quantization import quantize_architecture
    from ttpu_core.sharding.serving import ServingLimits
    from ttpu_core.sharding.strategy import DEFAULT_STRATEGY
    from ttpu_jax.runner.planned_step import compile_planned_step
    from ttpu_plan.served import planning_backend, served_workloads, shapes_for
    from ttpu_plan.shards import shard_model

    limits, quantization = ServingLimits.of(row["batch"], row["context"]), row.get("quantization")
    shapes = shapes_for(planning_backend(), shard_model(architecture.spec, row["mesh"]), limits, "bfloat16")
    steps = {one.task: one for one in served_workloads(shapes, limits, "bfloat16", quantization)}
    if quantization is not None:
        architecture = quantize_architecture(architecture, quantization)
    mesh = {axis: size for axis, size in row["mesh"].items() if size > 1}
    return compile_planned_step(architecture, row["topology"], mesh, DEFAULT_STRATEGY, steps[row["task"]]).peak_bytes


def written(peaks: dict[str, Any]) -> str:
    """The file's text: one line for each program."""
    parts = [f' "about": {json.dumps(peaks["about"])}']
    for name, rows in peaks.items():
        if name != "about":
            parts.append(f' "{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def document(peaks: dict[str, Any]) -> None:
    """Write the compiler's figures, the planner's and their difference into the tables."""
    sys.path.insert(0, str(PEAKS.parent))
    from test_plan_memory import predicted

    rows = iter([row for name in DOCUMENTED for row in peaks[name]])
    lines = DOCS.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not line.endswith("% |\n"):
            continue
        row, cells = next(rows), line.split("|")
        found, compiled = predicted(row).of_program / 2**30, row["peak_bytes"] / 2**30
        cells[-4:-1] = [f" {found:.2f} ", f" {compiled:.2f} ", f" {found / compiled - 1:+.1%} "]
        lines[number] = "|".join(cells)
    DOCS.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=COMPILED, help="of this part of the file alone")
    parser.add_argument("--task", choices=("decode", "prefill", "mixed", "train"), help="of these alone")
    parser.add_argument("--model", default="", help="whose name contains this alone")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    peaks = json.loads(PEAKS.read_text(encoding="utf-8"))
    rows = [row for name in COMPILED if asked.of in (None, name) for row in peaks.get(name, ())]
    rows = [row for row in rows if asked.task in (None, row["task"]) and asked.model in row["model"]]
    with ProcessPoolExecutor(asked.processes, mp_context=get_context("spawn")) as pool:
        for row, peak in zip(rows, pool.map(peak_of, rows), strict=True):
            print(f"{row['model']} {row['task']} {row['topology']}: {row['peak_bytes']:,} → {peak:,}", flush=True)
            row["peak_bytes"] = peak
            PEAKS.write_text(written(peaks), encoding="utf-8")
    document(peaks)


if __name__ == "__main__":
    main()
