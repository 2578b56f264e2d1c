"""Files that clients upload and batches write, on the server's disk: each client sees its own, and has so many bytes
and files at most."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from ttpu_core.errors import RequestError
from ttpu_core.files import write_whole
from ttpu_serve.server.errors import ApiError

LOG = logging.getLogger(__name__)
EXPIRY = (3600, 2_592_000)
"""Seconds after which a file may expire, at least and at most: OpenAI's."""
Purpose = Literal["batch", "batch_output"]


@dataclass(frozen=True)
class StoredFile:
    """A file's description. Times are Unix timestamps in seconds."""

    id: str
    owner: str
    filename: str
    purpose: Purpose
    bytes: int
    created_at: int
    expires_at: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        told = asdict(self) | {"object": "file", "status": "processed", "status_details": None}
        del told["owner"]
        return told


class FileStore:
    """Files in one folder, each with its description as JSON beside it. Methods may be called from any thread.

    Raises:
        RequestError: the folder cannot be used, or another server uses it.
    """

    def __init__(self, folder: str | None, most_bytes: int, most_files: int) -> None:
        """
        Args:
            folder: where the files are, and stay; None makes a temporary folder when the first one comes.
            most_bytes: of all files of one client.
            most_files: of one client.
        """
        self._most_bytes, self._most_files = most_bytes, most_files
        self.keeps = folder is not None
        self._folder: Path | None = None
        self._lock, self._locked = threading.RLock(), -1
        self._files: defaultdict[str, dict[str, StoredFile]] = defaultdict(dict)  # in the order of their creation
        self._incoming: defaultdict[str, dict[str, int]] = defaultdict(dict)  # sizes of files that arrive, by owner
        if folder is not None:
            self._folder = open_folder(folder)
            self._locked = _lock(self._folder)
            self._read()

    @property
    def folder(self) -> Path:
        """The folder, which is made if it is a temporary one."""
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="ttpu-files-"))  # for this user alone
            return self._folder

    def begin(self, owner: str, name: str | None = None) -> IncomingFile:
        """Begin a file, which nobody sees before it is finished. name: its id, if it has one.

        Raises:
            ApiError: the client has as many files as it may.
        """
        name = name or new_file_id()
        with self._lock:
            self._drop_expired()
            count = len(self._files[owner]) + len(self._incoming[owner])
            if count >= self._most_files:
                raise _full(f"you have {count:,} files, which is as many as one client may")
            self._incoming[owner][name] = 0
        return IncomingFile(self, owner, name)

    def list(self, owner: str) -> list[StoredFile]:
        """Return a client's files, the oldest first."""
        with self._lock:
            self._drop_expired()
            return list(self._files[owner].values())

    def get(self, name: str, owner: str, param: str | None = None) -> StoredFile:
        """Return a file.

        Raises:
            ApiError: there is none of this name, or it is another client's.
        """
        with self._lock:
            self._drop_expired()
            found = self._files[owner].get(name)
        if found is None:
            raise ApiError(
                f"the file {name[:80]!r} was asked for, but there is none of this name: it was never uploaded, or was "
                "deleted, or expired, or the server started again since. Upload it again.",
                status=404,
                param=param,
                code="file_not_found",
            )
        return found

    def open(self, file: StoredFile) -> IO[bytes]:
        """Open a file for reading; it can be read on when it is deleted.

        Raises:
            ApiError: it was deleted.
        """
        try:
            return self.path(file.id).open("rb")
        except FileNotFoundError:
            self.get(file.id, file.owner)
            raise

    def delete(self, name: str, owner: str) -> None:
        """Delete a file.

        Raises:
            ApiError: there is none of this name, or it is another client's.
        """
        with self._lock:
            file = self.get(name, owner)
            del self._files[owner][name]
            self._remove(file.id)

    def adopt(self, name: str, owner: str, filename: str, seconds: int | None) -> int | None:
        """Keep what a batch had written when its server ended, up to its last whole line.

        Args:
            name: the file's id.
            owner: the client.
            filename: as the client sees it.
            seconds: until it expires; None is never.

        Returns: the number of its lines, or None if there is no such file.
        """
        path = self.path(name)
        if not path.exists():
            return None
        size = lines = 0
        with path.open("r+b") as file:
            for line in file:
                if line.endswith(b"\n"):
                    size, lines = size + len(line), lines + 1
            file.truncate(size)
        now = int(time.time())
        expires = None if seconds is None else now + seconds
        self._keep(StoredFile(name, owner, filename, "batch_output", size, now, expires))
        return lines

    def forget_others(self) -> None:
        """Delete what arrived when an earlier server ended."""
        known = {name for files in self._files.values() for name in files}
        for path in self._files_folder.iterdir():
            if path.stem not in known:
                path.unlink()

    def close(self) -> None:
        """Delete a temporary folder, and let other servers use one that stays."""
        with self._lock:
            if self._locked >= 0:
                os.close(self._locked)
                self._locked = -1
            elif self._folder is not None and not self.keeps:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            self._files.clear()

    def path(self, name: str) -> Path:
        """Where a file's content is; `name` is the id of a file that exists or arrives."""
        return self._files_folder / f"{name}.jsonl"

    @property
    def _files_folder(self) -> Path:
        folder = self.folder / "files"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _grow(self, owner: str, name: str, size: int) -> None:
        """Count the bytes of a file that arrives."""
        with self._lock:
            before = sum(file.bytes for file in self._files[owner].values()) + sum(self._incoming[owner].values())
            if before + size > self._most_bytes:
                raise _full(f"your files have {before:,} bytes, and one client may have {self._most_bytes:,}")
            self._incoming[owner][name] += size

    def _keep(self, file: StoredFile) -> StoredFile:
        with self._lock:
            self._incoming[file.owner].pop(file.id, None)
            self._files[file.owner][file.id] = file
        write_json(self.path(file.id).with_suffix(".json"), asdict(file))
        return file

    def _drop(self, owner: str, name: str) -> None:
        with self._lock:
            if self._incoming[owner].pop(name, None) is not None and self._folder is not None:
                self._remove(name)

    def _remove(self, name: str) -> None:
        path = self.path(name)
        for one in (path.with_suffix(".json"), path):
            one.unlink(missing_ok=True)

    def _drop_expired(self) -> None:
        now = time.time()
        for files in self._files.values():
            for file in [file for file in files.values() if file.expires_at is not None and file.expires_at <= now]:
                del files[file.id]
                self._remove(file.id)

    def _read(self) -> None:
        found = []
        for path in self._files_folder.glob("*.json"):
            with suppress(OSError, ValueError, TypeError):  # damaged: as if it had never been finished
                file = StoredFile(**json.loads(path.read_bytes()))
                if file.id == path.stem and self.path(file.id).stat().st_size == file.bytes:
                    found.append((path.stat().st_mtime_ns, file))
        for _, file in sorted(found, key=lambda pair: pair[0]):
            self._files[file.owner][file.id] = file


class IncomingFile:
    """A file that is written. It counts while it grows. Use it in one thread at a time."""

    def __init__(self, store: FileStore, owner: str, name: str) -> None:
        self._store, self._owner, self.id = store, owner, name
        self.size = 0
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> None:
        """Write more.

        Raises:
            ApiError: the client's files have as many bytes as they may, or the disk takes no more.
        """
        self._store._grow(self._owner, self.id, len(data))
        try:
            if self._file is None:
                flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
                self._file = os.fdopen(os.open(self._store.path(self.id), flags, 0o600), "wb", buffering=0)
            view = memoryview(data)  # unbuffered, so that what is written is there if the server is killed
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            LOG.error("the file %s cannot be written: %s", self.id, error)
            raise ApiError(
                f"the server cannot write the file ({error.strerror or error}): tell who runs it.",
                status=507,
                kind="server_error",
                code="storage_failed",
                headers={"x-should-retry": "false"},
            ) from error
        self.size += len(data)

    def finish(self, filename: str, purpose: Purpose, seconds: int | None = None) -> StoredFile:
        """Close the file and show it to its client. seconds: until it expires; None is never."""
        if self._file is None:
            self.write(b"")
        self._close()
        now = int(time.time())
        expires = None if seconds is None else now + seconds
        return self._store._keep(StoredFile(self.id, self._owner, filename, purpose, self.size, now, expires))

    def discard(self) -> None:
        """Delete the file, unless it is finished."""
        self._close()
        self._store._drop(self._owner, self.id)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def new_file_id() -> str:
    """Return an id that nobody can guess."""
    return f"file-{uuid.uuid4().hex}"


def open_folder(folder: str) -> Path:
    """Return a folder that is made if it is not there, and that no one but this user may write to.

    Raises:
        RequestError: it cannot be made, is no folder, or others may write to it.
    """
    path = Path(folder).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        (path / "files").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"files were to be kept in {folder}, but that cannot be ({error.strerror or error}): name a folder that "
            "this user may write to."
        ) from error
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RequestError(
            f"files were to be kept in {folder}, but other users own it or may write to it: name a folder of this "
            "user's own, or take their rights away."
        )
    return path


def write_json(path: Path, value: Any) -> None:
    """Write a value whole or not at all, readable by this user alone."""
    write_whole(path, json.dumps(value), mode=0o600)


def _full(reason: str) -> ApiError:
    return ApiError(f"{reason}: delete some with DELETE /v1/files/ID.", status=413, code="storage_full")


def _lock(folder: Path) -> int:
    """Return an open file that no other server has, as long as it is open."""
    import fcntl

    handle = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise RequestError(
            f"files were to be kept in {folder}, but another server keeps its own there: name another folder."
        ) from error
    return handle
