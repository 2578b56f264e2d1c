"""Embeddings through the engine: those of the decoder itself, however a prompt is batched, cut into chunks, found in
the prefix cache or interrupted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from engine_cases import OPTIONS, PROMPTS, add, answers

from ttpu import LLM, AutoModelForTPU
from ttpu_core.errors import CheckpointError, RequestError
from ttpu_serve.execution.declared_pooling import LAST, declared_pooling
from ttpu_serve.execution.engine_core import EngineCore


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its files declare, as sentence-transformers writes them, that the first token's state is the embedding."""
    folder = tiny.llama_checkpoint(tmp_path_factory.mktemp("embed") / "llama")
    declare(folder, {"word_embedding_dimension": 64, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    return folder


def declare(folder: Path, pooling: object, *more: str) -> None:
    """Write the files of a model with a pooling module, and further modules after it."""
    kinds = ["Transformer", "Pooling", *more, "Normalize"]
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "",
         "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(pooling if isinstance(pooling, str) else json.dumps(pooling))


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
    vector = {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[pooling]
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_embeddings_are_the_decoders_hidden_states(engine: EngineCore, hidden: list[np.ndarray], pooling: str) -> None:
    """Together in one batch, next to a request that is answered; one prompt is longer than a step."""
    assert any(len(prompt) > OPTIONS["max_num_batched_tokens"] for prompt in PROMPTS)
    add(engine, PROMPTS[2])
    vectors = embeddings(engine, [add(engine, prompt, pooling=pooling) for prompt in PROMPTS])
    for vector, states in zip(vectors, hidden, strict=True):
        assert vector.dtype == np.float32 and np.linalg.norm(vector) == pytest.approx(1)
        np.testing.assert_allclose(vector, pooled(states, pooling), atol=1e-5)
    assert engine.stats().pages_in_use == {"full": 0}


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_a_cached_prefix_changes_no_embedding(engine: EngineCore, hidden: list[np.ndarray], pooling: str) -> None:
    """A mean needs every token, so that it looks up none; the last token's state needs the others' keys alone."""
    answers(engine, [PROMPTS[1]])
    hits = engine.stats().prefix_hits
    (vector,) = embeddings(engine, [add(engine, PROMPTS[1], pooling=pooling)])
    np.testing.assert_allclose(vector, pooled(hidden[1], pooling), atol=1e-5)
    assert (engine.stats().prefix_hits > hits) == (pooling == "last")


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
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
    with pytest.raises(RequestError, match="last, mean and cls"):
        llm.embed(PROMPTS, pooling="first")  # type: ignore[arg-type]


def test_what_the_checkpoint_declares_holds_where_a_request_does_not_say(llm: LLM, hidden: list[np.ndarray]) -> None:
    for output, states in zip(llm.embed(PROMPTS), hidden, strict=True):
        np.testing.assert_allclose(output.embedding, pooled(states, "cls"), atol=1e-5)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "cls", "embedding_dimension": 64}, "cls"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_old_and_new_files_of_sentence_transformers_are_read(config: object, mode: str, tmp_path: Path) -> None:
    declare(tmp_path, config)
    assert declared_pooling(tmp_path).mode == mode


def test_without_files_the_last_state_is_taken(tmp_path: Path) -> None:
    assert declared_pooling(tmp_path) == declared_pooling(None) == LAST
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer", "path": ""}]')
    assert declared_pooling(tmp_path) == LAST


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        ({"pooling_mode_max_tokens": True}, (), "declares pooling by max"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, (), "declares pooling by mean and cls"),
        ({"pooling_mode_mean_tokens": True}, ("Dense",), "declares a module 'Dense'"),
    ],
)
def test_what_is_not_computed_is_refused_where_an_embedding_is_asked_for(
    config: object,
    more: tuple[str, ...],
    said: str,
    engine: EngineCore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declare(tmp_path, config, *more)
    monkeypatch.setattr(engine.input_processor, "declared", declared_pooling(tmp_path))
    with pytest.raises(RequestError, match=f"{said}, and this engine pools by last, mean or cls: pass `pooling`"):
        add(engine, [1, 2], pooling="auto")
    embeddings(engine, [add(engine, [1, 2], pooling="mean")])


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"pooling_mode": "sideways"}'])
def test_malformed_files_are_refused_in_a_sentence(config: str, tmp_path: Path) -> None:
    declare(tmp_path, config)
    with pytest.raises(CheckpointError, match=r"1_Pooling.config.json was to say how embeddings are pooled, but it"):
        declared_pooling(tmp_path)


def test_a_path_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    declare(tmp_path / "model", {"pooling_mode": "mean"})
    text = (tmp_path / "model" / "modules.json").read_text().replace("1_Pooling", "../..")
    (tmp_path / "model" / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match="a path inside of the checkpoint's folder"):
        declared_pooling(tmp_path / "model")
