"""Weights of a running engine are replaced, and go to the host and back: answers are those of the weights that are
there when a token is made, memory is given back, and what does not fit changes nothing."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from engine_cases import GREEDY, NEW, PROMPTS, Oracle, add, answers, collect, finish, small_engine, with_weights
from safetensors.numpy import load_file, save_file

from ttpu_core.errors import CheckpointError, MappingError, RequestError, TTPUError
from ttpu_serve.execution.engine_core import EngineCore

pytestmark = [
    pytest.mark.slow,  # together they take long; the lane of the newest jax does without
    pytest.mark.usefixtures("collector_starts_anew"),
]

QKV = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three of the same architecture."""
    folder = tmp_path_factory.mktemp("weights")
    return [tiny.llama_checkpoint(folder / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def oracle(checkpoints: list[Path]) -> Oracle:
    return Oracle(checkpoints[0])


@pytest.fixture(scope="module")
def engines(checkpoints: list[Path]) -> dict[str | None, EngineCore]:
    """On one device, and cut over eight, for which heads are padded."""
    return {mesh: small_engine(checkpoints[0], parallelism_strategy=mesh) for mesh in (None, "tensor=8")}


@pytest.fixture(params=[None, "tensor=8"], ids=["one device", "eight devices"])
def engine(
    request: pytest.FixtureRequest, engines: dict[str | None, EngineCore], checkpoints: list[Path]
) -> EngineCore:
    """With the first checkpoint's weights."""
    core = engines[request.param]
    core.update_weights(checkpoints[0])
    return core


def tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    return load_file(checkpoint / "model.safetensors")


def assert_answers(core: EngineCore, oracle: Oracle, checkpoint: Path) -> None:
    oracle.uses(checkpoint)
    for prompt, answer in zip(PROMPTS, answers(core, PROMPTS), strict=True):
        assert oracle.agrees(prompt, answer)


def live_bytes() -> int:
    """Bytes of all arrays that are on devices."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


# replacing weights


def test_updated_weights_answer_as_a_fresh_engine(engine: EngineCore, oracle: Oracle, checkpoints: list[Path]) -> None:
    held, shardings = live_bytes(), {path: value.sharding for path, value in engine.runner.params.items()}
    recompiles = engine.stats().recompiles
    engine.update_weights(checkpoints[1])
    assert_answers(engine, oracle, checkpoints[1])
    assert {path: value.sharding for path, value in engine.runner.params.items()} == shardings
    assert live_bytes() == held
    assert engine.stats().recompiles == recompiles


def test_weights_come_as_arrays_of_any_floating_point(
    engine: EngineCore, oracle: Oracle, checkpoints: list[Path]
) -> None:
    given: dict[str, Any] = {name: value.astype(np.float64) for name, value in tensors(checkpoints[2]).items()}
    given["lm_head.weight"] = jax.numpy.asarray(given["lm_head.weight"], np.float32)
    engine.update_weights(given)
    assert_answers(engine, oracle, checkpoints[2])


@pytest.mark.torch
def test_weights_come_as_torch_tensors(
    engines: dict[str | None, EngineCore], oracle: Oracle, checkpoints: list[Path], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    rounded = {name: torch.from_numpy(value).to(torch.bfloat16) for name, value in tensors(checkpoints[1]).items()}
    engines[None].update_weights(rounded)
    changes = {name: value.float().numpy() for name, value in rounded.items()}
    assert_answers(engines[None], oracle, with_weights(checkpoints[1], tmp_path / "rounded", changes))


def test_some_weights_are_replaced_and_the_others_stay(
    engine: EngineCore, oracle: Oracle, checkpoints: list[Path], tmp_path: Path
) -> None:
    other = tensors(checkpoints[1])
    some = {name: other[name] for name in ("lm_head.weight", "model.layers.1.mlp.down_proj.weight", *QKV)}
    folder = tmp_path / "files"  # safetensors files alone, in two parts
    folder.mkdir()
    save_file({name: some[name] for name in QKV[:1]}, folder / "a.safetensors")
    save_file({name: value for name, value in some.items() if name != QKV[0]}, folder / "b.safetensors")
    engine.update_weights(folder)
    assert_answers(engine, oracle, with_weights(checkpoints[0], tmp_path / "whole", some))


def test_running_requests_go_on_with_the_new_weights(
    engine: EngineCore, oracle: Oracle, checkpoints: list[Path]
) -> None:
    tokens: dict[str, list[int]] = {}
    name = add(engine, PROMPTS[1])
    while len(tokens.get(name, ())) < 3:
        collect(engine, tokens)
    engine.update_weights(checkpoints[1])
    (answer,) = finish(engine, [name], tokens)
    kept = oracle.uses(checkpoints[0]).logits([*PROMPTS[1], *answer])[len(PROMPTS[1]) - 1 : -1].argmax(-1) == answer
    new = oracle.uses(checkpoints[1]).logits([*PROMPTS[1], *answer])[len(PROMPTS[1]) - 1 : -1].argmax(-1) == answer
    changed = int(np.argmin(kept))
    assert 3 <= changed < NEW  # what was dispatched before counts too
    assert new[changed:].all()


def test_what_the_old_weights_computed_is_not_used_again(
    engine: EngineCore, oracle: Oracle, checkpoints: list[Path]
) -> None:
    answers(engine, [PROMPTS[1]])
    hits = engine.stats().prefix_hits
    assert answers(engine, [PROMPTS[1]]) and engine.stats().prefix_hits == hits + 32
    engine.update_weights(checkpoints[1])
    (answer,) = answers(engine, [PROMPTS[1]])
    assert engine.stats().prefix_hits == hits + 32
    assert oracle.uses(checkpoints[1]).agrees(PROMPTS[1], answer)


def test_prefixes_are_shared_among_requests_with_the_same_salt_alone(engine: EngineCore) -> None:
    def served(**options: Any) -> tuple[list[int], int]:
        """The answer, and how many tokens of its prompt were there already."""
        before = engine.stats().prefix_hits
        (answer,) = finish(engine, [add(engine, PROMPTS[1], **options)])
        return answer, engine.stats().prefix_hits - before

    answer, found = served()
    assert found == 0
    assert served() == (answer, 32)
    for salt in ("mine", "yours"):
        assert served(cache_salt=salt) == (answer, 0)
        assert served(cache_salt=salt) == (answer, 32)
    engine.add("mapping", {"prompt_token_ids": PROMPTS[1], "cache_salt": "mine"}, GREEDY)
    before = engine.stats().prefix_hits
    assert finish(engine, ["mapping"]) == [answer] and engine.stats().prefix_hits == before + 32
    with pytest.raises(RequestError, match="cache_salt is 3"):
        add(engine, PROMPTS[1], cache_salt=3)


def test_weights_are_replaced_while_the_engine_sleeps(
    engine: EngineCore, oracle: Oracle, checkpoints: list[Path]
) -> None:
    engine.sleep()
    held = live_bytes()
    engine.update_weights(checkpoints[1])
    assert live_bytes() == held
    engine.wake_up()
    assert_answers(engine, oracle, checkpoints[1])


def test_the_loaded_model_has_the_new_weights(engine: EngineCore, oracle: Oracle, checkpoints: list[Path]) -> None:
    expected = oracle.uses(checkpoints[1]).logits(PROMPTS[1])
    engine.update_weights(checkpoints[1])
    engine.sleep()
    engine.wake_up()
    assert engine.model is not None
    np.testing.assert_allclose(engine.model(np.array([PROMPTS[1]])).logits[0], expected, atol=1e-4)


def _changed(name: str, value: Any) -> Any:
    return lambda given: {**given, name: value}


BAD: dict[str, tuple[type[TTPUError], str, Any]] = {
    "a part of a fused kernel": (MappingError, r"q_proj.weight' without .*k_proj", lambda g: {QKV[0]: g[QKV[0]]}),
    "another shape": (MappingError, r"\(3, 32\)", _changed("lm_head.weight", np.ones((3, 32), np.float32))),
    "an unknown tensor": (MappingError, "'extra'", _changed("extra", np.ones(3, np.float32))),
    "integers": (CheckpointError, "int8", _changed("lm_head.weight", np.ones((259, 32), np.int8))),
    "lists": (CheckpointError, "list", _changed("lm_head.weight", [1.0])),
    "nothing": (RequestError, "no tensor of this model", lambda g: {}),
}


@pytest.mark.parametrize("what", BAD)
def test_weights_that_do_not_fit_leave_the_engine_alone(
    what: str, engines: dict[str | None, EngineCore], checkpoints: list[Path], oracle: Oracle
) -> None:
    error, words, change = BAD[what]
    core = engines[None]
    core.update_weights(checkpoints[0])
    name = add(core, PROMPTS[0])
    core.step()
    preemptions = core.stats().preemptions
    with pytest.raises(error, match=words):
        core.update_weights(change(tensors(checkpoints[1])))
    assert oracle.uses(checkpoints[0]).agrees(PROMPTS[0], finish(core, [name])[0])
    assert core.stats().preemptions == preemptions


def test_a_directory_without_weights_or_with_a_damaged_file_is_refused(
    engines: dict[str | None, EngineCore], checkpoints: list[Path], oracle: Oracle, tmp_path: Path
) -> None:
    core = engines[None]
    core.update_weights(checkpoints[0])
    with pytest.raises(RequestError, match="no safetensors files"):
        core.update_weights(tmp_path)
    data = (checkpoints[1] / "model.safetensors").read_bytes()
    (tmp_path / "part.safetensors").write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match=r"part\.safetensors"):
        core.update_weights(tmp_path)
    for name in ("part", "again"):
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"again\.safetensors and in part\.safetensors"):
        core.update_weights(tmp_path)
    assert_answers(core, oracle, checkpoints[0])


def test_an_engine_without_room_for_adapters_says_what_to_set(engines: dict[str | None, EngineCore]) -> None:
    core = engines[None]
    with pytest.raises(RequestError, match="max_adapters"):
        core.load_adapter("an adapter", "somewhere")
    with pytest.raises(RequestError, match="those loaded are: none"):
        add(core, PROMPTS[0], adapter="an adapter")


# sleep


def test_sleep_gives_the_devices_memory_back(engine: EngineCore) -> None:
    before = answers(engine, PROMPTS)
    runner = engine.runner
    held = live_bytes()
    engine_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((runner.params, runner.caches, runner.sampler.state)))
    engine.sleep()
    assert engine_bytes > 0 and live_bytes() == held - engine_bytes
    assert engine.stats().asleep and engine.step() == []
    engine.sleep()  # twice is once
    engine.wake_up()
    engine.wake_up()
    assert live_bytes() == held
    assert answers(engine, PROMPTS) == before


def test_requests_in_the_middle_go_on_after_sleep(engine: EngineCore) -> None:
    expected = answers(engine, PROMPTS)
    tokens: dict[str, list[int]] = {}
    names = [add(engine, prompt) for prompt in PROMPTS[:3]]
    while len(tokens.get(names[0], ())) < 3:
        collect(engine, tokens)
    engine.sleep()
    names.append(add(engine, PROMPTS[3]))  # one that comes while the engine sleeps
    for _ in range(3):
        collect(engine, tokens)
    assert not any(len(of) == NEW for of in tokens.values()) and not engine.has_work
    engine.wake_up()
    assert finish(engine, names, tokens) == expected
    assert engine.stats().pages_in_use == {"full": 0}
