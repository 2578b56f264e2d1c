"""Trains the small llama in `examples/checkpoints/pydoc-llama` from nothing: in goes the Python language documentation
that every Python carries (`pydoc_data.topics`), out comes a Hugging Face checkpoint with its tokenizer and model card.

The forward pass is the JAX backend's own shared decoder, so what is trained here is what `ttpu generate` runs.
"""

from __future__ import annotations

import json
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from ttpu_jax.model.decoder import Decoder
from ttpu_jax.model.layers import Runtime, different_ropes
from ttpu_jax.params.export import save_checkpoint
from ttpu_jax.params.initialize import random_parameters
from ttpu_jax.params.placement import local_placement

from ttpu_core import Architecture, ModelConfig, default_registry

OUTPUT = Path(__file__).parent / "checkpoints" / "pydoc-llama"
CONTEXT = 512
EVALUATED = 8  # rows in one evaluation
PAD, BOS, EOS, USER, ASSISTANT = SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
HELD_OUT_EVERY = 25  # one passage in 25 is never trained on

# 2.7 million parameters: 5.4 MB in bfloat16, small enough to live in a repository. Deep rather than wide, because depth
# learns a text of this size better than width at the same number of parameters.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
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
    "pad_token_id": SPECIAL.index(PAD),
    "bos_token_id": SPECIAL.index(BOS),
    "eos_token_id": SPECIAL.index(EOS),
    "dtype": "bfloat16",
}
GENERATION_CONFIG = {
    "pad_token_id": SPECIAL.index(PAD),
    "bos_token_id": SPECIAL.index(BOS),
    "eos_token_id": SPECIAL.index(EOS),
    "do_sample": False,
    "max_new_tokens": 128,
}
# One question and its answer are one passage of training, so a conversation is rendered turn by turn.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] | trim }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] | trim + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
QUESTIONS = ("{}", "{}?", "What is {}?", "What are {}?", "Explain {}", "Explain {}.", "Tell me about {}", "help({!r})")


CARD = """card {python} {held_out}
"""
Parameters = dict[str, jax.Array]


@dataclass(frozen=True)
class Section:
    """A titled stretch of documentation; `names` are what a user may call it by."""

    names: tuple[str, ...]
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """Token sequences: `starts` index the paragraphs in `stream`; `chats` are questions with their answers."""

    stream: np.ndarray
    starts: np.ndarray
    chats: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]


def read_topics() -> list[tuple[str, list[str]]]:
    """Topics by name, each as its paragraphs; a topic whose text is nearly all inside a longer one is left out."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept: list[tuple[str, list[str]]] = []
    for name, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        paragraphs = [clean(p) for p in re.split(r"\n\s*\n", text.strip("\n")) if p.strip()]
        new = sum(len(p) for p in paragraphs if p not in seen)
        if new > 0.1 * sum(map(len, paragraphs)):
            kept.append((name, paragraphs))
            seen.update(paragraphs)
    return sorted(kept)


def clean(paragraph: str) -> str:
    """ASCII quotes and dashes, as a user types them, and prose on one line, so that a sentence is the same tokens wherever
    it once was wrapped; code, grammar and tables keep their lines."""
    for fancy, plain in (("“", '"'), ("”", '"'), ("‘", "'"), ("’", "'"), ("–", "-"), ("—", "-"), ("…", "..."), ("\xa0", " ")):
        paragraph = paragraph.replace(fancy, plain)
    lines = paragraph.split("\n")
    indents = {len(line) - len(line.lstrip()) for line in lines[1:]}
    wrapped = len(lines) > 1 and len(indents) == 1 and all(len(line) > 50 for line in lines[:-1])
    if not wrapped or any(mark in paragraph for mark in ("::=", ">>>", "| ", "***", "===", "---")):
        return paragraph.rstrip()
    lead = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return lead + re.sub(r"(?<=[.,:;?!)\"]) {2,}", " ", " ".join(line.strip() for line in lines))


def sections(topics: list[tuple[str, list[str]]]) -> Iterator[Section]:
    """Each topic cut at its underlined titles; a title also goes by the name of the topic that `help()` shows under it."""
    from pydoc_data.topics import topics as all_topics

    aliases = {clean(text.partition("\n")[0]): name for name, text in all_topics.items()}
    for name, paragraphs in topics:
        names: tuple[str, ...] = (name,)
        body: list[str] = []
        for paragraph in paragraphs:
            title, _, rule = paragraph.partition("\n")
            if re.fullmatch(r"[*=\-~^\"]{3,}", rule):
                if body:
                    yield Section(names, tuple(body))
                    names, body = (), []
                titles = (aliases.get(title), title.replace('"', ""))
                names = tuple(dict.fromkeys((*names, *filter(None, titles))))
            else:
                body.append(paragraph)
        if body:
            yield Section(names, tuple(body))


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE that turns every text into tokens and back without loss, and puts BOS in front of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, SPECIAL.index(BOS))]
    )
    return tokenizer


def build_corpus(topics: list[tuple[str, list[str]]], tokenizer: Tokenizer) -> Corpus:
    """Tokenize the topics; one passage (a run of about 2000 characters) in `HELD_OUT_EVERY` is held out whole."""
    bos, eos = SPECIAL.index(BOS), SPECIAL.index(EOS)
    held_out_text: set[str] = set()
    held_out: list[np.ndarray] = []
    stream: list[int] = []
    starts: list[int] = []
    passage: list[str] = []
    passages = 0

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def place(passage: list[str]) -> None:
        nonlocal passages
        passages += 1
        if passages % HELD_OUT_EVERY == 0:
            held_out_text.update(passage)
            held_out.append(np.array([bos, *encode("\n\n".join(passage) + "\n\n")], np.int32))
            return
        for paragraph in passage:
            starts.append(len(stream))
            stream.extend(encode(paragraph + "\n\n"))

    for _, paragraphs in topics:
        for paragraph in paragraphs:
            passage.append(paragraph)
            if sum(map(len, passage)) > 2000:
                place(passage)
                passage = []
        place(passage)
        passage = []
        stream.append(eos)
    chats = []
    for section in sections(topics):
        body = [p for p in section.paragraphs if p not in held_out_text]
        answer = [SPECIAL.index(ASSISTANT), *encode("\n\n".join(body)), eos]
        for name in section.names:
            for question in QUESTIONS:
                asked = question.format(name)
                for text in dict.fromkeys((asked, asked.lower())):
                    chats.append(np.array([bos, SPECIAL.index(USER), *encode(text), *answer][: CONTEXT + 1], np.int32))
    return Corpus(np.array(stream, np.int32), np.array(starts, np.int32), tuple(chats), tuple(held_out))


def batches(corpus: Corpus, seed: int, size: int) -> Iterator[np.ndarray]:
    """Endless batches [size, CONTEXT + 1]: four rows in five begin at a paragraph (each paragraph once per round), the
    others are a question with its answer, padded."""
    chance = np.random.default_rng(seed)
    order: list[int] = []
    while True:
        batch = np.full((size, CONTEXT + 1), SPECIAL.index(PAD), np.int32)
        for row in batch:
            if chance.random() < 0.2:
                tokens = corpus.chats[chance.integers(len(corpus.chats))]
                row[: len(tokens)] = tokens
                continue
            order = order or chance.permutation(corpus.starts).tolist()
            start = order.pop()
            tokens = corpus.stream[start : start + CONTEXT]
            row[0], row[1 : len(tokens) + 1] = SPECIAL.index(BOS), tokens
        yield batch


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


def model_card(record: dict[str, Any]) -> str:
    """README.md of the checkpoint: what it is, what it was trained on, how well it learned it, and whose text it is."""
    return CARD.format(**record)


def main(
    output: Annotated[Path, typer.Option(help="Folder of the checkpoint; its files are replaced one by one.")] = OUTPUT,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 1600,
    batch_size: Annotated[int, typer.Option(min=1, help=f"Windows of {CONTEXT} tokens in a step.")] = 4,
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule, after the warm-up.")] = 3e-3,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saves, so that an interrupted run leaves one.")] = 400,
    seed: Annotated[int, typer.Option(help="Of the first parameters and of the order of the text.")] = 0,
) -> None:
    """Train the demo checkpoint on the documentation inside this Python, and save it for transformers and ttpu."""
    console = Console()
    topics = read_topics()
    tokenizer = train_tokenizer(["\n\n".join(paragraphs) for _, paragraphs in topics])
    corpus = build_corpus(topics, tokenizer)
    held_tokens = sum(map(len, corpus.held_out))
    console.print(
        f"{len(topics)} topics, {len(corpus.stream):,} tokens to train on, {len(corpus.chats):,} questions, "
        f"{held_tokens:,} tokens held out"
    )

    architecture = default_registry().architecture(ModelConfig.from_dict(CONFIG))
    placement = local_placement()
    table = architecture.spec.parameters
    parameters = random_parameters(table, placement, np.dtype("float32"), seed)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(1, min(100, steps // 10)), steps, learning_rate / 50)
    # Norm scales are not decayed.
    decayed = {path: parameter.init == "normal" for path, parameter in table.items()}
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.97, weight_decay=0.02, mask=decayed)
    )
    loss_of = loss_function(architecture)
    update = jax.jit(make_update(loss_of, optimizer), donate_argnums=(0, 1))
    state = optimizer.init(parameters)
    evaluate = jax.jit(loss_of)

    def save(step: int, seconds: float) -> None:
        rounded = {path: value.astype(jnp.bfloat16) for path, value in parameters.items()}
        whole = {path: value.astype(jnp.float32) for path, value in rounded.items()}
        record = {
            "held_out": mean_loss(evaluate, whole, padded(corpus.held_out)),
            "train": mean_loss(evaluate, whole, padded(windows(corpus.stream))),
        }
        console.print(f"step {step}: loss {record['train']:.3f} on the text, {record['held_out']:.3f} held out")
        card = model_card(
            record
            | {
                "python": platform.python_version(),
                "jax": jax.__version__,
                "optax": version("optax"),
                "tokenizers": version("tokenizers"),
                "steps": step,
                "batch": batch_size,
                "seed": seed,
                "minutes": seconds / 60,
                "tokens": len(corpus.stream),
                "held_tokens": held_tokens,
                "seen": step * batch_size * CONTEXT / 1e6,
                "parameters": sum(value.size for value in parameters.values()) / 1e6,
            }
        )
        with tempfile.TemporaryDirectory() as sidecars:
            write_sidecars(Path(sidecars), tokenizer, card)
            save_checkpoint(output, architecture.mapping, rounded, CONFIG, source=Path(sidecars))

    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    started = time.monotonic()
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("compiling", total=steps)
        smooth = float("nan")
        for step, batch in zip(range(1, steps + 1), batches(corpus, seed, batch_size), strict=False):
            before = time.monotonic()
            parameters, state, loss = update(parameters, state, batch)
            smooth = float(loss) if step == 1 else 0.95 * smooth + 0.05 * float(loss)
            rate = batch_size * CONTEXT / (time.monotonic() - before)
            progress.update(task, advance=1, description=f"loss {smooth:.3f}  {rate:,.0f} tokens/s")
            if step % 100 == 0 and not console.is_terminal:
                console.print(f"step {step}: loss {smooth:.3f}, {rate:,.0f} tokens/s, {time.monotonic() - started:.0f} s")
            if step % save_every == 0 or step == steps:
                save(step, time.monotonic() - started)
    console.print(f"saved {output}")


LossFunction = Callable[[Parameters, jax.Array], tuple[jax.Array, jax.Array]]


def loss_function(architecture: Architecture) -> LossFunction:
    """From parameters and tokens [batch, seq + 1] to the summed cross-entropy in nats and the number of tokens."""
    spec = architecture.spec
    runtime = Runtime(local_placement(), "eager", different_ropes(spec.layers))

    def loss(parameters: Parameters, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        logits, _ = Decoder(spec, parameters, spec.parameters, runtime)(inputs, positions)
        counted = targets != SPECIAL.index(PAD)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(each * counted), jnp.sum(counted)

    return loss


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
    """The whole stream in rows of CONTEXT tokens behind a BOS."""
    bos = np.array([SPECIAL.index(BOS)], np.int32)
    return [np.concatenate([bos, stream[i : i + CONTEXT]]) for i in range(0, len(stream), CONTEXT)]


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows cut or padded to CONTEXT + 1, their number to a multiple of EVALUATED: [rows, CONTEXT + 1]."""
    result = np.full((-len(rows) % EVALUATED + len(rows), CONTEXT + 1), SPECIAL.index(PAD), np.int32)
    for target, row in zip(result, rows, strict=False):
        target[: len(row)] = row[: CONTEXT + 1]
    return result


def mean_loss(evaluate: LossFunction, parameters: Parameters, rows: np.ndarray) -> float:
    """Mean cross-entropy per token, in nats."""
    sums = [evaluate(parameters, rows[i : i + EVALUATED]) for i in range(0, len(rows), EVALUATED)]
    return float(sum(total for total, _ in sums) / sum(count for _, count in sums))


if __name__ == "__main__":
    typer.run(main)
