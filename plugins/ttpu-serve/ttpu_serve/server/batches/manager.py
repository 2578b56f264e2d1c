"""The batches of a server: checks their files, has their lines answered, and keeps their states. A batch that is not
done when the server ends has failed, and keeps the answers that it has."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from ttpu_serve.api.output_queue import EngineClosingError
from ttpu_serve.server.batches.endpoints import ENDPOINTS
from ttpu_serve.server.batches.executor import LineExecutor
from ttpu_serve.server.batches.file_store import FileStore, write_json
from ttpu_serve.server.batches.lines import LineCheck
from ttpu_serve.server.batches.protocol import BatchRequest
from ttpu_serve.server.batches.record import ENDED, Batch, Status
from ttpu_serve.server.batches.work import BatchWork, file_name
from ttpu_serve.server.errors import ApiError, as_api_error
from ttpu_serve.server.service import Service

LOG = logging.getLogger(__name__)
WINDOW_SECONDS = 24 * 3600
"""In which a batch is worked on."""
MOST_BATCHES, MOST_OPEN = 1000, 100
"""Of one client: that are remembered, and that have not ended."""
_UNANSWERED: Mapping[Status, tuple[str, str]] = {
    "expired": ("batch_expired", "the batch had 24 hours, in which this line got no answer: send it again."),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line got an answer: send it again."),
}
_STOPPED = "the server ended before the batch did: make a batch of the lines that are in none of its files."


class Batches:
    """All batches of a server, those of each client for itself."""

    def __init__(self, service: Service, store: FileStore) -> None:
        settings = service.settings
        self._service, self._store = service, store
        self.executor = LineExecutor(service, settings.batch_concurrency or max(service.max_num_seqs // 2, 1))
        self._batches: defaultdict[str, dict[str, Batch]] = defaultdict(dict)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        if store.keeps:
            self._read()

    async def create(self, request: BatchRequest, owner: str) -> Batch:
        """Make a batch, which is worked on from now on.

        Raises:
            ApiError: the file or the endpoint cannot be used, or the client has too many batches.
            EngineClosingError, EngineDeadError: the server takes nothing new.
        """
        self._service.engine.check_accepting()
        if request.endpoint not in ENDPOINTS:
            raise ApiError(
                f"endpoint is {request.endpoint[:80]!r}, but batches can ask {', '.join(ENDPOINTS)}: name one of them.",
                param="endpoint",
            )
        file = self._store.get(request.input_file_id, owner, "input_file_id")
        if file.purpose != "batch":
            raise ApiError(
                f"the file {file.id} has the purpose {file.purpose!r}, but a batch reads one of the purpose 'batch': "
                "upload one.",
                param="input_file_id",
            )
        self._make_room(owner)
        now = int(time.time())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            owner=owner,
            endpoint=request.endpoint,
            input_file_id=file.id,
            metadata=request.metadata,
            output_seconds=None if request.output_expires_after is None else request.output_expires_after.seconds,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
        )
        work = BatchWork(
            batch,
            self._store,
            self._store.open(file),
            most_bytes=self._service.most_body_bytes,
            most_values=self._service.most_values,
        )
        self._batches[owner][batch.id] = batch
        self._tasks[batch.id] = asyncio.create_task(self._run(batch, work))
        return batch

    def list(self, owner: str) -> list[Batch]:
        """Return a client's batches, the newest first."""
        return list(self._batches[owner].values())[::-1]

    def get(self, name: str, owner: str) -> Batch:
        """Return a batch.

        Raises:
            ApiError: there is none of this name, or it is another client's.
        """
        found = self._batches[owner].get(name)
        if found is None:
            raise ApiError(
                f"the batch {name[:80]!r} was asked for, but there is none of this name: it was never made, or the "
                "server started again since.",
                status=404,
                code="batch_not_found",
            )
        return found

    def cancel(self, name: str, owner: str) -> Batch:
        """End a batch, which keeps the answers that it has.

        Raises:
            ApiError: there is none of this name, or it has ended.
        """
        batch = self.get(name, owner)
        if batch.status == "cancelling":
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise ApiError(
                f"the batch {batch.id} was to be cancelled, but its status is {batch.status!r}: leave it.",
                status=409,
                code="batch_ended",
            )
        batch.enter("cancelling")
        self._tasks[batch.id].cancel()
        return batch

    async def close(self) -> None:
        """End what is worked on. Call it when the engine has been shut down."""
        for batches in self._batches.values():
            for batch in batches.values():
                if batch.status in ("validating", "in_progress"):
                    self._tasks[batch.id].cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.to_thread(self.executor.close)

    async def _run(self, batch: Batch, work: BatchWork) -> None:
        """Work on a batch until it has ended."""
        try:
            outcome = await self._outcome(batch, work)
            try:
                if outcome in _UNANSWERED and batch.total:
                    await self.executor.in_files_thread(partial(work.tell_unanswered, *_UNANSWERED[outcome]))
                await self.executor.in_files_thread(work.finish)
            except Exception as error:  # of the disk
                outcome = _noted(batch, error)
            batch.enter(outcome)
            await self._save(batch)
        finally:
            self._tasks.pop(batch.id, None)

    async def _outcome(self, batch: Batch, work: BatchWork) -> Status:
        """Work on a batch, and return the status that it comes into when its files are written."""
        try:
            async with asyncio.timeout(max(batch.expires_at - time.time(), 0)) as limit:
                await self._save(batch)
                await self._check(batch, work)
                if batch.problems:
                    batch.enter("finalizing")  # so that nobody cancels it meanwhile
                    return "failed"
                batch.enter("in_progress")
                await self._save(batch)
                await self.executor.run(work)
            outcome: Status = "completed"
        except asyncio.CancelledError:
            if batch.status == "cancelling":
                return "cancelled"
            outcome = _noted(batch, EngineClosingError(_STOPPED))
        except TimeoutError as error:
            outcome = "expired" if limit.expired() else _noted(batch, error)
        except Exception as error:
            outcome = _noted(batch, error)
        batch.enter("finalizing")
        return outcome

    async def _check(self, batch: Batch, work: BatchWork) -> None:
        """Check the lines of a batch, at which clients take turns."""
        settings = self._service.settings
        check = LineCheck(
            work.reader, work.urls, most_values=self._service.most_values, most_lines=settings.max_batch_requests
        )
        client = f"batches of {batch.owner}"
        while await asyncio.wrap_future(self._service.bodies.submit(client, check.some)):
            pass
        batch.problems = check.problems
        batch.total = check.count
        work.reader.rewind()

    def _make_room(self, owner: str) -> None:
        """Forget a client's oldest batch, if there are as many as are remembered."""
        batches = self._batches[owner]
        if sum(batch.status not in ENDED for batch in batches.values()) >= MOST_OPEN:
            raise ApiError(
                f"you have {MOST_OPEN} batches that have not ended, which is as many as one client may: try again when "
                "one has ended.",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": "60"},
            )
        if len(batches) >= MOST_BATCHES:
            oldest = next(batch for batch in batches.values() if batch.status in ENDED)
            del batches[oldest.id]
            if self._store.keeps:
                self._path(oldest.id).unlink(missing_ok=True)

    # what outlives the server

    def _path(self, name: str) -> Path:
        return self._store.folder / "batches" / f"{name}.json"

    async def _save(self, batch: Batch) -> None:
        if self._store.keeps:
            with suppress(OSError):  # the batch goes on
                await self.executor.in_files_thread(partial(write_json, self._path(batch.id), batch.kept()))

    def _read(self) -> None:
        """Read the batches of earlier servers. Those that had not ended have failed."""
        folder = self._store.folder / "batches"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = []
        for path in folder.glob("*.json"):
            try:
                found.append(Batch.read(json.loads(path.read_bytes())))
            except (OSError, ValueError, TypeError, KeyError):
                LOG.warning("the batch in %s is damaged, and left out", path)
        for batch in sorted(found, key=lambda each: each.order):
            self._batches[batch.owner][batch.id] = batch
            if batch.status not in ENDED:
                self._take_over(batch)
                write_json(self._path(batch.id), batch.kept())
        self._store.forget_others()

    def _take_over(self, batch: Batch) -> None:
        """Keep the answers of a batch that was worked on when its server was killed."""
        counts = {"output": 0, "error": 0}
        for kind, name in (("output", batch.output_id), ("error", batch.error_id)):
            lines = self._store.adopt(name, batch.owner, file_name(batch.id, kind), batch.output_seconds)
            if lines is not None:
                counts[kind] = lines
                batch.written = [*batch.written, name]
        batch.succeeded, batch.failed = counts["output"], counts["error"]
        batch.enter(_noted(batch, EngineClosingError(_STOPPED)))


def _noted(batch: Batch, error: Exception) -> Status:
    """Note why a batch fails."""
    told = as_api_error(error).body["error"]
    code, message = told["code"] or "server_error", told["message"]
    if isinstance(error, EngineClosingError):
        code, message = "server_stopped", _STOPPED
    batch.problems.append({"code": code, "line": None, "message": message, "param": None})
    return "failed"
