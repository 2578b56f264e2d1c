"""What `ttpu train examples/train/pydoc-llama.yaml` begins with and ends with: the model's folder and the data, made of
the Python language documentation that every Python contains (`pydoc_data.topics`), and the card of the trained
checkpoint.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from pydoc_corpus import (
    ASSISTANT,
    BOS,
    BOS_ID,
    CHAT_TEMPLATE,
    CONTEXT,
    EOS,
    EOS_ID,
    PAD,
    PAD_ID,
    USER,
    VOCABULARY,
    build_corpus,
    read_topics,
    rows,
    train_tokenizer,
    windows,
)

CARD = Path(__file__).parent / "pydoc_model_card.md"

# 2.7 million parameters: 5.4 MB in bfloat16, small enough to live in a repository.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 496,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "dtype": "bfloat16",
}
GENERATION_CONFIG = {
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "do_sample": False,
    "max_new_tokens": 128,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "additional_special_tokens": [USER, ASSISTANT],
    "model_max_length": CONTEXT,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)


@app.command()
def data(
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = CONFIG["num_hidden_layers"],
) -> None:
    """Write `model/`, which has a config and a tokenizer but no weights, and rows of tokens: `text.jsonl`,
    `chats.jsonl`, and for evaluation `held_out.jsonl` and `windows.jsonl` (the text once).

    Example: python examples/train/pydoc_llama.py data pydoc-data
    """
    topics = read_topics()
    tokenizer = train_tokenizer(["\n\n".join(paragraphs) for _, paragraphs in topics])
    corpus = build_corpus(topics, tokenizer)
    model = out / "model"
    model.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(model / "tokenizer.json"), pretty=False)
    for name, content in (
        ("config.json", CONFIG | {"num_hidden_layers": layers}),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("generation_config.json", GENERATION_CONFIG),
    ):
        (model / name).write_text(json.dumps(content, indent=2) + "\n")
    write_rows(out / "text.jsonl", rows(corpus))
    write_rows(out / "chats.jsonl", corpus.chats)
    write_rows(out / "held_out.jsonl", (passage[:CONTEXT] for passage in corpus.held_out))
    write_rows(out / "windows.jsonl", windows(corpus))
    print(
        f"{out}: {len(topics)} topics, {len(corpus.stream):,} tokens to train on, {len(corpus.chats):,} questions, "
        f"{len(corpus.held_out)} passages held out"
    )


@app.command()
def card(
    checkpoint: Annotated[Path, typer.Argument(help="The exported checkpoint, whose README.md is written.")],
    run: Annotated[Path, typer.Option(help="The output_dir of the run that made it.")],
    data: Annotated[Path, typer.Option(help="The folder that the data command wrote.")],
) -> None:
    """Measure the checkpoint's loss on the text and on what was held out, and write its model card.

    Example: python examples/train/pydoc_llama.py card pydoc-llama --run pydoc-llama-run --data pydoc-data
    """
    from ttpu import Trainer

    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(checkpoint, output_dir=scratch, max_length=CONTEXT, seed=0)
        losses = {name: trainer.evaluate(data / f"{name}.jsonl")["eval_loss"] for name in ("windows", "held_out")}
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "step_seconds" in line]
    steps = updates[-1]["step"]
    config = json.loads((checkpoint / "config.json").read_text())
    text = CARD.read_text().format(
        train=losses["windows"],
        held_out=losses["held_out"],
        tokens=count(data / "windows.jsonl"),
        held_tokens=count(data / "held_out.jsonl"),
        steps=steps,
        rows=4,
        minutes=steps * sum(line["step_seconds"] for line in updates) / len(updates) / 60,
        parameters=(checkpoint / "model.safetensors").stat().st_size / 2e6,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        context=CONTEXT,
        vocab=VOCABULARY,
        python=platform.python_version(),
        cores=os.cpu_count(),
        **{package: version(package) for package in ("jax", "optax", "tokenizers")},
    )
    (checkpoint / "README.md").write_text(text)
    print(f"{checkpoint}: {losses['windows']:.3f} nats a token on the text, {losses['held_out']:.3f} held out")


def write_rows(path: Path, tokens: Iterable[np.ndarray]) -> None:
    """Write one JSON object a line."""
    with path.open("w") as file:
        for row in tokens:
            file.write(json.dumps({"input_ids": row.tolist()}) + "\n")


def count(path: Path) -> int:
    """Tokens that are predicted in a file of rows."""
    return sum(len(json.loads(line)["input_ids"]) - 1 for line in path.read_text().splitlines())


if __name__ == "__main__":
    app()
