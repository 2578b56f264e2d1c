"""Trains the small llama in `examples/checkpoints/pydoc-llama` from scratch on the Python language documentation that
every Python contains (`pydoc_data.topics`), and saves it as a Hugging Face checkpoint with tokenizer and model card.

The forward pass is the JAX backend's shared decoder, which `ttpu generate` runs too.

The checkpoint in the repository took 25 minutes on two shared CPU cores, with Python 3.11.7, jax 0.10.2, optax 0.2.8
and tokenizers 0.23.3.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from optax import contrib
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
    batches,
    build_corpus,
    read_topics,
    train_tokenizer,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from ttpu_core import Architecture, ModelConfig, default_registry
from ttpu_core.spec import Parameter
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.params.export import save_checkpoint
from ttpu_jax.params.initialize import random_parameters
from ttpu_jax.params.placement import local_placement

OUTPUT = Path(__file__).parent / "checkpoints" / "pydoc-llama"
EVALUATED = 2  # rows in one evaluation
EMBEDDING_RATE = 0.15  # learning rate of the embedding, as a share of the kernels' rate
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
Parameters = dict[str, jax.Array]


def write_sidecars(directory: Path, tokenizer: Tokenizer, card: str) -> None:
    """The checkpoint's other files: tokenizer, generation config, model card."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    roles = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [USER, ASSISTANT],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (("tokenizer_config.json", roles), ("generation_config.json", GENERATION_CONFIG)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    (directory / "README.md").write_text(card)


def model_card(
    config: Mapping[str, Any],
    losses: Mapping[str, float],
    tokens: Mapping[str, int],
    training: Mapping[str, float],
    parameters: int,
) -> str:
    """README.md of the checkpoint: its contents, training data, results and licence."""
    names = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "context": "max_position_embeddings",
        "vocab": "vocab_size",
    }
    return CARD.read_text().format(
        **losses,
        **tokens,
        **training,
        **{name: config[key] for name, key in names.items()},
        parameters=parameters / 1e6,
        seen=training["steps"] * training["batch"] * CONTEXT / 1e6,
        python=platform.python_version(),
        cores=os.cpu_count(),
        **{package: version(package) for package in ("jax", "optax", "tokenizers")},
    )


LossFunction = Callable[[Parameters, jax.Array], tuple[jax.Array, jax.Array]]


def loss_function(architecture: Architecture) -> LossFunction:
    """A function of parameters and tokens [batch, seq + 1] that returns the summed cross-entropy in nats and the
    number of tokens."""
    spec = architecture.spec
    model = causal_model(spec, Runtime(local_placement(), "eager", different_ropes(spec.layers)))

    def loss(parameters: Parameters, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        logits, _ = model.forward(parameters, inputs, positions)
        counted = targets != PAD_ID
        each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(each * counted), jnp.sum(counted)

    return loss


def make_optimizer(table: Mapping[str, Parameter], steps: int, learning_rate: float) -> optax.GradientTransformation:
    """Gradient clipping, then Muon for the kernels and AdamW for embedding and norm scales, with warm-up and cosine
    decay.

    Muon orthogonalizes a kernel's update (https://kellerjordan.github.io/posts/muon/). After 120 steps of two
    windows of 256 tokens its loss was 5.5; AdamW's best of five settings reached 5.9. Time on a CPU is the limit
    here."""

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, max(1, min(50, steps // 10)), steps, peak / 50)

    def kernels(parameters: Mapping[str, Any]) -> dict[str, contrib.MuonDimensionNumbers | None]:
        return {path: _as_matrix(table[path]) if path.endswith(".kernel") else None for path in parameters}

    muon = contrib.muon(
        schedule(learning_rate),
        adam_learning_rate=schedule(learning_rate * EMBEDDING_RATE),
        adam_b2=0.97,
        weight_decay=0.01,
        muon_weight_dimension_numbers=kernels,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def _as_matrix(kernel: Parameter) -> contrib.MuonDimensionNumbers:
    """A kernel [*out, in] is one matrix, whatever its output axes are."""
    last = len(kernel.shape) - 1
    return contrib.MuonDimensionNumbers(reduction_axis=last, output_axis=tuple(range(last)))


def make_update(loss: LossFunction, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """One optimizer step: new parameters, new optimizer state, mean loss per token in nats."""

    def mean(parameters: Parameters, tokens: jax.Array) -> jax.Array:
        total, count = loss(parameters, tokens)
        return total / count

    def update(parameters: Parameters, state: Any, tokens: jax.Array) -> tuple[Parameters, Any, jax.Array]:
        value, gradients = jax.value_and_grad(mean)(parameters, tokens)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    return update


def windows(stream: np.ndarray) -> list[np.ndarray]:
    """The whole stream in rows of CONTEXT tokens after a BOS."""
    bos = np.array([BOS_ID], np.int32)
    return [np.concatenate([bos, stream[i : i + CONTEXT]]) for i in range(0, len(stream), CONTEXT)]


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows [rows, CONTEXT + 1], truncated or padded to that length. Their number is padded to a multiple of
    EVALUATED."""
    result = np.full((-len(rows) % EVALUATED + len(rows), CONTEXT + 1), PAD_ID, np.int32)
    for target, row in zip(result, rows, strict=False):
        target[: len(row)] = row[: CONTEXT + 1]
    return result


def mean_loss(evaluate: LossFunction, parameters: Parameters, rows: np.ndarray) -> float:
    """Mean cross-entropy per token in nats, computed in float32, of `rows`: [rows, CONTEXT + 1]."""
    parameters = {path: value.astype(jnp.float32) for path, value in parameters.items()}
    sums = [evaluate(parameters, jnp.asarray(rows[i : i + EVALUATED])) for i in range(0, len(rows), EVALUATED)]
    return float(sum(total for total, _ in sums) / sum(count for _, count in sums))


def main(
    output: Annotated[Path, typer.Option(help="Folder of the checkpoint; its files are replaced one by one.")] = OUTPUT,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 1400,
    batch_size: Annotated[int, typer.Option(min=1, help=f"Windows of {CONTEXT} tokens in a step.")] = 4,
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule, after the warm-up.")] = 2e-2,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saves: an interrupted run leaves one.")] = 200,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = CONFIG["num_hidden_layers"],
    seed: Annotated[int, typer.Option(help="Of the first parameters and of the order of the text.")] = 0,
    evaluate_rows: Annotated[
        int | None, typer.Option(min=EVALUATED, help="Windows that losses are measured on at a save; all without.")
    ] = None,
) -> None:
    """Train the demo checkpoint on the documentation inside this Python, and save it for transformers and ttpu.

    Example: python examples/train_demo_checkpoint.py --steps 200 --output /tmp/pydoc-llama
    """
    console = Console()
    topics = read_topics()
    tokenizer = train_tokenizer(["\n\n".join(paragraphs) for _, paragraphs in topics])
    corpus = build_corpus(topics, tokenizer)
    seen_rows, held_out_rows = (padded(rows)[:evaluate_rows] for rows in (windows(corpus.stream), corpus.held_out))
    console.print(
        f"{len(topics)} topics, {len(corpus.stream):,} tokens to train on, {len(corpus.chats):,} questions, "
        f"{len(corpus.held_out)} passages held out"
    )

    config = CONFIG | {"num_hidden_layers": layers}
    architecture = default_registry().architecture(ModelConfig.from_dict(config))
    placement = local_placement()
    table = architecture.spec.parameters
    parameters = random_parameters(table, placement, np.dtype("float32"), seed)
    optimizer = make_optimizer(table, steps, learning_rate)
    loss = loss_function(architecture)
    update = jax.jit(make_update(loss, optimizer), donate_argnums=(0, 1))
    state = optimizer.init(parameters)
    evaluate = jax.jit(loss)

    def save(step: int, seconds: float) -> None:
        """With the losses of the weights as stored, in bfloat16."""
        stored = {path: value.astype(jnp.bfloat16) for path, value in parameters.items()}
        train, held_out = (mean_loss(evaluate, stored, rows) for rows in (seen_rows, held_out_rows))
        console.print(f"step {step}: loss {train:.3f} on the text, {held_out:.3f} held out")
        card = model_card(
            config=config,
            losses={"train": train, "held_out": held_out},
            tokens={"tokens": len(corpus.stream), "held_tokens": int((held_out_rows[:, 1:] != PAD_ID).sum())},
            training={"steps": step, "batch": batch_size, "seed": seed, "minutes": seconds / 60},
            parameters=sum(value.size for value in parameters.values()),
        )
        with tempfile.TemporaryDirectory() as sidecars:
            write_sidecars(Path(sidecars), tokenizer, card)
            save_checkpoint(output, architecture.mapping, stored, config, source=Path(sidecars))

    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    started = time.monotonic()
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("compiling", total=steps)
        smooth = float("nan")
        for step, batch in zip(range(1, steps + 1), batches(corpus, seed, batch_size), strict=False):
            before = time.monotonic()
            parameters, state, latest = update(parameters, state, batch)
            smooth = float(latest) if step == 1 else 0.95 * smooth + 0.05 * float(latest)
            rate = batch_size * CONTEXT / (time.monotonic() - before)
            progress.update(task, advance=1, description=f"loss {smooth:.3f}  {rate:,.0f} tokens/s")
            if step % 100 == 0 and not console.is_terminal:
                seconds = time.monotonic() - started
                console.print(f"step {step}: loss {smooth:.3f}, {rate:,.0f} tokens/s, {seconds:.0f} s")
            if step % save_every == 0 or step == steps:
                save(step, time.monotonic() - started)
    console.print(f"saved {output}")


if __name__ == "__main__":
    typer.run(main)
