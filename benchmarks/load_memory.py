"""How much host memory loading takes, beyond what the process had before.

For as many processes as a mesh has devices, each with one CPU device and its own shards, the most resident memory
during `load_parameters`, summed over the processes, against the size of the checkpoint. The bar is 1.2 times that size.

    python benchmarks/load_memory.py                    1 GB of bfloat16 weights, cut eight ways along `tensor`
    python benchmarks/load_memory.py --mesh fsdp=8      cut along the residual stream, which makes short runs of bytes

With `--quantized`, the most resident memory during `AutoModelForTPU.from_pretrained` in one process with one CPU
device, for a checkpoint that is quantized while it is loaded, and for one that is quantized already. The bar is the
bytes of the quantized model and of two layers in bfloat16.

    python benchmarks/load_memory.py --quantized --output benchmarks/results/load_memory_quantized.json

Linux only: resident memory is read from /proc, where pages of the file cache do not count."""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
BAR = 1.2
SMALL_LAYERS = CONFIG | {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 16_000,
    "tie_word_embeddings": True,
}
"""A llama of 0.85 GB, of which two layers are a small part."""
SCHEMES = ("w8a16", "w4a16-g128")


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """A llama of random numbers in bfloat16."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from ttpu_core import default_registry
    from ttpu_core.checkpoint import open_config

    (folder / "config.json").write_text(json.dumps(config))
    mapping = default_registry().architecture(open_config(folder)).mapping
    random = np.random.default_rng(0)
    tensors = {
        name: random.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        for name, shape in mapping.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, mesh: str, process: int, processes: int, port: int) -> None:
    """One process: prints its memory before, its peak, and the seconds that loading took, as JSON."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", processes, process)

    from jax.experimental import multihost_utils

    from ttpu_core import default_registry, open_checkpoint
    from ttpu_core.mapping import pad_mapping
    from ttpu_jax.params.dtypes import model_dtype
    from ttpu_jax.params.load import load_parameters
    from ttpu_jax.params.padding import pad_for
    from ttpu_jax.params.placement import local_placement

    checkpoint = open_checkpoint(folder)
    architecture = default_registry().architecture(checkpoint.config)
    placement = local_placement(mesh)
    spec, paddings = pad_for(architecture.spec, placement)
    mapping, dtype = pad_mapping(architecture.mapping, paddings), model_dtype("auto", checkpoint)
    assert checkpoint.tensors and jnp.zeros(8).sum() == 0
    multihost_utils.sync_global_devices("all are ready")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory("VmRSS")
    began = time.perf_counter()
    params = load_parameters(checkpoint, mapping, spec.parameters, placement, dtype)
    seconds = time.perf_counter() - began
    peak = memory("VmHWM")
    held = sum(int(np.prod(s.data.shape)) * a.dtype.itemsize for a in params.values() for s in a.addressable_shards)
    print(json.dumps({"before": before, "peak": peak, "held": held, "seconds": seconds}))


def load_quantized(folder: Path, quantization: str | None) -> None:
    """One process: prints its memory before, its peak, the model's bytes and the seconds that loading took, as JSON."""
    import jax
    import jax.numpy as jnp

    from ttpu import AutoModelForTPU

    assert jnp.zeros(8).sum() == 0
    most_anonymous, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most_anonymous[0] = max(most_anonymous[0], memory("RssAnon"))

    Path("/proc/self/clear_refs").write_text("5")
    before, anonymous = memory("VmRSS"), memory("RssAnon")
    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    model = AutoModelForTPU.from_pretrained(folder, quantization=quantization)
    seconds, peak = time.perf_counter() - began, memory("VmHWM")
    done.set()
    watcher.join()
    held = sum(part.nbytes for part in jax.tree.leaves(model.params))
    anonymous = most_anonymous[0] - anonymous
    print(json.dumps({"held": held, "peak": peak - before, "anonymous": anonymous, "seconds": round(seconds, 2)}))


def quantized_rows() -> dict[str, Any]:
    """The rows of `--quantized`, with machine and versions."""
    from ttpu_core import default_registry
    from ttpu_core.checkpoint import open_config

    rows = []
    with tempfile.TemporaryDirectory() as name:
        dense = Path(name) / "dense"
        dense.mkdir()
        write_checkpoint(dense, SMALL_LAYERS)
        size = (dense / "model.safetensors").stat().st_size
        weights = default_registry().architecture(open_config(dense)).spec.parameters
        layer = 2 * sum(weight.size for path, weight in weights.items() if path.startswith("layers.0."))
        made = [("as it is", dense, "")] + [(f"{scheme} while loading", dense, scheme) for scheme in SCHEMES]
        for scheme in SCHEMES:
            out = Path(name) / scheme
            command = ["ttpu", "quantize", str(dense), "--scheme", scheme, "--method", "rtn", "--out", str(out)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            made.append((f"{scheme} checkpoint", out, ""))
        for row, folder, scheme in made:
            command = [sys.executable, __file__, "--load", str(folder), scheme]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
            report = json.loads(printed.splitlines()[-1])
            rows.append({"row": row, **report, "bar": report["held"] + 2 * layer})
            print(json.dumps(rows[-1]), file=sys.stderr)
    return {
        "machine": {"cpu": cpu_name(), "threads": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("jax", "jaxlib", "numpy", "safetensors")},
        "checkpoint_bytes": size,
        "layer_bytes": layer,
        "rows": rows,
    }


def cpu_name() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def memory(field: str) -> int:
    """Bytes, from this process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def main() -> int:
    """Run the processes and print the sums; 1 where they are over the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="tensor=8")
    parser.add_argument("--process", type=int, nargs=3, metavar=("NUMBER", "PROCESSES", "PORT"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--quantized", action="store_true", help="measure quantized models in one process")
    parser.add_argument("--output", type=Path, help="file for the results of --quantized, JSON")
    parser.add_argument("--load", nargs=2, metavar=("FOLDER", "SCHEME"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load_quantized(Path(arguments.load[0]), arguments.load[1] or None)
        return 0
    if arguments.quantized:
        found = quantized_rows()
        text = json.dumps(found, indent=2)
        print(text)
        if arguments.output:
            arguments.output.write_text(text + "\n")
        return int(any(row["peak"] > row["bar"] for row in found["rows"]))
    if arguments.process:
        load(arguments.folder, arguments.mesh, *arguments.process)
        return 0
    processes = prod(int(part.partition("=")[2]) for part in arguments.mesh.split(","))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, CONFIG)
        size = (folder / "model.safetensors").stat().st_size
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        }
        command = [sys.executable, __file__, "--mesh", arguments.mesh, "--folder", name]
        running = [
            subprocess.Popen(
                [*command, "--process", str(number), str(processes), str(port)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(processes)
        ]
        reports = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
    beyond = sum(report["peak"] - report["before"] for report in reports)
    result = {
        "mesh": arguments.mesh,
        "checkpoint_bytes": size,
        "held_bytes": sum(report["held"] for report in reports),
        "beyond_baseline_bytes": beyond,
        "times_checkpoint": round(beyond / size, 3),
        "baseline_bytes_per_process": [report["before"] for report in reports],
        "seconds": round(max(report["seconds"] for report in reports), 2),
    }
    print(json.dumps(result, indent=2))
    return int(beyond > BAR * size)


if __name__ == "__main__":
    sys.exit(main())
