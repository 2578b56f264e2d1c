"""Keys and values held in fewer bits: pages take less memory, and what the model says stays close, in groups of layers
that see everything and in those with a window."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from engine_cases import PROMPTS, answers, small_engine
from padded import qwen_checkpoint

from ttpu import SamplingParams
from ttpu_core.errors import RequestError
from ttpu_serve.execution.engine_core import EngineCore

pytestmark = pytest.mark.slow  # four engines are compiled
MEMORY = 64 * 2**10
ERROR = {"int8": 0.06, "fp8": 0.2}
"""Bounds on log-probabilities, three times what was measured with these weights (0.021 and 0.068)."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer that sees everything, and one that sees 16 tokens."""
    return qwen_checkpoint(
        tmp_path_factory.mktemp("kv") / "qwen2",
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=2,
        vocab_size=259,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=1,
    )


@pytest.fixture(scope="module")
def engines(checkpoint: Path) -> dict[str, EngineCore]:
    """By the dtype of keys and values, with pages for the same memory."""
    options = {"num_pages": None, "kv_cache_memory": MEMORY, "prompt_logprobs": True, "max_logprobs": 1}
    options |= {"penalties": False}
    made = {name: small_engine(checkpoint, kv_cache_dtype=name, **options) for name in ("float32", "int8", "fp8")}
    made["int8 on two devices"] = small_engine(
        checkpoint, kv_cache_dtype="int8", parallelism_strategy="tensor=2", **options
    )
    return made


def logprobs(core: EngineCore) -> np.ndarray:
    """Of the tokens of a prompt that is longer than a step and than the window, given those before them."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    core.add("prompt", PROMPTS[1], params)
    found = None
    while core.has_work:
        for delta in core.step():
            assert delta.error is None
            found = delta.prompt_logprobs or found
    assert found is not None
    return np.array([each[token].logprob for each, token in zip(found[1:], PROMPTS[1][1:], strict=True)])


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_log_probabilities_stay_close(engines: dict[str, EngineCore], dtype: str) -> None:
    error = np.abs(logprobs(engines[dtype]) - logprobs(engines["float32"])).max()
    assert 0 < error < ERROR[dtype]


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_greedy_answers_stay_close(engines: dict[str, EngineCore], dtype: str) -> None:
    """Once a token differs, those after it answer to something else."""
    same = []
    for ours, expected in zip(answers(engines[dtype], PROMPTS), answers(engines["float32"], PROMPTS), strict=True):
        same += np.logical_and.accumulate(np.equal(ours, expected)).tolist()
    assert np.mean(same) >= 0.75
    assert engines[dtype].stats().recompiles == 0


def test_pages_take_less_memory_so_that_there_are_more(engines: dict[str, EngineCore]) -> None:
    def page_bytes(core: EngineCore) -> float:
        groups = core.runner.layout.groups
        assert [group.name for group in groups] == ["full", "window 16"]
        pages = zip(core.runner.num_pages, groups, strict=True)
        held = sum(count * len(group.layers) for count, group in pages)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(core.runner.caches)) / held

    whole = page_bytes(engines["float32"])
    assert page_bytes(engines["fp8"]) == whole / 4
    assert whole / 4 < page_bytes(engines["int8"]) <= whole * (16 + 4) / (4 * 16)  # a float32 scale per 16 features
    full = {name: core.stats().pages["full"] for name, core in engines.items()}
    assert full["float32"] < full["int8"] <= full["fp8"]


def test_heads_on_several_devices_are_quantized_as_on_one(engines: dict[str, EngineCore]) -> None:
    sharded = engines["int8 on two devices"]
    assert answers(sharded, PROMPTS) == answers(engines["int8"], PROMPTS)
    leaf = jax.tree.leaves(sharded.runner.caches)[0]
    assert leaf.addressable_shards[0].data.size * 2 == leaf.size


def test_an_unknown_dtype_is_refused(checkpoint: Path) -> None:
    with pytest.raises(RequestError, match="int4"):
        small_engine(checkpoint, kv_cache_dtype="int4")
