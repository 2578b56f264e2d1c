"""Reports the compiler's figures of patched stock models on TPU slices. `python -m ttpu_torch_xla.aot.report` prints
the table of docs/torch_xla.md, with one process per row."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ttpu_core.config import ModelConfig
from ttpu_core.registry import default_registry
from ttpu_core.sharding.parallelism import resolve_parallelism
from ttpu_torch_xla.aot.compile import CompiledGraph
from ttpu_torch_xla.aot.model import abstract_model
from ttpu_torch_xla.aot.slice import TpuSlice
from ttpu_torch_xla.aot.steps import Step, compile_step

LAYERS = 4
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8B": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336,
        "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "max_position_embeddings": 8192, "sliding_window": 4096, "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
}  # fmt: skip
"""The published shapes, with four layers."""

PROGRAMS: Mapping[str, tuple[Step, int, int, str]] = {
    "prefill 1 × 8192, tensor=8": ("prefill", 1, 8192, "tensor=8"),
    "decode 32 × 2048, tensor=8": ("decode", 32, 2048, "tensor=8"),
    "training step 8 × 4096, fsdp=8": ("train", 8, 4096, "fsdp=8"),
}
"""Name → step, rows, tokens of a row and mesh."""

TOPOLOGIES = ("v5e:2x4", "v6e:2x4")
HEADER = """| model | program | slice | kernels | peak GiB | arguments | temporary | CPU s to compile |
|---|---|---|---|---|---|---|---|"""


def compiled(
    config: Mapping[str, Any], topology: str, step: Step, batch: int, context: int, mesh: str
) -> CompiledGraph:
    """Compile a program of a model in bfloat16 with splash attention; the arguments are those of `compile_step`.

    Args:
        mesh: as `parallelism_strategy` takes it.
    """
    tpu = TpuSlice(topology)
    architecture = default_registry().architecture(ModelConfig.from_dict(config))
    model = abstract_model(architecture, config, tpu, resolve_parallelism(mesh, tpu.num_devices()))
    try:
        return compile_step(model, step, batch, context)
    finally:
        model.ttpu.close()


def row(model: str, program: str, topology: str) -> str:
    """Return one line of the table: the compiler's memory figures on each device."""
    found = compiled(CONFIGS[model], topology, *PROGRAMS[program])
    peak, arguments, temporary = (
        f"{size / 2**30:.2f}" for size in (found.peak_bytes, found.argument_bytes, found.temp_bytes)
    )
    return (
        f"| {model} | {program} | {topology} | {found.kernels} | {peak} | {arguments} | {temporary} | "
        f"{found.compile_cpu_seconds:.0f} |"
    )


def main() -> None:
    """Print the table, or the one line that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="model, program and topology of one line")
    only = parser.parse_args().only
    if only:
        print(row(*only))
        return
    print(HEADER, flush=True)
    for model in CONFIGS:
        for program in PROGRAMS:
            for topology in TOPOLOGIES:
                subprocess.run([sys.executable, "-m", __spec__.name, model, program, topology], check=True)


if __name__ == "__main__":
    main()
