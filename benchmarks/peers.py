"""What the TPU compiler's schedule predicts of another library's programs, by the instrument that predicts ours. In:
an environment with google-tunix; out: benchmarks/results/peers.json, and the table below `<!-- predictions: peers -->`
in docs/compile-report.md. Nothing runs on a TPU.

    python -m venv ~/tunix && ~/tunix/bin/pip install google-tunix libtpu
    python benchmarks/peers.py --tunix ~/tunix/bin/python         every program, about 10 minutes on two cores
    python benchmarks/peers.py --tables                           write the table from the results of earlier runs

The programs are a call of Tunix's Llama 3 in its own sharding, as its sampler makes it, with the likeliest token of the
last logits; and the gradients of its trainer's loss with optax's AdamW, layers recomputed. Weights and state are
bfloat16. Attention is inside as XLA's own operations: Tunix calls no kernel there."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/peers.json"
GIB = 2**30
ROWS = {"decode": (32, 2048), "prefill": (1, 2048), "train": (8, 2048)}
"""Task → rows, and cache slots or tokens of each."""
SLICES = ("v5e:2x4", "v6e:2x4")
PROGRAMS = [*((task, name) for task in ("decode", "prefill") for name in SLICES), ("train", "v5e:2x4")]
HEAD = ("program", "slice", "Tunix: peak GiB", "predicted ms", "ours: peak GiB", "predicted ms", "times as fast")


def compiled(task: str, slice_name: str) -> dict[str, Any]:
    """Compile a program of Tunix, in the environment that has it; return its figures.

    Raises:
        UnsupportedError: it needs more memory than a device has.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec
    from tunix.models.llama3 import model as llama

    from ttpu_jax.aot.compile import compile_lowered
    from ttpu_jax.aot.topology import make_mesh, tpu_topology

    topology = tpu_topology(slice_name)
    train = task == "train"
    mesh = make_mesh(topology, {"fsdp": 8, "tp": 1} if train else {"fsdp": 1, "tp": 8})
    sharding = llama.ShardingConfig.get_default_sharding(is_sampling=not train)
    remat = llama.RematConfig.DECODER if train else llama.RematConfig.NONE
    config = llama.ModelConfig.llama3p1_8b()
    config = type(config)(**{
        **{name: getattr(config, name) for name in config.__dataclass_fields__},
        "shd_config": sharding,
        "remat_config": remat,
    })
    rows, context = ROWS[task]

    def array(shape: tuple[int, ...], dtype: Any, *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    model = nnx.eval_shape(lambda: llama.Llama3(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    specs = nnx.get_partition_spec(state)
    state = jax.tree.map(lambda one, spec: array(one.shape, jnp.bfloat16, *spec), state, specs)
    tokens = 1 if task == "decode" else context
    ids = array((rows, tokens), jnp.int32, "fsdp")
    mask = array((rows, tokens, context), jnp.bool_, "fsdp")
    cache = {
        f"layer_{number}": {
            **dict.fromkeys(
                "kv", array((rows, context, config.num_kv_heads, config.head_dim), jnp.bfloat16, "fsdp", None, "tp")
            ),
            "end_index": array((rows,), jnp.int32),
        }
        for number in range(config.num_layers)
    }

    def generate(state: Any, cache: Any, ids: Any, positions: Any, mask: Any) -> Any:
        logits, cache = nnx.merge(graph, state)(ids, positions, cache, mask)
        return jnp.argmax(logits[:, -1], axis=-1), cache

    with mesh, mock.patch.object(jax, "devices", lambda *_: list(topology.devices)):
        if train:
            step, moments = training(graph, state)
            lowered = jax.jit(step, donate_argnums=(0, 1)).lower(state, moments, ids, ids, mask)
        else:
            lowered = jax.jit(generate, donate_argnums=1).lower(state, cache, ids, ids, mask)
    program = compile_lowered(topology, lowered, task)
    return {
        "peak_bytes": program.peak_bytes,
        "total_seconds": program.estimate.total_seconds,
        "hbm_seconds": program.estimate.hbm_seconds,
        "compile_seconds": program.compile_seconds,
    }


def training(graph: Any, state: Any) -> tuple[Callable[..., Any], Any]:
    """An update of Tunix's trainer, and the abstract state of its optimizer."""
    import jax
    import optax
    from flax import nnx
    from tunix.sft.peft_trainer import _default_loss_fn

    optimizer = optax.adamw(1e-5)
    shapes = jax.eval_shape(optimizer.init, state)
    by_shape = {one.shape: one.sharding for one in jax.tree.leaves(state)}
    moments = jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=by_shape.get(one.shape)), shapes
    )

    def step(state: Any, moments: Any, ids: Any, positions: Any, mask: Any) -> Any:
        def loss(state: Any) -> Any:
            return _default_loss_fn(nnx.merge(graph, state), ids, ids > 0, positions, mask)

        value, gradients = jax.value_and_grad(loss)(state)
        updates, moments = optimizer.update(gradients, moments, state)
        return optax.apply_updates(state, updates), moments, value

    return step, moments


def table(results: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    """The lines of the table. ours: the results of `predictions.py`."""
    yield "| " + " | ".join(HEAD) + " |"
    yield "|" + "---|" * len(HEAD)
    for task, name in PROGRAMS:
        found, own = results.get(f"{task} {name}"), ours.get(task, {}).get(name)
        if found is None or own is None:
            continue
        rows, context = ROWS[task]
        cells = [f"{task} {rows} × {context}", name]
        if "error" in found:
            cells += ["does not fit", "–"]
        else:
            cells += [f"{found['peak_bytes'] / GIB:.2f}", f"{found['total_seconds'] * 1e3:,.1f}"]
        cells += [f"{own['peak_bytes'] / GIB:.2f}", f"{own['total_seconds'] * 1e3:,.1f}"]
        cells.append("–" if "error" in found else f"**{found['total_seconds'] / own['total_seconds']:.2f}**")
        yield "| " + " | ".join(cells) + " |"


def our_results() -> dict[str, Any]:
    """Task → slice → our report on the usual mesh, from the results of `predictions.py`."""
    from predictions import RESULTS as stored
    from predictions import TABLES

    reports = json.loads(stored.read_text())
    found: dict[str, Any] = {}
    for program in TABLES["roofline"]:
        if program.model == "Llama-3.1-8B" and not program.mesh and program.name in reports:
            found.setdefault(program.task, {})[program.slice] = reports[program.name]["report"]
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunix", type=Path, help="the interpreter of an environment with google-tunix and libtpu")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--tables", action="store_true", help="compile nothing")
    parser.add_argument("--one", nargs=2, metavar=("TASK", "SLICE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(compiled(*asked.one)))
        return
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not asked.tables:
        if asked.tunix is None:
            parser.error("name the interpreter of an environment with google-tunix by --tunix")
        packages = os.pathsep.join([str(ROOT), *map(str, sorted(ROOT.glob("plugins/*")))])
        for task, name in PROGRAMS:
            if task not in asked.only:
                continue
            command = [str(asked.tunix), __file__, "--one", task, name]
            done = subprocess.run(
                command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": packages}
            )
            if done.returncode and "more memory" not in done.stderr and "exceeds" not in done.stderr:
                raise SystemExit(f"{task} {name}: {done.stderr[-2000:]}")
            result = {"error": done.stderr.strip().splitlines()[-1]} if done.returncode else json.loads(done.stdout)
            results[f"{task} {name}"] = result
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(task, name, result, file=sys.stderr)
    from predictions import write_between

    write_between("peers", "\n".join(table(results, our_results())))


if __name__ == "__main__":
    main()
