"""Lets processes find each other before a framework connects them, because a framework aborts if a process never
comes. `meet` returns when all processes are present, or raises an error that names the missing ones."""

from __future__ import annotations

import errno
import selectors
import socket
import time

from ttpu_core.errors import LaunchError
from ttpu_core.processes import PROCESS_ID, TIMEOUT, Contract

GREETING = "ttpu"
RETRY_SECONDS = 0.1
LONGEST_LINE = 256


def meet(contract: Contract) -> None:
    """Return once all processes are present. The port is then free again for the framework's own service.

    Process 0 listens at the coordinator's port. The other processes send it their number and wait for its answer.

    Raises:
        LaunchError: processes do not come in time, two have the same number, or the port is taken.
    """
    assert contract.num_processes is not None and contract.process_id is not None
    if contract.num_processes == 1:
        return
    if contract.process_id == 0:
        _receive_all(contract, contract.num_processes)
    else:
        _greet(contract, contract.num_processes, contract.process_id)


def _receive_all(contract: Contract, count: int) -> None:
    deadline = time.monotonic() + contract.timeout
    present: dict[int, socket.socket] = {}
    refusal: str | None = None
    try:
        with _listening(contract) as server, selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            pending: dict[socket.socket, bytes] = {}
            while len(present) < count - 1 and refusal is None and time.monotonic() < deadline:
                for key, _ in selector.select(min(1.0, max(0.0, deadline - time.monotonic()))):
                    if key.fileobj is server:
                        peer, _ = server.accept()
                        peer.setblocking(False)
                        pending[peer] = b""
                        selector.register(peer, selectors.EVENT_READ)
                        continue
                    assert isinstance(key.fileobj, socket.socket)
                    peer = key.fileobj
                    line = _line_of(peer, pending)
                    if line is None:
                        continue
                    selector.unregister(peer)
                    number, refusal = _number_in(line, count, present)
                    if number is None:
                        _tell(peer, refusal or "no")
                        peer.close()
                    else:
                        present[number] = peer
            for stranger in pending:
                stranger.close()
        # The port is closed before the answer is sent: its receivers then connect to the framework's service.
        missing = sorted(set(range(1, count)) - set(present))
        if refusal is None and missing:
            refusal = (
                f"{count} processes were to meet at {contract.coordinator}, but after {contract.timeout} s "
                f"{_processes(missing)} had not come: see why in their logs, check that port {contract.address[1]} of "
                f"that host is open to them, or give them longer ({TIMEOUT}, `ttpu launch --timeout`)."
            )
        for peer in present.values():
            _tell(peer, refusal or "go")
    finally:
        for peer in present.values():
            peer.close()
    if refusal is not None:
        raise LaunchError(refusal)


def _greet(contract: Contract, count: int, number: int) -> None:
    deadline = time.monotonic() + contract.timeout
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(contract.address, timeout=min(left, 5.0)) as connection:
                connection.sendall(f"{GREETING} {number} {count}\n".encode())
                # Process 0 waits as long as this one, so its refusal, which names the missing processes, comes in time.
                connection.settimeout(max(deadline + 5 - time.monotonic(), 1.0))
                with connection.makefile("rb") as answers:
                    answer = answers.readline(4096).decode(errors="replace").strip()
        except OSError as error:
            reason = (error.strerror or str(error) or type(error).__name__).lower()
        else:
            if answer == "go":
                return
            if answer:
                raise LaunchError(answer)
            reason = "the connection was closed"
        time.sleep(RETRY_SECONDS)
    raise LaunchError(
        f"process {number} of {count} was to meet process 0 at {contract.coordinator}, but could not for "
        f"{contract.timeout} s ({reason}): start process 0, check that this address is its own and that the port is "
        f"open, or wait longer ({TIMEOUT}, `ttpu launch --timeout`)."
    )


def _listening(contract: Contract) -> socket.socket:
    port = contract.address[1]
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        taken = "another program has it" if error.errno == errno.EADDRINUSE else str(error.strerror).lower()
        raise LaunchError(
            f"process 0 was to listen at port {port} of {contract.address[0]}, but cannot ({taken}): choose another "
            "port for the coordinator."
        ) from error


def _line_of(peer: socket.socket, pending: dict[socket.socket, bytes]) -> str | None:
    """A whole line; None if it is not complete yet; "" if the connection is closed."""
    try:
        chunk = peer.recv(LONGEST_LINE)
    except BlockingIOError:
        return None
    except OSError:
        chunk = b""
    pending[peer] += chunk
    if chunk and b"\n" not in pending[peer] and len(pending[peer]) < LONGEST_LINE:
        return None
    return pending.pop(peer).decode(errors="replace").strip()


def _number_in(line: str, count: int, present: dict[int, socket.socket]) -> tuple[int | None, str | None]:
    """The number in a greeting, or the reason why all processes must stop. (None, None) for a stranger."""
    words = line.split()
    if len(words) != 3 or words[0] != GREETING or not all(word.isdecimal() for word in words[1:]):
        return None, None  # a port scanner, or a connection that broke
    number, its_count = int(words[1]), int(words[2])
    if its_count != count or not 1 <= number < count:
        return None, (
            f"process 0 expects {count} processes, but a process came that is number {number} of {its_count}: give all "
            "of them the same number of processes."
        )
    if number in present:
        if _is_open(present[number]):
            return None, (
                f"two processes came as number {number} of {count}, but each needs its own {PROCESS_ID}: number them 0 "
                f"to {count - 1}."
            )
        present.pop(number).close()
    return number, None


def _is_open(peer: socket.socket) -> bool:
    try:
        return peer.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _tell(peer: socket.socket, text: str) -> None:
    try:
        peer.settimeout(5.0)
        peer.sendall(f"{text}\n".encode())
    except OSError:
        return  # the peer is gone and reports its own error


def _processes(numbers: list[int]) -> str:
    shown = [str(number) for number in numbers[:8]]
    rest = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(shown)}{rest}"
