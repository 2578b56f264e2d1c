"""Programs are compiled once: a later start finds them, and never trusts what others may have written."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax.experimental.compilation_cache import compilation_cache
from torchless import torchless
from transformers import AutoTokenizer

from ttpu import LLM, SamplingParams
from ttpu_jax import compiler_flags as flags
from ttpu_jax.compiler_flags import compiler_flags
from ttpu_jax.compiling import compiled_with
from ttpu_jax.runner import executable_cache as store
from ttpu_jax.runner import page_count
from ttpu_jax.runner.compilation import Program, ProgramPool
from ttpu_jax.runner.compilation_cache import JAX_DIRECTORY, JAX_SECONDS, VARIABLE, keep_compiled, programs_folder
from ttpu_jax.runner.executable_cache import ExecutableCache

pytestmark = pytest.mark.slow  # together they take long; the lane of the newest jax does without

SMALL: dict[str, Any] = {
    "max_model_len": 32,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "sequence_buckets": (2,),
    "token_buckets": (8,),
    "page_size": 4,
    "sampling_level": "greedy",
    "prompt_logprobs": False,
    "progress": None,
}
LISTEN: list[Counter[str]] = []
FLAGS = dict(flags._AT_IMPORT)  # torch_xla adds to them in the environment


@pytest.fixture(scope="module", autouse=True)
def _listen() -> None:
    jax.monitoring.register_event_listener(lambda event, **_: [heard.update([event]) for heard in LISTEN])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs are kept during this test."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "programs"))
    return tmp_path / "programs"


@pytest.fixture
def unset() -> Iterator[None]:
    """As if the user had said nothing about JAX's cache; what was set before comes back."""
    before = {name: getattr(jax.config, name) for name in (JAX_DIRECTORY, JAX_SECONDS)}
    jax.config.update(JAX_DIRECTORY, None)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def heard() -> Iterator[Counter[str]]:
    """What JAX's cache did: its events, counted."""
    counts: Counter[str] = Counter()
    LISTEN.append(counts)
    yield counts
    LISTEN.remove(counts)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama_checkpoint(tmp_path_factory.mktemp("store") / "llama", num_hidden_layers=1)


def answer(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return list(llm.generate("hello", params)[0].outputs[0].token_ids)


def program(scale: float = 2.0) -> Program:
    """`x * scale + y` over [8, 4], x donated."""

    def function(x: jax.Array, y: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        return x * scale + y["y"], {"sum": (x * y["y"]).sum()}

    shape = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return Program(("scaled", scale), function, (shape, {"y": shape}), (0,))


def run(executable: Any) -> float:
    ones = jnp.ones((8, 4), jnp.float32)
    return float(executable(ones + 0, {"y": ones})[0][0, 0])


@pytest.fixture
def stored(folder: Path, unset: None) -> ExecutableCache:
    """A store that holds the program."""
    kept = ExecutableCache(jax.devices()[:1])
    lowered = program().lower()
    assert kept.save(kept.key(lowered), compiled_with(lowered, {}), {"peak": 7})
    return ExecutableCache(jax.devices()[:1])


def only_file(kept: ExecutableCache) -> Path:
    assert kept.folder is not None
    (path,) = kept.folder.glob("*.program")
    return path


class TestJaxCache:
    def test_a_second_start_of_an_engine_compiles_nothing(
        self, checkpoint: Path, folder: Path, unset: None, heard: Counter[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        AutoTokenizer.from_pretrained(checkpoint)  # may import torch_xla, which adds to flags that are in JAX's keys
        monkeypatch.setenv(JAX_SECONDS.upper(), "0")  # these programs take milliseconds
        jax.config.update(JAX_SECONDS, 0)
        jax.clear_caches()  # what other tests compiled would not be kept in this folder
        with LLM(str(checkpoint), **SMALL) as llm:
            programs, first = len(llm.engine.runner.pool.keys), answer(llm)
        assert heard["/jax/compilation_cache/cache_misses"] >= programs
        heard.clear()
        jax.clear_caches()
        with LLM(str(checkpoint), **SMALL) as llm:
            assert heard["/jax/compilation_cache/cache_misses"] == 0
            assert heard["/jax/compilation_cache/cache_hits"] >= programs
            assert answer(llm) == first
        assert (folder.stat().st_mode & 0o777) == 0o700

    def test_a_users_own_choice_of_a_cache_stands(self, folder: Path, unset: None, tmp_path: Path) -> None:
        jax.config.update(JAX_DIRECTORY, str(tmp_path / "own"))
        assert keep_compiled() == tmp_path / "own"
        assert not folder.exists()

    def test_it_can_be_turned_off(self, unset: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "off")
        assert keep_compiled() is None
        assert jax.config.jax_compilation_cache_dir is None  # type: ignore[attr-defined]

    def test_without_a_choice_it_lies_in_the_users_cache(
        self, unset: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(VARIABLE)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        found = keep_compiled()
        assert found is not None
        assert found.is_relative_to(tmp_path / "ttpu" / "programs" / "jax")
        assert str(found) == jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]


class TestFolder:
    def test_one_that_others_may_write_to_is_not_used(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder.mkdir()
        folder.chmod(0o770)
        assert programs_folder() is None
        assert "others may write to" in caplog.text

    def test_one_that_cannot_be_made_is_done_without(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "programs"))
        assert programs_folder("jax") is None
        assert "are not kept" in caplog.text


class TestStore:
    def test_a_pool_loads_what_is_stored_and_compiles_the_rest(self, stored: ExecutableCache) -> None:
        pool = ProgramPool(store=stored)
        pool.compile([program(), program(3.0)])
        assert pool.loaded == 1
        assert run(pool.executable(("scaled", 2.0))) == 3.0
        assert run(pool.executable(("scaled", 3.0))) == 4.0

    def test_what_is_stored_beside_a_program_comes_back(self, stored: ExecutableCache) -> None:
        assert stored.facts(stored.key(program().lower())) == {"peak": 7}
        assert stored.facts(stored.key(program(3.0).lower())) is None

    def test_another_process_finds_it_under_the_same_name(self, stored: ExecutableCache) -> None:
        script = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "import jax, test_engine_store as test\n"
            "kept = test.ExecutableCache(jax.devices()[:1])\n"
            "print(test.run(kept.load(test.program().lower())))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(Path(__file__).parent)],
            env=torchless({**os.environ, **FLAGS, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}),
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == "3.0", done.stderr

    def test_an_engine_starts_from_stored_programs(self, checkpoint: Path, folder: Path, unset: None) -> None:
        with LLM(str(checkpoint), **SMALL, num_pages=20) as llm:
            runner, first = llm.engine.runner, answer(llm)
            kept = ExecutableCache(runner.runtime.placement.devices)
            for each in runner.programs():
                kept.save(kept.key(each.lower()), runner.pool.executable(each.key))
        with LLM(str(checkpoint), **SMALL, num_pages=20) as llm:
            pool = llm.engine.runner.pool
            assert pool.loaded == len(pool.keys) > 2
            assert answer(llm) == first

    @pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:30], lambda data: b"",
                                        lambda data: data[:-1] + bytes([data[-1] ^ 1])])  # fmt: skip
    def test_a_damaged_file_is_as_good_as_none_and_replaced(self, stored: ExecutableCache, damage: Any) -> None:
        path, lowered = only_file(stored), program().lower()
        path.write_bytes(damage(path.read_bytes()))
        assert stored.load(lowered) is None
        assert stored.facts(path.stem) is None
        assert stored.save(path.stem, compiled_with(lowered, {})) == path
        assert run(stored.load(program().lower())) == 3.0

    @pytest.mark.parametrize("name", ["jax", "libtpu"])
    def test_another_version_finds_nothing(
        self, stored: ExecutableCache, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = {**store._versions(), name: "0.0.1"}
        monkeypatch.setattr(store, "_versions", lambda: other)
        assert ExecutableCache(jax.devices()[:1]).load(program().lower()) is None

    def test_other_compiler_flags_find_nothing(self, stored: ExecutableCache, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store, "compiler_flags", lambda platform: ("--xla_something=true",))
        assert ExecutableCache(jax.devices()[:1]).load(program().lower()) is None

    def test_another_effort_of_the_compiler_finds_nothing(self, stored: ExecutableCache) -> None:
        before = jax.config.jax_optimization_level
        jax.config.update("jax_optimization_level", "O1")
        try:
            assert ExecutableCache(jax.devices()[:1]).load(program().lower()) is None
        finally:
            jax.config.update("jax_optimization_level", before)
        assert ExecutableCache(jax.devices()[:1]).load(program().lower()) is not None

    def test_flags_without_effect_on_the_platform_are_no_others(self) -> None:
        given = {
            "XLA_FLAGS": "--xla_dump_to=/tmp --xla_cpu_a=1 --xla_b=2 --xla_force_host_platform_device_count=8",
            "LIBTPU_INIT_ARGS": " --xla_tpu_use_enhanced_launch_barrier=true --xla_tpu_c=3 --xla_b=2",
        }
        assert compiler_flags("tpu", given) == ("--xla_b=2", "--xla_tpu_c=3")
        assert compiler_flags("cpu", given) == ("--xla_b=2", "--xla_cpu_a=1")

    def test_other_devices_find_nothing(self, stored: ExecutableCache) -> None:
        assert ExecutableCache(jax.devices()[1:2]).load(program().lower()) is None

    @pytest.mark.parametrize("whose", ["folder", "file"])
    def test_what_others_may_write_is_not_read(self, stored: ExecutableCache, whose: str) -> None:
        path = only_file(stored)
        (path if whose == "file" else path.parent).chmod(0o777)
        assert stored.load(program().lower()) is None

    def test_a_file_of_somebody_else_is_not_read(
        self, stored: ExecutableCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As it looks to another user: what does not belong to them does not belong to root either."""
        owner = os.geteuid()
        real = os.fstat

        def of_another(descriptor: int) -> os.stat_result:
            status = list(real(descriptor))
            status[4] = owner + 1000
            return os.stat_result(status)

        assert stored.load(program().lower()) is not None
        monkeypatch.setattr(os, "fstat", of_another)
        assert stored.load(program().lower()) is None

    def test_a_link_is_not_followed(self, stored: ExecutableCache, tmp_path: Path) -> None:
        path = only_file(stored)
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert stored.load(program().lower()) is None

    def test_one_that_does_not_load_is_compiled_and_logged_once(
        self, stored: ExecutableCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuses(*_: Any, **__: Any) -> Any:
            raise ValueError("made for another device\nin detail")

        monkeypatch.setattr(store, "deserialize_and_load", refuses)
        pool = ProgramPool(store=stored)
        with caplog.at_level(logging.WARNING, "ttpu.engine"):
            pool.compile([program()])
            assert stored.load(program().lower()) is None
        assert pool.loaded == 0
        assert run(pool.executable(("scaled", 2.0))) == 3.0
        (record,) = caplog.records
        assert record.getMessage().endswith("made for another device")

    def test_nothing_is_stored_or_read_where_it_is_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "off")
        kept, lowered = ExecutableCache(jax.devices()[:1]), program().lower()
        assert kept.save(kept.key(lowered), compiled_with(lowered, {})) is None
        assert not kept
        assert kept.load(lowered) is None


class TestPageCount:
    @pytest.fixture(scope="class")
    @staticmethod
    def runner(checkpoint: Path) -> Iterator[Any]:
        with LLM(str(checkpoint), **SMALL, num_pages=20) as llm:
            yield llm.engine.runner

    def test_a_little_more_memory_does_not_change_the_programs(self, runner: Any, folder: Path) -> None:
        assert page_count.steady_pages((100,), runner, (8,)) == (100,)
        assert page_count.steady_pages((150,), runner, (8,)) == (100,)
        assert page_count.steady_pages((99,), runner, (8,)) == (99,)  # the remembered ones do not fit any more
        assert page_count.steady_pages((500,), runner, (8,)) == (500,)  # there is much more
        assert page_count.steady_pages((510,), runner, (8,)) == (500,)

    def test_another_engine_has_its_own(self, runner: Any, folder: Path) -> None:
        page_count.steady_pages((100,), runner, (8,))
        assert page_count.steady_pages((101,), runner, (16,)) == (101,)

    @pytest.mark.parametrize("content", ["", "{}", "[1]", '["100"]', "[100, 100]", "null"])
    def test_what_is_remembered_wrongly_is_forgotten(self, runner: Any, folder: Path, content: str) -> None:
        page_count.steady_pages((100,), runner, (8,))
        (path,) = (folder / "pages").glob("*.json")
        path.write_text(content)
        assert page_count.steady_pages((110,), runner, (8,)) == (110,)
        assert json.loads(path.read_text()) == [110]
