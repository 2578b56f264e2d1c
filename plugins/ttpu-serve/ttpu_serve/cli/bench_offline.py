"""`ttpu bench throughput` and `ttpu bench latency`: measure how fast this engine serves a workload, without a
server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ttpu_core.cli.console import print_json
from ttpu_core.cli.option_groups import with_option_groups
from ttpu_serve.cli import bench_options
from ttpu_serve.cli.bench_options import WORKLOAD, EngineOptions, ResultOptions, WorkloadOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ttpu import LLM
    from ttpu_serve.bench.offline import OfflineSummary
    from ttpu_serve.bench.workload import Prompt


@with_option_groups
def throughput(
    checkpoint: bench_options.Checkpoint,
    *,
    workload: WorkloadOptions,
    engine: EngineOptions,
    warmups: bench_options.Warmups = 1,
    rounds: bench_options.Rounds = 3,
    results: ResultOptions,
) -> None:
    """Serve many prompts at once, without a server: tokens per second.

    Decoding is greedy and ends at nothing but the length. The prefix cache is emptied before each repetition.

    Examples:

    \b
      ttpu bench throughput ./llama --num-prompts 64 --input-tokens 16-256 --output-tokens 16-128
      ttpu bench throughput ./llama --dataset prompts.jsonl --kv-cache-dtype int8 --output result.json
    """
    _offline("throughput", checkpoint, workload, engine, warmups, rounds, results)


@with_option_groups
def latency(
    checkpoint: bench_options.Checkpoint,
    *,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Prompts of the batch.", rich_help_panel=WORKLOAD)
    ] = 8,
    input_tokens: bench_options.InputTokens = "32",
    output_tokens: bench_options.OutputTokens = "128",
    seed: bench_options.Seed = 0,
    engine: EngineOptions,
    warmups: bench_options.Warmups = 3,
    rounds: bench_options.Rounds = 10,
    results: ResultOptions,
) -> None:
    """Serve one batch again and again, without a server: how long it takes.

    Examples:

    \b
      ttpu bench latency ./llama --batch-size 1 --input-tokens 128 --output-tokens 32
      ttpu bench latency ./llama --batch-size 32 --rounds 30 --json
    """
    workload = WorkloadOptions(batch_size, input_tokens, output_tokens, seed=seed)
    _offline("latency", checkpoint, workload, engine, warmups, rounds, results)


def _input(llm: LLM, prompt: Prompt) -> str | list[Any]:
    """What `LLM.generate` takes for a prompt. Conversations are rendered here, before anything is measured.

    Raises:
        MissingDependencyError: a conversation, and the checkpoint has no tokenizer.
        RequestError: a conversation, and there is no chat template, or it refuses the messages.
    """
    from ttpu_core.generation.chat_template import chat_tokens

    if isinstance(prompt.content, str):
        return prompt.content
    if prompt.is_ids:
        return list(prompt.content)
    return chat_tokens(llm.get_tokenizer(), cast("Sequence[Mapping[str, Any]]", prompt.content))


def _offline(
    name: str,
    checkpoint: str,
    workload: WorkloadOptions,
    engine: EngineOptions,
    warmups: int,
    rounds: int,
    results: ResultOptions,
) -> None:
    """Run the measurement and print or write the result."""
    from ttpu import LLM, SamplingParams
    from ttpu_serve.bench.machine import machine
    from ttpu_serve.bench.offline import measure
    from ttpu_serve.bench.report import as_json, print_offline

    llm = LLM(checkpoint, **engine.arguments())
    prompts = workload.prompts(vocab_size=llm.engine.vocab_size)
    asked = [_input(llm, prompt) for prompt in prompts]
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
            serve_all, len(prompts), warmups=warmups, rounds=rounds, percentiles=results.points, on_round=advance
        )
    document = {
        "benchmark": name,
        "settings": {
            "checkpoint": checkpoint,
            **workload.settings(len(prompts)),
            "warmups": warmups,
            "rounds": rounds,
            **engine.arguments(),
        },
        "machine": {
            **machine(),
            "devices": {"kind": devices.kind, "platform": devices.platform, "count": devices.count},
        },
        "results": as_json(summary),
    }
    results.write(document)
    if results.as_json:
        print_json(document)
    else:
        print_offline(summary, checkpoint)
