"""Tables of tokens that are not the head's too: what shards the vocabulary shards their features, where each device
gets whole lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from test_compile_report import architecture, count
from test_quantized_load import load
from tiny import llama_checkpoint
from updates import losses_of

from ttpu import AutoModelForTPU
from ttpu_core.sharding.padding import pad_architecture
from ttpu_core.sharding.parallelism import parse_rules, rules_text, strategy_with
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, TRAINING_STRATEGY, Strategy
from ttpu_core.spec import (
    ArchitectureSpec,
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    axes,
)
from ttpu_jax.aot.report import ProgramReport, compile_report
from ttpu_jax.model.modules import Runtime
from ttpu_jax.params.placement import local_placement
from ttpu_plan.shards import shard_model

TABLE, TIED = (axes.LOOKED_UP, axes.EMBED), (axes.VOCAB, axes.EMBED)
SIZES = {"hidden_size": 512, "num_hidden_layers": 1, "intermediate_size": 48}
WORDS = 65536
TOKENS = np.random.default_rng(0).integers(0, 259, (4, 16))


@pytest.mark.parametrize(
    ("logical", "features", "mesh", "sharded"),
    [
        (TABLE, 4096, {"tensor": 8}, ["", "tensor"]),
        (TABLE, 4096, {"fsdp": 4, "tensor": 8}, ["", "fsdp+tensor"]),
        (TABLE, 4096, {"fsdp": 8, "tensor": 8}, ["tensor", "fsdp"]),  # 64 features each
        (TABLE, 3584, {"tensor": 8}, ["tensor", ""]),  # 448 features each
        (TABLE, 3584, {"tensor": 4}, ["", "tensor"]),
        (TABLE, 4096, {"data": 8}, ["", ""]),
        (TIED, 4096, {"tensor": 8}, ["tensor", ""]),
    ],
)
def test_features_are_sharded_where_each_device_gets_whole_lanes(
    logical: tuple[str, ...], features: int, mesh: dict[str, int], sharded: list[str]
) -> None:
    found = DEFAULT_STRATEGY.mesh_axes(logical, (128256, features), mesh, "the table")
    assert ["+".join(each) for each in found] == sharded


def test_to_train_rows_are_sharded() -> None:
    mesh = {"fsdp": 2, "expert": 4, "tensor": 2}
    assert TRAINING_STRATEGY.mesh_axes(TABLE, (1004, 2048), mesh, "the table") == (("tensor",), ("fsdp", "expert"))


def test_rules_say_otherwise() -> None:
    def sharded(rules: str) -> tuple[tuple[str, ...], ...]:
        strategy = strategy_with(parse_rules(rules), DEFAULT_STRATEGY)
        return strategy.mesh_axes(TABLE, (1024, 4096), {"fsdp": 2, "tensor": 4}, "the table")

    assert sharded("looked_up=tensor") == (("tensor",), ("fsdp",))
    assert sharded("looked_up=none") == ((), ("fsdp",))
    assert sharded("vocab=none") == ((), ("fsdp",))
    assert sharded("embed=none") == ((), ("tensor",))
    assert sharded("vocab=fsdp+tensor") == ((), ("fsdp", "tensor"))


@pytest.mark.parametrize("rules", ["looked_up=none", "looked_up=tensor", "looked_up=fsdp+tensor"])
def test_rules_are_written_as_they_are_read(rules: str) -> None:
    strategy = strategy_with(parse_rules(rules), DEFAULT_STRATEGY)
    assert rules_text(strategy) == rules and rules_text(DEFAULT_STRATEGY) == ""
    assert rules_text(TRAINING_STRATEGY, TRAINING_STRATEGY) == ""
    assert rules_text(DEFAULT_STRATEGY, TRAINING_STRATEGY) == "batch=data+fsdp,embed=fsdp,latent=fsdp"


@pytest.mark.parametrize(
    ("rules", "rows"), [("", 1004), ("vocab=none", 1003), ("vocab=none,looked_up=tensor", 1004),
                        ("looked_up=fsdp+tensor", 1008)]
)  # fmt: skip
def test_a_table_whose_rows_are_sharded_is_padded(rules: str, rows: int) -> None:
    strategy = strategy_with(parse_rules(rules), DEFAULT_STRATEGY) if rules else DEFAULT_STRATEGY
    mesh = {"fsdp": 2, "tensor": 4}
    padded, _ = pad_architecture(architecture(vocab_size=1003).spec, mesh, strategy)
    assert padded.embedding.rows == rows
    assert shard_model(architecture(vocab_size=1003).spec, mesh, strategy).spec.embedding.rows == rows


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("table") / "llama", tie_word_embeddings=False, **SIZES)


def logits(model: Any) -> np.ndarray:
    return np.asarray(model(TOKENS).logits, np.float32)


@pytest.fixture(scope="module")
def expected(path: Path) -> np.ndarray:
    return logits(AutoModelForTPU.from_pretrained(path))


@pytest.mark.parametrize(
    ("mesh", "stream", "sharded"),
    [
        ("tensor=4", "whole", (None, "tensor")),
        ("tensor=4", "rings", (None, "tensor")),
        ("data=2,tensor=2", "rings", (None, "tensor")),
        ("fsdp=2,tensor=2", "whole", (None, ("fsdp", "tensor"))),
        ("fsdp=2,tensor=2", "rings", (None, ("fsdp", "tensor"))),
        ("sequence=2,tensor=2", "auto", (None, "tensor")),
        ("tensor=8", "rings", ("tensor", None)),
    ],
)
def test_logits_and_tokens_are_those_of_one_device(
    mesh: str, stream: Any, sharded: tuple[Any, ...], path: Path, expected: np.ndarray
) -> None:
    model = AutoModelForTPU.from_pretrained(path, mesh=mesh, residual_stream=stream)
    assert tuple(model.params["embed.embedding"].sharding.spec) == sharded
    np.testing.assert_allclose(logits(model)[..., :259], expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    asked = {"max_new_tokens": 4, "do_sample": False, "min_new_tokens": 4}
    one = AutoModelForTPU.from_pretrained(path).generate(TOKENS, **asked)
    np.testing.assert_array_equal(model.generate(TOKENS, **asked), one)


def test_a_quantized_table_is_looked_up_by_parts(path: Path) -> None:
    asked = {"bits": 8, "embeddings": True}
    one, shared = (load(path, asked, mesh=mesh) for mesh in (None, "tensor=4"))
    table = shared.params["embed.embedding"]
    assert tuple(table.values.sharding.spec) == (None, "tensor") and table.values.dtype == np.int8
    found, whole = logits(shared)[..., :259], logits(one)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-4 * np.abs(whole).max())


def test_steps_of_training_are_those_of_one_device() -> None:
    norm = NormSpec()
    layer = LayerSpec(AttentionSpec(4, 2, 16), MLPSpec(32), norm)
    spec = ArchitectureSpec("tiny", EmbeddingSpec(64, 512), (layer,), norm, HeadSpec(tied=False), 32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 8)), jnp.int32)

    def losses(mesh: str | None, strategy: Strategy = TRAINING_STRATEGY, *, trains: bool = True) -> list[float]:
        runtime = Runtime(local_placement(mesh, strategy), trains=mesh is not None and trains)
        return losses_of(spec, runtime, tokens, 0.05)

    alone = losses(None)
    assert alone[-1] < alone[0]
    for mesh in ("tensor=2", "fsdp=2,tensor=2"):
        np.testing.assert_allclose(losses(mesh), alone, rtol=1e-5)
        np.testing.assert_allclose(losses(mesh, DEFAULT_STRATEGY), alone, rtol=1e-5)
        np.testing.assert_allclose(losses(mesh, DEFAULT_STRATEGY, trains=False), alone, rtol=1e-5)


def compiled(task: Any, hidden: int, rules: str = "") -> ProgramReport:
    return compile_report(
        architecture(hidden_size=hidden, num_hidden_layers=1, vocab_size=WORDS),
        "v6e:2x2",
        task=task,
        batch=8 if task == "decode" else 1,
        context=512,
        strategy=strategy_with(parse_rules(rules), DEFAULT_STRATEGY) if rules else None,
    )


@pytest.mark.tpu_compile
@pytest.mark.parametrize("task", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("hidden", "rules", "by_features"), [(512, "", True), (512, "looked_up=tensor", False), (640, "", False)]
)
def test_a_tpu_exchanges_rows_and_copies_no_table(task: Any, hidden: int, rules: str, by_features: bool) -> None:
    pytest.importorskip("libtpu")
    program = compiled(task, hidden, rules)
    assert program.temp_bytes < WORDS * hidden // 4 * 2
    exchanged = count(program, "all-to-all") if task == "prefill" else count(program, "all-gather") - 2  # of sampling
    assert exchanged == by_features
