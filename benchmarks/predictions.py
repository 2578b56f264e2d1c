"""What the TPU compiler's schedule predicts of whole programs, beside the bound of the chip's rates. In: nothing but
configs that plugins ship; out: benchmarks/results/predictions.json, and the tables between `<!-- predictions: NAME -->`
and `<!-- end of predictions -->` in docs, written anew. Nothing runs on a TPU.

    python benchmarks/predictions.py                                every program, 15 to 20 minutes on two cores
    python benchmarks/predictions.py --only roofline                those of one table
    python benchmarks/predictions.py --only roofline --tables       write the tables from the results of earlier runs
    python benchmarks/predictions.py --task prefill                 prompts alone
    python benchmarks/predictions.py --missing                      those of which there is no result yet

Each program is what one command compiles, in a process of its own; the results have the command. The result of an
earlier run is replaced when its program was compiled again."""

from __future__ import annotations

import argparse
import importlib.resources
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from ttpu_core.config import ModelConfig
from ttpu_core.registry import default_registry
from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.spec.training_flops import training_flops

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/predictions.json"
GIB = 2**30
CONFIGS = {
    "Llama-3.1-8B": ("ttpu_llama", "llama-3.1-8b.json"),
    "gemma-3-12b": ("ttpu_gemma", "gemma-3-12b-text.json"),
    "Qwen3-30B-A3B": ("ttpu_qwen", "qwen3-30b-a3b.json"),
    "Mixtral-8x7B": ("ttpu_mistral", "mixtral-8x7b.json"),
}
"""Model → the plugin that ships its config, and the file's name."""


@dataclass(frozen=True)
class Program:
    """What one command compiles: a program of `generate`, or a training step.

    model: one of `CONFIGS`. slice: such as v5e:2x4. task: decode, prefill or train. mesh: as `--mesh` takes it;
    empty shards over all devices. options: more of the command's.
    """

    model: str
    slice: str
    task: str
    mesh: str = ""
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The key of its result."""
        return " ".join((self.model, self.slice, self.task, self.mesh, *self.options))

    def command(self) -> list[str]:
        """The command's arguments behind `ttpu`."""
        package, file = CONFIGS[self.model]
        config = str(importlib.resources.files(package) / "configs" / file)
        mesh = ["--mesh", self.mesh] if self.mesh else []
        asked = ["--topology", self.slice, "--task", self.task, *mesh, *self.options]
        return ["compile-report", config, *asked, "--json"]

    def written(self) -> str:
        """The command as one writes it in the root of the repository."""
        return " ".join(["ttpu", *self.command()]).replace(f"{ROOT}/", "")


def tensor_8(model: str, *tasks: str, options: tuple[str, ...] = ()) -> list[Program]:
    """Programs on v5e:2x4 and v6e:2x4."""
    return [Program(model, name, task, options=options) for task in tasks for name in ("v5e:2x4", "v6e:2x4")]


def trained(slice_name: str, rows: int, remat: str) -> Program:
    """An update of Llama-3.1-8B on the batch and with the recomputation that `ttpu plan` proposes for a slice."""
    options = ("--batch", str(rows), "--layers", "scan", "--remat", remat)
    return Program("Llama-3.1-8B", slice_name, "train", options=options)


TABLES: dict[str, list[Program]] = {
    "llama": [
        program
        for task, forms in (("decode", [()]), ("prefill", [(), ("--without", "layer_loop")]))
        for options in (*forms, ("--layers", "scan"))
        for program in tensor_8("Llama-3.1-8B", task, options=options)
    ],
    "roofline": [
        *tensor_8("Llama-3.1-8B", "decode", "prefill"),
        *(Program("Llama-3.1-8B", name, "prefill", "sequence=4,tensor=2") for name in ("v5e:2x4", "v6e:2x4")),
        Program("Llama-3.1-8B", "v5e:2x4", "train", options=("--batch", "8", "--layers", "scan")),
        *tensor_8("gemma-3-12b", "decode"),
        *tensor_8("Qwen3-30B-A3B", "decode", "prefill"),
        *(
            Program("Qwen3-30B-A3B", name, task, mesh, ("--sharding-rules", rule))
            for task, mesh, rule in (
                ("decode", "data=2,tensor=4", "expert=data+tensor"),
                ("decode", "tensor=8", "expert=tensor"),
                ("prefill", "tensor=8", "expert=tensor"),
                ("prefill", "data=2,tensor=4", "expert=data+tensor"),
            )
            for name in ("v5e:2x4", "v6e:2x4")
        ),
        *tensor_8("Mixtral-8x7B", "decode", "prefill"),
        *(
            Program("Mixtral-8x7B", name, "prefill", "tensor=8", ("--sharding-rules", "expert=tensor"))
            for name in ("v5e:2x4", "v6e:2x4")
        ),
    ],
    "training": [
        trained("v5e:4x4", 16, "mlp"),
        trained("v5e:4x4", 48, "attention"),
        trained("v5p:2x2x2", 96, "mlp"),
        trained("v6e:4x4", 48, "mlp"),
    ],
}


def result_of(program: Program) -> dict[str, Any]:
    """Compile a program; return what its command printed, and how long it took."""
    began = time.monotonic()
    command = [sys.executable, "-m", "ttpu_core.cli.main", *program.command()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{program.name}: {done.stderr[-2000:]}")
    return {"seconds": round(time.monotonic() - began, 1), "report": json.loads(done.stdout)["programs"][0]}


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds with three digits."""
    return f"{seconds * 1e3:,.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f}"


def llama(program: Program, report: dict[str, Any]) -> list[str]:
    """A row of `llama`."""
    shape = f"{report['batch']} × {report['context']}"
    rate = report["tokens_per_second"]
    return [
        *(f"{report['task']} {shape}", program.slice, report["layers"], f"{report['peak_bytes'] / GIB:.2f}"),
        "yes" if report["cache_in_place"] else "no",
        str(sum(one["count"] for one in report["collectives"] if one["op"] == "all-reduce")),
        f"**{milliseconds(report['total_seconds'])}**",
        milliseconds(report["hbm_seconds"]),
        milliseconds(report["roofline_seconds"]),
        f"{round(rate, -1 if rate < 30_000 else -2):,.0f}",
        f"{report['compile_seconds']:.0f} s",
    ]


def roofline(program: Program, report: dict[str, Any]) -> list[str]:
    """A row of `roofline`."""
    total, least = report["total_seconds"], report["roofline_seconds"]
    mesh = ", ".join(f"{axis}={size}" for axis, size in report["mesh"].items())
    if "--sharding-rules" in program.options:
        mesh += f"; {program.options[program.options.index('--sharding-rules') + 1]}"
    return [
        *(program.model, f"{report['task']} {report['batch']} × {report['context']}", program.slice, mesh),
        f"{report['peak_bytes'] / GIB:.1f} of {report['hbm_bytes'] / GIB:.2f}",
        f"**{milliseconds(total)}**",
        *(milliseconds(report["kernel_seconds"]), milliseconds(report["hbm_seconds"]), milliseconds(least)),
        f"{total / least:.2f}",
        f"{report['compile_seconds']:.0f} s",
    ]


def training(program: Program, report: dict[str, Any]) -> list[str]:
    """A row of `training`."""
    chip = parse_topology(program.slice).chip
    package, file = CONFIGS[program.model]
    config = json.loads((importlib.resources.files(package) / "configs" / file).read_text())
    spec = default_registry().architecture(ModelConfig.from_dict(config)).spec
    flops = report["batch"] * report["tokens"] * training_flops(spec, report["tokens"])
    mfu = flops / report["total_seconds"] / report["num_devices"] / chip.bf16_flops
    return [
        *(program.slice, ", ".join(f"{axis}={size}" for axis, size in report["mesh"].items())),
        f"{report['batch']} × {report['tokens']:,}",
        program.options[program.options.index("--remat") + 1],
        f"{report['peak_bytes'] / GIB:.2f} of {report['hbm_bytes'] / GIB:.2f}",
        f"**{milliseconds(report['total_seconds'])}**",
        milliseconds(report["kernel_seconds"]),
        f"{report['tokens_per_second']:,.0f}",
        f"**{mfu:.1%}**".replace("%", " %"),
        f"{report['compile_seconds']:.0f} s",
    ]


ROWS: dict[str, Callable[[Program, dict[str, Any]], list[str]]] = {
    "llama": llama,
    "roofline": roofline,
    "training": training,
}

HEADS: dict[str, tuple[str, ...]] = {
    "llama": (
        *("program", "slice", "layers", "peak GiB", "in place", "all-reduces", "predicted ms", "HBM, at least"),
        *("roofline ms", "tokens/s", "compiles in"),
    ),
    "roofline": (
        *("model", "program", "slice", "mesh", "peak GiB", "predicted ms", "of it kernels, at least"),
        *("HBM, at least", "roofline ms", "times the roofline", "compiles in"),
    ),
    "training": (
        *("slice", "mesh", "rows × tokens", "`remat`", "peak GiB", "predicted ms", "of it kernels, at least"),
        *("tokens/s", "MFU", "compiles in"),
    ),
}


def table_of(name: str, results: dict[str, Any]) -> Iterator[str]:
    """The lines of a table."""
    yield "| " + " | ".join(HEADS[name]) + " |"
    yield "|" + "---|" * len(HEADS[name])
    for program in TABLES[name]:
        yield "| " + " | ".join(ROWS[name](program, results[program.name]["report"])) + " |"


def write_between(name: str, table: str) -> None:
    """Replace a table in docs."""
    start, end = f"<!-- predictions: {name} -->\n", "<!-- end of predictions -->"
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        head, found, rest = text.partition(start)
        written = head + start + table + "\n" + end + rest.partition(end)[2] if found else text
        if written != text:
            path.write_text(written, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = list(TABLES)
    parser.add_argument("--only", nargs="+", choices=tables, default=tables, help="programs of these tables")
    parser.add_argument("--task", choices=("decode", "prefill", "train"), help="programs of this task alone")
    parser.add_argument("--tables", action="store_true", help="compile nothing")
    parser.add_argument("--missing", action="store_true", help="compile only programs that have no result yet")
    asked = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    programs = {program.name: program for name in asked.only for program in TABLES[name]}
    if asked.task is not None:
        programs = {name: program for name, program in programs.items() if program.task == asked.task}
    if asked.missing:
        programs = {name: program for name, program in programs.items() if name not in results}
    if not asked.tables:
        for name, program in track(programs.items(), "compiling", console=Console(stderr=True)):
            results[name] = {"command": program.written(), **result_of(program)}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for name in asked.only:
        write_between(name, "\n".join(table_of(name, results)))


if __name__ == "__main__":
    main()
