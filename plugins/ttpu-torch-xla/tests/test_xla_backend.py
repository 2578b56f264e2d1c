"""`from_pretrained(backend="torch_xla")` on one device: what comes back is the stock model, and stays right when it is
copied, saved, closed and deleted."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import logging
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
from once import once
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from ttpu import AutoModelForTPU, AutoXLAModelForCausalLM
from ttpu_core.default_device import WORDS, _is_kept
from ttpu_core.errors import CheckpointError, MappingError, PlanError, RequestError, UnsupportedError
from ttpu_torch_xla.patches.patch import active
from ttpu_torch_xla.runtime import current

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("collector_starts_anew")]

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
IDS = torch.arange(1, 25).reshape(2, 12)


def checkpoint(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A tiny llama on disk."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES | changes)).to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("llama"))


def load(path: Path, **options: Any) -> Any:
    return AutoModelForTPU.from_pretrained(path, backend="torch_xla", **options)


def logits(model: Any, ids: torch.Tensor = IDS, **inputs: torch.Tensor) -> torch.Tensor:
    """On the host, by a model anywhere."""
    there = {name: value.to(model.device) for name, value in inputs.items()}
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids.to(model.device), **there).logits.float().cpu()
    return found


def stock(path: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(path).eval()


def test_what_comes_back_is_the_stock_model_with_its_description(llama: Path) -> None:
    model = load(llama)
    assert type(model) is LlamaForCausalLM
    assert model.device.type == "xla"
    assert (model.ttpu.architecture.spec.model_type, model.ttpu.attention) == ("llama", "eager")
    assert {patch.target for patch in model.ttpu.patches} <= set(active())
    torch.testing.assert_close(logits(model), logits(stock(llama)), rtol=1e-5, atol=1e-6)


def test_the_line_that_is_left_out_of_the_log_is_torch_xlas() -> None:
    source = inspect.getsource(torch_xla.runtime._maybe_select_default_device)
    assert f"logging.warning('{WORDS}')" in source
    assert _is_kept in logging.getLogger().filters  # since ttpu_torch_xla was imported


def test_patches_go_with_the_last_model_that_needs_them(llama: Path) -> None:
    gc.collect()
    before = set(active())
    one, two = load(llama), load(llama)
    targets = {patch.target for patch in one.ttpu.patches}
    one.ttpu.close()
    assert targets <= set(active())
    del one, two
    gc.collect()
    assert set(active()) == before


def test_a_deleted_model_is_gone(llama: Path) -> None:
    model = load(llama)
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_copy_is_a_model_of_its_own(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    copied.save_pretrained(tmp_path)
    assert not load_file(tmp_path / "model.safetensors")["lm_head.weight"].any()
    targets = {patch.target for patch in model.ttpu.patches}
    model.ttpu.close()
    del model
    gc.collect()
    assert targets <= set(active())  # the copy needs them still
    assert not logits(copied).any()


def test_a_closed_model_runs_as_the_stock_one(llama: Path) -> None:
    model = load(llama, attn_implementation="splash_attention")
    assert model.ttpu.attention == "splash_attention"
    model.ttpu.close()
    torch.testing.assert_close(logits(model), logits(stock(llama)), rtol=1e-5, atol=1e-6)


def test_what_is_saved_is_what_was_loaded_tied_or_not(tmp_path: Path) -> None:
    for name, tied in (("tied", True), ("own", False)):
        path = checkpoint(tmp_path / name, tie_word_embeddings=tied)
        model = load(path)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        model.save_pretrained(tmp_path / f"{name} again")
        first, second = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / f"{name} again"))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_head_of_its_own_is_kept_where_the_config_says_that_it_is_tied(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, tie_word_embeddings=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    torch.testing.assert_close(logits(load(path)), logits(stock(path)), rtol=1e-5, atol=1e-6)


def test_packed_sequences_do_not_see_each_other(llama: Path) -> None:
    model = load(llama)
    lengths, ids = (3, 4, 5), torch.arange(1, 13)[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        packed = model(
            input_ids=ids.to(model.device), position_ids=positions.to(model.device), use_cache=False
        ).logits.cpu()
    alone = [logits(stock(llama), part) for part in ids.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [2, 8, 64])
def test_a_cache_that_grows_keeps_what_a_window_needs_shorter_or_longer_than_the_sequence(
    tmp_path: Path, window: int
) -> None:
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).save_pretrained(tmp_path)
    host = MistralForCausalLM.from_pretrained(tmp_path).eval()
    model, ids = load(tmp_path), torch.arange(1, 21)[None]
    expected, found = [], []
    for one, results in ((host, expected), (model, found)):
        with torch.no_grad():
            first = one(input_ids=ids[:, :12].to(one.device))  # with a cache, as is usual
            second = one(input_ids=ids[:, 12:].to(one.device), past_key_values=first.past_key_values)
        results.extend((first.logits.cpu(), second.logits.cpu()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_experts_run_without_the_optional_patches_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)).save_pretrained(tmp_path)
    expected = MixtralForCausalLM.from_pretrained(tmp_path).eval()
    gc.collect()
    model = load(tmp_path, patches=False)
    assert all(patch.needed for patch in model.ttpu.patches)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_holds_weights_as_the_checkpoint_says(tmp_path: Path, dtype: torch.dtype) -> None:
    path = checkpoint(tmp_path, dtype)
    assert load(path).dtype == dtype
    assert load(path, dtype=torch.float16).dtype == torch.float16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonsense": 1}, "was given nonsense, but the torch_xla backend takes"),
        ({"dtype": "int8"}, "for int8 and int4 pass do_quant=True"),
        ({"do_quant": "yes"}, "do_quant is 'yes', but it is a switch"),
        ({"use_fsdp_wrap": "yes"}, "use_fsdp_wrap is 'yes'"),
        ({"quantization_config": {"bits": 8}}, "without do_quant=True"),
        ({"do_quant": True, "quantization_config": 8}, "quantization"),
        ({"mesh": "tensor=2", "sharding_strategy": "fsdp"}, "pass one of them"),
        ({"attn_implementation": "splosh"}, "there is none: use auto"),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_refused(llama: Path, options: dict[str, Any], message: str) -> None:
    before = active()
    with pytest.raises(RequestError, match=message):
        load(llama, **options)
    assert active() == before


def test_autoxlas_class_shards_as_it_is_told_and_by_fsdp_otherwise(
    llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load = AutoXLAModelForCausalLM.from_pretrained
    load(llama, parallelism_strategy="dp", verbose=False).ttpu.close()
    with pytest.raises(PlanError, match=r"none\.json"):
        load(llama, plan=tmp_path / "none.json")
    with pytest.raises(RequestError, match="sharding_strategy and plan were given"):
        load(llama, plan=tmp_path / "none.json", sharding_strategy="fsdp")
    passed: list[Any] = []
    monkeypatch.setattr(AutoModelForTPU, "from_pretrained", lambda *_, **given: passed.append(given))
    for given in ({}, {"sharding_strategy": "3d"}, {"mesh": "fsdp=1"}, {"plan": "p"}, {"parallelism_strategy": "dp"}):
        load(llama, verbose=False, **given)
    assert [given["sharding_strategy"] for given in passed] == ["fsdp", "3d", None, None, None]


def test_a_mesh_that_these_devices_cannot_form_leaves_other_models_alone(llama: Path) -> None:
    model = load(llama)
    with pytest.raises(UnsupportedError, match="make it smaller"):
        load(llama, mesh="tensor=2")
    assert not current().is_spmd()
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (2, 14)


@pytest.fixture(scope="module")
def told(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process of two devices is told that trains on the host before it loads a model, and then loads another on
    a mesh. Starting one takes most of the time, so that one is asked both."""
    code = f"""
import json, torch, warnings
torch.ones(1, requires_grad=True).sum().backward()
from ttpu import AutoModelForTPU
from ttpu_core.errors import UnsupportedError
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    one = AutoModelForTPU.from_pretrained({str(llama)!r}, backend="torch_xla")
warned = [str(one.message) for one in told if "cannot be trained here" in str(one.message)]
shape = list(one.generate(torch.arange(1, 25).reshape(2, 12), max_new_tokens=2, do_sample=False).shape)
refused = ""
try:
    AutoModelForTPU.from_pretrained({str(llama)!r}, backend="torch_xla", mesh="fsdp=2")
except UnsupportedError as error:
    refused = str(error)
one(input_ids=torch.ones(1, 4, dtype=torch.long).to(one.device)).logits.cpu()
print(json.dumps({{"warned": warned, "shape": shape, "refused": refused, "afterwards": "still there"}}))
"""

    def run() -> Any:
        environment = os.environ | {"CPU_NUM_DEVICES": "2"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return dict(once(tmp_path_factory, "xla_backend_told", run))


@pytest.mark.slow
def test_a_model_on_one_device_and_one_on_all_are_refused_instead_of_crashing(told: dict[str, Any]) -> None:
    assert "cannot change over" in told["refused"]
    assert told["afterwards"] == "still there"


@pytest.mark.slow
def test_a_backward_pass_before_the_device_was_there_is_told(told: dict[str, Any]) -> None:
    assert any("load it before training on the CPU" in one for one in told["warned"])
    assert told["shape"] == [2, 14]


def test_loading_before_any_backward_pass_tells_nothing(llama: Path, recwarn: pytest.WarningsRecorder) -> None:
    load(llama)
    assert not [one for one in recwarn if "cannot be trained here" in str(one.message)]


def test_a_damaged_checkpoint_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    before = active()
    with pytest.raises(CheckpointError):
        load(path)
    assert active() == before


def test_a_missing_tensor_is_refused_and_not_made_up(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MappingError, match=r"has no tensor 'model.norm.weight'"):
        load(path)
