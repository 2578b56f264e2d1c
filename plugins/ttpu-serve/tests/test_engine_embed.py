"""Embeddings through the engine: those of the decoder itself, however a prompt is batched, cut into chunks, found in
the prefix cache or interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from engine_cases import OPTIONS, PROMPTS, add, answers

from ttpu import LLM, AutoModelForTPU
from ttpu_core.errors import RequestError
from ttpu_serve.execution.engine_core import EngineCore


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama_checkpoint(tmp_path_factory.mktemp("embed") / "llama")


@pytest.fixture(scope="module")
def hidden(checkpoint: Path) -> list[np.ndarray]:
    """The decoder's last hidden states [tokens, hidden] of each prompt, which it is given alone."""
    decoder = AutoModelForTPU.from_pretrained(checkpoint).module
    states = []
    for prompt in PROMPTS:
        ids = np.array([prompt], np.int32)
        states.append(np.asarray(decoder.hidden(ids, np.arange(ids.size, dtype=np.int32)[None])[0][0]))
    return states


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, **OPTIONS)


@pytest.fixture(scope="module")
def engine(llm: LLM) -> EngineCore:
    return llm.engine


def embeddings(core: EngineCore, names: Sequence[str]) -> list[np.ndarray]:
    """Step until nothing is left."""
    found: dict[str, Any] = {}
    while core.has_work:
        for delta in core.step():
            assert delta.error is None
            if delta.embedding is not None:
                assert delta.request_id not in found and delta.finish_reason == "stop" and not delta.token_ids
                found[delta.request_id] = delta.embedding
    return [found[name] for name in names]


def pooled(states: np.ndarray, pooling: str) -> np.ndarray:
    vector = states[-1] if pooling == "last" else states.mean(0)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_decoders_hidden_states(engine: EngineCore, hidden: list[np.ndarray], pooling: str) -> None:
    """Together in one batch, next to a request that is answered; one prompt is longer than a step."""
    assert any(len(prompt) > OPTIONS["max_num_batched_tokens"] for prompt in PROMPTS)
    add(engine, PROMPTS[2])
    vectors = embeddings(engine, [add(engine, prompt, pooling=pooling) for prompt in PROMPTS])
    for vector, states in zip(vectors, hidden, strict=True):
        assert vector.dtype == np.float32 and np.linalg.norm(vector) == pytest.approx(1)
        np.testing.assert_allclose(vector, pooled(states, pooling), atol=1e-5)
    assert engine.stats().pages_in_use == {"full": 0}


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_cached_prefix_changes_no_embedding(engine: EngineCore, hidden: list[np.ndarray], pooling: str) -> None:
    """A mean needs every token, so that it looks up none; the last token's state needs the others' keys alone."""
    answers(engine, [PROMPTS[1]])
    hits = engine.stats().prefix_hits
    (vector,) = embeddings(engine, [add(engine, PROMPTS[1], pooling=pooling)])
    np.testing.assert_allclose(vector, pooled(hidden[1], pooling), atol=1e-5)
    assert (engine.stats().prefix_hits > hits) == (pooling == "last")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_interrupted_embedding_starts_over(engine: EngineCore, hidden: list[np.ndarray], pooling: str) -> None:
    engine.reset_prefix_cache()
    name = add(engine, PROMPTS[1], pooling=pooling)
    assert engine.step() == []  # the first chunk
    engine.sleep()
    engine.wake_up()
    (vector,) = embeddings(engine, [name])
    np.testing.assert_allclose(vector, pooled(hidden[1], pooling), atol=1e-5)


def test_a_prompt_for_an_embedding_may_fill_the_context(engine: EngineCore) -> None:
    prompt = list(range(OPTIONS["max_model_len"]))
    assert len(embeddings(engine, [add(engine, prompt, pooling="last")])) == 1
    with pytest.raises(RequestError, match="at most 64"):
        add(engine, [*prompt, 1], pooling="last")
    with pytest.raises(RequestError, match="at most 64"):
        add(engine, prompt)
    with pytest.raises(RequestError, match="'max'"):
        add(engine, prompt, pooling="max")


def test_llm_embeds_prompts_in_their_order(llm: LLM, hidden: list[np.ndarray]) -> None:
    outputs = llm.embed(PROMPTS, pooling="mean")
    for output, prompt, states in zip(outputs, PROMPTS, hidden, strict=True):
        assert output.prompt_token_ids == prompt
        np.testing.assert_allclose(output.embedding, pooled(states, "mean"), atol=1e-5)
    with pytest.raises(RequestError, match="last and mean"):
        llm.embed(PROMPTS, pooling="first")  # type: ignore[arg-type]
