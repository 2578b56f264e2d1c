"""What a checkpoint is and what it refuses: a malformed file gives one sentence, and nothing is unpickled."""

import json
import os
import shlex
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from ttpu_core.checkpoint import Checkpoint, TensorInfo, open_checkpoint, open_config, read_tensor_into
from ttpu_core.checkpoint import header as safetensors_header
from ttpu_core.checkpoint.header import DTYPE_BITS, read_header
from ttpu_core.errors import CheckpointError, ConfigError, MissingDependencyError

CONFIG = {"model_type": "llama", "hidden_size": 8}
WEIGHTS: dict[str, np.ndarray] = {
    "embed.weight": np.arange(24, dtype=np.float32).reshape(6, 4),
    "layers.0.weight": np.arange(6, dtype=np.float16).reshape(2, 3),
    "layers.0.bias": np.array([-1, 2], dtype=np.int64),
    "mask": np.array([True, False, True]),
    "none": np.zeros((0, 3), dtype=np.uint8),
    "scale": np.array(0.5, dtype=np.float64),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with nothing but a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def refusal(read: Callable[[], Any]) -> str:
    """The message of the CheckpointError that `read` raises: one line, what was asked, found, and to do."""
    with pytest.raises(CheckpointError) as caught:
        read()
    message = str(caught.value)
    assert "\n" not in message and " asked for" in message and ": " in message
    return message


def values(info: TensorInfo) -> bytes:
    buffer = bytearray(info.nbytes)
    read_tensor_into(info, memoryview(buffer))
    return bytes(buffer)


def write_file(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_shards(folder: Path) -> dict[str, str]:
    """WEIGHTS in two shards with an index; returns its weight_map."""
    names = sorted(WEIGHTS)
    weight_map = {}
    for number, part in enumerate((names[:3], names[3:]), start=1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: WEIGHTS[name] for name in part}, folder / shard)
        weight_map.update(dict.fromkeys(part, shard))
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def assert_holds_weights(checkpoint: Checkpoint) -> None:
    assert checkpoint.tensors.keys() == WEIGHTS.keys()
    for name, array in WEIGHTS.items():
        info = checkpoint.tensors[name]
        assert (info.name, info.shape) == (name, array.shape)
        assert (info.nbytes, info.size) == (array.nbytes, array.size)
        assert values(info) == array.tobytes()
    assert checkpoint.total_bytes == sum(array.nbytes for array in WEIGHTS.values())


# What opens


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ({}, "float16"),
        ({"dtype": None}, "float16"),
        ({"dtype": "auto"}, "float16"),
        ({"dtype": "float8_e4m3fn"}, "float16"),
        ({"dtype": "float64"}, "float16"),
        ({"dtype": {"text_config": "bfloat16"}}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "half"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float32"}, "float32"),
    ],
)
def test_weights_have_the_dtype_of_the_config_or_else_of_the_files(
    folder: Path, written: dict[str, Any], dtype: str
) -> None:
    save_file({"w": np.zeros(4, dtype=np.float16)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **written}))
    assert open_checkpoint(folder).dtype == dtype


@pytest.mark.parametrize("value", ["flaot32", 7, "int8", "", False, "torch.int8", ["bfloat16"]])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_config_whose_dtype_is_none_is_refused(folder: Path, key: str, value: Any) -> None:
    save_file({"w": np.zeros(4, dtype=np.float16)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", key: value}))
    words = rf"sets '{key}' to .*, but a floating dtype's name such as float32, bfloat16, float16 is needed"
    with pytest.raises(ConfigError, match=words):
        _ = open_checkpoint(folder).dtype


def test_a_single_file_holds_the_weights_that_were_saved(folder: Path) -> None:
    save_file(WEIGHTS, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(folder)
    assert_holds_weights(checkpoint)
    assert {info.dtype for info in checkpoint.tensors.values()} == {"F32", "F16", "I64", "BOOL", "U8", "F64"}
    assert checkpoint.config.model_type == "llama"
    assert checkpoint.files == ("config.json", "model.safetensors")
    assert checkpoint.weight_files == (folder / "model.safetensors",)
    assert read_header(folder / "model.safetensors").metadata == {"format": "pt"}


def test_shards_hold_the_weights_that_were_saved(folder: Path) -> None:
    write_shards(folder)
    checkpoint = open_checkpoint(str(folder))
    assert_holds_weights(checkpoint)
    assert len(checkpoint.weight_files) == 2


def test_any_single_safetensors_file_will_do(folder: Path) -> None:
    save_file(WEIGHTS, folder / "weights.safetensors")
    assert_holds_weights(open_checkpoint(folder))


def test_the_symlinks_of_a_hub_cache_are_followed(folder: Path) -> None:
    blobs = folder / "blobs"
    blobs.mkdir()
    save_file(WEIGHTS, blobs / "0123abcd")
    (folder / "model.safetensors").symlink_to("blobs/0123abcd")
    assert_holds_weights(open_checkpoint(folder))


def test_a_tensor_that_the_index_forgot_is_kept(folder: Path) -> None:
    weight_map = write_shards(folder)
    del weight_map["mask"]
    write_index(folder, weight_map)
    assert_holds_weights(open_checkpoint(folder))


def test_the_config_alone_opens_and_only_the_tensors_are_refused(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.positive_int("hidden_size") == 8
    assert checkpoint.generation_config == {}
    assert "no other safetensors file among config.json" in refusal(lambda: checkpoint.tensors)


def test_generation_config_is_a_fresh_dict(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    checkpoint = open_checkpoint(folder)
    checkpoint.generation_config["temperature"] = 1.0
    assert checkpoint.generation_config == {"temperature": 0.6}
    (folder / "generation_config.json").write_text("{")
    assert "as a generation config, but it is not valid JSON" in refusal(lambda: checkpoint.generation_config)


def test_tensors_are_read_once_and_checkpoints_compare_by_value(folder: Path) -> None:
    save_file(WEIGHTS, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors is checkpoint.tensors
    assert checkpoint == open_checkpoint(folder) and hash(checkpoint) == hash(open_checkpoint(folder))
    with pytest.raises(TypeError):
        checkpoint.tensors["x"] = checkpoint.tensors["mask"]  # type: ignore[index]


def test_open_config_takes_a_file_or_a_directory(folder: Path) -> None:
    assert open_config(folder) == open_config(str(folder / "config.json")) == open_checkpoint(folder).config
    with pytest.raises(ConfigError, match="No such file"):
        open_config(folder / "other.json")


# What does not open


def test_a_path_that_is_no_checkpoint_directory_is_refused(tmp_path: Path) -> None:
    assert "no such directory" in refusal(lambda: open_checkpoint(tmp_path / "missing"))
    assert "no such directory" in refusal(lambda: open_checkpoint("./org/name"))
    assert "no such file: pass an existing directory" in refusal(lambda: open_checkpoint(str(tmp_path / "no.json")))
    assert "no such file: pass an existing directory" in refusal(lambda: open_checkpoint("missing/config.json"))
    assert "has no config.json among no files" in refusal(lambda: open_checkpoint(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "it is an adapter" in refusal(lambda: open_checkpoint(tmp_path))
    file = tmp_path / "adapter_config.json"
    assert f"pass the directory {tmp_path}" in refusal(lambda: open_checkpoint(file))
    assert "leave revision out" in refusal(lambda: open_checkpoint(tmp_path, revision="main"))


@pytest.mark.parametrize("part", ["", "checkpoints", "checkpoints/20"])
def test_a_training_run_is_refused_with_the_command_that_writes_its_model(tmp_path: Path, part: str) -> None:
    (tmp_path / "checkpoints" / "20" / "model").mkdir(parents=True)
    said = refusal(lambda: open_checkpoint(tmp_path / part))
    step = " --step 20" if part.endswith("20") else ""
    assert f"it is a training run, which has no config.json: write its model by `ttpu export {tmp_path}{step}" in said


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth"]
)
def test_pickled_weights_are_refused_with_the_command_that_converts_them(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"never read")
    (folder / "tokenizer.json").write_text("{}")
    message = refusal(lambda: open_checkpoint(folder))
    assert name in message
    python, flag, code = shlex.split(message.split("convert it with ")[1])
    assert (python, flag) == ("python", "-c")

    calls: list[Any] = []
    auto = SimpleNamespace(
        from_pretrained=lambda source: SimpleNamespace(save_pretrained=lambda to: calls.append((source, to)))
    )
    fake = SimpleNamespace(AutoModelForCausalLM=auto, AutoTokenizer=auto)
    exec(code.replace("import transformers as t; ", ""), {"t": fake})
    assert calls == [(str(folder), f"{folder}-safetensors")] * 2


def test_the_conversion_command_survives_quotes_in_a_path(tmp_path: Path) -> None:
    odd = tmp_path / """it's "é" $HOME"""
    odd.mkdir()
    (odd / "config.json").write_text(json.dumps(CONFIG))
    (odd / "model.bin").touch()
    code = shlex.split(refusal(lambda: open_checkpoint(odd)).split("convert it with ")[1])[2]
    sources: list[str] = []
    fake = SimpleNamespace(AutoModelForCausalLM=SimpleNamespace(from_pretrained=sources.append))
    with pytest.raises(AttributeError):  # list.append returned None, which has no save_pretrained
        exec(code.replace("import transformers as t; ", ""), {"t": fake})
    assert sources == [str(odd)]


def test_pickles_beside_safetensors_and_trainer_state_do_not_matter(folder: Path) -> None:
    (folder / "training_args.bin").touch()
    (folder / "optimizer.pt").touch()
    assert open_checkpoint(folder).config.model_type == "llama"
    (folder / "pytorch_model.bin").touch()
    save_file(WEIGHTS, folder / "model.safetensors")
    assert_holds_weights(open_checkpoint(folder))


def test_several_files_without_an_index_are_refused(folder: Path) -> None:
    for name in ("a", "b"):
        save_file(WEIGHTS, folder / f"{name}.safetensors")
    message = refusal(lambda: open_checkpoint(folder).tensors)
    assert "2 safetensors files (a.safetensors, b.safetensors) and no model.safetensors.index.json" in message


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "sub/x.safetensors",
        "/x.safetensors",
        "a\\x.safetensors",
        "C:x.safetensors",
        "a\0.safetensors",
        "x.bin",
        "..",
        "",
        3,
    ],
)
def test_an_index_names_only_files_beside_it(folder: Path, shard: Any) -> None:
    write_index(folder, {"w": shard})
    assert "not in a *.safetensors file beside it" in refusal(lambda: open_checkpoint(folder).tensors)


def test_an_index_that_does_not_match_its_shards_is_refused(folder: Path) -> None:
    weight_map = write_shards(folder)
    second = weight_map["scale"]

    def refused(changed: Any) -> str:
        write_index(folder, changed)
        return refusal(lambda: open_checkpoint(folder).tensors)

    assert f"places 'extra' in {second}, which does not hold it" in refused(weight_map | {"extra": second})
    assert "not there (gone.safetensors)" in refused(weight_map | {"extra": "gone.safetensors"})
    assert "has no weight_map" in refused({})
    assert "has no weight_map" in refused([1])
    (folder / "model.safetensors.index.json").write_bytes(b'{"weight_map": {"w": "a", "w": "b"}}')
    assert 'writes the key "w" twice' in refusal(lambda: open_checkpoint(folder).tensors)


def test_an_unlisted_tensor_in_two_shards_is_ambiguous(folder: Path) -> None:
    for letter in "ab":
        save_file({letter: np.zeros(1), "both": np.zeros(1)}, folder / f"{letter}.safetensors")
    write_index(folder, {"a": "a.safetensors", "b": "b.safetensors"})
    assert "'both', which is in both" in refusal(lambda: open_checkpoint(folder).tensors)


# The header


MALFORMED: list[tuple[str, Any, bytes, str]] = [
    ("not JSON", b"{", b"", "its header is not valid JSON"),
    ("not an object", b"[1]", b"", "does not begin with '{'"),
    ("leading space", b" {}", b"", "does not begin with '{'"),
    ("empty header", b"", b"", "does not begin with '{'"),
    ("not UTF-8", b'{"\xff": 1}', b"", "is not UTF-8"),
    ("deep", b'{"a":' + b"[" * 100_000, b"", "nested too deeply"),
    ("duplicate tensor", b'{"w": 1, "w": 2}', b"", 'writes the key "w" twice'),
    ("metadata", {"__metadata__": {"a": 1}}, b"", "__metadata__ is not an object of strings"),
    ("tensor is a number", {"w": 1}, b"", "'w' is not described by exactly"),
    ("no shape", {"w": {"dtype": "F32", "data_offsets": [0, 0]}}, b"", "'w' is not described by exactly"),
    ("unknown field", {"w": entry("U8", [1], 0, 1) | {"scale": 2}}, b"1", "'w' is not described by exactly"),
    ("unknown dtype", {"w": entry("F31", [1], 0, 4)}, b"1234", "'w' has the unknown dtype 'F31'"),
    ("negative", {"w": entry("U8", [-1, -1], 0, 1)}, b"1", "'w' has the shape [-1, -1], which is not"),
    ("bool shape", {"w": entry("U8", [True], 0, 1)}, b"1", "'w' has the shape [True], which is not a list"),
    ("float shape", {"w": entry("U8", [1.0], 0, 1)}, b"1", "'w' has the shape [1.0], which is not a list"),
    ("overflow", {"w": entry("U8", [2**62, 4], 0, 1)}, b"1", "overflows 64 bits"),
    ("overflow times zero", {"w": entry("U8", [2**62, 4, 0], 0, 0)}, b"", "overflows 64 bits"),
    ("offsets", {"w": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, b"1", "are not two integers"),
    ("reversed", {"w": entry("U8", [1], 2, 1)}, b"12", "are not a range from 0 on"),
    ("before 0", {"w": entry("U8", [1], -1, 0)}, b"1", "are not a range from 0 on"),
    ("bytes", {"w": entry("F32", [3], 0, 8)}, b"12345678", "'w' of F32[3] needs 12 bytes, but its range has"),
    ("half bytes", {"w": entry("F4", [3], 0, 1)}, b"1", "needs 1.5 bytes, but its range has 1"),
    ("truncated", {"w": entry("U8", [9], 0, 9)}, b"1234", "it is truncated (tensor 'w' should end at byte"),
    ("trailing", {"w": entry("U8", [1], 0, 1)}, b"123", "2 bytes after tensor 'w' that belong to no tensor"),
    ("empty, trailing", {}, b"1", "1 bytes after the header"),
    ("hole at 0", {"w": entry("U8", [1], 1, 2)}, b"12", "hole of 1 bytes between the header and tensor 'w'"),
    ("hole", {"v": entry("U8", [1], 0, 1), "w": entry("U8", [1], 2, 3)}, b"123", "between tensor 'v' and"),
    ("overlap", {"v": entry("U8", [2], 0, 2), "w": entry("U8", [2], 1, 3)}, b"123", "overlaps tensor 'v'"),
    ("surrogate", b'{"\\ud800": {}}', b"", "has a name that is not valid Unicode"),
    ("digits", b'{"w": ' + b"9" * 5000 + b"}", b"", "too many digits"),
]


@pytest.mark.parametrize(("name", "header", "data", "found"), MALFORMED, ids=[c[0] for c in MALFORMED])
def test_a_malformed_header_is_refused(
    tmp_path: Path, name: str, header: Any, data: bytes, found: str
) -> None:
    file = write_file(tmp_path / name, header, data)
    message = refusal(lambda: read_header(file))
    assert str(file) in message and found in message and len(message) < 600
    message.encode()  # printable


def test_a_wrong_header_length_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    for raw in (b"", b"1234567", struct.pack("<Q", 3) + b"{}", b"\xff" * 8 + b"{}"):
        file.write_bytes(raw)
        assert "truncated or another kind of file" in refusal(lambda: read_header(file))
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "run `git lfs pull`" in refusal(lambda: read_header(file))
    assert "cannot be read (No such file" in refusal(lambda: read_header(tmp_path / "missing"))
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 1)
    write_file(file, {})
    assert "over the limit of 1" in refusal(lambda: read_header(file))


def test_every_dtype_of_the_library_is_known(tmp_path: Path) -> None:
    """Four elements of each dtype fill whole bytes even at 4 and 6 bits."""
    for dtype, bits in DTYPE_BITS.items():
        file = write_file(tmp_path / dtype, {"w": entry(dtype, [4], 0, bits // 2)}, bytes(bits // 2))
        assert read_header(file).tensors["w"].nbytes == bits // 2
        with safe_open(file, framework="numpy") as library:
            assert library.get_slice("w").get_dtype() == dtype


def library_accepts(file: Path) -> bool:
    try:
        with safe_open(file, framework="numpy") as opened:
            opened.keys()
    except (SafetensorError, OSError):
        return False
    return True


def test_any_mutation_of_a_header_is_valid_or_refused(tmp_path: Path) -> None:
    """Nothing but CheckpointError comes out, and what passes is also what the safetensors library accepts."""
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies as st

    original = tmp_path / "original.safetensors"
    save_file(WEIGHTS, original, metadata={"format": "pt"})
    raw = original.read_bytes()
    header_bytes = 8 + struct.unpack("<Q", raw[:8])[0]
    interesting = st.sampled_from(list(b'0123456789-+.eE{}[]",:\\ \x00\x80\xff'))
    edit = st.tuples(
        st.sampled_from(["replace", "insert", "delete"]), st.integers(0, header_bytes - 1), interesting
    )
    mutant = tmp_path / "mutant.safetensors"

    @hypothesis.settings(max_examples=400, deadline=None, database=None, derandomize=True)
    @hypothesis.given(st.lists(edit, max_size=4), st.booleans(), st.integers(0, 3))
    def check(edits: list[tuple[str, int, int]], repair_length: bool, cut: int) -> None:
        changed, header_end = bytearray(raw), header_bytes
        for kind, position, byte in edits:
            if kind == "insert":
                changed.insert(position, byte)
                header_end += 1
            elif kind == "delete":
                del changed[position]
                header_end -= 1
            else:
                changed[position] = byte
        if repair_length:
            changed[:8] = struct.pack("<Q", header_end - 8)
        mutant.write_bytes(changed[: len(changed) - cut])
        try:
            header = read_header(mutant)
        except CheckpointError:
            return
        assert library_accepts(mutant)
        for info in header.tensors.values():
            assert len(values(info)) == info.nbytes

    check()


def test_the_reader_agrees_with_the_safetensors_library(folder: Path) -> None:
    save_file(WEIGHTS, folder / "model.safetensors")
    expected = load_file(folder / "model.safetensors")
    for name, info in open_checkpoint(folder).tensors.items():
        assert values(info) == expected[name].tobytes() and info.shape == expected[name].shape


# Reading bytes


def test_a_byte_range_is_read_into_the_start_of_the_buffer(folder: Path) -> None:
    save_file(WEIGHTS, folder / "model.safetensors")
    info = open_checkpoint(folder).tensors["embed.weight"]
    rows = np.zeros((3, 4), dtype=np.float32)
    read_tensor_into(info, rows.data, offset=2 * 16, nbytes=2 * 16)
    assert rows.tolist() == [[8, 9, 10, 11], [12, 13, 14, 15], [0, 0, 0, 0]]


def test_partial_reads_are_continued(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(WEIGHTS, folder / "model.safetensors")
    info = open_checkpoint(folder).tensors["embed.weight"]
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    assert values(info) == WEIGHTS["embed.weight"].tobytes()


def test_a_file_that_became_shorter_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({"w": np.zeros(4, dtype=np.float32)}, file)
    info = open_checkpoint(folder).tensors["w"]
    os.truncate(file, file.stat().st_size - 3)
    assert "truncated inside tensor 'w' (3 of 16 bytes are missing)" in refusal(lambda: values(info))
    file.unlink()
    assert "cannot be read" in refusal(lambda: values(info))


def test_buffers_and_ranges_that_do_not_fit_are_refused(folder: Path) -> None:
    save_file(WEIGHTS, folder / "model.safetensors")
    info = open_checkpoint(folder).tensors["scale"]
    with pytest.raises(ValueError, match="at least 8 bytes"):
        read_tensor_into(info, memoryview(bytearray(7)))
    with pytest.raises(ValueError, match="writable"):
        read_tensor_into(info, memoryview(bytes(8)))
    for offset, nbytes in ((9, None), (-1, 2), (4, 5), (0, -1)):
        with pytest.raises(ValueError, match="ask for a range inside it"):
            read_tensor_into(info, memoryview(bytearray(64)), offset, nbytes)


# The Hub


class GatedRepoError(Exception):
    """Stands in for huggingface_hub's class of this name."""


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str]) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))


def test_a_hub_id_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(hub_id: str, **options: Any) -> str:
        asked.append((hub_id, options))
        return str(folder)

    fake_hub(monkeypatch, download)
    save_file(WEIGHTS, folder / "model.safetensors")
    checkpoint = open_checkpoint("no-such-org/name", revision="v1")
    assert checkpoint.path == folder and checkpoint.source == "no-such-org/name"
    assert_holds_weights(checkpoint)
    ((hub_id, options),) = asked
    assert hub_id == "no-such-org/name" and options["revision"] == "v1"
    assert not any(pattern.endswith((".bin", ".pt", ".pth")) for pattern in options["allow_patterns"])


def test_a_hub_repository_without_safetensors_names_the_conversion(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub(monkeypatch, lambda hub_id, **options: str(folder))
    command = """t.AutoModelForCausalLM.from_pretrained("org/name").save_pretrained("name-safetensors")"""
    assert command in refusal(lambda: open_checkpoint("org/name").tensors)
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    assert command in refusal(lambda: open_checkpoint("org/name"))


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (GatedRepoError("403 Client Error.\n\nCannot access gated repo"), "accept its licence on its page"),
        (ConnectionError("no route to host"), "check the network connection, or pass a local directory."),
        (RuntimeError(""), "check the network connection"),
    ],
)
def test_a_failed_download_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, remedy: str
) -> None:
    def fail(hub_id: str, **options: Any) -> str:
        raise error

    fake_hub(monkeypatch, fail)
    message = refusal(lambda: open_checkpoint("org/name"))
    assert remedy in message and type(error).__name__ in message and "org/name" in message


def test_a_missing_huggingface_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "ttpu-core\[hub\]"'):
        open_checkpoint("org/name")
