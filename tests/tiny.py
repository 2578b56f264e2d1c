"""Tiny checkpoints for tests, without torch: in go changes to a small llama config, out comes a directory with random
weights, a byte-level tokenizer and, if asked for, a chat template."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,  # one per byte, then the three special tokens
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 256,
    "eos_token_id": 257,
    "dtype": "float32",
    "transformers_version": "5.0.0",
    "use_cache": True,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights of a llama config, by the names under which transformers saves them."""
    random = np.random.default_rng(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            f"{prefix}self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{prefix}self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            f"{prefix}post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
        }
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    if not config.get("tie_word_embeddings", False):
        weights["lm_head.weight"] = matrix(vocab, hidden)
    return weights


def llama_checkpoint(folder: Path, *, tokenizer: bool = True, chat: bool = False, seed: int = 0, **config: Any) -> Path:
    """Write a whole checkpoint into `folder`, which is made, and return it.

    `config` changes keys of `CONFIG`, and leaves out those whose value is None; `chat` adds a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    save_file(tensors(values, seed), folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        write_tokenizer(folder, chat=chat)
    return folder


def write_tokenizer(folder: Path, *, chat: bool = False) -> None:
    """A tokenizer whose ids are the bytes of UTF-8 text, 256 <s>, 257 </s> and 258 <pad>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # A byte-level tokenizer writes each byte as a printable letter; which one is the same for all of them.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of_letter)
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<pad>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if chat:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _byte_of_letter(letter: str) -> int:
    """GPT-2's table: printable Latin-1 letters stand for themselves, the other bytes for letters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return ord(letter) if ord(letter) in printable else others[ord(letter) - 256]
