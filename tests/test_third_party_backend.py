"""A backend that somebody else publishes works with every command, and what it cannot do is refused in one sentence. It
is a distribution made for this test, installed by pip beside the others, whose backends are excluded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from throwaway import Distribution, Environment

BACKEND = '''
    """Answers a prompt with itself. It imports no framework, and has options of its own."""
    from dataclasses import dataclass
    from types import SimpleNamespace

    from ttpu_core.generation.events import StreamEvent, Timings
    from ttpu_core.loading import LoadOptions

    @dataclass(frozen=True, kw_only=True)
    class EchoOptions(LoadOptions):
        loud: bool = False

    class EchoModel:
        tokenizer = SimpleNamespace(
            chat_template="{{ messages }}",
            apply_chat_template=lambda messages, **options: {"input_ids": [0]},
            decode=lambda ids: "?",
        )
        timings = Timings(load_seconds=0.0)

        def __init__(self, loud):
            self.loud = loud

        def generate(self, text, **arguments):
            return text.upper() if self.loud else text

        def stream(self, prompt, **arguments):
            text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            yield StreamEvent(self.generate(text), 1, finish_reason="stop")

    class EchoBackend:
        name = "echo"
        options = EchoOptions

        def open(self, architecture, checkpoint, options):
            options.progress and options.progress("load", 1.0, 1.0)
            return EchoModel(options.loud)

        def doctor(self):
            return {"devices": ["echo:0"], "missing": {}}

        def kernels(self, architecture):
            return {"attention": "none: it echoes"}
'''

LAUNCHING = '''
    class Launches:
        variables = ("ECHO_PROCESSES",)

        def check_processes(self, per_host):
            from ttpu_core.errors import LaunchError

            if per_host > 2:
                raise LaunchError(f"{per_host} processes were asked for, but echo has at most 2: start fewer.")

        def variables_for(self, processes, local_devices, given, *, on_tpu_worker):
            return {"ECHO_PROCESSES": str(processes)}

    LAUNCHES = Launches()
'''

OTHERS = {"TTPU_DISABLE_PLUGINS": "ttpu-jax,ttpu-torch-xla"}


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment whose only usable backend is the third party's."""
    echo = Distribution(
        "their-echo",
        {"their_echo/__init__.py": "", "their_echo/backend.py": BACKEND, "their_echo/launching.py": LAUNCHING},
        {
            "ttpu.backends": {"echo": "their_echo.backend:EchoBackend"},
            "ttpu.launches": {"echo": "their_echo.launching:LAUNCHES"},
        },
    )
    return Environment.install(tmp_path_factory.mktemp("echo"), echo)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", chat=True)


def refused(env: Environment, *arguments: str | Path) -> str:
    """The one line on stderr of a command that ends with status 2."""
    command = [sys.executable, "-m", "ttpu_core.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env.environment(OTHERS))
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_it_is_listed_and_examined(env: Environment) -> None:
    listed = json.loads(env.ttpu("list-plugins", "--json", **OTHERS))
    found = {(each["kind"], each["state"]) for each in listed if each["distribution"] == "their-echo"}
    assert found == {("backend", "available"), ("launch", "available")}
    assert json.loads(env.ttpu("doctor", "--json", **OTHERS))["backends"]["echo"]["devices"] == ["echo:0"]


def test_info_names_its_kernels(env: Environment, checkpoint: Path) -> None:
    for chosen in ((), ("--backend", "echo")):
        assert "none: it echoes" in env.ttpu("info", checkpoint, *chosen, **OTHERS)


def test_it_generates_and_chats_as_the_default_and_by_name(env: Environment, checkpoint: Path) -> None:
    assert env.ttpu("generate", checkpoint, "--prompt", "hello", "--quiet", **OTHERS) == "hello\n"
    assert env.ttpu("generate", checkpoint, "--backend", "echo", "-p", "hi", "--chat", "--quiet") == "hi\n"
    turns = subprocess.run(
        [sys.executable, "-m", "ttpu_core.cli.main", "chat", str(checkpoint), "--quiet"],
        input="one\ntwo\n", capture_output=True, text=True, timeout=120, env=env.environment(OTHERS),
    )  # fmt: skip
    assert (turns.returncode, turns.stdout) == (0, "one\ntwo\n"), turns.stderr


def test_from_python_its_own_options_are_taken_and_unknown_ones_refused(env: Environment, checkpoint: Path) -> None:
    got = env.run(
        f"""
        from ttpu import AutoModelForTPU

        path = {str(checkpoint)!r}
        report([
            AutoModelForTPU.from_pretrained(path, loud=True).generate("hello"),
            error(lambda: AutoModelForTPU.from_pretrained(path, lout=True)),
        ])
        """,
        **OTHERS,
    )
    assert got[0] == "HELLO"
    assert "from_pretrained() was given lout (did you mean loud?), but the echo backend takes" in got[1]


def test_a_launch_gives_its_processes_its_variables(env: Environment, tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text("import os; print(os.environ['ECHO_PROCESSES'])")
    launch = ("launch", "--backend", "echo", "--nproc-per-node")
    assert sorted(env.ttpu(*launch, "2", "--", script, **OTHERS).splitlines()) == ["[0] 2", "[1] 2"]
    assert "echo has at most 2: start fewer." in refused(env, *launch, "3", "--", script)


def test_what_it_cannot_do_is_refused_in_one_sentence(env: Environment, checkpoint: Path) -> None:
    plan = ("plan", checkpoint, "--topology", "v5e:2x2")
    assert env.ttpu(*plan, "--task", "generation", **OTHERS)
    assert refused(env, *plan) == (
        "error: a plan to serve was asked for, but no installed backend says what its engine compiles: `pip install "
        '"ttpu-core[jax]"`, or plan for generate() with `--task generation`.'
    )
    assert refused(env, *plan, "--task", "generation", "--verify") == (
        "error: --verify was asked for, but no installed backend can compile a plan: `pip install -U "
        '"ttpu-core[jax]"`.'
    )
    assert refused(env, "serve", checkpoint) == (
        "error: an engine for a model of the backend 'echo' was asked for, but that backend makes no runners for "
        "engines: install and name one that does (`ttpu list-plugins`)."
    )
