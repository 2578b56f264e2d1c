"""GRPO without a model: rewards and advantages, the rows of updates, positions that are saved, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ttpu_core.errors import CheckpointError, DataError, RequestError, UnsupportedError
from ttpu_train.arguments import TrainingArguments
from ttpu_train.callbacks import TrainerState
from ttpu_train.config_file import read_training_file
from ttpu_train.data.settings import DataSettings
from ttpu_train.grpo.arguments import GRPOArguments
from ttpu_train.grpo.batches import RolloutBatches
from ttpu_train.grpo.method import GRPOMethod
from ttpu_train.grpo.prompts import Prompts
from ttpu_train.grpo.rewards import names, scored
from ttpu_train.grpo.rollouts import Rollout, importance_ratios, update_rows
from ttpu_train.grpo.worker import Completion, RolloutWorker
from ttpu_train.runner import Batch


class Letters:
    """A tokenizer whose tokens are the letters' codes; 0 is special."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def batch_decode(self, rows: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        return ["".join(chr(token) for token in row if token or not skip_special_tokens) for row in rows]


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


class Worker:
    """Samples as many letters as a seed says, and ends those of odd seeds."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def generate(self, prompts: list[list[int]], seeds: list[int]) -> list[Completion]:
        self.seeds += seeds
        pairs = zip(prompts, seeds, strict=True)
        return [Completion([prompt[0]] * (seed % 3) + [0], None, bool(seed % 2)) for prompt, seed in pairs]

    def logprobs(self, batch: Batch, at_once: int, *, initial: bool = False) -> np.ndarray:
        return -batch.weights / np.float32(3) * (2 if initial else 1)

    def close(self) -> None: ...


def batches(worker: Any = None, *, rows: int = 4, parts: int = 1, count: int = 3, **given: Any) -> RolloutBatches:
    arguments: dict[str, Any] = {"reward_funcs": length, "num_generations": 2, "max_completion_length": 3}
    args = GRPOArguments(**(arguments | given))
    prompts = [{"prompt": "abcdef"[number] * 2, "wanted": number} for number in range(count)]
    read = Prompts(prompts, Letters(), DataSettings(seed=5), 8, shuffle=args.shuffle_dataset)
    made: Any = worker or Worker()
    return RolloutBatches(args, read, lambda: made, Letters(), TrainerState(), 5, rows, parts)


def test_advantages_compare_the_completions_of_a_group() -> None:
    args = GRPOArguments(reward_funcs=[length, lambda wanted, **_: wanted], reward_weights=[1, 10], num_generations=2)
    given: Any = (["p"] * 4, ["a", "aaa", "aa", "aa"], [[1]] * 4, {"wanted": [0.0, 0.0, 1.0, None]}, TrainerState())
    found = scored(args, *given)
    deviation = float(np.std([12.0, 2.0], ddof=1))
    expected: list[float] = [-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4), 5 / (deviation + 1e-4), -5 / (deviation + 1e-4)]
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-6)
    assert (found.metrics["reward"], found.metrics["frac_reward_zero_std"]) == (4.5, 0.0)
    assert found.metrics["rewards/<lambda>/mean"] == pytest.approx(1 / 3)  # where it judges
    plain = scored(GRPOArguments(reward_funcs=length, num_generations=2, scale_rewards=False), *given)
    np.testing.assert_array_equal(plain.advantages, [-1, 1, 0, 0])
    whole = scored(GRPOArguments(reward_funcs=length, num_generations=2, scale_rewards="batch"), *given)
    np.testing.assert_allclose(whole.advantages[1], 1 / (np.std([1, 3, 2, 2], ddof=1) + 1e-4), rtol=1e-6)


def test_completions_that_nobody_judges_teach_nothing() -> None:
    args = GRPOArguments(reward_funcs=lambda **_: [None, 1.0, 3.0], num_generations=3)
    found = scored(args, ["p"] * 3, ["a"] * 3, [[1]] * 3, {}, TrainerState()).advantages
    np.testing.assert_allclose(found, [0, -1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4)], rtol=1e-6)
    assert names([length, length]) == ["length", "length_2"]


@pytest.mark.parametrize(
    ("returned", "said"),
    [([1.0], "returned 1 rewards for 2"), (["a", 1], "a list of one number"), ([float("inf"), 1], "infinite reward")],
)
def test_wrong_rewards_are_refused(returned: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        scored(
            GRPOArguments(reward_funcs=lambda **_: returned, num_generations=2),
            ["p"] * 2, ["a"] * 2, [[1]] * 2, {}, TrainerState(),
        )  # fmt: skip


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_every_loss_type_is_a_weighted_mean(loss_type: Any) -> None:
    """With a loss of 1, 2, ... for the tokens of each row, the mean is that of the type's formula."""
    lengths = np.array([[2, 1], [1, 3], [1, 0], [2, 2]], np.int32)
    tokens = np.arange(24, dtype=np.int32).reshape(4, 6)
    rollout = Rollout(tokens, lengths, np.array([1, 1, 1, 0], np.float32), np.zeros(4, np.float32))
    batch = update_rows(
        GRPOArguments(reward_funcs=length, loss_type=loss_type, max_completion_length=5), rollout, slice(0, 2)
    )
    losses = np.where(batch.weights > 0, np.arange(1, 3)[:, None], 0.0)
    assert batch.weights.tolist() == [[0, 0, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, -1, -1, -1], [0, 1, 2, 3, -1, -1]]
    expected = {"grpo": (1 + 2) / 2, "bnpo": (1 + 6) / 4, "dapo": (1 + 6) / (4 * 2 / 4), "dr_grpo": (1 + 6) / (2 * 5)}
    found = (losses.sum(1) * batch.extra["scales"]).sum() / batch.extra["shares"].sum()
    assert found == pytest.approx(expected[loss_type])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [1.5, 0.5, 1.5]),
        ("token_mask", [0, 0.5, 0]),
        ("sequence_truncate", [1.5] * 3),
        ("sequence_mask", [0] * 3),
    ],
)
def test_importance_ratios_are_limited(mode: Any, expected: list[float]) -> None:
    args = GRPOArguments(
        reward_funcs=length, importance_sampling_correction=True, importance_sampling_mode=mode,
        importance_sampling_clip_max=1.5,
    )  # fmt: skip
    ratios = np.array([2.0, 0.5, 4.0], np.float32)
    sampled = Completion([7, 8, 9], (-np.log(ratios)).tolist(), True)
    old = np.zeros((1, 4), np.float32)
    ones = np.ones(1, np.float32)
    rollout = Rollout(np.zeros((1, 4), np.int32), np.array([[1, 3]], np.int32), ones, ones, old)
    found, metrics = importance_ratios(args, [sampled], rollout)
    np.testing.assert_allclose(found[0, 1:], expected, rtol=1e-6)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(np.log(4))


def test_what_is_sampled_depends_on_seed_and_number_alone() -> None:
    worker, again = Worker(), Worker()
    first, second = batches(worker, num_iterations=2), batches(again, num_iterations=2)
    for _ in range(5):
        a, b = next(first), next(second)
        np.testing.assert_array_equal(a.tokens, b.tokens)
    assert worker.seeds == again.seeds and len(set(worker.seeds)) == 3 * 4
    assert first.steps_per_epoch == 3.0 and [first.steps_of(epochs) for epochs in (1, 2, 0.5)] == [4, 6, 2]
    assert first.epoch == pytest.approx(2.5 * 2 / 3)
    assert {"reward", "rollout_seconds", "completions/mean_length"} <= first.metrics().keys() and not first.metrics()
    both = batches(steps_per_generation=2, beta=0.1)
    rows = [next(both) for _ in range(2)]
    assert sorted(np.concatenate([one.tokens[:, 0] for one in rows]).tolist()) != []
    assert {"old_logprobs", "ref_logprobs", "advantages", "scales", "shares"} == rows[0].extra.keys()
    assert "old_logprobs" not in next(batches()).extra  # the ratio is 1 then


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_position_within_a_rollout_is_saved_to_the_bit(taken: int) -> None:
    worker = Worker()
    straight, stopped = (batches(num_iterations=2, steps_per_generation=2) for _ in range(2))
    resumed = batches(worker, num_iterations=2, steps_per_generation=2)
    for _ in range(taken):
        next(straight)
        next(stopped)
    resumed.restore(json.loads(json.dumps(stopped.state())))
    assert resumed.epoch == stopped.epoch
    for number in range(4):
        ours, theirs = next(resumed), next(straight)
        assert bool(worker.seeds) == (taken + number >= 4)  # other weights would sample other completions
        for name in ("tokens", "weights", "positions"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        for name, values in theirs.extra.items():
            assert ours.extra[name].dtype == values.dtype
            np.testing.assert_array_equal(ours.extra[name], values)
    with pytest.raises(CheckpointError, match="num_generations=2, but this run has num_generations=4"):
        batches(num_generations=4, steps_per_generation=2, num_iterations=2).restore(straight.state())


def test_each_epoch_has_all_prompts_in_another_order() -> None:
    given = [{"prompt": chr(97 + number)} for number in range(8)]
    prompts = Prompts(given, Letters(), DataSettings(seed=5), 8, shuffle=True)
    epochs = [[one.content for one in prompts.taken(8 * epoch, 8)] for epoch in range(2)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == [one["prompt"] for one in given]
    assert [one.content for one in prompts.taken(6, 4)] == [*epochs[0][6:], *epochs[1][:2]]


def test_truncated_completions_can_be_left_out() -> None:
    worker = Worker()
    batch = next(batches(worker, mask_truncated_completions=True))
    ended = np.array(worker.seeds) % 2 > 0
    np.testing.assert_array_equal(batch.weights.any(1), ended)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"reward_funcs": [7]}, "rewards come from functions"),
        ({"reward_weights": [1.0, 2.0]}, "2 reward_weights were given for 1"),
        ({"num_generations": 1}, "at least 2"),
        ({"loss_type": "ppo"}, "one of grpo, bnpo, dr_grpo, dapo"),
        ({"temperature": 0.0}, "equal completions teach nothing"),
        ({"importance_sampling_correction": True, "temperature": 0.5}, "sample with temperature=1 alone"),
        ({"delta": 1.1}, "above 1 \\+ epsilon"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        GRPOArguments(**({"reward_funcs": length} | given))


def test_what_has_no_effect_is_refused() -> None:
    method = GRPOMethod.read({"reward_funcs": length, "max_completion_length": 100})
    with pytest.raises(RequestError, match="packing, eval_dataset was given with method='grpo'"):
        method.check(TrainingArguments(packing=True), evaluates=True)
    with pytest.raises(RequestError, match="raise max_length"):
        method.check(TrainingArguments(max_length=100), evaluates=False)
    with pytest.raises(RequestError, match="without reward_funcs"):
        GRPOMethod.read({})
    with pytest.raises(RequestError, match="which are not whole groups"):
        batches(num_generations=3)
    with pytest.raises(RequestError, match="give a multiple of 2"):
        batches(parts=2, steps_per_generation=3)
    with pytest.raises(UnsupportedError, match="gives no engine access"):
        RolloutWorker(cast(Any, SimpleNamespace()), method.arguments, 8, 4)


@pytest.mark.parametrize(("parts", "at_once", "expected"), [(4, None, 8), (4, 8, 16), (1, 3, 24)])
def test_the_engine_is_sized_for_what_is_sampled_at_once(parts: int, at_once: int | None, expected: int) -> None:
    """Eight rows of an update, in parts, of which `at_once` are sampled together."""
    given = {"reward_funcs": length, "max_completion_length": 3, "num_generations": 2, "steps_per_generation": at_once}
    served = SimpleNamespace(rollout_model=print, rollout_weights=print, token_logprobs=print)
    made = GRPOMethod.read(given).batches(
        [{"prompt": "a"}], Letters(), DataSettings(rows=8, max_length=8), lambda: cast(Any, served), TrainerState(),
        parts, cast(Any, None),
    )  # fmt: skip
    assert made._make_worker().live.options["max_num_seqs"] == made._sampled_rows == expected


def test_a_reward_model_is_a_reward_function_by_its_folder() -> None:
    opened: list[str] = []

    def judge(source: str) -> Any:
        opened.append(source)
        return length

    made = GRPOMethod.read({"reward_funcs": ["a/judge", length], "max_completion_length": 3}).batches(
        [{"prompt": "a"}], Letters(), DataSettings(rows=8, max_length=8), cast(Any, None), TrainerState(), 1, judge
    )
    assert opened == ["a/judge"] and made._args.functions == (length, length)


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ({"text": "a"}, "no 'prompt'"),
        ({"prompt": "a" * 9}, "from 1 to 8 fit"),
        ({"prompt": "a", "prompts": 1}, "rename"),
    ],
)
def test_wrong_prompts_are_refused(example: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        Prompts([example], Letters(), DataSettings(), 8, shuffle=False)


def test_reward_functions_are_imported(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def prompts():\n    return [{'prompt': 'a'}]\ndef one(**_):\n    return [1]\n")
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: m\nmethod: grpo\ntrain_dataset: {import: 'own.py:prompts'}\nbeta: 1e-2\n"
        "reward_funcs: [{import: 'own.py:one'}, {import: 'statistics:mean'}]\n"
    )
    read = read_training_file(file)
    assert (read.trainer["method"], read.trainer["train_dataset"]) == ("grpo", [{"prompt": "a"}])
    assert [one.__name__ for one in read.arguments["reward_funcs"]] == ["one", "mean"]
    (tmp_path / "judge").mkdir()
    assert read_training_file(file, ["reward_funcs=judge"]).arguments["reward_funcs"] == ["judge"]
    for wrong, said in (("{import: 'own.py:two'}", "has no attribute 'two'"), ("7", "each function is imported")):
        with pytest.raises(RequestError, match=said):
            read_training_file(file, [f"reward_funcs={wrong}"])
