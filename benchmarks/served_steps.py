"""What the TPU compiler's schedule predicts of an engine's largest decode or mixed step, with pages for sequences of a
given length: kernels state what these take at least, and loops whose turns depend on the requests turn as often as such
sequences need. In: a config.json and a slice; out: one line for the step, and one for each part of the model. Nothing
runs on a TPU.

    python benchmarks/served_steps.py plugins/ttpu-gemma/ttpu_gemma/configs/gemma-2-9b.json v5e:2x4
    python benchmarks/served_steps.py CONFIG v6e:2x4 --step mixed --attn-implementation eager"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

from ttpu_core.config import ModelConfig
from ttpu_core.registry import default_registry
from ttpu_core.sharding.parallelism import parse_rules, strategy_with
from ttpu_jax.aot import hlo
from ttpu_jax.aot.compile import CompiledProgram, compile_lowered
from ttpu_jax.aot.schedule import ScheduleEstimate, estimate
from ttpu_jax.aot.topology import tpu_topology
from ttpu_jax.ops.paged_attention.reference import OTHER_KEYS
from ttpu_jax.runner.ahead import abstract_runner, lower, name_of
from ttpu_jax.runner.memory import pages_per_group

PAGE_SIZE = 128


def compiled(asked: argparse.Namespace) -> CompiledProgram:
    """Compile the step, with the model sharded over all devices of the slice (`tensor`)."""
    architecture = default_registry().architecture(ModelConfig.from_dict(json.loads(asked.config.read_text())))
    topology = tpu_topology(asked.slice)
    settings = default_registry().service("engine").config({
        "max_num_seqs": asked.sequences, "max_model_len": 8192, "max_num_batched_tokens": 2048, "page_size": PAGE_SIZE,
        "kv_cache_dtype": asked.kv_cache_dtype,
    })  # fmt: skip
    mesh = {"tensor": len(topology.devices)}
    strategy = strategy_with(parse_rules(asked.sharding_rules) if asked.sharding_rules else None)
    runner = abstract_runner(
        architecture, topology, settings, "bfloat16", mesh, strategy, attn_implementation=asked.attn_implementation
    )
    pages = asked.sequences * -(-asked.tokens // PAGE_SIZE) + 1  # and the null page
    runner.num_pages = pages_per_group(replace(runner.config, num_pages=pages), runner.layout, (), None)
    decode = runner.buckets.step(asked.sequences, asked.sequences, 1)
    shape = decode if asked.step == "decode" else runner.buckets.all()[0]
    program = next(one for one in runner.programs() if one.key == ("step", shape))
    return compile_lowered(topology, lower(topology, program), name_of(program.key))


def walked(program: CompiledProgram, turns: int) -> ScheduleEstimate:
    """Walk the schedule; loops whose turns are not known turn `turns` times."""
    known = hlo.Module.trip_count

    def counted(module: hlo.Module, loop: hlo.Instruction) -> int:
        found = known(module, loop)
        return turns if found is None else found

    hlo.Module.trip_count = counted  # type: ignore[assignment, method-assign]
    try:
        return estimate(program.hlo_text, program.topology.chip.name)
    finally:
        hlo.Module.trip_count = known  # type: ignore[method-assign]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a model's config.json")
    parser.add_argument("slice", help="such as v5e:2x4")
    parser.add_argument("--step", choices=("decode", "mixed"), default="decode")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1024, help="of each sequence")
    parser.add_argument("--attn-implementation", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--sharding-rules", metavar="RULES", help="such as expert=tensor")
    parser.add_argument("--json", action="store_true", help="print one JSON object, without the parts")
    asked = parser.parse_args()
    program = compiled(asked)
    found = walked(program, -(-asked.tokens // OTHER_KEYS))
    if asked.json:
        print(json.dumps({"total_seconds": found.total_seconds, "hbm_seconds": found.hbm_seconds}))
        return
    print(
        f"{asked.step}, {asked.sequences} sequences of {asked.tokens} tokens, {asked.slice}: "
        f"{found.seconds * 1e3:.2f} ms without kernels, {found.seconds_with_kernels * 1e3:.2f} with, "
        f"{found.total_seconds * 1e3:.2f} with HBM shared; HBM at least {found.hbm_seconds * 1e3:.2f}; "
        f"{len(found.loops_without_trip_count) or len(program.estimate.loops_without_trip_count)} open loops"
    )
    for part in found.parts:
        print(f"  {part.part:24s}{part.seconds * 1e3:8.3f} ms, of it kernels {part.kernels * 1e3:.3f}")
    least: Counter[str] = Counter()
    for one in found.unmodelled:
        least[one.name.partition(".")[0]] += one.count * (one.roofline_seconds or 0.0)  # type: ignore[assignment]
    for name, seconds in least.items():
        print(f"  {name}: {f'at least {seconds * 1e3:.3f} ms' if seconds else 'without an estimate'}")


if __name__ == "__main__":
    main()
