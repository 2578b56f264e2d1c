"""How long a plan takes. In: nothing; out: for each purpose and slice, the number of meshes that are compared and the
seconds of processor time that `plans` takes for Llama-3.1-8B, and their sum, against a bar of 2 seconds.

    python benchmarks/planning.py
    python benchmarks/planning.py --output benchmarks/results/planning.json"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import platform
import time
from dataclasses import replace
from pathlib import Path

from ttpu_core.config import ModelConfig
from ttpu_core.registry import default_registry
from ttpu_core.sharding.hardware import parse_topology
from ttpu_plan.planner import Request, plans, smallest_slices
from ttpu_plan.served import planning_backend

CONFIG = "configs/llama-3.1-8b.json"
SLICES = ("v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:16x16", "v5p:4x4x4", "v5p:4x8x8")
BAR = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    config = ModelConfig.from_file(Path(str(importlib.resources.files("ttpu_llama") / CONFIG)))
    spec = default_registry().architecture(config).spec
    planning_backend()  # whose import is not planning
    rows = []
    for purpose in ("inference", "generation", "training"):
        request = replace(Request(purpose), batch=256) if purpose != "generation" else Request(purpose)
        for name in SLICES:
            began = time.process_time()
            found = plans(spec, parse_topology(name), request)
            rows.append((purpose, name, len(found), time.process_time() - began))
        began = time.process_time()
        smallest_slices(spec, request)
        rows.append((purpose, "smallest", 0, time.process_time() - began))
    for purpose, name, count, seconds in rows:
        print(f"{purpose:<12}{name:<12}{count or '':>5} meshes {seconds * 1000:8.1f} ms")
    total = sum(seconds for *_, seconds in rows)
    print(f"{'all':<24}{'':>5}        {total * 1000:8.1f} ms of the {BAR:.0f} s allowed")
    if options.output:
        keys = ("purpose", "slice", "meshes", "seconds")
        written = {
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "seconds": total,
            "plans": [dict(zip(keys, row, strict=True)) for row in rows],
        }
        options.output.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
