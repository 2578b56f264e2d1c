"""Batches: the same for any number of processes, and after any interruption."""

from __future__ import annotations

import gc
import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import sequences_in, tokenizer, write_lines

from ttpu_core.errors import CheckpointError, DataError, RequestError
from ttpu_train.data import token_files
from ttpu_train.data.loader import BatchLoader, batch_loader
from ttpu_train.data.settings import DataSettings
from ttpu_train.data.sources import sources_of
from ttpu_train.data.token_files import tokenized
from ttpu_train.data.tokenize import Tokenization
from ttpu_train.runner import Batch

EXAMPLES = [{"input_ids": list(range(100 * n, 100 * n + 3 + n % 11))} for n in range(1, 48)]
WAYS = [{}, {"packing": True}, {"shuffle": False}, {"drop_last": True}, {"packing": True, "num_workers": 3}]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> DataSettings:
    return DataSettings(max_length=16, rows=4, epochs=3, cache_dir=tmp_path_factory.mktemp("tokens"))


def loader(settings: DataSettings, index: int = 0, count: int = 1) -> BatchLoader:
    return batch_loader(EXAMPLES, None, settings, index, count)


def arrays(batch: Batch) -> list[Any]:
    found = [batch.tokens, batch.weights, batch.positions, batch.segments]
    return [None if array is None else array.tolist() for array in found]


def test_shapes_and_types(settings: DataSettings) -> None:
    for packing in (False, True):
        batches = loader(replace(settings, packing=packing))
        batch = next(batches)
        batches.close()
        assert {batch.tokens.shape, batch.weights.shape, batch.positions.shape} == {(4, 16)}
        assert (batch.tokens.dtype, batch.weights.dtype, batch.positions.dtype) == (np.int32, np.float32, np.int32)
        assert (batch.segments is not None) is packing
        if batch.segments is not None:
            assert (batch.segments.shape, batch.segments.dtype) == ((4, 16), np.int32)


@pytest.mark.parametrize("way", WAYS)
def test_four_processes_read_the_rows_of_one(settings: DataSettings, way: dict[str, Any]) -> None:
    given = replace(settings, **way)
    whole = [arrays(batch) for batch in loader(replace(given, rows=8))]
    parts = [[arrays(batch) for batch in loader(replace(given, rows=2), index, 4)] for index in range(4)]
    joined = [
        [None if rows[0] is None else list(chain(*rows)) for rows in zip(*each, strict=True)]
        for each in zip(*parts, strict=True)
    ]
    assert joined == whole


@pytest.mark.parametrize("way", WAYS)
def test_a_restored_run_goes_on_at_the_very_row(settings: DataSettings, way: dict[str, Any]) -> None:
    given = replace(settings, **way)
    straight = loader(given)
    batches, states, epochs = [], [straight.state()], [straight.epoch]
    for batch in straight:
        batches.append(arrays(batch))
        states.append(json.loads(json.dumps(straight.state())))
        epochs.append(straight.epoch)
    assert epochs == sorted(set(epochs))
    assert {0.0, 1.0, 2.0, 3.0} <= set(epochs)
    used = loader(given)
    for stop in (1, straight.steps_per_epoch - 1, straight.steps_per_epoch, len(batches) - 2, len(batches)):
        used.restore(states[stop])
        assert (used.epoch, used.state()) == (epochs[stop], states[stop])
        assert [arrays(batch) for batch in used] == batches[stop:]
        assert used.state() == states[-1]
    used.close()


def test_a_position_holds_for_another_number_of_processes_and_rows(settings: DataSettings) -> None:
    given = replace(settings, packing=True, epochs=2)
    old = loader(given)
    seen = [sequence for _ in range(3) for sequence in sequences_in(next(old))]
    old.close()
    rest = []
    for index in range(2):
        new = loader(replace(given, rows=3), index, 2)
        new.restore(old.state())
        rest += [sequence for batch in new for sequence in sequences_in(batch)]
    everything = [sequence for batch in loader(given) for sequence in sequences_in(batch)]
    assert sorted(seen + rest) == sorted(everything)


def test_a_position_in_other_data_is_refused(settings: DataSettings) -> None:
    state = loader(settings).state()
    for change in ({"seed": 7}, {"max_length": 12}, {"packing": True}, {"shuffle": False}):
        [name] = change
        with pytest.raises(CheckpointError, match=f"saved with {name}=.*resume with the same data"):
            loader(replace(settings, **change)).restore(state)
    with pytest.raises(CheckpointError, match="it is one in other training data"):
        batch_loader(EXAMPLES[1:], None, settings).restore(state)


def test_a_position_among_rows_that_are_left_out_now_is_refused(settings: DataSettings) -> None:
    def restored(prompt: int, old: bool) -> BatchLoader:
        example = {"input_ids": list(range(40)), "labels": [-100] * prompt + list(range(prompt, 40))}
        split = batch_loader([example] * 4, None, replace(settings, overlong="split"))
        state = json.loads(json.dumps(split.state()))
        assert ("layout" in state["data"]) is (prompt > 16)
        if old:
            state["data"].pop("layout", None)
        split.restore(state)
        return split

    restored(20, old=False), restored(4, old=True), restored(4, old=False)
    with pytest.raises(CheckpointError, match=r"kept parts of split documents .*Start a new run from the weights"):
        restored(20, old=True)


def test_each_epoch_reads_everything_once_in_a_new_order(settings: DataSettings) -> None:
    batches = loader(replace(settings, epochs=2))
    firsts = [sequence[0][0] for batch in batches for sequence in sequences_in(batch)]
    half = len(EXAMPLES)
    assert sorted(firsts[:half]) == sorted(firsts[half:]) == [100 * n for n in range(1, 48)]
    assert firsts[:half] != firsts[half:]
    assert (batches.epoch, batches.rows_seen, batches.steps_per_epoch) == (2.0, 2 * half, 12)
    other = loader(replace(settings, seed=1))
    assert next(other).tokens[:, 0].tolist() != firsts[:4]
    other.close()


def test_the_last_batch_is_filled_by_rows_without_weight_or_dropped(settings: DataSettings) -> None:
    batches = list(loader(replace(settings, epochs=1, shuffle=False)))
    assert len(batches) == 12
    assert not batches[-1].weights[3].any()
    assert (batches[-1].positions[3] == -1).all()
    assert len(list(loader(replace(settings, epochs=1, drop_last=True)))) == 11
    assert batch_loader(EXAMPLES, None, replace(settings, drop_last=True), 0, 2).steps_per_epoch == 5
    with pytest.raises(RequestError, match=r"drop_last=True .*47 rows and a global batch 64"):
        loader(replace(settings, rows=64, drop_last=True))


def test_an_endless_run_goes_on(settings: DataSettings) -> None:
    batches = loader(replace(settings, epochs=None, packing=True))
    for _ in range(4 * batches.steps_per_epoch):
        next(batches)
    assert 3.5 < batches.epoch < 4.5
    batches.close()


def test_tokens_are_cached_until_the_data_or_the_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "The for statement."}])
    monkeypatch.setenv("TTPU_CACHE", str(tmp_path / "cache"))
    given = DataSettings(max_length=16, rows=1)
    first = next(batch_loader(path, tokenizer(), given))

    def folders() -> list[Path]:
        return [each for each in (tmp_path / "cache" / "tokens").iterdir() if each.is_dir()]

    assert len(folders()) == 1
    with monkeypatch.context() as patched:
        patched.setattr(token_files, "_write", None)  # it would fail
        assert arrays(next(batch_loader(path, tokenizer(), given))) == arrays(first)
        assert arrays(next(batch_loader(path, tokenizer(), replace(given, rows=1, shuffle=False)))) == arrays(first)
    next(batch_loader(path, tokenizer(), replace(given, append_eos=False)))
    assert len(folders()) == 2
    write_lines(path, [{"text": "The while statement."}])
    assert arrays(next(batch_loader(path, tokenizer(), given))) != arrays(first)
    assert len(folders()) == 3


def test_damaged_tokens_are_made_again(tmp_path: Path) -> None:
    given = DataSettings()
    [source] = sources_of(EXAMPLES, given)
    whole = tokenized(source, Tokenization(None, given), tmp_path)
    expected = whole.tokens.tolist()
    [folder] = [each for each in tmp_path.iterdir() if each.is_dir()]
    (folder / token_files.TOKENS).write_bytes(b"1234")
    (tmp_path / f"{folder.name}.part-killed").mkdir()
    again = tokenized(source, Tokenization(None, given), tmp_path)
    assert again.tokens.tolist() == expected
    assert [each for each in tmp_path.iterdir() if each.is_dir()] == [folder]


def test_of_several_that_tokenize_at_once_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = DataSettings()
    source = sources_of(EXAMPLES, given)[0]
    writes, write, barrier = [], token_files._write, threading.Barrier(4)

    def counted(*arguments: Any) -> None:
        writes.append(arguments)
        write(*arguments)

    monkeypatch.setattr(token_files, "_write", counted)

    def read() -> None:
        barrier.wait()
        found.append(tokenized(source, Tokenization(None, given), tmp_path).digest)

    found: list[str] = []
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(set(found)), len(writes)) == (4, 1, 1)


def test_an_interrupt_while_garbage_is_collected_ends_a_tokenization(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        gc.callbacks.remove(interrupt)
        signal.raise_signal(signal.SIGINT)  # an exception ends here, as in JAX's callback

    class Read:
        """A dataset that is read while it becomes tokens."""

        name = "examples"

        def key(self) -> str:
            return self.name

        def examples(self) -> Iterator[tuple[str, dict[str, Any]]]:
            for number, example in enumerate(EXAMPLES):
                if number == 3:
                    gc.callbacks.append(interrupt)
                    gc.collect()
                yield f"example {number}", example

    with pytest.raises(KeyboardInterrupt):
        tokenized(Read(), Tokenization(None, DataSettings()), tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not [each for each in tmp_path.iterdir() if each.is_dir()]


def test_a_failed_tokenization_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="example 1"):
        batch_loader([{"text": "x"}, {"body": "y"}], tokenizer(), DataSettings(cache_dir=tmp_path))
    assert not [each for each in tmp_path.iterdir() if each.is_dir()]
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"were to be kept in .*file.*cache_dir"):
        batch_loader(EXAMPLES, None, DataSettings(cache_dir=tmp_path / "file"))
    with pytest.raises(DataError, match="no tokenizer"):
        batch_loader([{"text": "x"}], None, DataSettings(cache_dir=tmp_path))
