"""A part of a parameter is made of the bytes that it needs, each read once, whatever its rule does to them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ttpu_core.checkpoint import slices as box_reader
from ttpu_core.checkpoint.header import TensorInfo, TensorReader, read_header
from ttpu_core.checkpoint.ranges import pieces, ranges
from ttpu_core.checkpoint.slices import StoredTensor, read_boxes
from ttpu_core.errors import CheckpointError
from ttpu_core.mapping import Concat, Expression, Padded, Stack, Tensor, gather
from ttpu_core.mapping.padding import Box, Padding

A, B, C = (np.random.default_rng(n).standard_normal((12, 10)).astype(np.float32) for n in range(3))
RULES: dict[str, Expression] = {
    "as it is": Tensor("a", (12, 10)),
    "transposed": Tensor("a", (12, 10)).transpose(1, 0),
    "split and transposed": Tensor("a", (12, 10)).reshape(3, 4, 10).transpose(2, 0, 1),
    "half of each": Concat((Tensor("a", (12, 10))[:5], Tensor("b", (12, 10))[7:]), axis=0),
    "fused by heads": Concat(tuple(Tensor(n, (12, 10)).reshape(3, 2, 2, 10) for n in "abc"), axis=1),
    "stacked": Stack(tuple(Tensor(n, (12, 10)).transpose(1, 0) for n in "abc"), axis=1),
    "one row of each, stacked twice": Stack(
        tuple(Stack((Tensor(n, (12, 10))[3], Tensor(n, (12, 10))[5])) for n in "abc")
    ),
    "columns padded": Padded(Tensor("a", (12, 10)), Padding((12, 10), (12, 13), (12, 10), 1, ((0, 10), (-1, 3)))),
    "heads repeated and padded": Padded(
        Concat((Tensor("a", (12, 10)).reshape(2, 3, 2, 10),), axis=0),
        Padding((2, 3, 2, 10), (4, 2, 2, 10), (6, 2, 10), 0, ((0, 3), (-1, 1), (3, 2), (0, 1), (5, 1))),
    ),
    "every other": Tensor("a", (12, 10)).transpose(1, 0)[1::2, ::3],
    "backwards": Tensor("a", (12, 10))[::-1],
}


class Recording(TensorReader):
    """Counts how often each byte of a tensor is read."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, int]] = Counter()

    def read_into(self, info: TensorInfo, view: memoryview, offset: int = 0) -> None:
        self.counts.update((info.name, offset + at) for at in range(len(view)))
        super().read_into(info, view, offset)


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StoredTensor]:
    file = tmp_path_factory.mktemp("ranges") / "model.safetensors"
    save_file({"a": A, "b": B, "c": C}, file)
    return {name: StoredTensor(info, np.dtype(np.float32)) for name, info in read_header(file).tensors.items()}


def whole(rule: Expression) -> np.ndarray:
    out = np.empty(rule.result_shape, np.float32)
    gather(rule, {"a": A, "b": B, "c": C}.__getitem__, out)
    return out


def grid(shape: tuple[int, ...], cuts: tuple[int, ...]) -> list[Box]:
    """Boxes that fill an array, cut so and so often along each dimension; cuts that leave something over are left
    out."""
    boxes: list[Box] = [()]
    for size, count in zip(shape, cuts, strict=True):
        count = count if size % count == 0 else 1
        step = size // count
        boxes = [(*box, (start, start + step)) for box in boxes for start in range(0, size, step)]
    return boxes


def arrays(boxes: list[Box], dtype: Any = np.float32) -> dict[Box, np.ndarray]:
    return {box: np.full([stop - start for start, stop in box], np.nan, dtype) for box in boxes}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("block_bytes", [2**20, 24])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_cut_gives_the_parts_of_the_whole(
    rule: Expression,
    tensors: dict[str, StoredTensor],
    dtype: Any,
    block_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(box_reader, "BLOCK_BYTES", block_bytes)
    expected = whole(rule).astype(dtype)
    rank = len(rule.result_shape)
    along_one = [tuple(2 if other == axis else 1 for other in range(rank)) for axis in range(rank)]
    for cuts in [(1,) * rank, *along_one, (2,) * rank]:
        boxes = grid(rule.result_shape, cuts)
        for together in (boxes, boxes[-1:], boxes[::3]):
            with TensorReader() as reader:
                read_boxes(rule, parts := arrays(together, dtype), tensors, reader)
            for box, array in parts.items():
                np.testing.assert_array_equal(array, expected[tuple(slice(*dim) for dim in box)])


@pytest.mark.parametrize("apart", [True, False], ids=["one process each", "one process"])
@pytest.mark.parametrize("rule", [r for n, r in RULES.items() if "repeated" not in n and "every" not in n])
def test_every_byte_is_read_once_however_a_parameter_is_cut(
    rule: Expression, tensors: dict[str, StoredTensor], apart: bool
) -> None:
    for axis in range(len(rule.result_shape)):
        boxes = grid(rule.result_shape, tuple(2 if a == axis else 1 for a in range(len(rule.result_shape))))
        with Recording() as reader:
            for group in [[box] for box in boxes] if apart else [boxes]:
                read_boxes(rule, arrays(group), tensors, reader)
        wanted = {
            (piece.tensor, 4 * first + at)
            for piece in pieces(rule, tuple((0, size) for size in rule.result_shape))
            for first, count in ranges(piece)
            for at in range(4 * count)
        }
        assert reader.counts == Counter(dict.fromkeys(wanted, 1))


def test_whole_rows_are_one_range() -> None:
    (piece,) = pieces(Tensor("a", (12, 10)), ((3, 6), (0, 10)))
    assert list(ranges(piece)) == [(30, 30)]


def test_columns_are_one_range_for_each_row() -> None:
    (piece,) = pieces(Tensor("a", (12, 10)), ((3, 6), (5, 10)))
    assert list(ranges(piece)) == [(35, 5), (45, 5), (55, 5)]


def test_padding_needs_no_bytes() -> None:
    rule = RULES["columns padded"]
    assert list(pieces(rule, ((0, 12), (10, 13)))) == []
    assert [list(ranges(piece)) for piece in pieces(rule, ((0, 1), (8, 13)))] == [[(8, 2)]]


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": A}, file)
    stored = {"a": StoredTensor(read_header(file).tensors["a"], np.dtype(np.float32))}
    file.write_bytes(file.read_bytes()[:-100])
    with TensorReader() as reader, pytest.raises(CheckpointError, match=r"truncated inside tensor 'a'"):
        read_boxes(RULES["as it is"], arrays([((0, 12), (0, 10))]), stored, reader)
