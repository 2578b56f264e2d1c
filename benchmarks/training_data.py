"""How many tokens per second the input pipeline of a training run gives, tokenization cached. In: the number of
examples, whose lengths are drawn; out: tokens per second with and without packing, as a line to read and as JSON.

    python benchmarks/training_data.py                      50,000 examples of 20 to 800 tokens, rows of 2,048
    python benchmarks/training_data.py --examples 10000 --output results.json

Tokens are those that have a place in a row, padding not counted. Tokens per processor second count the time of all
threads of the process: they bound what a pipeline gives that shares a core with other work. `prepare_s` is the time
that hashing the examples and planning the epoch take. The bar holds for packed rows."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import numpy as np

from ttpu_train.data.loader import batch_loader
from ttpu_train.data.settings import DataSettings

BAR_TOKENS_PER_SECOND = 100_000
SHORTEST, LONGEST = 20, 800


def measure(
    examples: list[dict[str, list[int]]], cache: str, packing: bool, width: int, rows: int
) -> dict[str, object]:
    """One epoch of shuffled batches, after one that fills the cache."""
    settings = DataSettings(max_length=width, rows=rows, packing=packing, cache_dir=cache)
    begun = time.perf_counter()
    loader = batch_loader(examples, None, settings)
    prepared = time.perf_counter() - begun
    begun, cpu = time.perf_counter(), time.process_time()
    next(loader)
    first = time.perf_counter() - begun
    begun, cpu, tokens, batches = time.perf_counter(), time.process_time(), 0, 0
    for batch in loader:
        tokens += int(np.count_nonzero(batch.positions >= 0))
        batches += 1
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    return {
        "packing": packing,
        "batches": batches,
        "tokens": tokens,
        "filled": round(tokens / (batches * rows * width), 4),
        "prepare_s": round(prepared, 2),
        "first_s": round(first, 2),
        "tokens_per_s": round(tokens / seconds),
        "tokens_per_cpu_s": round(tokens / cpu),
    }


def main() -> int:
    """Run, print, and write; the exit status says whether the bar was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=50_000)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=8, help="in a batch")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    arguments = parser.parse_args()
    import_module("grain")  # its 2 s are no part of the first batch
    random = np.random.default_rng(0)
    lengths = random.integers(SHORTEST, LONGEST + 1, arguments.examples)
    examples = [{"input_ids": random.integers(0, 32_000, length).tolist()} for length in lengths]
    with tempfile.TemporaryDirectory() as cache:
        batch_loader(examples, None, DataSettings(cache_dir=cache)).close()
        results = [measure(examples, cache, packing, arguments.max_length, arguments.rows) for packing in (True, False)]
    for row in results:
        print(
            f"{'packed' if row['packing'] else 'padded'}: {row['tokens_per_s']:,} tokens/s, "
            f"{row['tokens_per_cpu_s']:,} per processor second; rows filled by {row['filled']:.1%}; "
            f"first batch after {row['first_s']} s"
        )
    met = int(str(results[0]["tokens_per_s"])) >= BAR_TOKENS_PER_SECOND
    report = {
        "machine": {
            "python": platform.python_version(),
            "processor": platform.machine(),
            "numpy": np.__version__,
            "grain": version("grain"),
        },
        "bar_tokens_per_s": BAR_TOKENS_PER_SECOND,
        "bar_met": met,
        "results": results,
    }
    print(json.dumps(report))
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
