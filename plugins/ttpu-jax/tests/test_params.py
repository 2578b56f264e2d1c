"""Checkpoints into device buffers and back."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import llama_checkpoint

from ttpu import AutoModelForTPU
from ttpu_core import default_registry, open_checkpoint
from ttpu_core.errors import CheckpointError, MappingError, RequestError
from ttpu_jax.params.dtypes import model_dtype
from ttpu_jax.params.export import save_checkpoint
from ttpu_jax.params.initialize import abstract_parameters, random_parameters
from ttpu_jax.params.load import load_parameters
from ttpu_jax.params.placement import local_placement

FLOAT32 = np.dtype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return llama_checkpoint(tmp_path / "llama", vocab_size=260)


def load(path: Path, mesh: str | None = None, dtype: np.dtype = FLOAT32, **options: object) -> dict[str, jax.Array]:
    checkpoint = open_checkpoint(path)
    architecture = default_registry().architecture(checkpoint.config)
    placement = local_placement(mesh)
    return load_parameters(checkpoint, architecture.mapping, architecture.spec.parameters, placement, dtype, **options)


@pytest.mark.parametrize("mesh", [None, "tensor=2", "fsdp=4,tensor=2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path: Path, mesh: str | None, dtype: str) -> None:
    source = llama_checkpoint(tmp_path / "source", dtype=dtype, vocab_size=260)
    kind = model_dtype(dtype)
    save_file(
        {k: v.astype(kind) for k, v in load_file(source / "model.safetensors").items()}, source / "model.safetensors"
    )
    AutoModelForTPU.from_pretrained(source, mesh=mesh).save_pretrained(tmp_path / "saved")
    before, after = (load_file(p / "model.safetensors") for p in (source, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(
        before[name].tobytes() == after[name].tobytes() and before[name].dtype == after[name].dtype for name in before
    )


def test_a_saved_checkpoint_keeps_config_and_tokenizer_and_says_its_dtype(path: Path, tmp_path: Path) -> None:
    AutoModelForTPU.from_pretrained(path, dtype="bfloat16").save_pretrained(tmp_path / "saved")
    before, after = (json.loads((p / "config.json").read_text()) for p in (path, tmp_path / "saved"))
    assert after == before | {"dtype": "bfloat16"}
    assert (tmp_path / "saved" / "tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()


def test_a_large_checkpoint_is_saved_in_shards_that_load_again(path: Path, tmp_path: Path) -> None:
    params = load(path)
    architecture = default_registry().architecture(open_checkpoint(path).config)
    target = save_checkpoint(
        tmp_path / "sharded", architecture.mapping, params, architecture.config.to_dict(), path, max_shard_bytes=20_000
    )
    assert len(list(target.glob("model-*-of-*.safetensors"))) > 2
    again = load(target)
    assert all(np.array_equal(params[name], again[name]) for name in params)
    save_checkpoint(target, architecture.mapping, params, architecture.config.to_dict(), path)
    assert sorted(file.name for file in target.glob("model*")) == ["model.safetensors"]


def test_saving_over_the_source_keeps_every_tensor_and_file(path: Path) -> None:
    before, files = load_file(path / "model.safetensors"), sorted(file.name for file in path.iterdir())
    AutoModelForTPU.from_pretrained(path).save_pretrained(path)
    after = load_file(path / "model.safetensors")
    assert sorted(file.name for file in path.iterdir()) == files
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)


def test_saved_weights_are_as_readable_as_the_config(path: Path, tmp_path: Path) -> None:
    saved = AutoModelForTPU.from_pretrained(path).save_pretrained(tmp_path / "saved")
    assert (saved / "model.safetensors").stat().st_mode == (saved / "config.json").stat().st_mode


def test_a_file_is_no_place_for_a_checkpoint(path: Path) -> None:
    with pytest.raises(RequestError, match=r"config\.json, but that is a file"):
        AutoModelForTPU.from_pretrained(path).save_pretrained(path / "config.json")


def test_an_interrupted_save_leaves_the_earlier_checkpoint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ttpu_jax.params import export

    model = AutoModelForTPU.from_pretrained(path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(export, "save_file", fail)
    with pytest.raises(CheckpointError, match="disk full"):
        model.save_pretrained(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_loading_reports_its_progress_in_bytes(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    params = load(path, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == len(params)
    assert seen[-1][0] == seen[-1][1] == sum(array.nbytes for array in params.values())


def test_the_cpu_takes_over_the_buffer_that_was_read(path: Path) -> None:
    """So that loading never holds a parameter twice."""
    from ttpu_jax.params.load import aligned_empty

    value = aligned_empty((300, 70), FLOAT32)
    assert jax.device_put(value, jax.devices()[0]).unsafe_buffer_pointer() == value.ctypes.data


@pytest.mark.parametrize(
    ("asked", "found"),
    [("bf16", ml_dtypes.bfloat16), ("torch.float16", np.float16), (np.float32, np.float32), ("fp32", np.float32)],
)
def test_dtypes_have_many_names(asked: object, found: type) -> None:
    assert model_dtype(asked) == np.dtype(found)


def test_a_tpu_holds_half_precision_in_bfloat16(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a checkpoint in float16, which no kernel takes, too."""
    checkpoint = open_checkpoint(llama_checkpoint(tmp_path / "half", dtype="float16"))
    assert model_dtype("auto", checkpoint, "tpu") == model_dtype("half", platform="tpu") == ml_dtypes.bfloat16
    assert caplog.text.count("held in bfloat16") == 2
    assert model_dtype("auto", checkpoint, "cpu") == np.float16
    assert model_dtype("float32", checkpoint, "tpu") == np.float32


@pytest.mark.parametrize("asked", ["int8", "float8", "float33"])
def test_other_dtypes_are_refused(asked: str) -> None:
    with pytest.raises(RequestError, match="float32, bfloat16, float16: pass one"):
        model_dtype(asked)


def test_the_dtype_is_the_checkpoints_own_unless_another_is_asked_for(tmp_path: Path) -> None:
    path = llama_checkpoint(tmp_path / "half", dtype="bfloat16")
    assert AutoModelForTPU.from_pretrained(path).dtype == ml_dtypes.bfloat16
    assert AutoModelForTPU.from_pretrained(path, dtype="float32").dtype == np.float32


@pytest.mark.parametrize(
    ("stored", "found"),
    [(np.float64, np.float32), (np.float32, np.float32), (np.float16, np.float16), (ml_dtypes.bfloat16,) * 2],
)
def test_a_config_without_a_dtype_leaves_it_to_the_tensors(path: Path, stored: type, found: type) -> None:
    config = json.loads((path / "config.json").read_text())
    del config["dtype"]
    (path / "config.json").write_text(json.dumps(config))
    edit(path, lambda tensors: tensors.update({name: value.astype(stored) for name, value in tensors.items()}))
    assert AutoModelForTPU.from_pretrained(path).dtype == np.dtype(found)


def test_weights_of_integers_are_refused(path: Path) -> None:
    edit(path, lambda tensors: tensors.update({"model.norm.weight": np.ones(32, np.int8)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight' is stored as I8.*not quantized"):
        load(path)


def test_a_base_model_without_the_prefix_loads_and_is_saved_with_it(path: Path, tmp_path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, path / "model.safetensors")
    AutoModelForTPU.from_pretrained(path).save_pretrained(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == tensors.keys()


def edit(path: Path, change: object) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, path / "model.safetensors")


def test_a_missing_tensor_is_named(path: Path) -> None:
    edit(path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(MappingError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(path)


def test_an_extra_tensor_is_named(path: Path) -> None:
    edit(path, lambda tensors: tensors.update({"model.layers.0.extra": np.zeros(2, np.float32)}))
    with pytest.raises(MappingError, match=r"model\.layers\.0\.extra"):
        load(path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(path: Path) -> None:
    edit(path, lambda tensors: tensors.update({"model.norm.weight": np.ones(31, np.float32)}))
    with pytest.raises(MappingError, match=r"model\.norm\.weight.*\(31,\).*\(32,\)"):
        load(path)


def test_a_truncated_file_is_refused(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(path)


def test_a_tensor_in_a_quantized_format_is_refused(path: Path) -> None:
    raw = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["model.norm.weight"] |= {"dtype": "F4", "shape": [256]}
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises((CheckpointError, MappingError), match=r"model\.norm\.weight"):
        load(path)


def test_a_tied_head_may_be_in_the_file_or_not(tmp_path: Path) -> None:
    path = llama_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    without = load(path)
    edit(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    assert load(path).keys() == without.keys()


@pytest.mark.slow
def test_random_parameters_follow_from_the_seed_and_not_from_the_mesh(path: Path) -> None:
    spec = default_registry().architecture(open_checkpoint(path).config).spec
    one, same, cut, other = (
        random_parameters(spec.parameters, local_placement(mesh), FLOAT32, seed)
        for mesh, seed in ((None, 0), (None, 0), ("fsdp=4", 0), (None, 1))
    )
    name = "layers.0.mlp.down.kernel"
    np.testing.assert_array_equal(one[name], same[name])
    np.testing.assert_array_equal(one[name], cut[name])
    assert not np.array_equal(one[name], other[name])
    np.testing.assert_array_equal(one["final_norm.scale"], np.ones(32))


def test_a_folder_without_weights_opens_with_random_ones_on_any_mesh(path: Path) -> None:
    (path / "model.safetensors").unlink()
    tokens = np.arange(12).reshape(2, 6)
    one, padded, other = (
        AutoModelForTPU.from_pretrained(path, dtype="float32", random_seed=seed, mesh=mesh)
        for seed, mesh in ((3, None), (3, "tensor=8"), (4, None))
    )
    assert padded.paddings  # heads are repeated for eight devices
    np.testing.assert_allclose(padded(tokens).logits, one(tokens).logits, atol=1e-5)
    assert np.abs(np.asarray(other(tokens).logits) - np.asarray(one(tokens).logits)).max() > 1e-3
    with pytest.raises(RequestError, match="leave one of them out"):
        AutoModelForTPU.from_pretrained(path, random_seed=3, quantization="w8a16")


def test_abstract_parameters_have_the_shapes_and_shardings_of_real_ones(path: Path) -> None:
    spec = default_registry().architecture(open_checkpoint(path).config).spec
    real, abstract = load(path, "tensor=2"), abstract_parameters(spec.parameters, local_placement("tensor=2"), FLOAT32)
    assert {n: (a.shape, a.dtype, a.sharding) for n, a in real.items()} == {
        n: (a.shape, a.dtype, a.sharding) for n, a in abstract.items()
    }


def test_a_head_of_its_own_wins_over_a_config_that_ties_it(tmp_path: Path) -> None:
    """As in transformers, which ties nothing where the checkpoint holds two different tensors."""
    path = llama_checkpoint(tmp_path / "untied", tie_word_embeddings=False)
    tokens = np.arange(8)[None]
    expected = AutoModelForTPU.from_pretrained(path)(tokens).logits
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    model = AutoModelForTPU.from_pretrained(path)
    np.testing.assert_array_equal(model(tokens).logits, expected)
    saved = model.save_pretrained(tmp_path / "saved")
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is False
    np.testing.assert_array_equal(AutoModelForTPU.from_pretrained(saved)(tokens).logits, expected)
