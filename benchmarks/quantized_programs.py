"""What the TPU compiler says of quantized programs of Llama-3.1-8B, all layers, on one small slice of each TPU
generation. In: nothing but the config; out: for each slice and format the bytes of the weights on one device, the
predicted time of a decode step (8 rows × 2,048 slots, unrolled) and of a prefill (2,048 tokens, one layer in a loop),
and the time of the Pallas kernels, which that prediction leaves out. Nothing runs on a TPU.

    python benchmarks/quantized_programs.py --output benchmarks/results/quantized_programs.json
    python benchmarks/quantized_programs.py --topologies v5e:2x2 --layers 2      # to try it

A program takes one to three minutes; the file keeps those of earlier runs. The kernels' cycles come from
--xla_jf_dump_static_llo_profile_to, in a process of its own, since libtpu reads its flags once. libtpu 0.0.42 has them
for v5e, v5p and v6e."""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

CONFIG = "configs/llama-3.1-8b.json"
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
FORMATS: dict[str, dict[str, Any] | None] = {
    "bfloat16": None,
    "w8a16": {"bits": 8, "lm_head": True},
    "w8a8": {"bits": 8, "quantize_activation": True, "lm_head": True},
    "w4a16-g128": {"bits": 4, "group_size": 128, "lm_head": True},
}
PROGRAMS = [*(("decode", form) for form in FORMATS), ("prefill", "bfloat16"), ("prefill", "w8a8")]
ROWS, SLOTS = {"decode": 8, "prefill": 1}, 2048
LAYERS: dict[str, Any] = {"decode": "unrolled", "prefill": "scan"}  # an unrolled prefill takes ten times as long
KERNEL = "weight_only_product"
FOR_LIBTPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
}
PACKAGES = ("jax", "jaxlib", "libtpu", "ttpu-jax")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES, metavar="NAME", help="slices, as in v5e:2x2")
    parser.add_argument("--tasks", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file after each program")
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # what a process of its own compiles, as JSON
    options = parser.parse_args()
    os.environ.update(FOR_LIBTPU)
    if options.alone:
        _without_lookup()
        _compiled(**json.loads(options.alone))
        return
    versions = {name: metadata.version(name) for name in PACKAGES}
    rows = _earlier(options.output, versions)

    def write() -> None:
        if options.output:
            written = {"python": platform.python_version(), "versions": versions, "programs": rows}
            options.output.write_text(json.dumps(written, indent=2) + "\n")

    for topology in options.topologies:
        for task, form in PROGRAMS:
            if task not in options.tasks or form not in options.formats:
                continue
            if any((row["topology"], row["task"], row["format"]) == (topology, task, form) for row in rows):
                continue
            one = {"topology": topology, "task": task, "form": form, "layers": options.layers}
            found = _compiled(**one)
            found["kernel_seconds"] = _kernel_seconds(one) if found["kernels"] else 0.0
            rows.append(found)
            _print(found)
            write()


def _earlier(output: Path | None, versions: dict[str, str]) -> list[dict[str, Any]]:
    """The programs of an earlier run with the same versions."""
    if output is None or not output.exists():
        return []
    found = json.loads(output.read_text())
    return list(found["programs"]) if found["versions"] == versions else []


def _print(row: dict[str, Any]) -> None:
    kernels = row["kernel_seconds"]
    known = "none" if not row["kernels"] else "not known" if kernels is None else f"{kernels * 1e3:.2f} ms"
    print(
        f"{row['topology']:<12}{row['task']:<8}{row['format']:<11}{row['weight_bytes'] / 1e6:8.0f} MB "
        f"{row['seconds'] * 1e3:8.2f} ms, kernels {known}",
        flush=True,
    )


def _kernel_seconds(one: dict[str, Any]) -> float | None:
    """Seconds of the Pallas kernels by the compiler's cycles; None where it says none."""
    from ttpu_core.sharding.hardware import parse_topology

    with tempfile.TemporaryDirectory() as folder:
        flags = {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_static_llo_profile_to={folder}"}
        command = [sys.executable, __file__, "--alone", json.dumps(one)]
        ran = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True)
        if ran.returncode:
            print(f"no cycles of {one}: {ran.stderr[-500:]}", file=sys.stderr)
            return None
        cycles = 0
        for file in Path(folder).glob(f"{KERNEL}*"):
            for words in re.split(r"(?=hlo_op_estimate \{)", file.read_text()):
                counts = {name: int(count) for name, count in re.findall(r"(\w+): (\d+)", words)}
                cycles += counts.get("estimated_cycles", 0) * counts.get("num_equivalent_hlos", 1)
    return cycles / parse_topology(one["topology"]).chip.clock_hz if cycles else None


def _compiled(topology: str, task: Any, form: str, layers: int | None) -> dict[str, Any]:
    from ttpu_core.config import ModelConfig
    from ttpu_core.quantization import quantize_architecture
    from ttpu_core.registry import default_registry
    from ttpu_jax.aot.report import compile_report

    config = json.loads((importlib.resources.files("ttpu_llama") / CONFIG).read_text())
    architecture = default_registry().architecture(
        ModelConfig.from_dict({**config, "num_hidden_layers": layers or config["num_hidden_layers"]})
    )
    report = compile_report(
        architecture,
        topology,
        task=task,
        batch=ROWS[task],
        context=SLOTS,
        layers=LAYERS[task],
        quantization=FORMATS[form],
    )
    spec = quantize_architecture(architecture, FORMATS[form]).spec
    return {
        "topology": topology,
        "mesh": dict(report.mesh),
        "task": task,
        "rows": report.batch,
        "slots": report.context,
        "format": form,
        "layers": len(spec.layers),
        "compiled": report.layers,
        "weight_bytes": _weight_bytes(spec, dict(report.mesh)),
        "peak_bytes": report.peak_bytes,
        "seconds": report.predicted_seconds,
        "collective_seconds": report.breakdown.collective,
        "kernels": sum(one.count for one in report.unmodelled if one.name.startswith(KERNEL)),
        "not_counted": dict(_not_counted(report)),
        "compile_seconds": report.compile_seconds,
    }


def _not_counted(report: Any) -> Counter[str]:
    """What counts as no time: names without the numbers of copies, and how often each is executed."""
    counts: Counter[str] = Counter()
    for one in report.unmodelled:
        counts[re.sub(r"\.\d+|\.cloned", "", one.name)] += one.count
    return counts


def _without_lookup() -> None:
    """A row of the table, broadcast, stands in for the lookup of tokens, at which libtpu 0.0.42 stops on v5e where it
    counts the cycles of kernels."""
    import jax.numpy as jnp

    from ttpu_jax.model.embedding import Embedding

    def look_up(self: Embedding, tokens: Any, positions: Any) -> Any:
        table = self.embedding[...]
        _, features = self.placement.array_axes(self.embedding.axis_names, table.shape, "the table")
        rows = jnp.broadcast_to(table[0], (*tokens.shape, table.shape[1]))
        return self.placement.constrain_looked_up(rows, features)

    Embedding.look_up = look_up  # type: ignore[method-assign]


def _weight_bytes(spec: Any, mesh: dict[str, int]) -> int:
    """Bytes of the weights on one device, without the embedding table, of which a step reads some rows."""
    from ttpu_core.spec.arithmetic import BITS
    from ttpu_plan.shards import shard_model

    model = shard_model(spec, mesh)
    counted = [(1, one) for one in model.ends if one.path != "embed.embedding"]
    counted += [(kind.count, one) for kind in model.layers for one in kind.parameters]
    parts = [(count, part) for count, one in counted for part in one.parts or (one,)]
    return sum(count * prod(part.local) * BITS[part.parameter.dtype or "bfloat16"] for count, part in parts) // 8


if __name__ == "__main__":
    main()
