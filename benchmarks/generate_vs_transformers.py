"""Times this backend against `transformers` on torch CPU, interleaved, on a llama of about 100 million parameters:
loading (seconds, peak RSS), prefill of 512 tokens, decode at batch 1 and 8 after 32, 512 and 2,048 tokens, in float32
and bfloat16.

Each engine runs in a process of its own that stays up; the driver asks them in turn, so that all see the same machine.
Results go to stdout as a table, and to --output as JSON with the machine and the versions. Tunix, which wants other
versions of libraries, runs in an environment of its own if its interpreter is named.

    python benchmarks/generate_vs_transformers.py --rounds 5 --output benchmarks/results/generate_cpu.json
    python benchmarks/generate_vs_transformers.py --tunix tunix-environment/bin/python
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

THREADS = 2
PREFILL_TOKENS, DECODE_PROMPTS, DECODE_TOKENS = 512, (32, 512, 2048), 64
FIGURES = ("prefill 1", *(f"decode {batch} {prompt}" for batch in (1, 8) for prompt in DECODE_PROMPTS))
SHAPE = {
    "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip


def main() -> None:
    """Build the checkpoint, start the engines, ask them in turn, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each engine is asked for each figure")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    told = f"these alone: {', '.join(FIGURES)}"
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=FIGURES, metavar="FIGURE", help=told)
    parser.add_argument("--tunix", help="the interpreter of an environment with google-tunix")
    parser.add_argument("--output", type=Path, help="write the results there as JSON, in place of what is there")
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
        for dtype in arguments.dtypes:
            checkpoint = Path(folder) / dtype
            subprocess.run([sys.executable, __file__, "--make", str(checkpoint)], check=True, env=environment(dtype))
            weights = (checkpoint / "model.safetensors").stat().st_size
            interpreters = {"transformers": sys.executable, "ttpu": sys.executable}
            if arguments.tunix:
                interpreters["tunix"] = arguments.tunix
            workers = {
                engine: Worker(interpreter, engine, checkpoint, dtype) for engine, interpreter in interpreters.items()
            }
            for engine, worker in workers.items():
                row = {"figure": "load", "dtype": dtype, "engine": engine, "weights_bytes": weights, **worker.loaded}
                report["results"].append(row)
                peak, base = row["peak_rss"] / 1e6, row["base_rss"] / 1e6
                print(
                    f"{dtype:9} load            {engine:13} {row['seconds']:.2f} s, peak RSS {peak:.0f} MB "
                    f"(weights {weights / 1e6:.0f} MB, before loading {base:.0f} MB)",
                    flush=True,
                )
            for figure in arguments.figures:
                rates: dict[str, list[float]] = {engine: [] for engine in workers}
                for worker in workers.values():
                    worker.ask(figure)  # compile, warm caches
                for _ in range(arguments.rounds):
                    for engine, worker in workers.items():
                        rates[engine].append(worker.ask(figure)["tokens_per_second"])
                report["results"].append(row_of(figure, dtype, rates))
                keep(report, arguments.output)
            for worker in workers.values():
                worker.stop()


def keep(report: dict[str, Any], path: Path | None) -> None:
    """Write what is known so far, where a path is given."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")


def row_of(figure: str, dtype: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the ratio to each other engine with its spread over rounds."""
    medians = {engine: statistics.median(values) for engine, values in rates.items()}
    ratios = {
        engine: [ours / theirs for ours, theirs in zip(rates["ttpu"], values, strict=True)]
        for engine, values in rates.items()
        if engine != "ttpu"
    }
    told = "  ".join(f"{engine} {rate:7.1f}" for engine, rate in medians.items())
    against = "  ".join(
        f"{statistics.median(values):.2f} × {engine} ({min(values):.2f} to {max(values):.2f})"
        for engine, values in ratios.items()
    )
    print(f"{dtype:9} {figure:15} tokens/s: {told}   {against}", flush=True)
    spread = {engine: [min(values), max(values)] for engine, values in ratios.items()}
    of_medians = {engine: statistics.median(values) for engine, values in ratios.items()}
    return {
        "figure": figure,
        "dtype": dtype,
        "tokens_per_second": medians,
        "ratio": of_medians,
        "ratio_spread": spread,
    }


class Worker:
    """An engine in its own process, asked by lines of JSON."""

    def __init__(self, interpreter: str, engine: str, checkpoint: Path, dtype: str) -> None:
        command = [interpreter, __file__, "--worker", engine, str(checkpoint), dtype]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, env=environment(dtype), **pipes)  # type: ignore[call-overload]
        self.loaded = self._read()

    def ask(self, figure: str) -> dict[str, Any]:
        """One measurement."""
        self.process.stdin.write(figure + "\n")
        self.process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"worker {self.process.args} ended with status {self.process.wait()}")
        return json.loads(line)


def work(engine: str, checkpoint: str, dtype: str) -> None:
    """The worker: load, then answer."""
    engines = {"transformers": transformers_engine, "ttpu": ttpu_engine, "tunix": tunix_engine}
    run = engines[engine](checkpoint, dtype)
    for line in sys.stdin:
        kind, batch, prompt = (*line.split(), str(PREFILL_TOKENS))[:3]
        print(json.dumps({"tokens_per_second": run(kind, int(batch), int(prompt))}), flush=True)


def transformers_engine(checkpoint: str, dtype: str) -> Any:
    """torch eager with scaled-dot-product attention and a dynamic cache; a bare greedy loop, without generate()'s
    cost."""
    import torch
    from transformers import DynamicCache, LlamaForCausalLM

    torch.set_num_threads(THREADS)
    base, began = rss(), time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    print(json.dumps({"seconds": time.perf_counter() - began, "base_rss": base, "peak_rss": peak_rss()}), flush=True)

    @torch.no_grad()
    def run(kind: str, batch: int, prompt: int) -> float:
        ids = torch.randint(3, 31_999, (batch, prompt), generator=torch.Generator().manual_seed(0))
        cache = DynamicCache(config=model.config)
        began = time.perf_counter()
        token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        if kind == "prefill":
            return batch * prompt / (time.perf_counter() - began)
        began = time.perf_counter()
        for _ in range(DECODE_TOKENS):
            token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        return batch * DECODE_TOKENS / (time.perf_counter() - began)

    return run


def ttpu_engine(checkpoint: str, dtype: str) -> Any:
    """This backend, through the public interface."""
    import numpy as np

    import ttpu_jax.backend  # noqa: F401  (imports count towards the baseline)
    from ttpu import AutoModelForTPU

    base, began = rss(), time.perf_counter()
    model = AutoModelForTPU.from_pretrained(checkpoint, dtype=dtype)
    print(json.dumps({"seconds": time.perf_counter() - began, "base_rss": base, "peak_rss": peak_rss()}), flush=True)

    def run(kind: str, batch: int, prompt: int) -> float:
        ids = np.random.default_rng(0).integers(3, 31_999, (batch, prompt))
        model.generate(ids, max_new_tokens=1 if kind == "prefill" else DECODE_TOKENS + 1, ignore_eos=True)
        timings = model.timings
        return timings.prefill_tokens_per_second if kind == "prefill" else timings.decode_tokens_per_second

    return run


def tunix_engine(checkpoint: str, dtype: str) -> Any:
    """Tunix's llama and its sampler, which takes texts: a text of n letters stands for n tokens. Its time after the
    first token is that of a whole call minus that of one with a single token."""
    import jax.numpy as jnp
    import numpy as np
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.llama3 import model as llama
    from tunix.models.llama3.params import create_model_from_safe_tensors

    class Letters:
        """A tokenizer."""

        def encode(self, text: str, **_: Any) -> list[int]:
            return np.random.default_rng(len(text)).integers(3, 31_999, len(text)).tolist()

        def decode(self, ids: Any, **_: Any) -> str:
            return " ".join(map(str, ids))

        def bos_id(self) -> int:
            return 1

        def eos_id(self) -> int:
            return 2

        def pad_id(self) -> int:
            return 0

    base, began = rss(), time.perf_counter()
    config = llama.ModelConfig(
        num_layers=SHAPE["num_hidden_layers"],
        vocab_size=SHAPE["vocab_size"],
        embed_dim=SHAPE["hidden_size"],
        hidden_dim=SHAPE["intermediate_size"],
        num_heads=SHAPE["num_attention_heads"],
        head_dim=SHAPE["hidden_size"] // SHAPE["num_attention_heads"],
        num_kv_heads=SHAPE["num_key_value_heads"],
        rope_theta=10_000,
        norm_eps=1e-6,
    )
    model = create_model_from_safe_tensors(checkpoint, config, dtype=getattr(jnp, dtype))
    print(json.dumps({"seconds": time.perf_counter() - began, "base_rss": base, "peak_rss": peak_rss()}), flush=True)
    samplers: dict[int, Sampler] = {}

    def seconds(batch: int, prompt: int, new_tokens: int) -> float:
        length = prompt + DECODE_TOKENS + 8
        if prompt not in samplers:
            size = CacheConfig(length, config.num_layers, config.num_kv_heads, config.head_dim)
            samplers[prompt] = Sampler(model, Letters(), size)
        began = time.perf_counter()
        samplers[prompt](
            ["x" * (prompt - 1)] * batch,  # and the first token, which it adds
            max_generation_steps=new_tokens,
            max_prompt_length=prompt,
            eos_tokens=[SHAPE["vocab_size"] - 1],
        )
        return time.perf_counter() - began

    def run(kind: str, batch: int, prompt: int) -> float:
        first = min(seconds(batch, prompt, 1) for _ in range(2))  # the first call of a shape compiles
        if kind == "prefill":
            return batch * prompt / first
        seconds(batch, prompt, DECODE_TOKENS + 1) if (batch, prompt) not in compiled else None
        compiled.add((batch, prompt))
        return batch * DECODE_TOKENS / (seconds(batch, prompt, DECODE_TOKENS + 1) - first)

    compiled: set[tuple[int, int]] = set()
    return run


def make_checkpoint(path: Path) -> None:
    """A random llama, saved by transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.to(getattr(torch, os.environ["BENCHMARK_DTYPE"])).save_pretrained(path)


def environment(dtype: str) -> dict[str, str]:
    """Both engines get the same threads."""
    threads = {"OMP_NUM_THREADS": str(THREADS), "JAX_PLATFORMS": "cpu", "BENCHMARK_DTYPE": dtype}
    return {**os.environ, **threads, "HF_HUB_OFFLINE": "1"}


def rss() -> int:
    """Resident bytes of this process now."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def peak_rss() -> int:
    """The most resident bytes so far."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "torch", "transformers", "ttpu-jax")}
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": THREADS,
        "python": platform.python_version(),
        "versions": versions,
    }


if __name__ == "__main__":
    main()
