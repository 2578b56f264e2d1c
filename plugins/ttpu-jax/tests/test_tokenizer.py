"""Tokenizers are those of transformers' AutoTokenizer, and loading one imports no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from transformers import AutoTokenizer

from ttpu_core.checkpoint import Checkpoint, open_checkpoint
from ttpu_core.errors import CheckpointError
from ttpu_jax.tokenizer import load_tokenizer

SHIPPED = Path(__file__).parents[3] / "examples" / "checkpoints" / "pydoc-llama"


def run(code: str, *args: str) -> str:
    """What a new process prints."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def changed(folder: Path, *, tokenizer_class: object = ..., auto_map: bool = False, **config: object) -> Checkpoint:
    """The shipped checkpoint with other keys; None drops one."""
    for file in SHIPPED.iterdir():
        shutil.copy(file, folder / file.name)
    described = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in described.items() if v is not None}))
    written = json.loads((folder / "tokenizer_config.json").read_text())
    if tokenizer_class is not ...:
        written["tokenizer_class"] = tokenizer_class
    if auto_map:
        written["auto_map"] = {"AutoTokenizer": ["code.Its", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in written.items() if v is not None}))
    return open_checkpoint(folder)


OPENED = """
import sys
from ttpu import AutoModelForTPU
model = AutoModelForTPU.from_pretrained(sys.argv[1])
text = "".join(event.text for event in model.stream("What is a list?", max_new_tokens=4))
assert text
print("torch" in sys.modules)
"""


def test_a_model_generates_text_without_importing_torch() -> None:
    assert run(OPENED, str(SHIPPED)) == "False"


SERVED = """
import sys
from ttpu import LLM, SamplingParams
few = {"sequence_buckets": (2,), "token_buckets": (16,), "sampling_level": "greedy", "prompt_logprobs": False}
llm = LLM(sys.argv[1], max_num_seqs=2, max_num_batched_tokens=16, **few)
[answer] = llm.chat([{"role": "user", "content": "What is a list?"}], SamplingParams(temperature=0.0, max_tokens=4))
assert answer.outputs[0].token_ids
print("torch" in sys.modules)
"""


def test_an_engine_answers_without_importing_torch() -> None:
    assert run(SERVED, str(SHIPPED)) == "False"


LATER = """
import sys
from ttpu_core.checkpoint import open_checkpoint
from ttpu_jax.tokenizer import load_tokenizer
tokenizer = load_tokenizer(open_checkpoint(sys.argv[1]))
assert "torch" not in sys.modules
ids = tokenizer("a list", return_tensors="pt").input_ids
import torch
import transformers
assert isinstance(ids, torch.Tensor) and torch is sys.modules["torch"]
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=2100, dtype="bfloat16",
    rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
)
model = transformers.AutoModelForCausalLM.from_config(config)
print(model.dtype, tuple(model(ids).logits.shape[:2]) == tuple(ids.shape))
"""


def test_torch_and_models_of_transformers_work_afterwards() -> None:
    assert run(LATER, str(SHIPPED)) == "torch.bfloat16 True"


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3_moe", "gemma3_text", "mistral", "gpt2", "deepseek_v3"]
)
@pytest.mark.parametrize(
    "tokenizer_class",
    [
        "PreTrainedTokenizerFast",
        "LlamaTokenizerFast",
        "LlamaTokenizer",
        "GPT2Tokenizer",
        "Qwen2Tokenizer",
        "Unknown",
        None,
    ],
)
def test_the_class_is_the_one_that_transformers_chooses(
    model_type: str, tokenizer_class: str | None, tmp_path: Path
) -> None:
    checkpoint = changed(tmp_path, tokenizer_class=tokenizer_class, model_type=model_type)
    ours, theirs = load_tokenizer(checkpoint), AutoTokenizer.from_pretrained(str(tmp_path))
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.chat_template == theirs.chat_template


def test_a_class_that_only_config_json_names_is_used(tmp_path: Path) -> None:
    changed(tmp_path, tokenizer_class=None, model_type="llama")
    described = json.loads((tmp_path / "config.json").read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert type(load_tokenizer(open_checkpoint(tmp_path))) is type(AutoTokenizer.from_pretrained(str(tmp_path)))


def test_without_tokenizer_files_there_is_none(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(SHIPPED / name, tmp_path / name)
    assert load_tokenizer(open_checkpoint(tmp_path)) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    checkpoint = changed(tmp_path)
    (tmp_path / name).write_text("{" if name == "tokenizer.json" else "[1")
    with pytest.raises(CheckpointError, match=r"tokenizer .*cannot be read"):
        load_tokenizer(checkpoint)
