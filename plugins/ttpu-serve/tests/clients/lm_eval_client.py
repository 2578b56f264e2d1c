"""lm-eval's model local-completions, over tasks of its three kinds of requests."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import harness
import lm_eval
import lm_eval.evaluator
from lm_eval.tasks import TaskManager
from openai import OpenAI

QUESTION = "The with statement is used"
CHOICES = ["to wrap the execution of a block", "zebra zebra zebra"]
FOLDER = Path(tempfile.mkdtemp())
KINDS: dict[str, dict[str, Any]] = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": CHOICES,
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
    "roll": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}

lm_eval.evaluator.add_env_info = lambda results: None  # which lists all packages, for seconds


def run(task: str, *, begins: bool = True) -> dict[str, Any]:
    """The results of a task, whose texts get the token of beginnings; lm-eval puts it before rolling texts anyway."""
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    arguments = {
        "base_url": f"{harness.URL}/v1/completions",
        "model": harness.MODEL,
        "tokenizer": harness.CHECKPOINT,
        "tokenizer_backend": "huggingface",
        "add_bos_token": begins,
        "max_length": 256,
        "num_concurrent": 1,
        "max_retries": 1,
    }
    found = lm_eval.simple_evaluate(
        model="local-completions", model_args=arguments, tasks=[task], task_manager=manager, bootstrap_iters=0
    )
    assert found is not None
    return dict(found["results"][task])


@harness.case
def multiple_choice() -> None:
    """multiple choice: log-likelihoods of two continuations, the right one larger"""
    assert run("choose")["acc,none"] == 1.0


@harness.case
def generate_until() -> None:
    """generate_until: the same text as the official client gets"""
    found = run("generate")
    assert found["exact_match,none"] == 1.0, found


@harness.case
def rolling() -> None:
    """loglikelihood_rolling: the perplexity that follows from the echoed prompt's log-probabilities"""
    found = run("roll", begins=False)
    answer = OpenAI().completions.create(model=harness.MODEL, prompt=QUESTION, max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].logprobs is not None
    total = sum(logprob for logprob in answer.choices[0].logprobs.token_logprobs or [] if logprob is not None)
    expected = -total / len(QUESTION.encode()) / math.log(2)
    assert math.isclose(found["bits_per_byte,none"], expected, rel_tol=1e-3), (found, expected)


def prepare() -> None:
    """Write the tasks and their one document."""
    greedy = OpenAI().completions.create(
        model=harness.MODEL, prompt=QUESTION, max_tokens=12, temperature=0, stop=["\n\n"]
    )
    document = {"text": QUESTION, "target": greedy.choices[0].text}
    (FOLDER / "data.json").write_text(json.dumps(document) + "\n")
    for name, kind in KINDS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(FOLDER / "data.json")}, "cache_dir": str(FOLDER)},
            "test_split": "test",
        }
        (FOLDER / f"{name}.yaml").write_text(json.dumps(common | kind))


prepare()
harness.main()
