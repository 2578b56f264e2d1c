"""Makes this process one of several, as its environment says (`ttpu_core.processes`). In: the contract; out:
`jax.devices()` are those of all processes. It comes before anything touches a device; a process that is alone is left
alone."""

from __future__ import annotations

import atexit
import io
import os
import re
import sys
import threading
from contextlib import suppress
from types import TracebackType

import jax
import numpy as np
from jax.sharding import Mesh

from ttpu_core.errors import LaunchError
from ttpu_core.processes import AUTO, NUM_PROCESSES, PROCESS_ID, Contract, contract_of, leave_at_once
from ttpu_launch.rendezvous import meet

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it

_WORDS = rb"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :"
GLOO_PEERS = re.compile(rb"[\d\s]*((" + _WORDS + rb")[\d\s]*)+")
"""A line of gloo's; threads write several at once, so that pieces of them stand in one. A line without its words, such
as a number, is somebody else's."""

DRAIN_SECONDS = 1.0
"""How long the end waits for what stands in the pipe; a child that is still running holds it open."""

_initialized = False


def initialize() -> None:
    """Join the other processes of this contract; once is enough, and more do nothing.

    On a CPU the processes talk through gloo. From here on an exception that nobody catches ends this process at once:
    JAX would otherwise wait at exit for the others, which may be waiting for this one.

    Raises:
        LaunchError: the contract is half set or contradicts itself, the others cannot be met in time, JAX has devices
            already, or "auto" finds no TPU slice.
    """
    global _initialized
    if _initialized:
        return
    contract = contract_of(os.environ)
    if contract is None:
        return
    try:
        _configure(contract)
        if contract.coordinator == AUTO:
            _join_slice(contract)
        elif contract.num_processes != 1:
            meet(contract)
            jax.distributed.initialize(
                contract.coordinator,
                contract.num_processes,
                contract.process_id,
                initialization_timeout=contract.timeout,
                cluster_detection_method="deactivate",
            )
    except RuntimeError as error:  # JAX's own words differ by release
        raise LaunchError(
            f"this process is to be one of several at {contract.coordinator}, but JAX refuses to join them "
            f"({_one_line(error)}): call ttpu_jax.distributed.initialize() before anything uses a device."
        ) from error
    _initialized = True
    if os.environ.get(NUM_PROCESSES) != "1":
        sys.excepthook = _end_at_once


def shared_seed(seed: int | None, mesh: Mesh | None) -> int | None:
    """`seed`, or where it is None and the mesh has devices of several processes, one that they have in common: what
    each would draw for itself would give each other tokens.

    All processes of such a mesh must come here. Without one each process runs by itself, and asks nobody.
    """
    if seed is not None or mesh is None or all(d.process_index == jax.process_index() for d in mesh.devices.flat):
        return seed
    from jax.experimental import multihost_utils

    drawn = np.frombuffer(os.urandom(4), np.uint32)
    return int(multihost_utils.broadcast_one_to_all(drawn)[0])


def _configure(contract: Contract) -> None:
    """What must be said before devices exist."""
    if contract.local_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", contract.local_devices)
    if jax.config.jax_platforms == "cpu":  # type: ignore[attr-defined]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if contract.num_processes != 1:
            _keep_stdout()
    # JAX's preemption service would catch the SIGTERM by which a launcher ends a process, which then went on.
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        jax.config.update("jax_enable_preemption_service", False)


def _join_slice(contract: Contract) -> None:
    """Let the TPU runtime say which process this is, and write it where the core looks."""
    try:
        jax.distributed.initialize(initialization_timeout=contract.timeout)
    except ValueError as error:
        raise LaunchError(
            f"this process is to be a worker of a TPU slice, but none can be found here ({_one_line(error)}): run "
            "`ttpu launch --tpu-pod` on the workers of a slice, or give it hosts (--hosts) elsewhere."
        ) from error
    os.environ[NUM_PROCESSES], os.environ[PROCESS_ID] = str(jax.process_count()), str(jax.process_index())


def _keep_stdout() -> None:
    """Give Python's stdout a descriptor of its own, because gloo writes to descriptor 1 how many peers it found, in the
    middle of what a user asked for. What else is written there goes to stderr: that of C libraries, and of a child
    process unless it is given `stdout=sys.stdout`."""
    stream = sys.stdout
    try:
        if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != 1:
            return
        stream.flush()
        own = os.dup(1)
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        os.close(writing)
    except (OSError, ValueError):  # closed, or replaced by something without a descriptor
        return
    reader = threading.Thread(target=_pass_on, args=(reading,), name="descriptor 1", daemon=True)
    reader.start()
    raw = os.fdopen(own, "wb", 0 if stream.write_through else -1)
    sys.stdout = kept = io.TextIOWrapper(
        raw,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    atexit.register(_give_back, kept, reader)


def _give_back(kept: io.TextIOWrapper, reader: threading.Thread) -> None:
    """Let descriptor 1 be stdout again, which closes the pipe, and wait for what still stands in it."""
    try:
        kept.flush()
        os.dup2(kept.fileno(), 1)
    except (OSError, ValueError):  # stdout was closed
        with suppress(OSError):
            os.close(1)
    reader.join(DRAIN_SECONDS)


def _pass_on(reading: int) -> None:
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            if GLOO_PEERS.fullmatch(line) is None:
                with suppress(OSError):  # without a stderr it still reads, or whoever writes would wait for ever
                    os.write(2, line)


def _end_at_once(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, traceback)
    leave_at_once(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")
