"""`ttpu bench throughput` and `ttpu bench latency`: measure how fast this engine serves a workload, without a
server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli.console import print_json
from ttpu_serve.cli import bench_options, engine_options
from ttpu_serve.cli.bench_options import RESULTS, WORKLOAD

if TYPE_CHECKING:
    from ttpu_serve.bench.offline import OfflineSummary
    from ttpu_serve.bench.workload import Prompt


def throughput(
    checkpoint: bench_options.Checkpoint,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Requests; 100, or all of a dataset.", rich_help_panel=WORKLOAD),
    ] = None,
    input_tokens: bench_options.InputTokens = "128",
    output_tokens: bench_options.OutputTokens = "128",
    prefix_tokens: bench_options.PrefixTokens = 0,
    dataset: bench_options.Dataset = None,
    seed: bench_options.Seed = 0,
    dtype: bench_options.Dtype = "auto",
    parallelism_strategy: bench_options.Strategy = None,
    max_num_seqs: engine_options.MaxNumSeqs = None,
    max_model_len: engine_options.MaxModelLen = None,
    max_num_batched_tokens: engine_options.MaxNumBatchedTokens = None,
    kv_cache_dtype: engine_options.KvCacheDtype = "auto",
    speculative: engine_options.Speculative = None,
    warmups: bench_options.Warmups = 1,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Repetitions.", rich_help_panel=RESULTS)] = 3,
    percentiles: bench_options.Percentiles = "50,90,99",
    as_json: bench_options.AsJson = False,
    output: bench_options.Output = None,
) -> None:
    """Serve many prompts at once, without a server: tokens per second.

    Decoding is greedy and ends at nothing but the length. The prefix cache is emptied before each repetition.

    Examples:

    \b
      ttpu bench throughput ./llama --num-prompts 64 --input-tokens 16-256 --output-tokens 16-128
      ttpu bench throughput ./llama --dataset prompts.jsonl --kv-cache-dtype int8 --output result.json
    """
    points = bench_options.percentiles(percentiles)
    bench_options.check_output(output)
    options = _engine_options(
        dtype, parallelism_strategy, max_num_seqs, max_model_len, max_num_batched_tokens, kv_cache_dtype, speculative
    )
    llm = _llm(checkpoint, options)
    prompts = bench_options.prompts(
        num_prompts, input_tokens, output_tokens, prefix_tokens, dataset, seed, vocab_size=llm.engine.vocab_size
    )
    _offline("throughput", checkpoint, llm, prompts, options, warmups, rounds, points, as_json, output)


def latency(
    checkpoint: bench_options.Checkpoint,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Prompts of the batch.", rich_help_panel=WORKLOAD)
    ] = 8,
    input_tokens: bench_options.InputTokens = "32",
    output_tokens: bench_options.OutputTokens = "128",
    seed: bench_options.Seed = 0,
    dtype: bench_options.Dtype = "auto",
    parallelism_strategy: bench_options.Strategy = None,
    max_num_seqs: engine_options.MaxNumSeqs = None,
    max_model_len: engine_options.MaxModelLen = None,
    max_num_batched_tokens: engine_options.MaxNumBatchedTokens = None,
    kv_cache_dtype: engine_options.KvCacheDtype = "auto",
    speculative: engine_options.Speculative = None,
    warmups: bench_options.Warmups = 3,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Repetitions.", rich_help_panel=RESULTS)] = 10,
    percentiles: bench_options.Percentiles = "50,90,99",
    as_json: bench_options.AsJson = False,
    output: bench_options.Output = None,
) -> None:
    """Serve one batch again and again, without a server: how long it takes.

    Examples:

    \b
      ttpu bench latency ./llama --batch-size 1 --input-tokens 128 --output-tokens 32
      ttpu bench latency ./llama --batch-size 32 --rounds 30 --json
    """
    points = bench_options.percentiles(percentiles)
    bench_options.check_output(output)
    options = _engine_options(
        dtype, parallelism_strategy, max_num_seqs, max_model_len, max_num_batched_tokens, kv_cache_dtype, speculative
    )
    llm = _llm(checkpoint, options)
    prompts = bench_options.prompts(
        batch_size, input_tokens, output_tokens, 0, None, seed, vocab_size=llm.engine.vocab_size
    )
    _offline("latency", checkpoint, llm, prompts, options, warmups, rounds, points, as_json, output)


def _offline(
    name: str,
    checkpoint: str,
    llm: Any,
    prompts: list[Prompt],
    options: dict[str, Any],
    warmups: int,
    rounds: int,
    points: tuple[float, ...],
    as_json: bool,
    output: Path | None,
) -> None:
    """Run the measurement and print or write the result."""
    from ttpu import SamplingParams
    from ttpu_serve.bench.machine import machine
    from ttpu_serve.bench.offline import measure
    from ttpu_serve.bench.report import as_json as plain
    from ttpu_serve.bench.report import print_offline

    asked = [prompt.content if isinstance(prompt.content, str) else list(prompt.content) for prompt in prompts]
    params = [
        SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts
    ]

    def serve_all() -> tuple[int, int]:
        llm.reset_prefix_cache()
        outputs = llm.generate(asked, params)
        read = sum(len(one.prompt_token_ids) for one in outputs)
        return read, sum(len(sequence.token_ids) for one in outputs for sequence in one.outputs)

    devices = llm.engine.runner.devices
    with llm, bench_options.Bar("repetitions", warmups + rounds) as advance:
        summary: OfflineSummary = measure(
            serve_all, len(prompts), warmups=warmups, rounds=rounds, percentiles=points, on_round=advance
        )
    document = {
        "benchmark": name,
        "settings": {"checkpoint": checkpoint, "prompts": len(prompts), **options},
        "machine": {
            **machine(),
            "devices": {"kind": devices.kind, "platform": devices.platform, "count": devices.count},
        },
        "results": plain(summary),
    }
    if output is not None:
        bench_options.write(output, document)
    if as_json:
        print_json(document)
    else:
        print_offline(summary, checkpoint)


def _llm(checkpoint: str, options: dict[str, Any]) -> Any:
    from ttpu import LLM

    return LLM(checkpoint, **options)


def _engine_options(
    dtype: str,
    parallelism_strategy: str | None,
    max_num_seqs: int | None,
    max_model_len: int | None,
    max_num_batched_tokens: int | None,
    kv_cache_dtype: str,
    speculative: str | None,
) -> dict[str, Any]:
    """Return the given options by their names in `LLM`."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "parallelism_strategy": parallelism_strategy,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_cache_dtype": kv_cache_dtype,
        "speculative": speculative,
    }
    return {name: value for name, value in options.items() if value is not None}
