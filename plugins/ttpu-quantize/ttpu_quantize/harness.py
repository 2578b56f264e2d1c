"""The service "harness" (`ttpu_core.services.Harness`): tasks of the lm-evaluation-harness for a model that an engine
serves. Importing it imports nothing of the harness."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from ttpu_core.errors import MissingDependencyError
from ttpu_core.services import LoadedTasks


class HarnessService:
    """Loads tasks."""

    def load(
        self,
        tasks: Sequence[str],
        *,
        num_fewshot: int | None = None,
        limit: float | None = None,
        apply_chat_template: bool = False,
    ) -> LoadedTasks:
        """Find tasks and read their data; see `ttpu_core.services.Harness.load`.

        Args:
            tasks: names of tasks, groups or tags, or paths of YAML files.
            num_fewshot: examples before each question; None as the tasks say.
            limit: examples of each task; below 1, their share; None takes all.
            apply_chat_template: write prompts as the tokenizer's chat template does.

        Raises:
            MissingDependencyError: the harness is not installed.
            RequestError: a task that does not exist, or runs code.
            DataError: the data of a task cannot be read.
        """
        if find_spec("lm_eval") is None:
            raise MissingDependencyError(
                f"the tasks {', '.join(tasks)} were asked for, but the lm-evaluation-harness is not installed: "
                '`pip install "ttpu-quantize[lm-eval]"` brings it.'
            )
        from ttpu_quantize.lm_eval_tasks import load_tasks

        return load_tasks(tasks, num_fewshot, limit, apply_chat_template=apply_chat_template)


HARNESS = HarnessService()
