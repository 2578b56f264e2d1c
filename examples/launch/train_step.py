"""One training step of a checkpoint on a mesh that may span several processes; prints the loss before and after. Every
process runs the same program and holds its shards of the weights.

    python examples/launch/train_step.py examples/checkpoints/pydoc-llama
    ttpu launch --nproc-per-node 2 --devices-per-process 4 -- \\
        examples/launch/train_step.py examples/checkpoints/pydoc-llama --mesh fsdp=4,tensor=2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from ttpu import AutoModelForTPU
from ttpu_jax.aot.steps import train_step


def main() -> None:
    """Take one step and print its effect on the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--mesh", help="such as fsdp=4,tensor=2; without it each process trains alone, on one device")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="tokens per row")
    parser.add_argument("--save", type=Path, metavar="FILE.npz", help="write losses and the updated weights")
    options = parser.parse_args()

    # Joins the other processes, if `ttpu launch` started several; from here on jax.devices() are those of all.
    model = AutoModelForTPU.from_pretrained(options.checkpoint, dtype="float32", mesh=options.mesh)

    runtime, spec = model.programs.runtime, model.programs.spec
    program = train_step(
        spec, runtime, np.dtype(np.float32), batch=options.batch, tokens=options.tokens, stacked=False
    )
    _, abstract_state, abstract_tokens = program.arguments
    # The same rows in every process, which puts those on its devices that are cut for them.
    rows = np.random.default_rng(0).integers(0, spec.vocab_size, abstract_tokens.shape, np.int32)
    tokens = jax.make_array_from_callback(rows.shape, abstract_tokens.sharding, lambda part: rows[part])
    # AdamW's moments begin at zero; they lie where their weights do.
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), abstract_state)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (model.params, state))

    step = jax.jit(program.function, donate_argnums=program.donated, out_shardings=(*shardings, None))
    params, state, before = step(model.params, state, tokens)
    updated = {path: _whole(value) for path, value in params.items()} if options.save else {}
    _, _, after = step(params, state, tokens)
    if jax.process_index() == 0:
        print(f"loss {float(before):.6f}, after one step {float(after):.6f}, on {jax.device_count()} devices of "
              f"{jax.process_count()} processes")  # fmt: skip
        if options.save:
            np.savez(options.save, **updated, losses=np.array([before, after], np.float32))


def _whole(value: jax.Array) -> np.ndarray:
    """A weight as one host array; every process takes part in gathering it."""
    return np.asarray(multihost_utils.process_allgather(value, tiled=True))


if __name__ == "__main__":
    main()
