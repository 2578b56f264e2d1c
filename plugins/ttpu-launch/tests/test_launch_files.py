"""What `ttpu launch` writes for other launchers is what they read: YAML that says what was asked, a script that bash
runs, a gcloud command, and a contract out of SLURM's variables."""

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ttpu_core.cli.main import app
from ttpu_core.errors import LaunchError
from ttpu_core.processes import Contract
from ttpu_core.sharding.hardware import CHIPS, parse_topology
from ttpu_launch.gke import ACCELERATORS, JobSet
from ttpu_launch.slurm import first_node, slurm_contract
from ttpu_launch.tpu_pod import gcloud_command, worker_label

AWKWARD = ("ttpu", "generate", "/models/a b", "--prompt", 'it\'s "1: 2" # {x} 🜁\n%')


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["launch", *arguments])


def job_set(topology: str, **more: Any) -> dict[str, Any]:
    """The manifest as Kubernetes would read it."""
    yaml = pytest.importorskip("yaml")
    text = JobSet(AWKWARD, parse_topology(topology), "registry.example/ttpu:1", **more).yaml()
    manifest: dict[str, Any] = yaml.safe_load(text)
    return manifest


def expanded(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of a command's word or a variable's value: `$(NAME)` is the variable where there is one,
    `$$` is one `$`. kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#Container."""

    def meant(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", meant, text)


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def parts(manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The one replicated job, its pods and their container."""
    (job,) = manifest["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return job, pod, container


# -- GKE -----------------------------------------------------------------------------------------------------

# Hosts and chips of a host: cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus.
SLICES = {
    "v4:2x2x4": ("tpu-v4-podslice", "2x2x4", 1, 4, 4),
    "v5e:1x1": ("tpu-v5-lite-podslice", "1x1", 1, 1, 1),
    "v5e:2x4": ("tpu-v5-lite-podslice", "2x4", 1, 1, 8),
    "2*v5e:4x4": ("tpu-v5-lite-podslice", "4x4", 2, 4, 4),
    "v5p:2x2x2": ("tpu-v5p-slice", "2x2x2", 1, 2, 4),
    "3*v6e:4x8": ("tpu-v6e-slice", "4x8", 3, 8, 4),
    "tpu7x:2x2x4": ("tpu7x", "2x2x4", 1, 4, 4),
}


@pytest.mark.parametrize("topology", SLICES)
def test_a_job_set_has_a_job_for_each_slice_and_a_pod_for_each_host(topology: str) -> None:
    accelerator, size, slices, hosts, chips = SLICES[topology]
    manifest = job_set(topology)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    job, pod, container = parts(manifest)
    assert job["replicas"] == slices
    assert (job["template"]["spec"]["completions"], job["template"]["spec"]["parallelism"]) == (hosts, hosts)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": size,
    }
    assert container["resources"] == {"requests": {"google.com/tpu": chips}, "limits": {"google.com/tpu": chips}}


def test_every_chip_has_a_name_on_gke() -> None:
    assert set(ACCELERATORS) == set(CHIPS)


def test_the_command_arrives_as_it_was_given() -> None:
    _, _, container = parts(job_set("v5e:2x4", environment=(("HF_HOME", 'a: "b"'),)))
    assert container["command"] == ["ttpu", "launch", "--tpu-pod", "--", *AWKWARD]
    assert container["env"] == [{"name": "HF_HOME", "value": 'a: "b"'}]
    assert container["image"] == "registry.example/ttpu:1"


def test_kubernetes_expands_nothing_in_a_command_or_a_value() -> None:
    awkward = ("sh", "-c", "echo $(HOME) $HOME $$ $$(HOME) $", "$(")
    manifest = JobSet(awkward, parse_topology("v5e:2x4"), "a", environment=(("HOME", "x"), ("Y", "$(HOME)$"))).yaml()
    _, _, container = parts(pytest.importorskip("yaml").safe_load(manifest))
    assert tuple(expanded(word, {"HOME": "x"}) for word in container["command"][4:]) == awkward
    assert expanded(container["env"][1]["value"], {"HOME": "x"}) == "$(HOME)$"


def test_names_that_yaml_has_another_meaning_for_stay_names() -> None:
    namespace = "0" * 63  # Kubernetes takes digits, and 63 of them
    assert job_set("v5e:2x4", name="no", namespace="on")["metadata"] == {
        "name": "no", "namespace": "on", "annotations": job_set("v5e:2x4")["metadata"]["annotations"],
    }  # fmt: skip
    assert job_set("v5e:2x4", namespace=namespace)["metadata"]["namespace"] == namespace
    with pytest.raises(LaunchError, match=r"--namespace .* up to 63 lower-case letters"):
        job_set("v5e:2x4", namespace="a" * 64)


def test_a_variable_without_a_value_comes_from_a_secret_of_kubernetes() -> None:
    _, _, container = parts(job_set("v5e:2x4", environment=(("HF_TOKEN", None),), secret="hf"))
    assert container["env"] == [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "HF_TOKEN"}}}
    ]  # fmt: skip
    with pytest.raises(LaunchError, match="write --env HF_TOKEN=VALUE, or create a Kubernetes Secret with the key"):
        job_set("v5e:2x4", environment=(("HF_TOKEN", None),))
    with pytest.raises(LaunchError, match="--secret 'H_F' was given"):
        job_set("v5e:2x4", secret="H_F")


def test_workers_wait_and_end_as_they_were_asked_to() -> None:
    _, pod, container = parts(job_set("v5e:2x4", timeout=60, grace=45.5))
    assert container["command"][:8] == ["ttpu", "launch", "--tpu-pod", "--timeout", "60", "--grace", "45.5", "--"]
    assert pod["terminationGracePeriodSeconds"] > 45.5
    assert parts(job_set("v5e:2x4"))[1]["terminationGracePeriodSeconds"] == 30


@pytest.mark.parametrize("kind", ["gke", "slurm-script"])
def test_a_file_that_holds_a_value_can_be_read_by_its_owner_alone(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "job"
    asked = [f"--{kind}", str(file), *(["--topology", "v5e:4x4", "--image", "a"] if kind == "gke" else [])]
    assert run(*asked, "--", "x").exit_code == 0
    assert mode(file) & stat.S_IRUSR and "alone" not in run(*asked, "--force", "--", "x").stderr
    done = run(*asked, "--force", "--env", "A=secret-1234", "--env", "B=2", "--", "x")
    assert f"{file} is written, and can be read by you alone: it holds the values of A and B; next" in done.stderr
    assert mode(file) == (0o600 if kind == "gke" else 0o700)
    assert "secret-1234" in file.read_text()


def test_other_hosts_can_be_asked_for_and_impossible_ones_are_refused() -> None:
    job, _, container = parts(job_set("v5e:2x4", chips_per_host=4))
    assert (job["template"]["spec"]["completions"], container["resources"]["limits"]["google.com/tpu"]) == (2, 4)
    with pytest.raises(LaunchError, match="hosts of v5p for v5p:2x2x2 have 1 or 4 chips"):
        job_set("v5p:2x2x2", chips_per_host=8)


@pytest.mark.parametrize("name", ["Big", "-a", "a_b", "a" * 41])
def test_a_name_that_kubernetes_would_refuse_is_refused_first(name: str) -> None:
    with pytest.raises(LaunchError, match="lower-case letters"):
        job_set("v5e:2x4", name=name)


def test_the_command_for_a_written_file_quotes_its_path(tmp_path: Path) -> None:
    file = tmp_path / "my job"
    job_set = ("--gke", str(file), "--topology", "v5e:4x4", "--image", "a/b")
    assert f"next: kubectl apply -f '{file}'\n" in run(*job_set, "--", "x").stderr
    assert f"next: sbatch '{file}'\n" in run("--slurm-script", str(file), "--force", "--", "x").stderr


def test_the_manifest_is_a_file_that_is_not_replaced_unasked(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    asked = ["--gke", str(file), "--topology", "v5e:4x4", "--image", "a/b"]
    assert run(*asked, "--", "ttpu", "info", "x").stderr == f"{file} is written; next: kubectl apply -f {file}\n"
    first = file.read_text()
    refused = run(*asked, "--name", "other", "--", "ttpu", "info", "x")
    assert refused.exit_code == 2 and "it exists: pass --force" in refused.stderr
    assert file.read_text() == first
    assert run(*asked, "--name", "other", "--force", "--", "ttpu", "info", "x").exit_code == 0
    assert 'name: "other"' in file.read_text()
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image", "a"], "without --topology"),
        (["--topology", "v5e:4x4"], "without --image"),
        (["--topology", "v9:4x4", "--image", "a"], "the chips are"),
    ],
)
def test_a_manifest_needs_a_slice_and_an_image(arguments: list[str], message: str, tmp_path: Path) -> None:
    refused = run("--gke", str(tmp_path / "job.yaml"), *arguments, "--", "x")
    assert refused.exit_code == 2 and message in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    for place in (tmp_path / "no" / "job.yaml", tmp_path):
        refused = run("--gke", str(place), "--topology", "v5e:4x4", "--image", "a", "--", "x")
        assert refused.exit_code == 2 and refused.stderr.count("\n") == 1


# -- SLURM ---------------------------------------------------------------------------------------------------

# srun's part: two tasks with the variables that SLURM gives them, which stop when one fails.
FAKE_SRUN = """#!/bin/bash
echo "srun $1" >&2
shift
export SLURM_JOB_ID=77 SLURM_NTASKS=2 SLURM_STEP_NODELIST='tpu[003-004]'
SLURM_PROCID=0 "$@" & first=$!
SLURM_PROCID=1 "$@"
status=$?
wait $first || status=$?
exit $status
"""


def test_the_script_runs_the_command_once_per_task_with_its_number(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    ttpu = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ttpu_core.cli.main "$@"\n'
    programs = {"srun": FAKE_SRUN, "ttpu": ttpu}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    script = tmp_path / "job.sh"
    show = 'import os, sys; print(os.environ["TTPU_PROCESS_ID"], os.environ["TTPU_COORDINATOR"], sys.argv[1:])'
    asked = ["--slurm-script", str(script), "--nodes", "2", "--devices-per-process", "4", "--env", "X=it's"]
    assert run(*asked, "--", "python3", "-c", show, *AWKWARD[2:]).exit_code == 0
    assert script.stat().st_mode & stat.S_IXUSR
    environment = {**os.environ, "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([str(script)], env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    port = 61440 + 77
    expected = [f"[{number}] {number} tpu003:{port} {list(AWKWARD[2:])}" for number in (0, 1)]
    assert sorted(done.stdout.splitlines()) == expected
    assert "srun --kill-on-bad-exit=1" in done.stderr


def test_the_script_asks_for_what_was_asked(tmp_path: Path) -> None:
    asked = "--nodes 4 --nproc-per-node 2 --time 2:00:00 --partition tpu --name train --sbatch=--account=lab"
    text = run("--slurm-script", "x", *asked.split(), "--dry-run", "--", "train.py").stdout
    comments = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert {
        "--job-name=train", "--nodes=4", "--ntasks-per-node=2", "--time=2:00:00", "--partition=tpu", "--account=lab",
    } < set(comments)  # fmt: skip
    assert text.startswith("#!/bin/bash\n#SBATCH")
    assert text.endswith("ttpu launch --slurm -- train.py\n")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_a_variable_without_a_value_is_not_written_into_the_script(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    asked = "--env HF_TOKEN --timeout 9 --grace 3"
    assert run("--slurm-script", str(script), *asked.split(), "--", "x").exit_code == 0
    text = script.read_text()
    assert "srun --kill-on-bad-exit=1 ttpu launch --slurm --timeout 9 --grace 3 -- x\n" in text
    (tmp_path / "srun").write_text("#!/bin/sh\necho $HF_TOKEN\n")
    (tmp_path / "srun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def job(**more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([str(script)], env=environment | more, capture_output=True, text=True, timeout=30)

    assert job(HF_TOKEN="t").stdout == "t\n"
    unset = job()
    assert unset.returncode and "HF_TOKEN: is not set in the job: set it where sbatch is called" in unset.stderr


def test_an_option_that_is_none_is_refused(tmp_path: Path) -> None:
    refused = run("--slurm-script", str(tmp_path / "x"), "--sbatch", "account=lab", "--", "train.py")
    assert refused.exit_code == 2 and "does not begin with '-'" in refused.stderr


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("tpu1", "tpu1"),
        ("tpu1,gpu[1-2]", "tpu1"),
        ("tpu[003-010,012],gpu1", "tpu003"),
        ("tpu[7,9]-ib", "tpu7-ib"),
        ("a-b.c.d", "a-b.c.d"),
        ("rack[1-2]node[1-4]", "rack1node1"),
        ("rack[2,4]node[07-08]-ib,x", "rack2node07-ib"),
    ],
)
def test_the_first_node_of_a_compressed_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", [",a", "a[1-2", "a[]", "a[x]", "a]"])
def test_a_list_without_a_first_node_is_refused(nodes: str) -> None:
    with pytest.raises(LaunchError, match="a compressed list of hosts"):
        first_node(nodes)


def test_a_task_of_srun_has_its_contract() -> None:
    variables = {"SLURM_JOB_ID": "5000", "SLURM_NTASKS": "8", "SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "n[2-9]"}
    assert slurm_contract(variables, local_devices=4, timeout=9) == Contract("n2:62344", 8, 3, 4, 9)


@pytest.mark.parametrize(
    ("variables", "where"),
    [({}, "outside an allocation"), ({"SLURM_JOB_ID": "1"}, "inside an allocation, but not by srun")],
)
def test_what_is_no_task_of_srun_is_told_how_to_be_one(variables: dict[str, str], where: str) -> None:
    with pytest.raises(LaunchError, match=f"{where} .*run `srun --kill-on-bad-exit=1 ttpu launch --slurm"):
        slurm_contract(variables)


# -- TPU slices ----------------------------------------------------------------------------------------------


def test_gcloud_runs_the_command_on_all_workers() -> None:
    argv = gcloud_command(
        AWKWARD, "slice", zone="us-east5-b", project="me", directory="~me/a b", environment={"X": "it's"}, timeout=60
    )
    assert argv[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "slice"]
    assert argv[6:9] == ["--zone=us-east5-b", "--project=me", "--worker=all"]
    there = argv[9].removeprefix("--command=")
    expected = ["cd", "~me/a b", "&&", "X=it's", "ttpu", "launch", "--tpu-pod", "--timeout", "60", "--", *AWKWARD]
    assert shlex.split(there) == expected
    shown = run("--tpu-pod", "--tpu-name", "slice", "--zone", "z", "--dry-run", "--", "ttpu", "info", "x")
    assert shlex.split(shown.stdout)[-1] == "--command=ttpu launch --tpu-pod -- ttpu info x"


def test_gcloud_passes_on_how_long_workers_wait_and_its_dry_run_shows_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-1234")
    asked = "--tpu-pod --tpu-name slice --zone z --grace 3 --timeout 9 --env HF_TOKEN --dry-run"
    there = shlex.split(run(*asked.split(), "--", "x").stdout)[-1]
    assert there == "--command=HF_TOKEN='<HF_TOKEN>' ttpu launch --tpu-pod --timeout 9 --grace 3 -- x"


def test_a_value_that_gcloud_shows_to_everybody_is_announced(tmp_path: Path) -> None:
    (tmp_path / "gcloud").write_text("#!/bin/sh\n")
    (tmp_path / "gcloud").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "ttpu_core.cli.main", "launch", "--tpu-pod", "--tpu-name", "slice", "--zone", "z",
         "--env", "HF_TOKEN=a", "--", "x"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("the value of HF_TOKEN can be read in lists of processes, here and on the workers")


def test_a_worker_leaves_its_place_to_the_runtime() -> None:
    code = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('TTPU_')}))"
    done = subprocess.run(
        [sys.executable, "-m", "ttpu_core.cli.main", "launch", "--tpu-pod", "--", sys.executable, "-c", code],
        env={**os.environ, "TPU_WORKER_ID": "3"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith("[3] ")
    told = json.loads(done.stdout.removeprefix("[3] "))
    assert told["TTPU_COORDINATOR"] == "auto" and told["TTPU_PROCESS_ID"] == ""


def test_workers_of_several_slices_are_told_apart() -> None:
    assert worker_label({"TPU_WORKER_ID": "3"}) == "3"
    assert worker_label({"TPU_WORKER_ID": "3", "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}) == "1.3"
