"""The checkpoint that ships in examples/: small, loadable by transformers, fluent in what it was trained on, and made
again by the configuration beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ttpu_core import default_registry, open_checkpoint
from ttpu_core.cli.main import app

EXAMPLES = Path(__file__).parent.parent / "examples"
CHECKPOINT = EXAMPLES / "checkpoints" / "pydoc-llama"
SCRIPT = EXAMPLES / "train" / "pydoc_llama.py"
LARGEST = 6_000_000  # bytes: what a repository can carry for the sake of its demo
PROMPT = "The with statement"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(CHECKPOINT)


def make_data(out: Path, hash_seed: str) -> None:
    """The data and the model's folder, as a user makes them, but with one layer."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "data", str(out), "--layers", "1"],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def greedy(tokens: list[int], new: int, directory: Path = CHECKPOINT) -> list[int]:
    """Greedy tokens by transformers' own model, in float32."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        result = model.generate(torch.tensor([tokens]), max_new_tokens=new, do_sample=False)
    return [int(token) for token in result[0, len(tokens) :]]


def greedy_by_the_decoder(tokens: list[int], new: int) -> list[int]:
    """Greedy tokens by the backend's decoder, in float32 and without a cache."""
    import jax
    import jax.numpy as jnp

    from ttpu_jax.model.causal_model import causal_model
    from ttpu_jax.model.modules import Runtime, different_ropes
    from ttpu_jax.params.load import load_parameters
    from ttpu_jax.params.placement import local_placement

    checkpoint = open_checkpoint(CHECKPOINT)
    architecture = default_registry().architecture(checkpoint.config)
    spec, placement = architecture.spec, local_placement()
    parameters = load_parameters(checkpoint, architecture.mapping, spec.parameters, placement, np.dtype("float32"))
    model = causal_model(spec, Runtime(placement, "eager", different_ropes(spec.layers)))
    length = len(tokens) + new

    @jax.jit
    def forward(parameters: Any, row: jax.Array) -> jax.Array:
        positions = jnp.arange(length)[None]
        return model.forward(parameters, row, positions)[0]

    row = np.zeros((1, length), np.int32)
    row[0, : len(tokens)] = tokens
    for place in range(len(tokens), length):
        row[0, place] = int(np.asarray(forward(parameters, row))[0, place - 1].argmax())
    return [int(token) for token in row[0, len(tokens) :]]


def test_the_checkpoint_is_small_and_complete() -> None:
    sizes = {file.name: file.stat().st_size for file in CHECKPOINT.iterdir()}
    assert set(sizes) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) <= LARGEST


def test_the_model_card_names_the_source_and_licence_of_the_text() -> None:
    card = (CHECKPOINT / "README.md").read_text()
    assert "pydoc_data.topics" in card
    assert "PSF License Version 2" in card


def test_every_tensor_is_bfloat16_and_is_the_one_that_the_llama_plugin_expects() -> None:
    checkpoint = open_checkpoint(CHECKPOINT)
    architecture = default_registry().architecture(checkpoint.config)
    expected = {leaf.name for _, rule in architecture.mapping.rules for leaf in rule.leaves()}
    assert set(checkpoint.tensors) == expected
    assert {info.dtype for info in checkpoint.tensors.values()} == {"BF16"}


@pytest.mark.parametrize("text", [PROMPT, "def f(x):\n\treturn x  # naïve → 日本語 🐍\n", "   indented\n\n\n", ""])
def test_text_survives_tokenizing_and_back(tokenizer: Any, text: str) -> None:
    tokens = tokenizer(text)["input_ids"]
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_the_tokenizer_agrees_with_the_config(tokenizer: Any) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer.model_max_length == config["max_position_embeddings"]
    for role in ("bos", "eos", "pad"):
        assert getattr(tokenizer, f"{role}_token_id") == config[f"{role}_token_id"]


def test_the_chat_template_marks_who_speaks(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "lambda"}]
    shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert shown == "<|bos|><|user|>lambda<|assistant|>"
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert encoded[:2] == tokenizer.convert_tokens_to_ids(["<|bos|>", "<|user|>"])
    assert encoded[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")


@pytest.mark.torch
def test_transformers_and_the_decoder_continue_with_the_same_words_of_the_documentation(tokenizer: Any) -> None:
    from pydoc_data.topics import topics

    prompt = tokenizer(PROMPT)["input_ids"]
    reference = greedy(prompt, 24)
    assert greedy_by_the_decoder(prompt, 24) == reference
    known = set(" ".join(topics.values()).split())
    words = tokenizer.decode(reference).split()[:-1]  # the last one may be cut short
    assert len(words) >= 8
    assert sum(word in known for word in words) >= 0.9 * len(words)


@pytest.mark.slow
@pytest.mark.torch
def test_the_checkpoint_can_be_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates of the run that made it: the second is the first with a learning rate above 0."""
    make_data(tmp_path / "pydoc-data", hash_seed="1")
    make_data(tmp_path / "again", hash_seed="2")
    for file in sorted((tmp_path / "again").rglob("*.json*")):
        assert file.read_bytes() == (tmp_path / "pydoc-data" / file.relative_to(tmp_path / "again")).read_bytes(), file
    monkeypatch.chdir(tmp_path)
    changes = ["max_steps=2", "per_device_train_batch_size=1", "eval_strategy=no", "cache_dir=cache"]
    for command in (
        ["train", str(EXAMPLES / "train" / "pydoc-llama.yaml"), *changes],
        ["export", "pydoc-llama-run", "--out", "made"],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    made = {file.name for file in Path("made").iterdir()}
    assert made == {file.name for file in CHECKPOINT.iterdir()} - {"README.md"}
    assert (tmp_path / "made" / "tokenizer.json").read_bytes() == (CHECKPOINT / "tokenizer.json").read_bytes()
    assert len(greedy([1, 100, 200], 4, tmp_path / "made")) > 0


def test_the_script_beside_it_explains_itself() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "data" in done.stdout and "card" in done.stdout
