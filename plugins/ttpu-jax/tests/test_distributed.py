"""Several processes are one machine to a model: they find each other or say in one sentence why not, every one of them
returns the same tokens, and text, loss and updated weights are those of one process."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from devices import xla_flags
from torchless import torchless

from ttpu import AutoModelForTPU
from ttpu_jax.distributed import shared_seed
from ttpu_launch.places import free_port
from ttpu_launch.stdout import GLOO_PEERS

ROOT = Path(__file__).parents[3]
TRAIN_STEP = ROOT / "examples/launch/train_step.py"
TWO_BY_FOUR = ["--nproc-per-node", "2", "--devices-per-process", "4"]


def environment(**more: str) -> dict[str, str]:
    """This test's, without the eight devices that it simulates, and without torch."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TTPU_")}
    return torchless(kept) | {"XLA_FLAGS": xla_flags()} | more


def python(code: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(**variables), capture_output=True, text=True, timeout=120
    )


def launch(*command: str, cwd: Path) -> str:
    """stdout of two processes of four devices."""
    done = subprocess.run(
        [sys.executable, "-m", "ttpu_core.cli.main", "launch", *TWO_BY_FOUR, "--", *command],
        env=environment(), cwd=cwd, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Gloo" not in done.stdout + done.stderr
    return done.stdout


def said_by(number: int, stdout: str) -> str:
    prefix = f"[{number}] "
    return "\n".join(line.removeprefix(prefix) for line in stdout.splitlines() if line.startswith(prefix))


# -- joining -------------------------------------------------------------------------------------------------

JOIN = """
import sys
from ttpu_core.errors import LaunchError
from ttpu_jax.distributed import initialize
try:
    initialize()
    initialize()
except LaunchError as error:
    sys.exit(f"refused: {error}")
import jax
print(jax.process_count(), jax.device_count())
"""


def contract(**more: str) -> dict[str, str]:
    address = f"127.0.0.1:{free_port()}"
    return {"TTPU_COORDINATOR": address, "TTPU_NUM_PROCESSES": "2", "TTPU_PROCESS_ID": "1", "TTPU_TIMEOUT": "1"} | more


def test_a_process_without_a_contract_is_left_alone() -> None:
    assert python(JOIN).stdout == "1 1\n"


def test_a_process_alone_in_its_contract_simulates_its_devices() -> None:
    alone = contract(TTPU_NUM_PROCESSES="1", TTPU_PROCESS_ID="0", TTPU_LOCAL_DEVICES="4")
    assert python(JOIN, **alone).stdout == "1 4\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "process 1 of 2 was to meet process 0 at 127.0.0.1:"),
        ({"TTPU_PROCESS_ID": "0"}, "after 1 s process 1 had not come"),
        ({"TTPU_PROCESS_ID": ""}, "TTPU_PROCESS_ID is not"),
        ({"TTPU_PROCESS_ID": "2"}, "numbered 0 to 1"),
        ({"TTPU_COORDINATOR": "auto"}, "to be a worker of a TPU slice, but none can be found here"),
    ],
    ids=["no coordinator", "nobody came", "half set", "out of range", "no slice"],
)
def test_a_process_that_cannot_join_says_why_in_one_sentence(changes: dict[str, str], message: str) -> None:
    done = python(JOIN, **contract(**changes))
    assert done.returncode == 1
    assert done.stderr.startswith("refused: ") and done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr


def test_a_process_whose_devices_are_there_already_is_told_to_join_earlier() -> None:
    late = contract(TTPU_NUM_PROCESSES="1", TTPU_PROCESS_ID="0", TTPU_LOCAL_DEVICES="4")
    done = python(f"import jax; jax.devices()\n{JOIN}", **late)
    assert "call ttpu_jax.distributed.initialize() before anything uses a device" in done.stderr


@pytest.mark.parametrize("failure", ["raise ValueError('this one')", "import sys; sys.exit('ValueError: this one')"])
def test_a_script_that_fails_does_not_wait_for_the_others(failure: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\nfrom ttpu_jax.distributed import initialize\ninitialize()\nimport jax\n"
        "assert jax.process_count() == 2\n"
        f"if jax.process_index() == 1:\n    {failure}\ntime.sleep(100)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "ttpu_core.cli.main", "launch", *TWO_BY_FOUR, "--", str(script)],
        env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("ttpu launch:") :]
    assert report.startswith("ttpu launch: process 1 ended with exit code 1, so the other was ended too:")
    assert report.endswith("  | ValueError: this one\n")


# -- stdout --------------------------------------------------------------------------------------------------

PEERS = b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"


@pytest.mark.parametrize(
    "line", [PEERS, b"[Gloo] Rank 10[Gloo] Rank  is connected to 1 peer ranks. \n", b" is connected to 3"]
)
def test_what_gloo_says_of_its_peers_is_known_also_in_pieces(line: bytes) -> None:
    assert GLOO_PEERS.fullmatch(line)


@pytest.mark.parametrize(
    "line", [b"42\n", b"\n", b"0123456789" * 400 + b"e\n", b"[Gloo] Rank 0 failed\n", b"1 is connected to b\n"]
)
def test_nobody_elses_line_is_taken_for_gloos_nor_costs_time(line: bytes) -> None:
    assert GLOO_PEERS.fullmatch(line) is None


WRITE = f"""
import os, subprocess, sys
import jax
from ttpu_core.processes import contract_of
from ttpu_jax.distributed import _configure
jax.config.update("jax_platforms", "cpu")
_configure(contract_of(os.environ))
print("answer")
os.write(1, {PEERS!r})
os.write(1, b"42\\n" + b"0123456789" * 20 + b"e\\n")
subprocess.run(["echo", "child"])
subprocess.run(["echo", "asked"], stdout=sys.stdout)
os.write(1, b"the end")
"""


def test_what_others_write_to_descriptor_1_goes_to_stderr_whole_and_only_gloo_is_silent() -> None:
    done = python(WRITE, **contract())
    assert sorted(done.stdout.splitlines()) == ["answer", "asked"]
    assert done.stderr.splitlines() == ["42", "0123456789" * 20 + "e", "child", "the end"]


def test_a_process_alone_keeps_its_stdout() -> None:
    done = python(WRITE, **contract(TTPU_NUM_PROCESSES="1", TTPU_PROCESS_ID="0"))
    assert "child\nasked\nthe end" in done.stdout and done.stderr == ""


# -- generating ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_generate_the_text_of_one_and_the_first_prints_it(tmp_path: Path) -> None:
    checkpoint = tiny.llama_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1)
    asked = ["--prompt", "The with statement", "--max-new-tokens", "12", "--dtype", "float32", "--json"]
    two = launch("ttpu", "generate", str(checkpoint), *asked, "--mesh", "fsdp=4,tensor=2", cwd=tmp_path)
    assert said_by(1, two) == ""
    answer = json.loads(said_by(0, two))
    one = AutoModelForTPU.from_pretrained(checkpoint, dtype="float32")
    result = one.generate("The with statement", max_new_tokens=12, return_dict_in_generate=True)
    assert answer["text"] == result.completions[0].text
    assert answer["token_ids"] == result.completions[0].all_ids


GENERATE = """
import os, sys, numpy as np
from ttpu import AutoModelForTPU
model = AutoModelForTPU.from_pretrained(sys.argv[1], mesh=sys.argv[2])
prompts = [[1, 2, 3, 4, 5], [7, 8, 9]]
drawn = model.generate(prompts, max_new_tokens=5, do_sample=True, temperature=2.0, ignore_eos=True, logprobs=2)
greedy = model.generate(prompts, max_new_tokens=5, repetition_penalty=1.3, ignore_eos=True)
print(drawn.tolist())
print(greedy.tolist())
print(np.asarray(model([[1, 2, 3, 4]]).logits)[0, -1, :5].tolist())
import jax
assert not all(value.is_fully_addressable for value in model.params.values())
alone = AutoModelForTPU.from_pretrained(sys.argv[1])
for call in range(1 + int(os.environ["TTPU_PROCESS_ID"])):
    greedy = alone.generate([[1, 2, 3]], max_new_tokens=3, ignore_eos=True)
    drawn = alone.generate([[1, 2, 3]], max_new_tokens=3, do_sample=True, ignore_eos=True)
print(greedy.tolist())
"""
"""On a mesh that both processes share, then in each without a mesh, as often as it likes."""


def test_a_seed_is_shared_only_by_the_processes_of_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental import multihost_utils

    asked: list[np.ndarray] = []

    def broadcast(drawn: np.ndarray) -> np.ndarray:
        asked.append(drawn)
        return np.array([7])

    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)

    def mesh(*processes: int) -> Any:
        return SimpleNamespace(devices=np.array([SimpleNamespace(process_index=number) for number in processes]))

    assert shared_seed(None, None) is None and shared_seed(None, mesh(0, 0)) is None
    assert shared_seed(3, mesh(0, 1)) == 3
    assert not asked
    assert shared_seed(None, mesh(0, 1)) == 7 and len(asked) == 1


@pytest.mark.slow
def test_every_process_returns_the_same_and_without_a_mesh_waits_for_nobody(tmp_path: Path) -> None:
    folder = tiny.llama_checkpoint(
        tmp_path / "checkpoint", tokenizer=False, num_hidden_layers=1, num_key_value_heads=4, vocab_size=264
    )
    script = tmp_path / "generate.py"
    script.write_text(GENERATE)
    stdout = launch(str(script), str(folder), "data=2,tensor=4", cwd=tmp_path)
    first, second = (said_by(number, stdout).splitlines() for number in (0, 1))
    assert first == second
    one = AutoModelForTPU.from_pretrained(folder)
    alone = one.generate([[1, 2, 3, 4, 5], [7, 8, 9]], max_new_tokens=5, repetition_penalty=1.3, ignore_eos=True)
    assert json.loads(first[1]) == alone.tolist()
    logits = np.asarray(one([[1, 2, 3, 4]]).logits)[0, -1, :5]
    np.testing.assert_allclose(json.loads(first[2]), logits, atol=2e-5)
    assert json.loads(first[3]) == one.generate([[1, 2, 3]], max_new_tokens=3, ignore_eos=True).tolist()


def test_a_mesh_that_leaves_a_process_out_is_refused(tmp_path: Path) -> None:
    folder = tiny.llama_checkpoint(tmp_path / "checkpoint", tokenizer=False)
    done = subprocess.run(
        [sys.executable, "-m", "ttpu_core.cli.main", "launch", *TWO_BY_FOUR, "--",
         "ttpu", "generate", str(folder), "--prompt", "a", "--mesh", "tensor=2"],
        env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    report = done.stderr[done.stderr.index("ttpu launch:") :].splitlines()
    assert len(report) == 3 and "but 2 processes have 8 together, and all of them must be in it" in report[2]


# -- training ------------------------------------------------------------------------------------------------


def one_step(checkpoint: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Losses and weights after a step on one device of this process."""
    monkeypatch.setattr(sys, "argv", ["train_step.py", str(checkpoint), "--save", str(file)])
    runpy.run_path(str(TRAIN_STEP), run_name="__main__")
    return dict(np.load(file))


@pytest.mark.slow
def test_a_training_step_of_two_processes_is_that_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny.llama_checkpoint(tmp_path / "checkpoint", tokenizer=False, num_hidden_layers=1, vocab_size=264)
    file = tmp_path / "two.npz"
    said = launch(str(TRAIN_STEP), str(checkpoint), "--save", str(file), "--mesh", "fsdp=4,tensor=2", cwd=tmp_path)
    assert said_by(0, said).endswith("on 8 devices of 2 processes") and said_by(1, said) == ""
    two: dict[str, Any] = dict(np.load(file))
    losses = two["losses"]
    assert losses[1] < losses[0] - 1e-3  # a step of AdamW at 1e-4 on the same rows; it did something
    one = one_step(checkpoint, tmp_path / "one.npz", monkeypatch)
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=0, atol=1e-5, err_msg=name)
