"""Times updates of this trainer against torch on CPU, interleaved, on a llama of about 100 million parameters: batch 2,
256 tokens a row, AdamW, in float32 and bfloat16; and what `Trainer` adds to a bare update.

Each engine runs in a process of its own that stays up; the driver asks them in turn, so that both see the same machine.
`ttpu` is the runner's compiled update, called as the trainer calls it; `trainer` is `Trainer.train` on rows of token
ids, with its log, its data and without checkpoints, divided by its updates (compilation and the first line of the log
left out). Nothing is computed again in the backward pass, as in torch. torch holds weights in the dtype that it
computes in; this trainer always holds float32 master weights.

    python benchmarks/training_vs_torch.py --rounds 3 --output benchmarks/results/training_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

THREADS, ROWS, LENGTH, UPDATES = 2, 2, 256, 4
SHAPE = {
    "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
ENGINES = ("torch", "torch.compile", "ttpu", "trainer")


def main() -> None:
    """Build the checkpoint, start the engines, ask them in turn, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each engine is asked")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    parser.add_argument("--worker", nargs=3, metavar=("ENGINE", "CHECKPOINT", "DTYPE"), help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker)
    elif arguments.make:
        make_checkpoint(arguments.make)
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """The driver."""
    report: dict[str, Any] = {"machine": machine(), "rounds": arguments.rounds, "results": []}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "llama"
        subprocess.run([sys.executable, __file__, "--make", str(checkpoint)], check=True, env=environment())
        for dtype in arguments.dtypes:
            rates: dict[str, list[float]] = {engine: [] for engine in arguments.engines}
            workers = {engine: Worker(engine, checkpoint, dtype) for engine in arguments.engines}
            for _ in range(arguments.rounds):
                for engine, worker in workers.items():
                    rates[engine].append(worker.ask())
            for worker in workers.values():
                worker.stop()
            for engine, values in rates.items():
                row = {
                    "dtype": dtype,
                    "engine": engine,
                    "updates_per_second": statistics.median(values),
                    "spread": [min(values), max(values)],
                }
                if engine != "torch" and "torch" in rates:
                    ratios = [ours / theirs for ours, theirs in zip(values, rates["torch"], strict=True)]
                    row |= {"ratio_to_torch": statistics.median(ratios), "ratio_spread": [min(ratios), max(ratios)]}
                report["results"].append(row)
                print(json.dumps(row), flush=True)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


class Worker:
    """An engine in its own process, asked by lines."""

    def __init__(self, engine: str, checkpoint: Path, dtype: str) -> None:
        command = [sys.executable, __file__, "--worker", engine, str(checkpoint), dtype]
        self.process = subprocess.Popen(
            command, text=True, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.ask()  # compile, warm caches

    def ask(self) -> float:
        """Updates per second."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"worker {self.process.args} ended with status {self.process.wait()}")
        return float(json.loads(line))

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def work(engine: str, checkpoint: str, dtype: str) -> None:
    """The worker: load, then answer."""
    made = {"ttpu": bare_engine, "trainer": trainer_engine}.get(engine)
    run = made(checkpoint, dtype) if made else torch_engine(checkpoint, dtype, compiled=engine == "torch.compile")
    for _ in sys.stdin:
        print(json.dumps(run()), flush=True)


def torch_engine(checkpoint: str, dtype: str, *, compiled: bool) -> Any:
    """transformers' model, its own loss, torch's AdamW and clipping."""
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    forward = torch.compile(model) if compiled else model
    tokens = torch.randint(0, SHAPE["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))

    def run() -> float:
        began = time.perf_counter()
        for _ in range(UPDATES):
            loss = forward(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
        return UPDATES / (time.perf_counter() - began)

    return run


def bare_engine(checkpoint: str, dtype: str) -> Any:
    """The runner's update."""
    import numpy as np

    from ttpu import AutoModelForTPU, TrainingArguments
    from ttpu_core.registry import default_registry
    from ttpu_train.runner import Batch

    arguments = TrainingArguments(
        bf16=dtype == "bfloat16", learning_rate=1e-4, max_steps=1000, gradient_checkpointing=False
    )
    model = AutoModelForTPU.from_pretrained(checkpoint, dtype="float32")
    runner = default_registry().backend("jax").train_runner(model, arguments.step_settings(1000))
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (ROWS, LENGTH)).astype(np.int32)
    weights = np.ones((ROWS, LENGTH), np.float32)
    weights[:, 0] = 0
    batch = Batch(tokens, weights, np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)))

    def run() -> float:
        began = time.perf_counter()
        for _ in range(UPDATES):
            runner.step(batch).values()
        return UPDATES / (time.perf_counter() - began)

    return run


def trainer_engine(checkpoint: str, dtype: str) -> Any:
    """A whole run of the trainer, of which each call does some updates."""
    import queue
    import threading

    import numpy as np

    from ttpu import Trainer, TrainerCallback

    go: queue.Queue[None] = queue.Queue()
    done: queue.Queue[float] = queue.Queue()
    ids = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (64, LENGTH))

    class Meter(TrainerCallback):
        """Waits for a request before each group of updates, and measures it."""

        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % UPDATES == 0:
                go.get()
                self.began = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            done.put(UPDATES / (time.perf_counter() - self.began))

    trainer = Trainer(
        checkpoint,
        train_dataset=[{"input_ids": row.tolist()} for row in ids],
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        max_length=LENGTH,
        max_steps=1000,
        learning_rate=1e-4,
        bf16=dtype == "bfloat16",
        gradient_checkpointing=False,
        logging_steps=UPDATES,
        save_strategy="no",
        disable_tqdm=True,
        callbacks=[Meter()],
    )
    threading.Thread(target=trainer.train, daemon=True).start()

    def run() -> float:
        go.put(None)
        return done.get()

    return run


def make_checkpoint(folder: Path) -> None:
    """A random llama in float32."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def environment() -> dict[str, str]:
    """Two threads for every engine, and the CPU."""
    return os.environ | {"OMP_NUM_THREADS": str(THREADS), "JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    packages = ("jax", "torch", "transformers", "optax", "grain")
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


if __name__ == "__main__":
    main()
