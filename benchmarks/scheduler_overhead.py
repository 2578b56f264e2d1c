"""What scheduling costs the host per step. In: a number of running requests; out: microseconds of `schedule` and
`update` together, with a null model (every token is given at once), as a line to read and as JSON. `cpu` is the
thread's own time, which other programs on the machine do not lengthen; the bar is for the clock's.

    python benchmarks/scheduler_overhead.py                         256 running requests, as the bar has it: 500 us
    python benchmarks/scheduler_overhead.py --running 64 --steps 5000 --output results.json

Prompts have 192 to 320 tokens. Pages are allocated, registered in the prefix cache and freed in all cases:

decode    all requests decode, and the next step is scheduled before the last one's tokens are known
sync      tokens are known before the next step is scheduled
lockstep  all prompts have 256 tokens, so that every sixteenth step needs a page for everybody
hybrid    a second page group, with a window
drafts    four draft tokens for each request, of which two hold
churn     answers of 128 tokens end, and new prompts take their place"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np

from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.scheduling.block_table import PageGroup
from ttpu_serve.scheduling.request import Request
from ttpu_serve.scheduling.scheduler import ScheduledStep, Scheduler, SchedulerConfig

BAR_MICROSECONDS = 500.0
SHORTEST, LONGEST, CHURN_OUTPUT, PAGE = 192, 320, 128, 16
DRAFTS, ACCEPTED = 4, 2
CASES = ["decode", "sync", "lockstep", "hybrid", "drafts", "churn"]
PARAMS = SamplingParams(max_tokens=1)


def measure(case: str, running: int, steps: int, warmup: int) -> dict[str, float | int | str]:
    """Times `steps` steps of one case."""
    churn = case == "churn"
    output = CHURN_OUTPUT if churn else (steps + warmup + 8) * (ACCEPTED + 1 if case == "drafts" else 1)
    length = LONGEST + output
    pages = running * (-(-length // PAGE) + 2) + 1
    groups = [PageGroup("full", pages)]
    if case == "hybrid":
        groups.append(PageGroup("window", running * (1024 // PAGE + 4) + 1, window=1024))
    config = SchedulerConfig(
        max_num_seqs=running,
        max_num_batched_tokens=8192 if churn else max(8192, running * LONGEST),
        max_model_len=length,
        page_size=PAGE,
        lookahead=DRAFTS if case == "drafts" else 0,
        watermark=0.0,
    )
    scheduler = Scheduler(config, groups)
    random = np.random.default_rng(0)
    added = 0

    def add(count: int) -> None:
        nonlocal added
        for _ in range(count):
            ends = output if not churn or added >= running else 1 + added * output // running  # not all at once
            tokens = 256 if case == "lockstep" else random.integers(SHORTEST, LONGEST + 1)
            prompt = random.integers(0, 32_000, tokens).tolist()
            scheduler.add(Request(str(added), prompt, PARAMS, max_output=ends))
            added += 1

    add(running)
    depth = 0 if case in ("sync", "drafts") else 1
    in_flight: deque[ScheduledStep] = deque()
    watch = Watch()
    gc.collect()
    for _ in range(steps + warmup):
        if case == "drafts":
            for request in scheduler._running.decoding:
                request.draft = [1] * DRAFTS
        with watch:
            step = scheduler.schedule()
        assert step is not None
        in_flight.append(step)
        if len(in_flight) > depth:
            done = in_flight.popleft()
            tokens = np.where(done.samples, 1, -1)
            guesses = [[1] * (1 + min(len(draft), ACCEPTED)) for draft in done.drafts] if done.drafts else None
            with watch:
                if guesses is None:
                    scheduler.update_single(done, tokens)
                else:
                    scheduler.update(done, guesses)
            if churn:
                over = [request for request in done.requests if len(request.output) == request.max_output]
                with watch:
                    for request in over:
                        scheduler.finish(request, "length")
                add(len(over))
        watch.next()
    wall, cpu = sorted(watch.wall[warmup:-1]), sorted(watch.cpu[warmup:-1])
    return {
        "case": case,
        "running": running,
        "steps": steps,
        "median_us": round(statistics.median(wall), 1),
        "mean_us": round(statistics.fmean(wall), 1),
        "p99_us": round(wall[int(len(wall) * 0.99)], 1),
        "median_cpu_us": round(statistics.median(cpu), 1),
        "mean_cpu_us": round(statistics.fmean(cpu), 1),
        "p99_cpu_us": round(cpu[int(len(cpu) * 0.99)], 1),
        "pages_in_use": sum(scheduler.pages_in_use),
    }


class Watch:
    """Microseconds spent inside `with`, per step."""

    def __init__(self) -> None:
        self.wall: list[float] = [0.0]
        self.cpu: list[float] = [0.0]

    def __enter__(self) -> None:
        self._begin = time.perf_counter_ns(), time.thread_time_ns()

    def __exit__(self, *_: object) -> None:
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        self.wall[-1] += (wall - self._begin[0]) / 1e3
        self.cpu[-1] += (cpu - self._begin[1]) / 1e3

    def next(self) -> None:
        """A new step begins."""
        self.wall.append(0.0)
        self.cpu.append(0.0)


def main() -> int:
    """Run, print, and write; the exit status says whether the bar was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, help="requests that run at once")
    parser.add_argument("--steps", type=int, default=2000, help="steps to time, after a tenth as many to warm up")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    arguments = parser.parse_args()
    results = [measure(case, arguments.running, arguments.steps, arguments.steps // 10) for case in arguments.cases]
    for row in results:
        print(
            f"{row['case']:>8}: median {row['median_us']:6.1f} us, p99 {row['p99_us']:7.1f} us; cpu median "
            f"{row['median_cpu_us']:6.1f} us, p99 {row['p99_cpu_us']:7.1f} us; {row['running']} running"
        )
    met = all(float(row["median_us"]) <= BAR_MICROSECONDS for row in results if row["case"] in ("decode", "sync"))
    report = {
        "machine": {"python": platform.python_version(), "processor": platform.machine(), "numpy": np.__version__},
        "bar_us": BAR_MICROSECONDS,
        "bar_met": met,
        "results": results,
    }
    print(json.dumps(report))
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
