"""Times three ways to answer 64 requests of mixed lengths on CPU, interleaved, with a llama of about 100 million
parameters in float32 and bfloat16: this engine (`LLM`), `transformers` generate with its best static batching, and
EasyDeL's eSurge, which needs an environment of its own.

    python benchmarks/serving_throughput.py --easydel-python ~/easydel/bin/python \\
        --output benchmarks/results/serving_throughput_cpu.json

Each engine lives in a process of its own, on the same cores. The driver asks them in turn; those that are not asked are
stopped (SIGSTOP), so that their background threads take nothing. A rate counts the tokens that were asked for, from
the moment all requests are there until the last answer is whole. Prompts are token ids, decoding is greedy, and the end
of a sequence is ignored, so that all engines do the same work. An engine that cannot run here is reported, with the
reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

SEED = 0
PROMPT_TOKENS, OUTPUT_TOKENS, MAX_MODEL_LEN = (16, 256), (16, 128), 512
PAGE_MEMORY = 2**30
"""Bytes for keys and values: enough that all requests run at once, in float32 too."""
SHAPE: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
ENGINES = ("transformers", "easydel", "ttpu")
PACKAGES = {
    "transformers": ("torch", "transformers"),
    "easydel": ("easydel", "ejkernel", "jax", "flax"),
    "ttpu": ("ttpu-jax", "jax", "flax"),
}
EASYDEL_ATTENTION = "ragged_page_attention_v2"
"""Of eSurge's paged attentions (easydel 0.3.0) the only one that runs on CPU where head_dim is 64: its default, version
3, stores keys and values there in a layout that only the TPU kernel reads, and it takes version 3 for all others."""

Answer = Callable[[], list[list[int]]]
Prepare = Callable[[dict[str, Any]], Answer]
"""From an engine's settings to what answers all requests once; what it takes to get there is not timed."""


def main() -> None:
    """Build the checkpoints, start the engines, ask them in turn, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--easydel-python", metavar="PATH", help="of an environment with easydel and torch")
    parser.add_argument("--easydel-page-sizes", nargs="+", type=int, default=[8, 16, 32], help="tried by eSurge")
    parser.add_argument("--transformers-python", metavar="PATH", default=sys.executable, help="with transformers")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3, help="how often each engine is timed")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[4, 8, 16, 32, 64], help="tried by transformers")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="cores that each engine gets")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="fewer, to try the script")
    parser.add_argument("--limit", type=float, default=900, help="seconds that all answers may take an engine")
    parser.add_argument("--output", type=Path, help="write the results there as JSON, after each dtype")
    parser.add_argument("--verbose", action="store_true", help="show what the engines write on stderr")
    parser.add_argument("--worker", nargs=3, metavar=("ENGINE", "FOLDER", "DTYPE"), help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=2, metavar=("FOLDER", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        engine, folder, dtype = arguments.worker
        work(engine, folder, dtype, arguments.threads)
    elif arguments.make:
        folder, dtype = arguments.make
        make_checkpoint(folder, dtype, arguments.layers)
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """The driver."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no stopped worker is left behind
    requests = make_requests(arguments.requests)
    report: dict[str, Any] = {
        "machine": machine(arguments.threads),
        "workload": {
            "requests": len(requests), "seed": SEED, "shape": {**SHAPE, "num_hidden_layers": arguments.layers},
            "prompt_tokens": sum(len(one["prompt"]) for one in requests),
            "output_tokens": sum(one["max_tokens"] for one in requests),
        },
        "rounds": arguments.rounds, "engines": {}, "results": [],
    }  # fmt: skip
    tokens = report["workload"]
    say(f"{len(requests)} requests, {tokens['prompt_tokens']:,} tokens in, {tokens['output_tokens']:,} tokens out")
    with tempfile.TemporaryDirectory() as name:
        for dtype in arguments.dtypes:
            folder = Path(name) / dtype
            make = [sys.executable, __file__, "--layers", str(arguments.layers), "--make", str(folder), dtype]
            subprocess.run(make, check=True, env=environment(arguments.threads), stderr=subprocess.DEVNULL)
            (folder / "requests.json").write_text(json.dumps(requests))
            report["results"].append(compare_in(dtype, folder, arguments, report["engines"]))
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps(report, indent=2) + "\n")


def compare_in(dtype: str, folder: Path, arguments: argparse.Namespace, engines: dict[str, Any]) -> dict[str, Any]:
    """One dtype: every engine's best settings first, then rounds in which each is asked once."""
    pythons = {**dict.fromkeys(ENGINES, sys.executable), "easydel": arguments.easydel_python}
    pythons["transformers"] = arguments.transformers_python
    workers: dict[str, Worker] = {}
    best: dict[str, dict[str, Any]] = {}
    row: dict[str, Any] = {"dtype": dtype, "absent": {}, "tried": {}}
    answers: dict[str, list[list[int]]] = {}
    with contextlib.ExitStack() as stack:
        for engine in arguments.engines:
            try:
                if pythons[engine] is None:
                    raise AbsentError(f"no interpreter was given (--{engine}-python)")
                tried: list[dict[str, Any]] = []
                row["tried"][engine] = tried
                for settings in choices(engine, arguments):
                    worker = workers.get(engine)
                    if worker is None or engine == "easydel":  # whose pages stay allocated as long as its process
                        worker = Worker(engine, pythons[engine], folder, dtype, arguments)
                        stack.callback(worker.kill)
                    answer = worker.ask(settings)
                    answers[engine] = answer.pop("tokens")
                    fastest = max((one["tokens_per_second"] for one in tried), default=0.0)
                    tried.append({**settings, **answer})
                    say(f"{dtype:9} {engine:13} {answer['tokens_per_second']:8.1f} tokens/s with {words(settings)}")
                    slower = worker
                    if answer["tokens_per_second"] > fastest:
                        slower, workers[engine], best[engine] = workers.get(engine, worker), worker, settings
                    if slower is not workers[engine]:
                        slower.kill()
                engines[engine] = workers[engine].versions
            except AbsentError as absent:
                workers.pop(engine, None)
                row["absent"][engine] = str(absent)
                say(f"{dtype:9} {engine:13} not measured: {absent}")
        rates: dict[str, list[float]] = {engine: [] for engine in workers}
        for _ in range(arguments.rounds):
            for engine, worker in workers.items():
                rates[engine].append(worker.ask(best[engine])["tokens_per_second"])
    row |= {
        "settings": best,
        "tokens_per_second": {engine: statistics.median(values) for engine, values in rates.items() if values},
        "all_tokens_per_second": rates,
        "same_tokens_as_transformers": agreement(answers),
        "ratio": {},
    }
    for engine, rate in row["tokens_per_second"].items():
        low, high = min(rates[engine]), max(rates[engine])
        say(f"{dtype:9} {engine:13} {rate:8.1f} tokens/s ({low:.1f} to {high:.1f}) with {words(best[engine])}")
    for peer in ("transformers", "easydel"):
        if "ttpu" in rates and peer in rates:
            ratios = [ours / theirs for ours, theirs in zip(rates["ttpu"], rates[peer], strict=True)]
            row["ratio"][peer] = {"median": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}
            say(f"{dtype:9} ttpu / {peer}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    for engine, share in row["same_tokens_as_transformers"].items():
        say(f"{dtype:9} {engine}: {share:.1%} of its tokens come before the first that transformers chose otherwise")
    return row


def choices(engine: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The settings that an engine is tried with before its best ones are timed."""
    if engine == "transformers":
        sizes = [size for size in arguments.batch_sizes if size <= arguments.requests] or [arguments.requests]
        return [{"batch_size": size, "sorted_by": order} for size in sizes for order in ("output", "prompt")]
    if engine == "easydel":
        return [{"page_size": size} for size in arguments.easydel_page_sizes]
    return [{"devices": count} for count in sorted({1, arguments.threads})]


def agreement(answers: dict[str, list[list[int]]]) -> dict[str, float]:
    """Of all tokens, those before an answer's first difference from transformers' answer to the same request.

    Random weights make near ties, so that rounding decides now and then, in bfloat16 often."""
    reference = answers.get("transformers")
    if not reference:
        return {}
    shares = {}
    for engine, given in answers.items():
        pairs = [list(zip(mine, theirs, strict=True)) for mine, theirs in zip(given, reference, strict=True)]
        same = sum(next((i for i, (mine, theirs) in enumerate(pair) if mine != theirs), len(pair)) for pair in pairs)
        if engine != "transformers":
            shares[engine] = same / sum(map(len, reference))
    return shares


class AbsentError(Exception):
    """An engine that cannot run here, and why."""


class Worker:
    """An engine in its own process group, asked by lines of JSON and stopped in between."""

    def __init__(self, engine: str, python: str, folder: Path, dtype: str, arguments: argparse.Namespace) -> None:
        command = [python, __file__, "--threads", str(arguments.threads), "--worker", engine, str(folder), dtype]
        self.limit: float = arguments.limit
        self.log = folder / f"{engine}.log"
        log = None if arguments.verbose else self.log.open("w")
        try:
            self.process = subprocess.Popen(
                command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env=environment(arguments.threads),
            )  # fmt: skip
        except OSError as error:
            raise AbsentError(f"{python} does not run ({error.strerror})") from error
        try:
            self.versions = self._read()
        except AbsentError:
            self.kill()
            raise

    def ask(self, settings: dict[str, Any]) -> dict[str, Any]:
        """One run over all requests."""
        self._signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(settings) + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return self._read()

    def kill(self) -> None:
        """End the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self.process.wait()

    def _read(self) -> dict[str, Any]:
        if not select.select([self.process.stdout], [], [], self.limit)[0]:
            self.kill()
            raise AbsentError(f"not done after {self.limit:g} seconds")
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            lines = self.log.read_text().strip().splitlines() if self.log.exists() else []
            raise AbsentError(lines[-1].strip() if lines else f"ended with status {self.process.wait()}")
        self._signal(signal.SIGSTOP)
        return json.loads(line)

    def _signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)


def work(engine: str, folder: str, dtype: str, threads: int) -> None:
    """The worker: load, then answer. Its stdout is for the driver alone."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests = json.loads((Path(folder) / "requests.json").read_text())
    start = {"transformers": transformers_engine, "easydel": easydel_engine, "ttpu": ttpu_engine}[engine]
    prepare = start(folder, dtype, requests, threads)
    versions = {package: metadata.version(package) for package in PACKAGES[engine]}
    print(json.dumps({"python": platform.python_version(), **versions}), file=channel, flush=True)
    for line in sys.stdin:
        answer_all = prepare(json.loads(line))
        began, worked = time.perf_counter(), time.process_time()
        tokens = answer_all()
        seconds, worked = time.perf_counter() - began, time.process_time() - worked
        wanted = [one["max_tokens"] for one in requests]
        if [len(one) for one in tokens] != wanted:
            raise SystemExit(f"{engine} gave {[len(one) for one in tokens]} tokens where {wanted} were asked for")
        rate = sum(wanted) / seconds
        answer = {"seconds": seconds, "cpu_seconds": worked, "tokens_per_second": rate, "tokens": tokens}
        print(json.dumps(answer), file=channel, flush=True)
    os._exit(0)


def transformers_engine(folder: str, dtype: str, requests: list[dict[str, Any]], threads: int) -> Prepare:
    """torch eager; batches of requests of similar lengths, padded on the left, each running to its longest answer."""
    import torch
    from transformers import GenerationConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)

    lengths = [(len(one["prompt"]), one["max_tokens"]) for one in requests]

    @torch.no_grad()
    def answer(size: int, sorted_by: str) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in requests]
        order = sorted(range(len(requests)), key=lambda i: lengths[i] if sorted_by == "prompt" else lengths[i][::-1])
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            width = max(lengths[i][0] for i in rows)
            ids = torch.zeros((len(rows), width), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(rows):
                ids[row, width - lengths[i][0] :] = torch.tensor(requests[i]["prompt"])
                mask[row, width - lengths[i][0] :] = 1
            output = model.generate(ids, attention_mask=mask, max_new_tokens=max(lengths[i][1] for i in rows))
            for row, i in enumerate(rows):
                answers[i] = output[row, width : width + lengths[i][1]].tolist()
        return answers

    return lambda settings: partial(answer, settings["batch_size"], settings["sorted_by"])


def easydel_engine(folder: str, dtype: str, requests: list[dict[str, Any]], threads: int) -> Prepare:
    """eSurge, fed with token ids through the call that its own `generate` makes once it has tokenized a prompt."""
    import jax.numpy as jnp
    from easydel.caching.ragged_page import cache
    from easydel.inference.esurge import eSurge
    from easydel.inference.sampling_params import SamplingParams

    # On CPU it takes 4 GiB for pages whatever hbm_utilization says.
    cache.per_device_hbm_budget_bytes = lambda *_, **__: PAGE_MEMORY
    engines: list[Any] = []

    def prepare(settings: dict[str, Any]) -> Answer:
        if not engines:
            engine = eSurge(
                model=folder, dtype=getattr(jnp, dtype), max_model_len=MAX_MODEL_LEN, max_num_seqs=len(requests),
                max_num_batched_tokens=MAX_MODEL_LEN, page_size=settings["page_size"], reserve_tokens=8,
                enable_prefix_caching=False, attn_mechanism=EASYDEL_ATTENTION, silent_mode=True,
            )  # fmt: skip
            answer(engine, [{**one, "max_tokens": 4} for one in requests[:4]])  # its programs are compiled
            engines.append(engine)
        return partial(answer, engines[0], requests)

    def answer(engine: Any, wanted: list[dict[str, Any]]) -> list[list[int]]:
        name = str(time.time_ns())
        for i, one in enumerate(wanted):
            params = SamplingParams(max_tokens=one["max_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
            engine._add_request(f"{name}-{i}", "", params, prompt_token_ids=one["prompt"])
        outputs = [engine._wait_for_request(f"{name}-{i}") for i in range(len(wanted))]
        return [list(map(int, output.outputs[0].token_ids)) for output in outputs]

    return prepare


def ttpu_engine(folder: str, dtype: str, requests: list[dict[str, Any]], threads: int) -> Prepare:
    """This engine, through the public interface: the cores as one device, or as one each, over which heads are cut."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={threads}"
    from ttpu import LLM, SamplingParams

    models: dict[int, LLM] = {}
    params = [
        SamplingParams(max_tokens=one["max_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
        for one in requests
    ]

    def prepare(settings: dict[str, Any]) -> Callable[[], list[list[int]]]:
        devices = settings["devices"]
        if devices not in models:
            models[devices] = LLM(
                folder, dtype=dtype, tensor_parallel_size=devices, max_model_len=MAX_MODEL_LEN,
                max_num_seqs=len(requests), max_num_batched_tokens=MAX_MODEL_LEN, enable_prefix_caching=False,
                sequence_buckets=tuple(size for size in (1, 4, *range(8, 64, 8)) if size < len(requests)),
                token_buckets=(128,), kv_cache_memory=PAGE_MEMORY, sampling_level="greedy", prompt_logprobs=False,
                progress=None,
            )  # fmt: skip
        return partial(answer, models[devices])

    def answer(model: LLM) -> list[list[int]]:
        outputs = model.generate([one["prompt"] for one in requests], params)
        return [output.outputs[0].token_ids for output in outputs]

    return prepare


def make_requests(number: int) -> list[dict[str, Any]]:
    """Random token ids, with lengths spread evenly over the two ranges."""
    import numpy as np

    random = np.random.default_rng(SEED)
    prompts = random.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1, number)
    outputs = random.integers(OUTPUT_TOKENS[0], OUTPUT_TOKENS[1] + 1, number)
    return [
        {"prompt": random.integers(3, SHAPE["vocab_size"], int(length)).tolist(), "max_tokens": int(tokens)}
        for length, tokens in zip(prompts, outputs, strict=True)
    ]


def make_checkpoint(folder: str, dtype: str, layers: int) -> None:
    """A random llama, saved by transformers, and a tokenizer that has a word for each token (eSurge asks for one)."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_hidden_layers": layers}))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(SHAPE["vocab_size"])}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "t0", "bos_token": "t1", "eos_token": "t2"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def environment(threads: int) -> dict[str, str]:
    """All engines get the same threads."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}


def machine(threads: int) -> dict[str, Any]:
    """What the numbers were measured on; each engine adds its own versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": threads, "python": platform.python_version()}


def words(settings: dict[str, Any]) -> str:
    """`batch_size 16, sorted_by output`."""
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "its defaults"


def say(line: str) -> None:
    """One line of the report."""
    print(line, flush=True)


if __name__ == "__main__":
    main()
