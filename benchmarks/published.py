"""Predictions beside what others measured on TPUs and published. In: nothing; out: benchmarks/results/published.json,
and the table between `<!-- predictions: published -->` and `<!-- end of predictions -->` in docs/compile-report.md.
Nothing runs on a TPU.

    python benchmarks/published.py                     every figure, about 15 minutes on two cores
    python benchmarks/published.py --only product      those of one kind
    python benchmarks/published.py --tables            write the table from the results of earlier runs

A published figure is of another program than the one compiled here, but for products and sums: the same model, batch,
context, precision and slice, in another library's form. So the ratio holds the error of the prediction and the
difference of the programs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from predictions import CONFIGS, ROOT, write_between
from rich.console import Console
from rich.progress import track

from ttpu_jax.aot.compile import compile_for
from ttpu_jax.aot.topology import make_mesh, tpu_topology

RESULTS = ROOT / "benchmarks/results/published.json"
RECIPES = "AI-Hypercomputer/tpu-recipes"
HEAD = ("what", "slice", "measured ms", "predicted ms", "measured / predicted", "source")
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
"""What Llama-3.3-70B has otherwise than Llama-3.1-8B."""


@dataclass(frozen=True)
class Figure:
    """What was published. seconds: of one execution. predict: returns the predicted seconds."""

    kind: str
    what: str
    slice: str
    seconds: float
    source: str
    predict: Callable[[], float]


def product(size: int) -> float:
    """A product of two square bfloat16 matrices on one device of TPU7x."""
    topology = tpu_topology("tpu7x:2x2x1")
    mesh = make_mesh(topology, {"data": len(topology.devices)})
    whole = NamedSharding(mesh, PartitionSpec())  # every device computes the same
    matrix = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=whole)
    return compile_for(topology, jnp.matmul, matrix, matrix).estimate.total_seconds


def all_reduce(size: int) -> float:
    """The sum over 256 chips of a square bfloat16 matrix that each has."""
    topology = tpu_topology("v6e:16x16")
    mesh = make_mesh(topology, {"data": len(topology.devices)})

    def summed(matrix: jax.Array) -> jax.Array:
        return jax.lax.psum(matrix, "data")

    everywhere = PartitionSpec()
    step = jax.shard_map(summed, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    matrix = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=NamedSharding(mesh, everywhere))
    return compile_for(topology, step, matrix).estimate.total_seconds


def training_step(model: str, batch: int) -> float:
    """A training step on 8 chips of v6e, rows of 8,192 tokens."""
    package, file = CONFIGS[model]
    config = ROOT / "plugins" / package.replace("_", "-") / package / "configs" / file
    asked = ["--topology", "v6e:2x4", "--task", "train", "--batch", str(batch), "--context", "8192", "--layers", "scan"]
    command = [sys.executable, "-m", "ttpu_core.cli.main", "compile-report", str(config), *asked, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["programs"][0]["total_seconds"])


def decode_step(sequences: int, tokens: int) -> float:
    """An engine's decode step of a 70B Llama on 8 chips of v6e."""
    package, file = CONFIGS["Llama-3.1-8B"]
    config = json.loads((ROOT / "plugins" / package.replace("_", "-") / package / "configs" / file).read_text())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config | LLAMA_70B))
        script = str(ROOT / "benchmarks/served_steps.py")
        sizes = ["--sequences", str(sequences), "--tokens", str(tokens), "--json"]
        command = [sys.executable, script, str(path), "v6e:2x4", *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["total_seconds"])


GEMM = {1024: 349.7, 2048: 679.3, 4096: 892.9, 16384: 950.1, 32768: 956.4}
"""Rows and columns → TFLOP/s of one device (two a chip) of TPU7x."""
SUMMED = 17408
SERVED = (
    f"{RECIPES}, inference/trillium/vLLM/Llama3.x (vLLM 0.12: median time between tokens, {{}} clients)"
)
FIGURES = [
    *(
        Figure(
            "product",
            f"product of {size:,} × {size:,} bfloat16",
            "tpu7x, one device",
            2 * size**3 / (rate * 1e12),
            f"{RECIPES}, microbenchmarks/ironwood",
            partial(product, size),
        )
        for size, rate in GEMM.items()
    ),
    Figure(
        "sum",
        f"all-reduce of {SUMMED:,} × {SUMMED:,} bfloat16",
        "v6e:16x16",
        2 * SUMMED**2 * 2 * 255 / 256 / 235.76e9,
        f"{RECIPES}, microbenchmarks/trillium/collectives (235.8 GB/s, of twice 255/256 of the matrix)",
        partial(all_reduce, SUMMED),
    ),
    Figure(
        "decode",
        "Llama-3.3-70B, bfloat16, decode step of 64 sequences of 1,000 to 2,000 tokens",
        "v6e:2x4",
        23.11e-3,
        SERVED.format(64),
        partial(decode_step, 64, 1500),
    ),
    Figure(
        "decode",
        "Llama-3.3-70B, bfloat16, decode step of 128 sequences of 1,000 to 2,000 tokens",
        "v6e:2x4",
        30.73e-3,
        SERVED.format(128),
        partial(decode_step, 128, 1500),
    ),
    Figure(
        "train",
        "Llama-3.1-8B, training step of 24 × 8,192 tokens",
        "v6e:2x4",
        3.443,
        f"{RECIPES}, training/trillium/Llama3.1-8B-MaxText/v6e-8 (it keeps activations on the host)",
        partial(training_step, "Llama-3.1-8B", 24),
    ),
]


def table(results: dict[str, float]) -> Iterator[str]:
    """The lines of the table."""
    yield "| " + " | ".join(HEAD) + " |"
    yield "|" + "---|" * len(HEAD)
    for figure in FIGURES:
        if (predicted := results.get(figure.what)) is not None:
            ratio = figure.seconds / predicted
            times = [f"{seconds * 1e3:,.{4 if seconds < 1e-3 else 1}f}" for seconds in (figure.seconds, predicted)]
            yield "| " + " | ".join((figure.what, figure.slice, *times, f"**{ratio:.2f}**", figure.source)) + " |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = list(dict.fromkeys(figure.kind for figure in FIGURES))
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="figures of these kinds")
    parser.add_argument("--tables", action="store_true", help="compile nothing")
    asked = parser.parse_args()
    stored: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results: dict[str, float] = stored.get("predicted_seconds", {})
    figures = [] if asked.tables else [figure for figure in FIGURES if figure.kind in asked.only]
    for figure in track(figures, "compiling", console=Console(stderr=True), disable=not figures):
        results[figure.what] = figure.predict()
        RESULTS.write_text(json.dumps({"jax": jax.__version__, "predicted_seconds": results}, indent=1) + "\n")
    write_between("published", "\n".join(table(results)))


if __name__ == "__main__":
    main()
