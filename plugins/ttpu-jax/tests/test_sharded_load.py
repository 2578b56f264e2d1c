"""Each process reads what its own devices hold, each byte once, and no more is on the host than it must be."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from devices import xla_flags
from padded import qwen_checkpoint
from safetensors.numpy import load_file
from tiny import llama_checkpoint

from ttpu_core import default_registry, open_checkpoint
from ttpu_core.checkpoint.header import TensorInfo, TensorReader
from ttpu_core.checkpoint.slices import read_boxes
from ttpu_core.errors import CheckpointError
from ttpu_core.mapping import gather, pad_mapping, stack_layers
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.params import load as load_module
from ttpu_jax.params.load import aligned_empty, device_boxes, load_parameters, stored_tensors
from ttpu_jax.params.padding import pad_for
from ttpu_jax.params.placement import local_placement

FLOAT32 = np.dtype(np.float32)


class Recording(TensorReader):
    """Which ranges of which tensors were read."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []

    def read_into(self, info: TensorInfo, view: memoryview, offset: int = 0) -> None:
        self.ranges.append((info.name, offset, len(view)))
        super().read_into(info, view, offset)

    @property
    def nbytes(self) -> int:
        return sum(size for _, _, size in self.ranges)

    def times(self, name: str, nbytes: int) -> set[int]:
        """How often the bytes of a tensor were read."""
        counts = np.zeros(nbytes, int)
        for tensor, start, size in self.ranges:
            if tensor == name:
                counts[start : start + size] += 1
        return set(counts.tolist())


class Layout:
    """A checkpoint as a mesh needs it."""

    def __init__(self, path: Path, mesh: str, *, stacked: bool = False) -> None:
        self.checkpoint, self.placement = open_checkpoint(path), local_placement(mesh)
        architecture = default_registry().architecture(self.checkpoint.config)
        spec, paddings = pad_for(architecture.spec, self.placement)
        self.mapping = pad_mapping(architecture.mapping, paddings)
        self.table = spec.parameters
        if stacked:
            self.mapping, self.table = stack_layers(self.mapping, spec), stacked_parameters(spec)

    def load(self, reader: TensorReader | None = None, **options: Any) -> dict[str, jax.Array]:
        return load_parameters(
            self.checkpoint, self.mapping, self.table, self.placement, FLOAT32, reader=reader, **options
        )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(
        tmp_path_factory.mktemp("load") / "llama",
        vocab_size=264,
        hidden_size=64,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=96,
    )


@pytest.mark.parametrize("mesh", ["tensor=8", "fsdp=8", "fsdp=2,tensor=4"])
def test_eight_processes_read_each_byte_once_in_all(llama: Path, mesh: str) -> None:
    layout = Layout(llama, mesh)
    tensors = stored_tensors(layout.checkpoint, layout.mapping)
    mesh_devices = layout.placement.mesh.devices.ravel()  # type: ignore[union-attr]
    with Recording() as reader:
        for device in mesh_devices:  # each a process of its own
            for path, parameter in layout.table.items():
                boxes = device_boxes(layout.placement.parameter(path, parameter), parameter.shape)
                (box,) = (box for box, devices in boxes.items() if device in devices)
                array = np.empty([stop - start for start, stop in box], np.float32)
                read_boxes(layout.mapping[path], {box: array}, tensors, reader)
    norms = 0
    for name, stored in tensors.items():
        copies = len(mesh_devices) if "norm" in name else 1
        norms += stored.info.nbytes if "norm" in name else 0
        assert reader.times(name, stored.info.nbytes) == {copies}, name
    assert reader.nbytes == layout.checkpoint.total_bytes + 7 * norms


@pytest.mark.parametrize("mesh", ["tensor=8", "fsdp=2,tensor=4", "data=8", "data=2,fsdp=2,tensor=2"])
def test_one_process_reads_each_byte_once_however_many_devices_it_has(llama: Path, mesh: str) -> None:
    layout = Layout(llama, mesh)
    with Recording() as reader:
        layout.load(reader)
    for name, info in layout.checkpoint.tensors.items():
        assert reader.times(name, info.nbytes) == {1}, name


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("mesh", ["tensor=8", "data=2,tensor=4", "fsdp=4,tensor=2"])
def test_what_is_loaded_is_what_the_rules_say(tmp_path: Path, mesh: str, stacked: bool) -> None:
    layout = Layout(qwen_checkpoint(tmp_path / "qwen"), mesh, stacked=stacked)
    tensors = stored_tensors(layout.checkpoint, layout.mapping)

    def read(name: str) -> np.ndarray:
        info = tensors[name].info
        return np.fromfile(info.file, FLOAT32, info.size, offset=info.start).reshape(info.shape)

    params = layout.load()
    assert list(params) == list(layout.table)
    for path, array in params.items():
        expected = np.empty(array.shape, FLOAT32)
        gather(layout.mapping[path], read, expected)
        np.testing.assert_array_equal(array, expected)
        assert array.sharding == layout.placement.parameter(path, layout.table[path])


def test_parameters_are_read_within_a_bound_on_the_hosts_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(llama, "tensor=8")
    held, most = Counter[str](), 0
    load = load_module._load

    def counting(rule: Any, shape: Any, dtype: Any, *rest: Any) -> Any:
        nonlocal most
        nbytes = int(np.prod(shape)) * dtype.itemsize
        held["now"] += nbytes
        most = max(most, held["now"])
        try:
            return load(rule, shape, dtype, *rest)
        finally:
            held["now"] -= nbytes

    monkeypatch.setattr(load_module, "_load", counting)
    monkeypatch.setattr(load_module, "HOST_BYTES", 40_000)
    params = layout.load()
    largest = max(array.nbytes for array in params.values())
    assert most <= max(40_000, largest)


def test_a_file_that_is_cut_off_after_its_header_was_read_is_refused_in_one_sentence(tmp_path: Path) -> None:
    layout = Layout(llama_checkpoint(tmp_path / "llama", vocab_size=264), "tensor=2")
    assert layout.checkpoint.tensors
    file = layout.checkpoint.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors .* truncated inside tensor .*: download it"):
        layout.load()


def test_devices_that_share_a_buffer_keep_their_values_when_one_is_written_over() -> None:
    placement = local_placement("data=8")
    sharding = placement.sharding((None,), (1024,), "x")
    value = aligned_empty((1024,), FLOAT32)
    value[:] = 1
    shards = [jax.device_put(value, device) for device in jax.devices()[:8]]
    array = jax.make_array_from_single_device_arrays((1024,), sharding, shards)
    changed = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert (np.asarray(changed) == 2).all() and (value == 1).all()
    assert all((np.asarray(shard.data) == 2).all() for shard in changed.addressable_shards)


TWO_PROCESSES = """
import json, pathlib, sys
import jax
process, port, folder = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, process)
from test_sharded_load import Layout, Recording
from ttpu_jax.params.export import save_checkpoint
layout = Layout(folder / "qwen", "tensor=8")
with Recording() as reader:
    params = layout.load(reader)
save_checkpoint(folder / "saved", layout.mapping, params, {})
replicated = sum(a.nbytes for a in params.values() if a.sharding.is_fully_replicated)
(folder / f"{process}.json").write_text(json.dumps([reader.nbytes, replicated]))
"""


@pytest.mark.slow
def test_two_processes_read_their_own_halves_and_save_the_whole(tmp_path: Path) -> None:
    source = qwen_checkpoint(tmp_path / "qwen", num_attention_heads=16, num_key_value_heads=8, vocab_size=1000)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "XLA_FLAGS": xla_flags(4),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    command = [sys.executable, "-c", TWO_PROCESSES]
    running = [
        subprocess.Popen([*command, str(process), port, str(tmp_path)], env=environment, stderr=subprocess.PIPE)
        for process in range(2)
    ]
    errors = [process.communicate(timeout=300)[1].decode() for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(error[-2000:] for error in errors)
    before, after = (load_file(p / "model.safetensors") for p in (source, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    (first, replicated), (second, _) = (json.loads((tmp_path / f"{n}.json").read_text()) for n in range(2))
    assert first + second == open_checkpoint(source).total_bytes + replicated
