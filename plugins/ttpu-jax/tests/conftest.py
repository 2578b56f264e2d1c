"""Eight virtual devices, so that sharded runs are tested on one CPU, and no programs kept in the user's home; set
before JAX is imported."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TTPU_COMPILE_CACHE", "off")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import pytest


@pytest.fixture(scope="session", autouse=True)
def kernels_count_nothing_from_the_end() -> Iterator[None]:
    """The interpreter of kernels asks of each index of each access whether it is negative, which is two thirds of a
    kernel's program and half of what lowering it takes. A JAX that does so elsewhere goes on doing it."""
    try:
        slicing = import_module("jax._src.lax.slicing")
        users = import_module("jax._src.state.discharge"), import_module("jax._src.pallas.hlo_interpreter")
    except ImportError:
        users = ()
    if not users:
        yield
        return
    names = "dynamic_slice", "dynamic_update_slice"
    changed = {name: partial(getattr(slicing, name), allow_negative_indices=False) for name in names}
    with ExitStack() as stack:
        for module, name in zip(users, ("lax_slicing", "slicing"), strict=True):
            if getattr(module, name, None) is slicing:
                stack.enter_context(mock.patch.object(module, name, SimpleNamespace(**vars(slicing) | changed)))
        yield


@pytest.fixture
def little_effort() -> Iterator[None]:
    """libtpu compiles in half the time, with the same kernels, layouts and collectives, but schedules less well."""
    import jax

    before = jax.config.jax_exec_time_optimization_effort
    jax.config.update("jax_exec_time_optimization_effort", -1.0)
    yield
    jax.config.update("jax_exec_time_optimization_effort", before)
