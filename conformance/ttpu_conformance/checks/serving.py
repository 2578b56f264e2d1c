"""Checks of the serving engine: a request's answer does not depend on the other requests, and equals the model's own
generation."""

from __future__ import annotations

from typing import Any

from ttpu_conformance.case import Case
from ttpu_conformance.check import check
from ttpu_conformance.checks.generation import generated
from ttpu_conformance.errors import fail
from ttpu_conformance.model_under_test import IsServed, able

PREFILL = 6  # tokens of one step: longer prompts come in parts


@check("numerics", scope="type", quick="base")
def check_served_tokens(case: Case) -> None:
    """Requests served together, their prompts in parts, preempted for want of pages, and again from cached prefixes,
    get the greedy tokens of generation without the engine."""
    model = able(case.model, IsServed, "serves nothing: the engine has no runner for it")
    prompts, alone = generated(case)
    for turn, served in enumerate(_served(model, prompts, len(alone[0]))):
        for prompt, ours, expected in zip(prompts, served, alone, strict=True):
            if ours != expected:
                at = next(i for i, (one, other) in enumerate(zip(ours, expected, strict=True)) if one != other)
                which = "first" if turn == 0 else "second"
                fail(
                    f"served with others for the {which} time, the greedy token number {at + 1} after a prompt of "
                    f"{len(prompt)} tokens is {ours[at]}, but generated alone it is {expected[at]}: a mixer must leave "
                    "its state as it is for padding, and depend on positions and not on places."
                )


def _served(model: IsServed, prompts: list[list[int]], new_tokens: int) -> list[list[list[int]]]:
    """Greedy tokens after prompts that the engine serves together, twice: it runs fewer at once than there are, and has
    pages for fewer still."""
    from ttpu_core.generation.sampling_params import SamplingParams
    from ttpu_serve.api.llm import LLM

    page, running = 4, len(prompts) - 1
    longest = max(map(len, prompts)) + new_tokens
    settings: dict[str, Any] = {
        "max_model_len": longest,
        "max_num_seqs": running,
        "max_num_batched_tokens": PREFILL,
        "sequence_buckets": (running,),
        "token_buckets": (PREFILL,),
        "page_size": page,
        "num_pages": 2 * (-(-longest // page)) + 1,
        "sampling_level": "greedy",
        "penalties": False,
        "prompt_logprobs": False,
        "strict_compile": True,
    }
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    with LLM(model.for_engine(), progress=None, **settings) as llm:
        return [[output.outputs[0].token_ids for output in llm.generate(prompts, params)] for _ in range(2)]
