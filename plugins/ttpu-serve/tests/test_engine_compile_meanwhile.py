"""An engine that serves before all of its programs are compiled gives the same tokens, and compiles the rest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from serving import until

from ttpu import LLM, SamplingParams
from ttpu_core.errors import TTPUError
from ttpu_jax.runner.buckets import StepShape, buckets_for
from ttpu_jax.runner.compilation import Program, ProgramPool

OPTIONS: Any = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_logprobs": 3}
PROMPTS = [[5, 9, 11], list(range(3, 90)), [7], [8, 8, 8, 8, 8, 8, 8, 8, 8]]
ASKED = (
    SamplingParams(max_tokens=6, temperature=0.0),
    SamplingParams(max_tokens=6, temperature=0.9, top_k=20, top_p=0.9, seed=3),
    SamplingParams(max_tokens=6, temperature=0.7, seed=1, repetition_penalty=1.3, logit_bias={5: 2.0}),
    SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, prompt_logprobs=1),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny-llama")


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Iterator[LLM]:
    llm = LLM(str(checkpoint), **OPTIONS)
    yield llm
    llm.close()


def answers(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for params in ASKED for out in llm.generate(PROMPTS, params)]


def test_any_request_is_served_by_the_first_programs(
    checkpoint: Path, whole: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those that log-probabilities of prompts need are compiled beside them, when they are asked for."""
    monkeypatch.setattr(ProgramPool, "_go_on", lambda self: None)
    llm = LLM(str(checkpoint), compile_meanwhile=True, **OPTIONS)
    stats, pool = llm.engine.stats(), llm.engine.runner.pool
    assert stats.programs <= 6 and stats.programs_pending == whole.engine.stats().programs - stats.programs
    first = set(pool.keys)
    assert answers(llm) == answers(whole)
    assert {key[0] for key in set(pool.keys) - first} <= {"prompt_logprobs"}
    assert llm.engine.stats().recompiles == 0
    llm.close()


def test_the_others_are_compiled_while_it_serves(checkpoint: Path, whole: LLM) -> None:
    llm = LLM(str(checkpoint), compile_meanwhile=True, **OPTIONS)
    assert answers(llm) == answers(whole)
    until(lambda: llm.engine.stats().programs_pending == 0, 60)
    pools = (one.engine.runner.pool.keys for one in (llm, whole))
    # Log-probabilities of prompts are compiled for who asks for them, as another test of the whole engine does.
    ours, theirs = ({key for key in keys if key[0] != "prompt_logprobs"} for keys in pools)
    assert ours == theirs
    assert answers(llm) == answers(whole) and llm.engine.stats().recompiles == 0
    llm.close()


def test_strict_engines_wait_for_all_programs(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), compile_meanwhile=True, strict_compile=True, **OPTIONS)
    assert llm.engine.stats().programs_pending == 0
    llm.close()


def test_a_closed_engine_compiles_nothing_more(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, built = threading.Event(), ProgramPool._built
    llm_pools: list[ProgramPool] = []

    def slowly(self: ProgramPool, lowered: Any) -> Any:
        if self.serving:
            llm_pools.append(self)
            gate.wait(20)
        return built(self, lowered)

    monkeypatch.setattr(ProgramPool, "_built", slowly)
    llm = LLM(str(checkpoint), compile_meanwhile=True, **OPTIONS)
    until(lambda: llm_pools)
    closing = threading.Thread(target=llm.close)
    closing.start()
    until(lambda: not llm_pools[0]._waiting)
    gate.set()
    closing.join(20)
    assert not closing.is_alive() and len(llm_pools) == 1


def test_the_smallest_shape_that_holds_a_step_is_among_those_that_hold_it() -> None:
    for buckets in (buckets_for(64, 512), buckets_for(64, 512, draft=4), buckets_for(16, 256, max_prefills=4)):
        largest, smallest = buckets.first()
        assert {largest, smallest} <= set(buckets.all())
        for tokens, sequences, most in ((1, 1, 1), (9, 9, 1), (30, 5, 20), (16, 4, 4), (16, 16, 1)):
            chosen = buckets.step(tokens, sequences, most)
            prefills = 0 if most == 1 else 1
            held = buckets.holding(StepShape(tokens, sequences, sequences, most, prefills))
            assert chosen in held and largest in held
            assert list(held) == sorted(held)
        assert not buckets.holding(replace(largest, max_prefills=largest.max_prefills + 1))


def test_no_step_has_more_tokens_than_all_sequences_together() -> None:
    assert buckets_for(4, 2048, max_model_len=64).tokens == (16, 64, 256)
    assert buckets_for(256, 2048, max_model_len=64) == buckets_for(256, 2048)
    assert buckets_for(4, 2048, max_model_len=64, tokens=(32, 512, 1024)).tokens == (32, 256)
    # Of sequences with a recurrent state only so many read prompts at once; the others have a token each, and drafts.
    assert buckets_for(8, 2048, max_model_len=64, max_prefills=2).tokens[-1] == 2 * 64 + 6
    assert buckets_for(8, 2048, max_model_len=64, max_prefills=2, draft=3).tokens[-1] == 2 * 64 + 6 * 4
    largest, smallest = buckets_for(1, 2048, max_model_len=1).first()
    assert (largest.tokens, smallest.tokens) == (1, 1)


def program(key: str, work: Callable[[Any], Any] = lambda x: x + 1) -> Program:
    return Program((key, 0), work, (jax.ShapeDtypeStruct((2,), jnp.float32),))


def test_a_program_that_is_waited_for_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, lowered, gate = ProgramPool(strict=True), [], threading.Event()
    lower = Program.lower

    def noting(self: Program) -> Any:
        lowered.append(self.key)
        if self.key == ("a", 0):
            gate.wait(20)
        return lower(self)

    monkeypatch.setattr(Program, "lower", noting)
    pool.compile_meanwhile([program("a"), program("b"), program("c")])
    pool.serving = True
    until(lambda: lowered)
    assert pool.get(("c", 0), lambda: program("c")) is pool.executable(("c", 0)), "it goes before the others"
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(pool.get(("a", 0), lambda: program("a"))))
    waiting.start()
    gate.set()
    waiting.join(20)
    until(lambda: pool.stats().pending == 0)
    assert sorted(lowered) == [("a", 0), ("b", 0), ("c", 0)] and found == [pool.executable(("a", 0))]
    with pytest.raises(TTPUError, match="strict_compile"):
        pool.get(("d", 0), lambda: program("d"))
    pool.close()


def test_a_program_that_fails_does_not_end_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def broken(x: Any) -> Any:
        raise ValueError("no such thing")

    pool = ProgramPool()
    with caplog.at_level(logging.ERROR, "ttpu.engine"):
        pool.compile_meanwhile([program("bad", broken), program("good")])
        pool.serving = True
        until(lambda: pool.has(("good", 0)))
    assert "bad" in caplog.text and not pool.has(("bad", 0))
    with pytest.raises(ValueError, match="no such thing"):
        pool.get(("bad", 0), lambda: program("bad", broken))
    pool.close()
