"""Reads the header of a *.safetensors file into one `TensorInfo` (dtype, shape, byte range) per tensor, checks that
the tensors account for every byte of the file, and reads tensor bytes on request."""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from ttpu_core.config import parse_json_object
from ttpu_core.errors import CheckpointError
from ttpu_core.spec.arithmetic import BITS

# safetensors.safe_open maps the file, and mapped pages count towards a host's peak RSS until the kernel drops them.
# A host also needs only the byte ranges of its own shards, read directly into its own buffers.

_NUMPY_NAMES = (
    {"BOOL": "bool", "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64"}
    | {f"{sign}{bits}": f"{name}{bits}" for sign, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)}
    | {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
    | {"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
    | {"F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn"}
)
DTYPE_BITS: Mapping[str, int] = MappingProxyType({stored: BITS[name] for stored, name in _NUMPY_NAMES.items()})
"""Bits per element by safetensors' dtype name; the names that safetensors 0.8 writes."""

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LENGTH_BYTES = 8  # the header's length comes first, little-endian
_LARGEST_DIM = 2**63 - 1


@dataclass(frozen=True)
class TensorInfo:
    """Location of a tensor: `nbytes` bytes of `file` from byte `start` on, little-endian and row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class SafetensorsHeader:
    """A file's tensors in the order of their bytes, and its free-form metadata."""

    file: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


def read_header(file: Path) -> SafetensorsHeader:
    """Read and check the header of `file`.

    Raises:
        CheckpointError: the file is unreadable or malformed; the message names the file and the tensor.
    """
    raw, data_start, file_bytes = _read_raw_header(file)
    try:
        entries = parse_json_object(raw)
    except ValueError as problem:
        raise _malformed(file, f"its header {problem}") from None
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _malformed(file, "its __metadata__ is not an object of strings")
    tensors = [_tensor_info(file, data_start, name, entry) for name, entry in entries.items()]
    tensors.sort(key=lambda info: (info.start, info.nbytes))
    _check_coverage(file, tensors, data_start, file_bytes)
    named = MappingProxyType({info.name: info for info in tensors})
    return SafetensorsHeader(file, named, MappingProxyType(metadata))


def read_tensor_into(
    info: TensorInfo, buffer: memoryview, offset: int = 0, nbytes: int | None = None
) -> None:
    """Read `nbytes` bytes of the tensor, from byte `offset` on, into the start of `buffer`. The default reads to the
    tensor's end.

    Raises:
        ValueError: the range lies outside the tensor, or `buffer` is not writable, not contiguous or too small.
        CheckpointError: the file is shorter than its header says.
    """
    nbytes = info.nbytes - offset if nbytes is None else nbytes
    if offset < 0 or nbytes < 0 or offset + nbytes > info.nbytes:
        asked = f"bytes {offset} to {offset + nbytes} of {info.name!r} were asked for"
        raise ValueError(f"{asked}, but it has {info.nbytes}: ask for a range inside it")
    if buffer.readonly or not buffer.c_contiguous or buffer.nbytes < nbytes:
        raise ValueError(f"{info.name!r} needs a writable, contiguous buffer of at least {nbytes} bytes")
    if nbytes == 0:
        return  # memoryview.cast refuses an empty view
    with TensorReader() as reader:
        reader.read_into(info, buffer.cast("B")[:nbytes], offset)


class TensorReader:
    """Reads byte ranges of tensors. It may be used from several threads. Files stay open until `close`."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read_into(self, info: TensorInfo, view: memoryview, offset: int = 0) -> None:
        """Fill `view`, a writable view of bytes, with the tensor's bytes from `offset` on.

        Raises:
            CheckpointError: the file is unreadable, or shorter than its header says.
        """
        nbytes, position = len(view), info.start + offset
        try:
            descriptor = self._open(info.file)
            while len(view):  # Linux reads at most 2 GiB per call
                count = os.preadv(descriptor, [view], position)
                if count == 0:
                    lost = f"{len(view)} of {nbytes} bytes are missing"
                    raise _malformed(info.file, f"it is truncated inside tensor {info.name!r} ({lost})")
                view, position = view[count:], position + count
        except OSError as error:
            raise _unreadable(info.file, error) from None

    def _open(self, file: Path) -> int:
        descriptor = self._descriptors.get(file)
        if descriptor is None:
            with self._lock:
                descriptor = self._descriptors.get(file)
                if descriptor is None:
                    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                    self._descriptors[file] = descriptor
        return descriptor


def _read_raw_header(file: Path) -> tuple[bytes, int, int]:
    """The header's bytes, the offset of the first tensor byte, and the size of the file."""
    try:
        with file.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            prefix = stream.read(_LENGTH_BYTES)
            if prefix == b"version ":  # what a clone without git-lfs leaves in a weight file's place
                raise CheckpointError(
                    f"{file} was asked for as a safetensors file, but it is a Git LFS pointer without the "
                    "weights: run `git lfs pull` in its directory."
                )
            length = int.from_bytes(prefix, "little")
            if len(prefix) < _LENGTH_BYTES or length > file_bytes - _LENGTH_BYTES:
                needed = _LENGTH_BYTES + (length if len(prefix) == _LENGTH_BYTES else 0)
                found = f"its header should end at byte {needed} and the file has {file_bytes}"
                raise _malformed(file, f"it is truncated or another kind of file ({found})")
            if length > MAX_HEADER_BYTES:
                raise _malformed(file, f"its header has {length} bytes, over the limit of {MAX_HEADER_BYTES}")
            raw = stream.read(length)
    except OSError as error:
        raise _unreadable(file, error) from None
    if len(raw) < length:
        raise _malformed(file, "it became shorter while its header was read")
    if not raw.startswith(b"{"):
        raise _malformed(file, "its header does not begin with '{'")
    return raw, _LENGTH_BYTES + length, file_bytes


def _tensor_info(file: Path, data_start: int, name: str, entry: Any) -> TensorInfo:
    def malformed(problem: str) -> CheckpointError:
        return _malformed(file, f"its tensor {name!r} {problem}")

    if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
        raise malformed("has a name that is not valid Unicode")
    fields = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or entry.keys() != fields:
        raise malformed("is not described by exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise malformed(f"has the unknown dtype {str(dtype)[:40]!r} (known: {', '.join(DTYPE_BITS)})")
    if not isinstance(shape, list) or not all(type(dim) is int and dim >= 0 for dim in shape):
        raise malformed(f"has the shape {str(shape)[:60]}, which is not a list of integers from 0 on")
    if prod(dim for dim in shape if dim) > _LARGEST_DIM:
        raise malformed(f"has the shape {str(shape)[:60]}, whose size overflows 64 bits")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(end) is int for end in offsets):
        raise malformed(f"has the data_offsets {str(offsets)[:60]}, which are not two integers")
    begin, end = offsets
    if not 0 <= begin <= end <= _LARGEST_DIM:
        raise malformed(f"has the data_offsets {str(offsets)[:60]}, which are not a range from 0 on")
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - begin):
        needed = f"{dtype}{str(shape)[:60]} needs {bits / 8:.15g} bytes"
        raise malformed(f"of {needed}, but its range has {end - begin}")
    return TensorInfo(name, dtype, tuple(shape), file, data_start + begin, end - begin)


def _check_coverage(file: Path, tensors: list[TensorInfo], data_start: int, file_bytes: int) -> None:
    """Check that every byte after the header belongs to exactly one tensor. `tensors` are sorted by start."""
    position, before = data_start, "the header"
    for info in tensors:
        if info.start < position:
            raise _malformed(file, f"its tensor {info.name!r} overlaps {before}")
        if info.start > position:
            hole = f"a hole of {info.start - position} bytes between {before} and tensor {info.name!r}"
            raise _malformed(file, f"it has {hole}")
        position, before = info.start + info.nbytes, f"tensor {info.name!r}"
        if position > file_bytes:
            found = f"{before} should end at byte {position} and the file has {file_bytes}"
            raise _malformed(file, f"it is truncated ({found})")
    if position < file_bytes:
        extra = file_bytes - position
        raise _malformed(file, f"it has {extra} bytes after {before} that belong to no tensor")


def _malformed(file: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{file} was asked for as a safetensors file, but {found}: download it, or save it, once more."
    )


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{file} was asked for as a safetensors file, but it cannot be read ({error.strerror}): "
        "put a readable file there."
    )
