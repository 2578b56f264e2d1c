"""A process of torch_xla takes from `ttpu launch` what it is told, and refuses what torch_xla cannot do."""

from __future__ import annotations

import pytest

from ttpu_core.errors import LaunchError
from ttpu_core.processes import AUTO, Contract, is_first_process
from ttpu_torch_xla.xla.distributed import after_start, before_start

pytestmark = pytest.mark.torch

ALONE = Contract("127.0.0.1:8476", 1, 0, local_devices=4)


def test_a_process_that_nobody_launched_is_left_alone() -> None:
    environment = {"PATH": "/bin"}
    before_start(environment)
    after_start(lambda: (1, 2), environment)
    assert environment == {"PATH": "/bin"}


def test_simulated_devices_are_those_of_the_contract() -> None:
    environment = ALONE.environment()
    before_start(environment)
    assert (environment["PJRT_DEVICE"], environment["CPU_NUM_DEVICES"]) == ("CPU", "4")


def test_what_is_set_already_stays() -> None:
    environment = ALONE.environment() | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    before_start(environment)
    assert environment["CPU_NUM_DEVICES"] == "8"


def test_several_processes_on_a_cpu_are_refused() -> None:
    environment = Contract("127.0.0.1:8476", 2, 1, local_devices=4).environment()
    with pytest.raises(LaunchError, match="process 1 of 2 on a CPU, but torch_xla joins processes on TPUs only"):
        before_start(environment)


def test_on_a_slice_the_runtime_says_which_process_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Contract(AUTO).environment()
    before_start(environment)
    after_start(lambda: (3, 4), environment)
    assert (environment["TTPU_PROCESS_ID"], environment["TTPU_NUM_PROCESSES"]) == ("3", "4")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not is_first_process()
