"""Every llama variant against transformers: logits, greedy tokens, checkpoints in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ttpu import AutoModelForTPU

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from variants import BASE, VARIANTS, make_model, write_old_style_rope  # noqa: E402

LENGTH = 40  # longer than the original contexts of the rope variants, so that their scaling shows
FLOAT32_TOLERANCE = 2e-5  # of the logits' scale


@pytest.fixture(scope="module", params=VARIANTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A variant's name, its torch model, and the checkpoint that transformers saved."""
    model = make_model(request.param)
    path = tmp_path_factory.mktemp("llama") / request.param
    model.save_pretrained(path)
    return request.param, model, path


def token_ids(batch: int = 2, length: int = LENGTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, BASE["vocab_size"], (batch, length))


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.float().numpy()


def relative_error(ours: Any, theirs: np.ndarray) -> float:
    return float(np.abs(np.asarray(ours, np.float32) - theirs).max() / np.abs(theirs).max())


def test_float32_logits_equal_transformers(saved: tuple[str, Any, Path]) -> None:
    _, model, path = saved
    ids = token_ids()
    ours = AutoModelForTPU.from_pretrained(path)(ids).logits
    assert ours.shape == (*ids.shape, BASE["vocab_size"])
    assert relative_error(ours, logits_of(model, ids)) <= FLOAT32_TOLERANCE


def test_bfloat16_error_is_no_larger_than_transformers(saved: tuple[str, Any, Path]) -> None:
    name, model, path = saved
    ids = token_ids(batch=4)
    exact = logits_of(model, ids)
    theirs = relative_error(logits_of(make_model(name, dtype="bfloat16"), ids), exact)
    ours = relative_error(AutoModelForTPU.from_pretrained(path, dtype="bfloat16")(ids).logits, exact)
    assert ours <= 1.5 * theirs


def test_greedy_tokens_equal_transformers_alone_and_padded_on_either_side(saved: tuple[str, Any, Path]) -> None:
    _, model, path = saved
    new = 64
    # Shorter than the dynamic variant's original context: else transformers keeps the frequencies of its last call.
    lengths = (23, 17, 9)
    ids = token_ids(batch=3, length=23)
    ours = AutoModelForTPU.from_pretrained(path)
    expected = []
    for row, length in zip(ids, lengths, strict=True):
        prompt = torch.tensor(row[None, :length])
        mask = torch.ones_like(prompt)  # else transformers takes real tokens that equal pad_token_id for padding
        whole = model.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
        expected.append(whole[0, length:].numpy())
        alone = ours.generate(row[None, :length], max_new_tokens=new)
        np.testing.assert_array_equal(alone[0, length:], expected[-1])
    for left in (True, False):
        padded, mask = np.zeros_like(ids), np.zeros_like(ids)
        for row, length in enumerate(lengths):
            where = slice(23 - length, 23) if left else slice(0, length)
            padded[row, where], mask[row, where] = ids[row, :length], 1
        together = ours.generate(padded, attention_mask=mask, max_new_tokens=new)
        np.testing.assert_array_equal(together[:, 23:], np.stack(expected))


def test_old_and_new_rope_json_describe_the_same_model(saved: tuple[str, Any, Path], tmp_path: Path) -> None:
    from ttpu_core import default_registry, open_checkpoint

    _, model, path = saved
    model.save_pretrained(tmp_path)
    write_old_style_rope(tmp_path)
    new, old = (default_registry().architecture(open_checkpoint(p).config).spec for p in (path, tmp_path))
    assert old == new


def test_save_pretrained_writes_the_same_tensors(saved: tuple[str, Any, Path], tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    _, model, path = saved
    AutoModelForTPU.from_pretrained(path).save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    theirs, ours = model.state_dict(), again.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_logits_of_a_padded_row_are_those_of_the_row_alone(saved: tuple[str, Any, Path]) -> None:
    _, model, path = saved
    ids = token_ids(batch=1, length=20)
    alone = logits_of(model, ids)
    padded = np.concatenate([np.zeros((1, 5), int), ids], axis=1)
    mask = np.concatenate([np.zeros((1, 5), int), np.ones_like(ids)], axis=1)
    ours = AutoModelForTPU.from_pretrained(path)(padded, attention_mask=mask).logits
    assert relative_error(np.asarray(ours)[:, 5:], alone) <= FLOAT32_TOLERANCE
