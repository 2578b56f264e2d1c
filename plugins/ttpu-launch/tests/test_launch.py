"""What `ttpu launch` promises of the processes that it starts: each knows its place, its lines carry its number, the
first that fails ends the rest and gives the exit code, and whatever happens none is left."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_import_time import HEAVY, loaded_after
from typer.main import get_command
from typer.testing import CliRunner

from ttpu_core.cli.main import app
from ttpu_core.errors import LaunchError
from ttpu_core.processes import Contract, contract_of
from ttpu_launch.cli import app as launch_app
from ttpu_launch.options import PLACES, READ_BY
from ttpu_launch.places import Host, asked_for, coordinator_of, free_port, hosts_in, hosts_of, passed_on, ssh_tasks
from ttpu_launch.rendezvous import meet

TTPU = [sys.executable, "-m", "ttpu_core.cli.main"]
FAKE_SSH = """
import os, subprocess, sys, threading
host, command = sys.argv[1:]
if host == "gone":
    sys.exit(255)
with open(os.environ["HOSTS"], "a") as hosts:
    print(host, file=hosts)
far = subprocess.Popen(["sh", "-c", command], cwd="/", env={"PATH": os.environ["PATH"]}, stdin=subprocess.PIPE,
                       start_new_session=True)
def carry():
    while data := os.read(0, 4096):
        os.write(far.stdin.fileno(), data)
    far.stdin.close()
threading.Thread(target=carry, daemon=True).start()
status = far.wait()
os._exit(255 if status < 0 else status)
"""
SLEEPERS = 'sleep 1000 & echo $! >> pids; echo $$ >> pids; wait'


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TTPU_")} | more


def launch(*arguments: str, cwd: Path | None = None, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*TTPU, "launch", *arguments],
        capture_output=True, text=True, timeout=60, cwd=cwd, env=environment(**variables), stdin=subprocess.DEVNULL,
    )  # fmt: skip


def shell(
    script: str, *options: str, processes: int = 2, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    return launch("--nproc-per-node", str(processes), *options, "--", "sh", "-c", script, cwd=cwd)


def started(script: str, cwd: Path, *options: str, **variables: str) -> "subprocess.Popen[str]":
    """A launch of two processes in the background, once both of them have written their numbers."""
    process = subprocess.Popen(
        [*TTPU, "launch", *options, "--", "sh", "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment(**variables),
    )  # fmt: skip
    try:
        until(lambda: (cwd / "pids").exists() and len((cwd / "pids").read_text().split()) == 4)
    except AssertionError:
        process.kill()
        raise
    return process


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def alive(cwd: Path) -> list[int]:
    """Processes in the file that run; one that was ended but not yet reaped does not. A launch that fails may end its
    processes before they have written a number, or made the file."""
    file = cwd / "pids"
    numbers = [int(number) for number in file.read_text().split()] if file.exists() else []
    return [number for number in numbers if _runs(number)]


def _runs(number: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


@pytest.fixture
def clean(tmp_path: Path) -> Iterator[Path]:
    """A directory of the test's own; what is left running in it is ended, so that a failure harms no other test."""
    yield tmp_path
    for number in alive(tmp_path):
        os.kill(number, signal.SIGKILL)


# -- the contract --------------------------------------------------------------------------------------------


def test_every_process_gets_the_whole_contract() -> None:
    names = "$TTPU_COORDINATOR $TTPU_NUM_PROCESSES $TTPU_PROCESS_ID $TTPU_LOCAL_DEVICES"
    done = shell(f"echo {names}", "--devices-per-process", "4", processes=3)
    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert [line[2:] for line in lines] == [["3", "0", "4"], ["3", "1", "4"], ["3", "2", "4"]]
    (address,) = {line[1] for line in lines}
    assert address.startswith("127.0.0.1:")


def test_a_contract_is_what_its_environment_says() -> None:
    contract = Contract("10.0.0.2:8476", 8, 3, 4, 60)
    assert contract_of(contract.environment()) == contract
    assert contract_of({"TTPU_COORDINATOR": "auto"}) == Contract("auto")
    assert contract_of({"PATH": "/bin", "TTPU_PROCESS_ID": ""}) is None


def test_what_the_callers_shell_has_of_an_older_launch_reaches_no_process() -> None:
    stale = {"TTPU_LOCAL_DEVICES": "7", "TTPU_PROCESS_ID": "5", "TTPU_NUM_PROCESSES": "9"}
    assert contract_of({**stale, **Contract("auto").environment()}) == Contract("auto")
    done = launch("--", "sh", "-c", "echo [$TTPU_LOCAL_DEVICES] $TTPU_PROCESS_ID", cwd=None, **stale)
    assert done.stdout == "[0] [] 0\n"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TTPU_PROCESS_ID": "1"}, "TTPU_PROCESS_ID is set .* TTPU_COORDINATOR and TTPU_NUM_PROCESSES are not"),
        ({"TTPU_COORDINATOR": "a:1", "TTPU_PROCESS_ID": "0"}, "TTPU_NUM_PROCESSES is not"),
        ({"TTPU_COORDINATOR": "a:1", "TTPU_NUM_PROCESSES": "2", "TTPU_PROCESS_ID": "2"}, "numbered 0 to 1"),
        ({"TTPU_COORDINATOR": "a", "TTPU_NUM_PROCESSES": "2", "TTPU_PROCESS_ID": "0"}, "a host and a port are needed"),
        ({"TTPU_COORDINATOR": "fd00::1:9", "TTPU_NUM_PROCESSES": "2", "TTPU_PROCESS_ID": "0"}, r"\[fd00::1\]:8476"),
        ({"TTPU_COORDINATOR": "a:1", "TTPU_NUM_PROCESSES": "two", "TTPU_PROCESS_ID": "0"}, "whole number of 1 or more"),
        ({"TTPU_COORDINATOR": "a:1", "TTPU_NUM_PROCESSES": "2", "TTPU_PROCESS_ID": "-1"}, "whole number of 0 or more"),
    ],
)
def test_a_contract_that_is_half_set_or_contradicts_itself_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        contract_of(variables)


# -- meeting -------------------------------------------------------------------------------------------------


def meeting(*numbers: int, count: int, timeout: int = 1) -> list[str]:
    """What each of several processes says after it tried to meet the others: "" or an error."""
    port = free_port()
    code = (
        "import sys\nfrom ttpu_core.errors import LaunchError\n"
        "from ttpu_core.processes import Contract\nfrom ttpu_launch.rendezvous import meet\n"
        f"try:\n    meet(Contract('127.0.0.1:{port}', int(sys.argv[2]), int(sys.argv[1]), timeout={timeout}))\n"
        "except LaunchError as error:\n    print(error)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(number), str(count)], stdout=subprocess.PIPE, text=True)
        for number in numbers
    ]
    return [process.communicate(timeout=30)[0].strip() for process in processes]


def test_processes_meet_in_any_order_of_starting() -> None:
    assert meeting(2, 1, 0, count=3, timeout=20) == ["", "", ""]


def test_everybody_is_told_which_processes_did_not_come() -> None:
    answers = meeting(0, 2, count=4, timeout=2)
    assert all("after 2 s processes 1, 3 had not come" in answer for answer in answers)


def test_a_process_whose_number_is_taken_ends_the_meeting() -> None:
    answers = meeting(0, 1, 1, count=3, timeout=20)
    assert all("two processes came as number 1 of 3" in answer for answer in answers), answers


def test_a_coordinator_that_is_not_there_is_named() -> None:
    port = free_port()
    with pytest.raises(LaunchError, match=rf"process 1 of 2 was to meet process 0 at 127.0.0.1:{port}, .* refused"):
        meet(Contract(f"127.0.0.1:{port}", 2, 1, timeout=1))


def test_a_port_that_is_taken_is_named() -> None:
    import socket

    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"listen at port {port} .*\(another program has it\)"):
            meet(Contract(f"127.0.0.1:{port}", 2, 0, timeout=1))


# -- output --------------------------------------------------------------------------------------------------


def test_each_line_carries_the_number_of_its_process_also_one_without_an_end() -> None:
    done = shell("echo out $TTPU_PROCESS_ID; echo err >&2; printf half")
    assert sorted(done.stdout.splitlines()) == ["[0] half", "[0] out 0", "[1] half", "[1] out 1"]
    assert sorted(done.stderr.splitlines()) == ["[0] err", "[1] err"]
    assert done.returncode == 0


def test_lines_of_several_processes_are_never_mixed() -> None:
    script = "i=0; while [ $i -lt 300 ]; do printf 'aaaaaaaaaa'; printf 'bbbbbbbbbb\\n'; i=$((i+1)); done"
    done = shell(script, processes=4)
    lines = done.stdout.splitlines()
    assert len(lines) == 1200
    assert {line[4:] for line in lines} == {"a" * 10 + "b" * 10}


def test_bytes_that_are_no_text_do_not_stop_it() -> None:
    done = shell(r"printf '\377\n'; echo on", processes=1)
    assert done.stdout.splitlines() == ["[0] �", "[0] on"]


def test_a_stdout_that_is_closed_ends_the_processes(clean: Path) -> None:
    script = f"{SLEEPERS.replace('wait', 'while true; do echo on; sleep 0.05; done')}"
    line = shlex.join([*TTPU, "launch", "--grace", "1", "--", "sh", "-c", script])
    subprocess.run(["sh", "-c", f"{line} | head -n 1"], cwd=clean, env=environment(), timeout=30, capture_output=True)
    until(lambda: alive(clean) == [])


# -- ends ----------------------------------------------------------------------------------------------------


def test_the_first_to_fail_ends_the_rest_and_is_shown_with_its_last_lines() -> None:
    began = time.monotonic()
    done = shell('[ $TTPU_PROCESS_ID = 0 ] && sleep 1000; seq 100 >&2; echo "no room" >&2; exit 7')
    assert done.returncode == 7
    assert time.monotonic() - began < 20
    report = done.stderr[done.stderr.index("ttpu launch:") :].splitlines()
    assert report[0] == "ttpu launch: process 1 ended with exit code 7, so the other was ended too:"
    assert report[-1] == "  | no room"
    assert report[2] == "  | 82" and len(report) == 22  # the last twenty of stderr


def test_a_process_that_a_signal_ends_is_reported_as_a_shell_would() -> None:
    done = shell("kill -9 $$", processes=1)
    assert done.returncode == 128 + signal.SIGKILL
    assert "process 0 was ended by SIGKILL, and left nothing on stderr" in done.stderr


def test_a_command_that_does_not_exist_is_one_sentence() -> None:
    done = launch("--", "no-such-command")
    assert done.returncode == 127
    assert "no-such-command cannot be run on" in done.stderr


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(clean: Path) -> None:
    script = SLEEPERS.replace("wait", "[ $TTPU_PROCESS_ID = 1 ] && exit 3; wait")
    done = shell(f"trap '' TERM; {script}", "--grace", "0.5", cwd=clean)
    assert done.returncode == 3
    assert (clean / "pids").read_text().split()
    assert alive(clean) == []


def test_what_a_process_left_in_the_background_ends_with_it(clean: Path) -> None:
    done = shell("sleep 1000 & echo $! >> pids", cwd=clean)
    assert done.returncode == 0
    assert (clean / "pids").read_text().split()
    assert alive(clean) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_processes(number: signal.Signals, clean: Path) -> None:
    process = started(SLEEPERS, clean, "--nproc-per-node", "2")
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert alive(clean) == []


def test_a_second_ctrl_c_waits_for_nobody(clean: Path) -> None:
    process = started(f"trap '' TERM; {SLEEPERS}", clean, "--nproc-per-node", "2", "--grace", "1000")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert alive(clean) == []


def test_a_launcher_that_is_killed_leaves_no_process(clean: Path) -> None:
    process = started(f"trap '' TERM; {SLEEPERS}", clean, "--nproc-per-node", "2", "--grace", "0.5")
    process.kill()
    process.communicate(timeout=30)
    until(lambda: alive(clean) == [])


# -- hosts ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_ssh(tmp_path: Path) -> str:
    """Takes the place of ssh: notes the host and runs the command here, without this environment, and with a stdin that
    ends when its own does."""
    script = tmp_path / "fake-ssh"
    script.write_text(f"#!{sys.executable}\n{FAKE_SSH}")
    script.chmod(0o755)
    return str(script)


def on_hosts(fake_ssh: str, script: str, cwd: Path, *options: str, **more: str) -> "subprocess.CompletedProcess[str]":
    where = [*options] or ["--hosts", "ada@tpu-a,tpu-b"]
    return launch(
        *where, "--ssh", fake_ssh, "--coordinator", "127.0.0.1:9", "--", "sh", "-c", script,
        cwd=cwd, HOSTS=str(cwd / "hosts"), **more,
    )  # fmt: skip


def test_hosts_run_a_process_each_in_the_same_directory(fake_ssh: str, tmp_path: Path) -> None:
    here = tmp_path / "a b"
    here.mkdir()
    done = on_hosts(fake_ssh, "echo $TTPU_PROCESS_ID of $TTPU_NUM_PROCESSES at $TTPU_COORDINATOR in $PWD", here)
    assert sorted(done.stdout.splitlines()) == [f"[{n}] {n} of 2 at 127.0.0.1:9 in {here}" for n in (0, 1)], done.stderr
    assert sorted((here / "hosts").read_text().split()) == ["ada@tpu-a", "tpu-b"]


def test_hosts_get_the_variables_that_matter_and_those_asked_for(fake_ssh: str, tmp_path: Path) -> None:
    done = on_hosts(
        fake_ssh, "echo $XLA_FLAGS, $TPU_WORKER_ID, $MINE, $GIVEN", tmp_path,
        "--hosts", "tpu-a", "--env", "MINE", "--env", "GIVEN=it's $HOME",
        XLA_FLAGS="--xla_a=1", MINE="m", TPU_WORKER_ID="0",
    )  # fmt: skip
    assert done.stdout == "[0] --xla_a=1, , m, it's $HOME\n"


def test_a_secret_that_hosts_get_is_in_no_list_of_processes(fake_ssh: str, tmp_path: Path) -> None:
    script = "echo $HF_TOKEN; ps -eo args | grep -c '[s]ecret-1234'"
    done = on_hosts(fake_ssh, script, tmp_path, "--hosts", "tpu-a", HF_TOKEN="secret-1234")
    assert done.stdout == "[0] secret-1234\n[0] 0\n"


def test_a_host_that_cannot_be_reached_ends_the_rest(fake_ssh: str, clean: Path) -> None:
    done = on_hosts(fake_ssh, SLEEPERS, clean, "--hosts", "tpu-a,gone", "--grace", "1")
    assert done.returncode == 255
    assert "process 1 on gone ended with exit code 255 (ssh's own: it could not connect" in done.stderr
    until(lambda: alive(clean) == [])


def test_a_lost_connection_ends_the_process_at_its_far_end(fake_ssh: str, clean: Path) -> None:
    where = ["--hosts", "tpu-a,tpu-b", "--coordinator", "127.0.0.1:9", "--ssh", fake_ssh]
    process = started(SLEEPERS, clean, *where, "--grace", "0.5", HOSTS=str(clean / "hosts"))
    process.kill()
    process.communicate(timeout=30)
    until(lambda: alive(clean) == [])


@pytest.mark.parametrize(
    ("ssh", "message"),
    [
        ("no-such-ssh -T", "process 0 on tpu-a was to be started by 'no-such-ssh', which cannot be run (No such file"),
        ("ssh 'x", '--ssh "ssh \'x" was given, but a quote or escape in it is not closed'),
        ("", "--ssh '' was given, but it is empty"),
    ],
    ids=["not there", "half a quote", "empty"],
)
def test_an_ssh_that_cannot_be_run_is_one_sentence(ssh: str, message: str) -> None:
    done = launch("--hosts", "tpu-a", "--ssh", ssh, "--", "x")
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_ssh_notices_a_dead_connection() -> None:
    (task,) = ssh_tasks(["x"], hosts_of("tpu-a", 1), Contract("tpu-a:1"), {}, python="python3")
    assert task.guard[:-2] == ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")


def test_a_host_file_has_a_host_a_line(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the slice\ntpu-a slots=2\n\nada@tpu-b  # the other\n")
    assert hosts_in(file, 1) == [Host("tpu-a", 2), Host("ada@tpu-b", 1)]
    file.write_text("tpu-a cpus=2\n")
    with pytest.raises(LaunchError, match=r"line 1 .*'tpu-a cpus=2', but a host and at most slots=N"):
        hosts_in(file, 1)
    with pytest.raises(LaunchError, match="cannot be read"):
        hosts_in(tmp_path / "none", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a,a", "a is there twice"), (" , ", "names no host"), ("-oProxyCommand=x", "not the name of a host")],
)
def test_hosts_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        hosts_of(text, 1)


def test_process_0_listens_on_the_first_host_unless_told_otherwise() -> None:
    hosts = hosts_of("ada@tpu-a,tpu-b", 1)
    assert coordinator_of(hosts, None) == "tpu-a:8476"
    assert coordinator_of(hosts, ":99") == "tpu-a:99"
    assert coordinator_of(hosts, "10.0.0.1") == "10.0.0.1:8476"
    assert coordinator_of(hosts, "[fd00::1]:99") == "[fd00::1]:99"
    assert coordinator_of(hosts_of("ada@fd00::1,fd00::2", 1), None) == "[fd00::1]:8476"
    assert coordinator_of(hosts_of("fd00::1", 1), ":99") == "[fd00::1]:99"
    with pytest.raises(LaunchError, match="HOST, HOST:PORT or :PORT"):
        coordinator_of(hosts, "a:b:c")
    with pytest.raises(LaunchError, match="the other hosts resolve that name to themselves"):
        coordinator_of(hosts_of("localhost,tpu-b", 1), None)


def test_a_variable_to_be_passed_must_be_there() -> None:
    assert passed_on(asked_for(["A", "B=x=y"]), {"A": "1"}) == {"A": "1", "B": "x=y"}
    with pytest.raises(LaunchError, match="--env NONE was given, but NONE is not set here"):
        passed_on(asked_for(["NONE"]), {})
    with pytest.raises(LaunchError, match="--env 'A B=1' was given, but a variable's name has letters"):
        asked_for(["A B=1"])


# -- the command line ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command was given"),
        (["--hosts", "a", "--slurm", "--", "x"], "--hosts and --slurm were given"),
        (["--tpu-name", "a", "--", "x"], "only with --tpu-pod"),
        (["--tpu-pod", "--tpu-name", "a", "--", "x"], "without --zone"),
        (["--image", "a", "--", "x"], "only with --gke"),
        (["--hosts", "", "--slurm", "--", "x"], "--hosts and --slurm were given"),
        (["--", "ttpu", "chat", "./llama"], "a conversation needs one terminal"),
        (["--", "ttpu", "launch", "x"], "one launch starts all processes"),
    ],
)
def test_what_makes_no_sense_is_one_sentence_and_status_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["launch", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--nodes 1", "--nodes was given for processes on this machine, but it is read only with --slurm-s"),
        ("--namespace default", "--namespace was given for processes on this machine"),
        ("--force", "only with --slurm-script or --gke"),
        ("--ssh ssh", "only with --hosts or --hostfile"),
        ("--tpu-pod --tpu-name a --zone z --nproc-per-node 8", "--nproc-per-node was given with --tpu-pod and "),
        ("--tpu-pod --devices-per-process 8", "--devices-per-process was given with --tpu-pod, but it is read"),
        ("--tpu-pod --zone z", "only with --tpu-pod and --tpu-name"),
        ("--gke f --nproc-per-node 1", "only on this machine or with --hosts or --hostfile or --slurm-script"),
        ("--slurm --nproc-per-node 2", "--nproc-per-node was given with --slurm, but it is read"),
        ("--slurm-script f --secret a", "--secret was given with --slurm-script, but"),
    ],
)
def test_an_option_that_its_place_does_not_read_is_refused_not_dropped(arguments: str, message: str) -> None:
    result = CliRunner().invoke(app, ["launch", *arguments.split(), "--", "x"])
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_every_option_says_which_places_read_it() -> None:
    parameters = get_command(launch_app).params
    assert {parameter.name for parameter in parameters} == set(READ_BY)
    assert all(set(places) <= set(PLACES) for places in READ_BY.values())


def test_a_python_that_cannot_watch_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "waitid")
    result = CliRunner().invoke(app, ["launch", "--", "x"])
    assert result.exit_code == 2
    assert "this Python has no os.waitid" in result.stderr and result.stderr.count("\n") == 1


def test_options_after_the_command_are_the_commands_own() -> None:
    line = "launch --dry-run ttpu generate x --max_new_tokens 3 --timeout 5"
    result = CliRunner().invoke(app, line.split())
    assert result.stdout.endswith("-m ttpu_core.cli.main generate x --max_new_tokens 3 --timeout 5\n")
    assert "TTPU_TIMEOUT=300" in result.stdout and "TTPU_LOCAL_DEVICES" not in result.stdout


def test_a_dry_run_shows_all_variables_of_a_process_but_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"HF_TOKEN": "hf_1", "TTPU_API_KEY": "k1", "TTPU_SECRET": "s1", "TTPU_PASSWORD": "p1"}
    for name, value in {"XLA_FLAGS": "--a=1 --b=2", "MINE": "m1", **secrets}.items():
        monkeypatch.setenv(name, value)
    line = ["launch", "--hosts", "tpu-a", "--env", "FOO=two words", "--env", "EMPTY=", "--env", "MINE", "--dry-run"]
    (said,) = CliRunner().invoke(app, [*line, "--", "x"]).stdout.splitlines()
    shown = dict(word.split("=", 1) for word in shlex.split(said) if "=" in word)
    wanted = {"XLA_FLAGS": "--a=1 --b=2", "FOO": "two words", "EMPTY": "", "TTPU_NUM_PROCESSES": "1"}
    assert shown.items() >= {**wanted, **{name: f"<{name}>" for name in ("MINE", *secrets)}}.items()
    (here,) = CliRunner().invoke(app, ["launch", "--env", "FOO=bar", "--dry-run", "--", "x"]).stdout.splitlines()
    assert "FOO=bar" in here.split() and "XLA_FLAGS" not in here  # inherited, and not passed on


def test_a_script_is_run_by_this_python(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.executable, sys.argv[1:])")
    done = launch("--", "script.py", "--flag", cwd=tmp_path)
    assert done.stdout == f"[0] {sys.executable} ['--flag']\n"


def test_launching_loads_no_framework() -> None:
    rooms = "supervisor, places, slurm, gke, tpu_pod, rendezvous, guard, files, command, script, options"
    assert loaded_after(f"from ttpu_launch import {rooms}", HEAVY) == []


@pytest.mark.torch
def test_asking_what_a_backend_needs_loads_no_framework() -> None:
    asked = "from ttpu_launch.backends import LaunchedBackend\nfor name in ('jax', 'torch_xla'): LaunchedBackend(name)"
    assert loaded_after(asked, HEAVY) == []


def test_a_group_that_dies_is_started_again_as_often_as_asked(tmp_path: Path) -> None:
    script = 'echo "try ${TTPU_RESTART:-0}"; [ -n "$TTPU_RESTART" ] || [ "$TTPU_PROCESS_ID" = 0 ] || kill -9 $$; exit 0'
    done = shell(script, "--restarts", "2", cwd=tmp_path)
    assert done.returncode == 0 and "restart 1 of 2" in done.stderr and "restart 2" not in done.stderr
    assert done.stdout.count("try 1") == 2 and "SIGKILL" in done.stderr
    refused = shell("exit 2", "--restarts", "1", processes=1, cwd=tmp_path)
    assert refused.returncode == 2 and "restart 1" not in refused.stderr
    failed = shell("exit 7", "--restarts", "1", processes=1, cwd=tmp_path)
    assert failed.returncode == 7 and failed.stderr.count("exit code 7") == 2
