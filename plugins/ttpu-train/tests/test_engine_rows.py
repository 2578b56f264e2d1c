"""The rows of a user's own loader: packed rows are cut into sequences, and few lengths are compiled, the same in every
process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from numpy_train_runner import BigramModel, NumpyBackend, NumpyTrainRunner

import ttpu_train.trainer
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_train.initialize import initialize
from ttpu_train.micro_batches import batch_of, joined
from ttpu_train.row_shapes import RowShapes, rounded
from ttpu_train.runner import RowLayout, StepSettings


def test_positions_that_begin_again_begin_a_sequence() -> None:
    packed = batch_of({"input_ids": [[4, 5, 6, 7, 8, 9]], "position_ids": [[0, 1, 0, 1, 2, 0]]})
    assert packed.segments is not None
    assert packed.segments.tolist() == [[1, 1, 2, 2, 2, 3]]
    assert packed.weights.tolist() == [[0, 1, 0, 1, 1, 0]]
    cut = batch_of({"input_ids": [[4, 5, 6, 7]], "position_ids": [[3, 4, 7, 8]]})  # parts of longer sequences
    assert cut.segments is not None and cut.segments.tolist() == [[1, 1, 2, 2]]
    assert cut.weights.tolist() == [[0, 1, 0, 1]]
    one = batch_of({"input_ids": [[4, 5, 6, 7]], "position_ids": [[3, 4, 5, 6]]})
    assert one.segments is None and one.weights.tolist() == [[0, 1, 1, 1]]


def test_a_mask_leaves_out_padding_and_what_its_positions_say() -> None:
    mask, left = [[1, 1, 1, 1, 0, 0]], [[0, 0, 1, 1, 1, 1]]
    tokens = [[4, 5, 6, 7, 8, 9]]
    packed = batch_of({"input_ids": tokens, "attention_mask": mask, "position_ids": [[0, 1, 0, 1, 0, 1]]})
    assert packed.segments is not None and packed.segments.tolist() == [[1, 1, 2, 2, 0, 0]]
    assert packed.positions.tolist() == [[0, 1, 0, 1, -1, -1]]
    padded = batch_of({"input_ids": tokens, "attention_mask": left, "position_ids": [[1, 1, 0, 1, 2, 3]]})
    assert padded.segments is None and padded.weights.tolist() == [[0, 0, 0, 1, 1, 1]]
    gap = batch_of({"input_ids": tokens, "attention_mask": [[1] * 6], "position_ids": [[0, 1, 2, 9, 10, 11]]})
    assert gap.segments is None
    hole = batch_of({"input_ids": tokens, "attention_mask": [[1, 1, 0, 1, 1, 1]]})
    assert hole.segments is None and hole.positions.tolist() == [[0, 1, -1, 2, 3, 4]]
    with pytest.raises(RequestError, match="attention_mask holds 2, but it is 1 for tokens and 0 for padding"):
        batch_of({"input_ids": tokens, "attention_mask": [[1, 1, 2, 2, 2, 0]]})


def test_packed_and_other_rows_are_one_update() -> None:
    packed = batch_of({"input_ids": [[4, 5, 6]], "position_ids": [[0, 1, 0]]})
    plain = batch_of({"input_ids": [[7, 8]], "attention_mask": [[0, 1]]})
    rows = joined((plain, packed))
    assert rows.segments is not None and rows.segments.tolist() == [[0, 1, 0], [1, 1, 2]]


def test_rows_of_one_length_are_never_padded_and_others_to_few() -> None:
    shapes = RowShapes(NumpyTrainRunner(BigramModel(3), StepSettings()))

    def length(count: int) -> int:
        return shapes.padded(batch_of({"input_ids": np.zeros((1, count), int)})).tokens.shape[1]

    assert [length(1001), length(1001)] == [1001, 1001]
    assert [length(990), length(700), length(650), length(10)] == [1001, 768, 768, 16]
    assert len({rounded(count) for count in range(1, 4097)}) <= 34
    assert all(count <= rounded(count) <= max(1.25 * count, count + 7) for count in range(1, 4097))


class Pair(NumpyBackend):
    """The backend of one of two processes, which are threads."""

    def __init__(self, process: int, barrier: Barrier, values: list[float]) -> None:
        super().__init__()
        self.layout, self.barrier, self.given = RowLayout(2, process, 2, 2, process, 2), barrier, values

    def row_layout(self, model: Any) -> RowLayout:
        return self.layout

    def train_runner(self, model: Any, settings: Any) -> Any:
        runner: Any = NumpyTrainRunner(model, settings, self.layout)
        runner.gathered = self.gathered
        return runner

    def gathered(self, value: float) -> tuple[float, ...]:
        self.given[self.layout.process_index] = value
        self.barrier.wait(10)
        both = tuple(self.given)
        self.barrier.wait(10)
        return both


def test_processes_agree_on_the_length_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier, values = Barrier(2), [0.0, 0.0]
    backends = {str(process): Pair(process, barrier, values) for process in range(2)}
    monkeypatch.setattr(ttpu_train.trainer, "training_backend", lambda name: backends[name])
    lengths = [[5, 9, 4, 3], [8, 7, 3, 2]]

    def trained(process: int) -> list[Any]:
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "optimizer": {}}
        engine: Any
        engine, *_ = initialize(model=BigramModel(11), config=config, backend=str(process), disable_tqdm=True)
        found = []
        for number, length in enumerate(lengths[process]):
            engine.train(number < 3)
            rows = {"input_ids": np.ones((2, length), int)}
            if number == 2 and process == 1:
                rows["position_ids"] = np.asarray([[0, 1, 0]] * 2)
            loss = engine(rows)
            if engine.training:
                engine.backward(loss)
                engine.step()
                found.append(engine.runner.rows[-1].shape)
            else:
                found.append(loss.item())
        with pytest.raises(RequestError, match="micro-batch of 3 rows was given, but each of 2 processes gives 2"):
            engine(input_ids=np.ones((3, 4), int))
        engine.runner.gathered = None
        return [found, engine._shapes._packed]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(trained, range(2))
    assert first[0][:3] == second[0][:3] == [(2, 8), (2, 16), (2, 8)]
    assert first[1] and second[1]  # rows of one process were packed


def test_processes_that_cannot_compare_lengths_are_refused() -> None:
    shapes = RowShapes(NumpyTrainRunner(BigramModel(3), StepSettings(), RowLayout(2, 0, 2, 2)))
    with pytest.raises(UnsupportedError, match="2 processes were to train on rows of their own loaders"):
        shapes.padded(batch_of({"input_ids": [[1, 2]]}))
