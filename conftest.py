"""Tests start children that are interrupted, so a signal that this process's shell ignores must not be ignored in them:
`nohup make test &` ignores both. A handler, unlike "ignore", is not inherited by a child.

The collector of reference cycles looks less often than Python's default, because each look at the objects of torch, jax
and transformers takes long, the longer the more tests a worker has run: a sixth of the time of collecting the tests,
and a twelfth of running them. What is there
when all tests are collected stays, and is not looked at again: a test that calls the collector waited for it for most
of a second."""

import gc
import signal
from itertools import groupby

import pytest

gc.set_threshold(100_000, 10, 10)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ends", action="store_true", help="of each parametrized test, run the first and the last case only"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The lane of the newest jax asks whether each path still runs, not whether each value is still right."""
    if not config.getoption("ends"):
        return
    kept, left_out = [], []
    for _, cases in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        first, *middle = cases
        kept += [first, *middle[-1:]]
        left_out += middle[:-1]
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def collector_starts_anew() -> None:
    """For a module whose tests call the collector: it looks at nothing that is there before them, which took it most of
    a second each time."""
    gc.collect()
    gc.freeze()
