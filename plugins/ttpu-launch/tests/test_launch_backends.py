"""`ttpu launch --backend torch_xla`: one process on each host, told how many devices a CPU simulates; more processes
only where TPUs join them."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ttpu_core.cli.main import app
from ttpu_core.errors import LaunchError
from ttpu_launch.backends import LaunchedBackend

# The variables are declared by the backend, which is installed where torch is.
pytestmark = pytest.mark.torch


def launched(*arguments: str, status: int = 0, **variables: str) -> str:
    """What a launch writes, with these variables and no others of torch_xla."""
    cleared = {"PJRT_DEVICE": None, "CPU_NUM_DEVICES": None}
    result = CliRunner().invoke(app, ["launch", "--backend", *arguments], env={**cleared, **variables})
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


def test_one_process_simulates_as_many_devices_as_it_is_told() -> None:
    said = launched("torch_xla", "--devices-per-process", "8", "--dry-run", "--", "train.py")
    assert "PJRT_DEVICE=CPU CPU_NUM_DEVICES=8" in said
    assert "TTPU_NUM_PROCESSES=1" in said


def test_other_backends_get_none_of_its_variables() -> None:
    assert "PJRT_DEVICE" not in launched("jax", "--devices-per-process", "8", "--dry-run", "--", "train.py")


def test_the_process_has_the_variables(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text("import os; print(os.environ['PJRT_DEVICE'], os.environ['CPU_NUM_DEVICES'])")
    import subprocess

    command = [sys.executable, "-m", "ttpu_core.cli.main", "launch", "--backend", "torch_xla"]
    done = subprocess.run(
        [*command, "--devices-per-process", "4", "--", str(script)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[0] CPU 4\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("torch_xla", "--nproc-per-node", "2"), "drives all devices of a host from one process"),
        (("torch_xla", "--hosts", "a,b"), "joins processes on TPUs only: pass --env PJRT_DEVICE=TPU"),
        (("torch_xla", "--hosts", "a", "--nproc-per-node", "4"), "with 4 processes on a host"),
        (("torch_xla", "--devices-per-process", "2", "--env", "PJRT_DEVICE=TPU"), "PJRT_DEVICE is 'TPU'"),
        (("torch_xla", "--slurm-script", "x", "--nodes", "2", "--devices-per-process", "4"), "on TPUs only"),
        (("torch_xla", "--slurm-script", "x", "--nodes", "2"), "for 2 processes, but torch_xla joins"),
        (("torch_xla", "--slurm-script", "x", "--nproc-per-node", "2"), "with --ntasks-per-node=1"),
        (
            ("torch_xla", "--slurm-script", "x", "--devices-per-process", "4", "--env", "PJRT_DEVICE=TPU"),
            "PJRT_DEVICE is 'TPU'",
        ),
        (("torch_tpu",), "processes are launched for jax or torch_xla"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    assert message in launched(*arguments, "--", "train.py", status=2)


def test_a_host_file_may_not_ask_for_two_processes_on_a_host(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("tpu-a slots=2\n")
    said = launched("torch_xla", "--hostfile", str(hosts), "--env", "PJRT_DEVICE=TPU", "--", "train.py", status=2)
    assert "with 2 processes on a host" in said


def test_hosts_with_tpus_run_a_process_each() -> None:
    said = launched("torch_xla", "--hosts", "a,b", "--env", "PJRT_DEVICE=TPU", "--dry-run", "--", "train.py")
    assert said.count("PJRT_DEVICE=TPU") == 2
    assert said == launched("torch_xla", "--hosts", "a,b", "--dry-run", "--", "train.py", PJRT_DEVICE="TPU")


def test_a_script_for_slurm_says_that_its_nodes_have_tpus_and_is_written_only_then(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    asked = ("torch_xla", "--slurm-script", str(script), "--nodes", "2")
    launched(*asked, "--", "train.py", status=2)
    assert not script.exists()
    launched(*asked, "--env", "PJRT_DEVICE=TPU", "--", "train.py")
    assert "export PJRT_DEVICE=TPU" in script.read_text()


STEP = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n[1-4]"}


def test_two_tasks_of_slurm_on_a_node_are_refused() -> None:
    there = {**STEP, "PJRT_DEVICE": "TPU"}
    task = ("torch_xla", "--slurm", "--dry-run", "--", "train.py")
    for name, value in (("SLURM_STEP_TASKS_PER_NODE", "1,2(x3)"), ("SLURM_NTASKS_PER_NODE", "2")):
        variables = {**there, name: value}
        assert "with 2 processes on a host" in launched(*task, status=2, **variables)
    fewer_than_the_job = {**there, "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}
    for variables in (fewer_than_the_job, there):
        assert "PJRT_DEVICE=TPU" in launched(*task, **variables)  # type: ignore[arg-type]
    variables = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    launched("jax", *task[1:], **variables)  # type: ignore[arg-type]


def test_a_worker_of_a_slice_uses_its_tpu() -> None:
    assert "PJRT_DEVICE=TPU" in launched("torch_xla", "--tpu-pod", "--dry-run", "--", "train.py")


@pytest.mark.parametrize(
    "where",
    [
        ("--tpu-pod", "--tpu-name", "slice", "--zone", "z"),
        ("--slurm-script", "job.sh"),
        ("--gke", "job.yaml", "--topology", "v5e:4x4", "--image", "i"),
    ],
)
def test_what_another_machine_launches_is_for_the_same_backend(where: tuple[str, ...]) -> None:
    words = launched("torch_xla", *where, "--dry-run", "--", "train.py").replace('", "', " ")
    assert "--backend torch_xla" in words
    assert "--backend" not in launched("jax", *where, "--dry-run", "--", "train.py")


def test_a_platform_that_is_named_already_stays() -> None:
    runs = LaunchedBackend("torch_xla")
    assert runs.variables_for(1, 2, {"PJRT_DEVICE": "CPU"}, on_tpu_worker=False)["CPU_NUM_DEVICES"] == "2"
    assert runs.variables_for(1, None, {"PJRT_DEVICE": "CPU"}, on_tpu_worker=True) == {"PJRT_DEVICE": "CPU"}
    assert runs.variables_for(1, None, {}, on_tpu_worker=False) == {}
    with pytest.raises(LaunchError, match="--devices-per-process 2 was given, but PJRT_DEVICE is 'TPU'"):
        runs.variables_for(2, 2, {"PJRT_DEVICE": "TPU"}, on_tpu_worker=False)
