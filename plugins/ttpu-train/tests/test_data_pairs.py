"""Preferences: the rows of pairs and of labelled completions, their order, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import tokenizer

from ttpu_core.errors import DataError, RequestError
from ttpu_train.data.loader import BatchLoader
from ttpu_train.data.packing import EpochPlan
from ttpu_train.data.pairs import PairPlanner
from ttpu_train.data.settings import DataSettings
from ttpu_train.preference import PreferenceMethod
from ttpu_train.runner import Batch
from ttpu_train.trainer import Trainer

PAIRS = [{"prompt": f"def f{n}", "chosen": f"(): {n}", "rejected": "class " * (1 + n)} for n in range(5)]
LABELLED = [{"prompt": f"def f{n}", "completion": f"(): {n}", "label": n % 3 > 0} for n in range(5)]
WIDTH = 32


def planner(examples: Any, folder: Path, kind: Any = "pairs", **settings: Any) -> PairPlanner:
    usual: dict[str, Any] = {"max_length": WIDTH, "rows": 2, "cache_dir": folder}
    return PairPlanner(examples, tokenizer(), DataSettings(**{**usual, **settings}), kind)


def said(batch: Batch, row: int, *, weighted: bool = True) -> str:
    chosen = batch.weights[row] > 0 if weighted else batch.positions[row] >= 0
    text: str = tokenizer().decode(batch.tokens[row][chosen], skip_special_tokens=True)
    return text.strip()


def test_a_pair_is_two_rows_of_one_prompt_with_both_completions(tmp_path: Path) -> None:
    found = planner(PAIRS, tmp_path, shuffle=False)
    batch = found.batch(found.plan(0), 3, 5, 3)
    assert batch.tokens.shape == (6, WIDTH)
    completions = ["(): 3", "class " * 4, "(): 4", "class " * 5]
    assert [said(batch, row) for row in range(4)] == [one.strip() for one in completions]
    assert said(batch, 0, weighted=False) == "def f3(): 3"
    assert not batch.weights[4:].any() and (batch.positions[4:] == -1).all()
    assert (batch.positions[0] == np.where(batch.positions[0] >= 0, np.arange(WIDTH), -1)).all()


def test_labelled_completions_have_the_completion_before_beside_them(tmp_path: Path) -> None:
    found = planner(LABELLED, tmp_path, "labels_and_others", shuffle=False)
    batch = found.batch(found.plan(0), 0, 2, 2)
    rows = ["def f0(): 0", "def f0(): 4", "def f1(): 1", "def f1(): 0"]
    assert [said(batch, row, weighted=False) for row in range(4)] == rows
    assert batch.extra["labels"].tolist() == [0, -1, 1, -1]
    alone = planner(LABELLED, tmp_path, "labels", shuffle=False)
    assert alone.batch(alone.plan(0), 0, 3, 4).extra["labels"].tolist() == [0, 1, 1, -1]


def test_conversations_may_begin_with_their_prompt(tmp_path: Path) -> None:
    asked, good, bad = (
        {"role": role, "content": text}
        for role, text in (("user", "def"), ("assistant", "return"), ("assistant", "class"))
    )
    whole = planner([{"chosen": [asked, good], "rejected": [asked, bad]}], tmp_path, shuffle=False)
    split = planner([{"prompt": [asked], "chosen": [good], "rejected": [bad]}], tmp_path, shuffle=False)
    batches = [one.batch(one.plan(0), 0, 1, 1) for one in (whole, split)]
    np.testing.assert_array_equal(batches[0].tokens, batches[1].tokens)
    np.testing.assert_array_equal(batches[0].weights, batches[1].weights)
    assert said(batches[0], 0).startswith("return") and said(batches[0], 1).startswith("class")


def test_references_follow_their_examples_in_any_order_and_over_processes(tmp_path: Path) -> None:
    found = planner(PAIRS, tmp_path)
    found.compare(lambda batch: np.concatenate([batch.tokens.sum(1), np.full(4, -1.0)]), 0, 2)
    assert found.references is not None and found.references.shape == (5, 2)
    assert (found.references[2:4] == -1).all() and (found.references[[0, 1, 4]] != -1).all()
    found.compare(lambda batch: np.concatenate([np.full(4, -1.0), batch.tokens.sum(1)]), 1, 2)
    second = found.references[2:4]
    found.compare(lambda batch: batch.tokens.sum(1).astype(np.float64), 0, 1)
    np.testing.assert_array_equal(second, found.references[2:4])
    shapes = []

    def of_part(batch: Batch) -> np.ndarray:
        shapes.append(batch.tokens.shape[0])
        return batch.tokens.sum(1).astype(np.float64)

    found.compare(of_part, 0, 1, parts=2)  # an update of two examples in two parts: one example at once
    assert shapes == [2] * 5
    batch = found.batch(found.plan(1), 0, 5, 5)
    np.testing.assert_array_equal(batch.extra["ref_logps"], batch.tokens.sum(1))
    assert sorted(found.plan(1).members) == list(range(5)) and list(found.plan(1).members) != list(range(5))


def test_rewards_are_learned_from_whole_texts_with_margins(tmp_path: Path) -> None:
    texts = [{"chosen": "good", "rejected": "bad", "margin": 2}, {"chosen": "a", "rejected": "b " * WIDTH, "margin": 3}]
    found = planner([*texts, {"prompt": "x", **texts[0]}], tmp_path, "rewards", shuffle=False)
    batch = found.batch(found.plan(0), 0, 2, 3)
    assert found.plan(0).rows == 2  # the second is longer than a row, and not cut
    said_whole = [said(batch, row, weighted=False) for row in range(4)]
    assert said_whole == ["good", "bad", "xgood", "xbad"]
    assert batch.extra["margins"].tolist() == [2, 0, 2, 0, 0, 0]
    assert not batch.weights[:, 0].any() and batch.weights[0, 1:3].all()  # nothing predicts the first token
    plain = planner([{"chosen": "good", "rejected": "bad"}], tmp_path, "rewards")
    assert not plain.batch(plain.plan(0), 0, 1, 1).extra and plain.digest != found.digest
    with pytest.raises(DataError, match=r"1 of 2 examples were given without a margin"):
        planner([texts[0], {"chosen": "a", "rejected": "b"}], tmp_path, "rewards")
    with pytest.raises(DataError, match=r"the margin 'much', but it is a number"):
        planner([{**texts[0], "margin": "much"}], tmp_path, "rewards")


def test_the_order_does_not_depend_on_processes_and_goes_on_where_it_was(tmp_path: Path) -> None:
    def loader(process: int, processes: int, rows: int) -> BatchLoader:
        settings = DataSettings(max_length=WIDTH, rows=rows, cache_dir=tmp_path, epochs=2)
        return BatchLoader(planner(PAIRS, tmp_path, rows=rows), settings, process, processes)

    whole = [batch.tokens for batch in loader(0, 1, 2)]
    parts = [[batch.tokens for batch in loader(process, 2, 1)] for process in range(2)]
    assert len(whole) == 6
    for number, tokens in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([parts[0][number], parts[1][number]]), tokens)
    first, second = loader(0, 1, 2), loader(0, 1, 2)
    next(first)
    second.restore(first.state())
    np.testing.assert_array_equal(next(second).tokens, whole[1])


def test_examples_without_a_completion_in_the_row_are_left_out(tmp_path: Path) -> None:
    long = {"prompt": "import " * WIDTH, "chosen": "a", "rejected": "b"}
    assert planner([PAIRS[0], long, PAIRS[1]], tmp_path, shuffle=False).plan(0).rows == 2
    with pytest.raises(DataError, match=r"1 examples.*max_length"):
        planner([long], tmp_path)
    batch = planner([PAIRS[0]], tmp_path).batch(EpochPlan(np.arange(1), np.arange(2)), 0, 1, 1)
    begin = int(np.flatnonzero(batch.weights[0])[0])
    assert planner([PAIRS[0]], tmp_path, max_length=begin + 1).plan(0).rows == 1
    with pytest.raises(DataError, match=r"begin within the first"):
        planner([PAIRS[0]], tmp_path, max_length=begin)


def test_labels_stay_with_their_examples_and_are_part_of_the_data(tmp_path: Path) -> None:
    long = {"prompt": "import " * WIDTH, "completion": "a", "label": True}
    found = planner([long, *LABELLED], tmp_path, "labels", shuffle=False)
    assert found.batch(found.plan(0), 0, 5, 5).extra["labels"].tolist() == [0, 1, 1, 0, 1]
    other = planner([long, *LABELLED[:-1], {**LABELLED[-1], "label": False}], tmp_path, "labels", shuffle=False)
    assert other.digest != found.digest  # a run is not resumed with other labels


@pytest.mark.parametrize(
    ("examples", "kind", "words"),
    [
        ([{"prompt": "a", "chosen": "b"}], "pairs", r"'prompt', 'chosen'.*needs.*add 'rejected'"),
        ([{"prompt": "a", "completion": "b"}], "labels", r"add 'label'"),
        ([{"prompt": "a", "completion": "b", "label": "yes"}], "labels", r"label 'yes'.*true or false"),
        ([{"prompt": "a", "chosen": "b", "rejected": ""}], "pairs", r"\(rejected\).*'completion'.*empty"),
    ],
)
def test_wrong_examples_are_refused(examples: Any, kind: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        planner(examples, tmp_path, kind)


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("dpo", {"beta": 0.0}, "beta=0.0 .*above 0"),
        ("dpo", {"loss_type": "square"}, "loss_type='square'.*sigmoid, hinge, ipo"),
        ("dpo", {"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing=0.1 .*0 with loss_type='hinge'"),
        ("dpo", {"loss_type": "exo_pair"}, "above 0 with loss_type='exo_pair'"),
        ("kto", {"desirable_weight": -1.0}, "desirable_weight=-1.0 .*0 or more"),
        ("reward", {"center_rewards_coefficient": -1.0}, "center_rewards_coefficient=-1.0 .*0 or more"),
    ],
)
def test_values_out_of_range_are_refused(method: str, arguments: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        PreferenceMethod.read(method, arguments)


def test_arguments_without_meaning_are_refused() -> None:
    with pytest.raises(RequestError, match=r"packing was given with method='dpo'"):
        Trainer("model", method="dpo", packing=True)
    with pytest.raises(RequestError, match=r"desirable_weight"):
        Trainer("model", method="orpo", desirable_weight=1.0)
    with pytest.raises(RequestError, match=r"method='ppo'.*dpo, orpo, kto, reward"):
        Trainer("model", method="ppo")
