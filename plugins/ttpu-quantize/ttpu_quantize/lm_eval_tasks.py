"""Tasks of the lm-evaluation-harness, loaded once and run on an engine as often as a training evaluates."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from ttpu_core.errors import DataError, RequestError
from ttpu_core.services import RolloutEngine
from ttpu_quantize.lm_eval_engine import EngineLM

SEED, FEWSHOT_SEED = 0, 1234
"""Those of the harness: of Python's random numbers, and of numpy's and of the examples before each question."""


@dataclass(frozen=True, eq=False)
class HarnessTasks:
    """Tasks with their data: `ttpu_core.services.LoadedTasks`.

    Attributes:
        loaded: what the harness's TaskManager gives.
        limit: examples of each task; below 1, their share; None takes all.
        apply_chat_template: write prompts as the tokenizer's chat template does.
    """

    loaded: dict[str, Any]
    limit: float | None
    apply_chat_template: bool

    def evaluate(
        self, engine: RolloutEngine, tokenizer: Any, max_model_len: int, *, quiet: bool = False
    ) -> dict[str, float]:
        """Run the tasks on an engine and return TASK_METRIC → value, without standard errors. A metric of a filter has
        its name at the end.

        Args:
            engine: awake, built with prompt_logprobs.
            tokenizer: of its model, of transformers.
            max_model_len: tokens of the engine's sequences.
            quiet: show no progress.
        """
        with seeded():
            found = evaluate(
                lm=EngineLM(engine, tokenizer, max_model_len, quiet=quiet),
                task_dict=self.loaded,
                limit=self.limit,
                bootstrap_iters=0,
                log_samples=False,
                apply_chat_template=self.apply_chat_template,
                fewshot_as_multiturn=self.apply_chat_template,
            )
        return dict(_metrics({**found["results"], **found.get("groups", {})}))


def load_tasks(
    names: Sequence[str], num_fewshot: int | None, limit: float | None, *, apply_chat_template: bool
) -> HarnessTasks:
    """Find tasks and read their data, as the harness's `simple_evaluate` does.

    Args:
        names: of tasks, groups or tags, or paths of YAML files.
        num_fewshot: examples before each question; None as the tasks say.
        limit: examples of each task.
        apply_chat_template: write prompts as the tokenizer's chat template does.

    Raises:
        RequestError: a task that does not exist, is named twice, or runs code.
        DataError: the data of a task cannot be read.
    """
    files = [Path(name).expanduser() for name in names]
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name, file in zip(names, files, strict=True):
        found = _load(str(file) if _is_yaml(file) else name)
        twice = sorted(set(found["tasks"]) & set(loaded["tasks"]))
        if twice:
            raise RequestError(
                f"the tasks {', '.join(names)} were asked for, but {name} holds {', '.join(twice)}, which another of "
                "them holds too: name each once."
            )
        for part, kept in loaded.items():
            kept.update(found.get(part, {}))
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            what = "runs code that the model writes" if getattr(task, "UNSAFE_CODE", False) else "shows images"
            raise RequestError(
                f"the task {name} was asked for, but it {what}, which no evaluation during a training does: leave it "
                "out, and run it on a checkpoint."
            )
        usual = task.get_config("num_fewshot")
        if num_fewshot is not None and usual != 0:  # a task that says 0 means it
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif usual is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return HarnessTasks(loaded, limit, apply_chat_template)


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") and path.is_file()


@lru_cache(maxsize=2)
def _manager(*, include_defaults: bool) -> TaskManager:
    """Reads the thousands of files of the harness's own tasks, which takes long, only if they are included."""
    return TaskManager(include_defaults=include_defaults)


def _load(name: str) -> dict[str, Any]:
    """One task, or the tasks of a group. A YAML file may name tasks of the harness."""
    if _is_yaml(Path(name)):
        with suppress(Exception), seeded():
            alone: dict[str, Any] = _manager(include_defaults=False).load([name])
            return alone
    manager = _manager(include_defaults=True)
    if name not in manager.all_tasks and not _is_yaml(Path(name)):
        close = get_close_matches(name, manager.all_tasks, 3)
        advice = f"did you mean {', '.join(close)}?" if close else "`lm_eval ls tasks` lists them."
        raise RequestError(
            f"the task {name!r} was asked for, but the lm-evaluation-harness has none of that name, and no YAML file "
            f"of that path is there: {advice}"
        )
    try:
        with seeded():
            found: dict[str, Any] = manager.load([name])
    except Exception as error:  # whatever a task's own code or the library that reads its data raises
        raise DataError(
            f"the task {name!r} was asked for, but it cannot be loaded ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}): connect to the Hugging Face Hub for its data, or correct the task."
        ) from error
    return found


@contextmanager
def seeded() -> Iterator[None]:
    """Python's and numpy's global random numbers as the harness sets them, and afterwards as they were."""
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(SEED)
    np.random.seed(FEWSHOT_SEED)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


def _metrics(results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
    for task, values in results.items():
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if chosen and isinstance(value, Real) and not metric.endswith("_stderr"):
                yield f"{task}_{metric}{'' if chosen == 'none' else f'_{chosen}'}", float(value)
