"""The model `ttpu` of the lm-evaluation-harness: a task made here gives the figures that the harness's own model `hf`
gives for the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import llama_checkpoint

from ttpu_core.errors import RequestError

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
pytest.importorskip("torch")

pytestmark = pytest.mark.torch

DOCUMENTS = [
    {"text": "The cat sat on the", "choices": [" mat", " moon", " roof"], "answer": 0},
    {"text": "Two and two are", "choices": [" four", " five", " fish and chips"], "answer": 0},
    {"text": "A window moves over", "choices": [" the text", " it"], "answer": 1},
]
TASKS = {
    "made_choice": (
        "output_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: answer\n"
        "metric_list:\n  - metric: acc\n"
    ),
    "made_rolling": (
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}} and then once more {{text}}'\n"
        "metric_list:\n  - metric: byte_perplexity\n"
    ),
    "made_answer": (
        "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: ' four'\n"
        "generation_kwargs:\n  until: ['e']\n  max_gen_toks: 6\nmetric_list:\n  - metric: exact_match\n"
    ),
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "made.jsonl").write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, body in TASKS.items():
        files = f"dataset_kwargs:\n  data_files:\n    test: {folder / 'made.jsonl'}\n"
        data = f"dataset_path: json\n{files}test_split: test\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{body}")
    return folder


def evaluated(tasks: Path, model: Any, arguments: str | None = None) -> dict[str, list[Any]]:
    """Task → the answers to each of its requests."""
    from lm_eval.tasks import TaskManager

    import ttpu_quantize.lm_eval  # noqa: F401  registers the model

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=manager,
        batch_size=2,
        device="cpu" if model == "hf" else None,
        bootstrap_iters=0,
    )
    return {name: [sample["resps"] for sample in samples] for name, samples in found["samples"].items()}


def assert_same(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> None:
    assert found.keys() == expected.keys() == TASKS.keys()
    assert found["made_answer"] == expected["made_answer"]
    for name in ("made_choice", "made_rolling"):
        for ours, theirs in zip(found[name], expected[name], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                (value, best), (expected_value, expected_best) = (
                    pair[0] if isinstance(pair[0], tuple) else (pair[0], None) for pair in (one, other)
                )
                assert value == pytest.approx(expected_value, rel=1e-4)
                assert best == expected_best


def test_a_task_gives_the_figures_of_the_harness_own_model(tasks: Path, tmp_path: Path) -> None:
    checkpoint = llama_checkpoint(tmp_path / "tiny", max_position_embeddings=32)  # texts are longer than this
    found = evaluated(tasks, "ttpu", f"pretrained={checkpoint}")
    expected = evaluated(tasks, "hf", f"pretrained={checkpoint},dtype=float32,max_length=32")
    assert_same(found, expected)


def test_requests_that_cannot_be_met_are_refused(tmp_path: Path) -> None:
    from ttpu_quantize.lm_eval import TTPULM

    with pytest.raises(RequestError, match="a backend chooses its devices"):
        TTPULM("nowhere", device="cuda")
    with pytest.raises(RequestError, match="a number from 1 on"):
        TTPULM("nowhere", batch_size="auto")
    with pytest.raises(RequestError, match="no tokenizer files"):
        TTPULM(str(llama_checkpoint(tmp_path / "bare", tokenizer=False)))


def test_tasks_during_a_training_give_the_figures_of_the_exported_checkpoint(tasks: Path, tmp_path: Path) -> None:
    """The engine reads the weights in training."""
    from ttpu import Trainer
    from ttpu_quantize.lm_eval_engine import EngineLM

    checkpoint = llama_checkpoint(tmp_path / "tiny", max_position_embeddings=34)
    engine = {
        "max_num_seqs": 4, "sequence_buckets": (4,), "token_buckets": (32,), "max_num_batched_tokens": 32,
        "page_size": 8,
    }  # fmt: skip
    trainer: Any = Trainer(
        str(checkpoint), train_dataset=[{"text": "Two and two are four."}] * 8, output_dir=tmp_path / "run",
        max_steps=2, learning_rate=1e-2, eval_strategy="steps", eval_steps=1, eval_on_start=True, save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="made_choice_acc", max_length=32, logging_steps=1,
        eval_tasks=[str(tasks / f"{name}.yaml") for name in TASKS], eval_tasks_engine_options=engine,
        disable_tqdm=True, remat="none",
    )  # fmt: skip
    trainer.train()
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    evaluations = [line for line in log if "eval_made_choice_acc" in line]
    assert [line["step"] for line in evaluations] == [0, 1, 2]
    assert len({line["eval_made_rolling_byte_perplexity"] for line in evaluations}) == 3
    assert {"eval_made_answer_exact_match"} <= evaluations[0].keys()
    best = max(evaluations[1:], key=lambda line: line["eval_made_choice_acc"])
    assert trainer.state.best_metric == best["eval_made_choice_acc"]
    saved = trainer.save_model(tmp_path / "saved", dtype="float32")
    with trainer._tasks._live.awake() as live:
        found = evaluated(tasks, EngineLM(live, trainer.tokenizer, 34))
    assert_same(found, evaluated(tasks, "hf", f"pretrained={saved},dtype=float32,max_length=32"))
