"""Models whose heads, vocabulary and MLP no mesh of these tests divides. In: a folder; out: their checkpoints, and what
a model says on one device and on a mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tiny import llama_checkpoint, tensors

from ttpu import AutoModelForTPU

TOLERANCE = 2e-5
QWEN = {  # Qwen2.5-7B's head counts
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 102,
    "vocab_size": 1003,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
IDS = np.random.default_rng(1).integers(0, 1003, (8, 12))
PROMPTS = [row[:length].tolist() for row, length in zip(IDS, (12, 5, 9, 1), strict=False)]


def qwen_checkpoint(folder: Path, **config: Any) -> Path:
    """Qwen2 with biases on queries, keys and values, and with a tokenizer that has fewer tokens."""
    values = QWEN | config
    path = llama_checkpoint(folder, **values)
    from tiny import CONFIG

    weights = tensors({**CONFIG, **values})
    random = np.random.default_rng(5)
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        size = len(weights[name])
        weights[name.removesuffix("weight") + "bias"] = random.standard_normal(size).astype(np.float32)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def load(path: Path, mesh: str | None = None) -> Any:
    return AutoModelForTPU.from_pretrained(path, dtype="float32", mesh=mesh)


def assert_equal(ours: Any, reference: Any) -> None:
    """Within a tolerance relative to the largest."""
    ours, reference = np.asarray(ours), np.asarray(reference)
    assert ours.shape == reference.shape
    assert np.abs(ours - reference).max() <= TOLERANCE * np.abs(reference).max()


def assert_same_as_one_device(path: Path, *meshes: str) -> None:
    """Logits, greedy and sampled tokens, with penalties and log-probabilities, on each of the meshes."""
    one = load(path)
    logits = one(IDS).logits
    cases: tuple[dict[str, Any], ...] = (
        {},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 3},
        {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "seed": 7},
    )
    asked = [{"max_new_tokens": 6, "ignore_eos": True, "return_dict_in_generate": True, **case} for case in cases]
    expected = [one.generate(PROMPTS, **arguments).completions for arguments in asked]
    for mesh in meshes:
        cut = load(path, mesh)
        assert_equal(cut(IDS).logits, logits)
        for arguments, theirs in zip(asked, expected, strict=True):
            ours = cut.generate(PROMPTS, **arguments).completions
            assert [row.token_ids for row in ours] == [row.token_ids for row in theirs], mesh
            if "logprobs" in arguments:
                for row, other in zip(ours, theirs, strict=True):
                    np.testing.assert_allclose(row.logprobs, other.logprobs, rtol=1e-4)
                    assert [list(top) for top in row.top_logprobs] == [list(top) for top in other.top_logprobs]
