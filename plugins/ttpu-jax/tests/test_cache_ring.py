"""Layers whose queries see a window keep the newest tokens alone, with the same results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny import llama_checkpoint

from ttpu_core import default_registry, open_checkpoint
from ttpu_core.mapping import stack_layers
from ttpu_core.spec import ArchitectureSpec, AttentionSpec
from ttpu_core.spec.arithmetic import REWOUND, kept_slots
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.model import step_cache
from ttpu_jax.model.cache import KVCache, LayerCache, empty_cache
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.ops.attention import AttentionContext
from ttpu_jax.params.load import load_parameters
from ttpu_jax.params.placement import local_placement

FLOAT32 = np.dtype(np.float32)
LENGTH, SLOTS, WINDOW = 90, 96, 6
RING = 32  # 6 tokens and REWOUND more, in steps of 16
TOKENS = np.random.default_rng(0).integers(0, 259, (3, LENGTH)).astype(np.int32)
STARTS = np.array([0, 7, 40], np.int32)  # two rows are padded on the left
POSITIONS = np.arange(LENGTH, dtype=np.int32)[None] - STARTS[:, None]


def limited(spec: ArchitectureSpec, **limit: int) -> ArchitectureSpec:
    """The architecture with a full layer and two whose queries see a window, or a chunk."""
    first, *others = spec.layers
    changed = [replace(layer, mixer=replace(layer.mixer, **limit)) for layer in others]
    return replace(spec, layers=(first, *changed))


class Model:
    """A tiny llama with a window in its second and third layer."""

    def __init__(
        self, path: Path, mesh: str | None = None, *, stacked: bool = False, attention: str = "eager", **limit: int
    ) -> None:
        checkpoint = open_checkpoint(path)
        architecture = default_registry().architecture(checkpoint.config)
        self.spec = limited(architecture.spec, **(limit or {"window": WINDOW}))
        self.placement = local_placement(mesh)
        table = stacked_parameters(self.spec) if stacked else self.spec.parameters
        mapping = stack_layers(architecture.mapping, self.spec) if stacked else architecture.mapping
        self.params = load_parameters(checkpoint, mapping, table, self.placement, FLOAT32)
        runtime = Runtime(self.placement, attention, different_ropes(self.spec.layers))
        self.model = causal_model(self.spec, runtime, stacked=stacked)
        self.run = jax.jit(
            lambda params, tokens, cache, fresh: self.model.forward(params, tokens, cache=cache, fresh=fresh),
            static_argnums=3,
        )

    def logits(self) -> np.ndarray:
        run = jax.jit(lambda params, tokens, positions: self.model.forward(params, tokens, positions)[0])
        return np.asarray(run(self.params, TOKENS, POSITIONS))

    def cache(self, slots: int = SLOTS, **options: Any) -> KVCache:
        cache = self.model.empty_cache(len(TOKENS), slots, FLOAT32, **options)
        return replace(cache, start=jax.device_put(STARTS, cache.start.sharding))

    def read(self, cache: KVCache, begin: int, end: int, *, fresh: bool = False) -> tuple[np.ndarray, KVCache]:
        logits, after = self.run(self.params, TOKENS[:, begin:end], cache, fresh)
        return np.asarray(logits), after

    def in_parts(self, lengths: list[int], *, fresh: bool) -> np.ndarray:
        cache, parts, begin = self.cache(), [], 0
        for length in lengths:
            part, cache = self.read(cache, begin, begin + length, fresh=fresh and not begin)
            parts.append(part)
            begin += length
        return np.concatenate(parts, axis=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("ring") / "llama", num_hidden_layers=3, vocab_size=264)


@pytest.fixture(scope="module")
def reference(path: Path) -> np.ndarray:
    return Model(path).logits()


def assert_equal(ours: np.ndarray, theirs: np.ndarray, begin: int = 0) -> None:
    """Equal where there is no padding; both [rows, length, vocab], from slot `begin` on."""
    real = POSITIONS[:, begin : begin + ours.shape[1]] >= 0
    assert np.abs(ours - theirs)[real].max() <= 2e-5 * np.abs(theirs[real]).max()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [
        [LENGTH],
        [RING - 1, *[1] * (LENGTH - RING + 1)],  # token by token around the ring, twice
        [70, *[1] * 20],
        [RING, 26, 32],
        [3, 5, 61, 1, 1, 19],
    ],
    ids=str,
)
def test_tokens_in_parts_equal_the_whole(path: Path, reference: np.ndarray, lengths: list[int], stacked: bool) -> None:
    model = Model(path, stacked=stacked)
    assert_equal(model.in_parts(lengths, fresh=True), reference)
    assert_equal(model.in_parts(lengths, fresh=False), reference)


def test_chunks_too(path: Path) -> None:
    model = Model(path, chunk=7)
    assert_equal(model.in_parts([RING + 5, 20, *[1] * 33], fresh=True), model.logits())


@pytest.mark.parametrize(
    ("mesh", "by_product"), [(None, False), (None, True), ("data=1,tensor=2", False)], ids=["alone", "pairs", "mesh"]
)
def test_the_kernel_that_reads_a_cache_or_a_ring_writes_it_too(
    path: Path, mesh: str | None, by_product: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results and the cache are those of separate writes, before the end of a ring of two blocks and behind it, and
    after several tokens. On a TPU keys and values come in pairs."""
    tokens = np.random.default_rng(1).integers(0, 259, (len(TOKENS), 261)).astype(np.int32)
    found, fused = [], []
    monkeypatch.setattr("ttpu_jax.ops.attention.decode_kernel.BLOCK_BYTES", 1)
    monkeypatch.setattr(Runtime, "rotates_by_product", by_product)
    kernel = step_cache.attention_ops.write_and_attend
    monkeypatch.setattr(
        step_cache.attention_ops, "write_and_attend", lambda *given, **more: fused.append(1) or kernel(*given, **more)
    )
    for attention in ("eager", "decode_attention"):
        model = Model(path, mesh, attention=attention, window=256 - REWOUND)
        _, cache = model.run(model.params, tokens[:, :1], model.cache(512), True)
        assert [layer.slots for layer in cache.layers] == [512, 256, 256]
        logits = []
        for begin, end in ((1, 252), (252, 255), *((number, number + 1) for number in range(255, 261))):
            step, cache = model.run(model.params, tokens[:, begin:end], cache, False)
            logits.append(step[:, -1:])
        found.append((np.concatenate(logits, axis=1), cache.layers, len(fused)))
    (theirs, expected, apart), (ours, layers, together) = found
    assert (apart, together) == (0, 2), "once for each kind of layer, of the program for one token"
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()
    for one, other in zip(jax.tree.leaves(layers), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("mesh", ["data=1,tensor=2", "data=1,sequence=4"])
def test_a_sharded_ring_too(path: Path, reference: np.ndarray, mesh: str) -> None:
    model = Model(path, mesh, stacked=True)
    assert_equal(model.in_parts([40, 30, *[1] * 20], fresh=True), reference)


def test_attention_is_told_that_a_cache_is_sharded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is one query, which is not: a kernel would gather the cache."""
    contexts: list[AttentionContext] = []

    def attend(name: str, *arrays: Any, context: AttentionContext, **options: Any) -> Any:
        contexts.append(context)
        return step_cache.attention_ops.eager(*arrays, context=context, **options)

    monkeypatch.setattr(step_cache.attention_ops, "attend", attend)
    model = Model(path, "data=1,sequence=4")
    _, cache = model.read(model.cache(), 0, 40, fresh=True)
    assert {(one.own_keys, one.sequence_axes) for one in contexts} == {(True, ("sequence",))}
    contexts.clear()
    model.read(cache, 40, 41)
    assert {(one.own_keys, one.sequence_axes) for one in contexts} == {(False, ("sequence",))}


@pytest.mark.parametrize("second", [20, 40])
def test_the_last_token_of_a_later_part_alone(path: Path, reference: np.ndarray, second: int) -> None:
    """The last layer has one query then, and several keys that are new."""
    model = Model(path)
    _, cache = model.read(model.cache(), 0, 40, fresh=True)
    last = jax.jit(lambda params, tokens, cache: model.model.forward(params, tokens, cache=cache, last_only=True)[0])
    end = 40 + second
    assert_equal(np.asarray(last(model.params, TOKENS[:, 40:end], cache)), reference[:, end - 1 : end], end - 1)


def test_a_ring_is_smaller_than_the_context(path: Path) -> None:
    model = Model(path)
    kept = [layer.slots for layer in model.cache().layers if isinstance(layer, LayerCache)]
    assert kept == [SLOTS, RING, RING]
    assert [layer.slots for layer in model.cache(rewound=60).layers if isinstance(layer, LayerCache)][1:] == [80, 80]


@pytest.mark.parametrize("back", [1, 5, REWOUND])
def test_tokens_can_be_taken_back(path: Path, reference: np.ndarray, back: int) -> None:
    """As many as was said, after which the keys that they were written over are seen by no query."""
    model = Model(path)
    _, cache = model.read(model.cache(), 0, 50, fresh=True)
    wrong = np.full((len(TOKENS), back), 7, np.int32)
    _, cache = model.run(model.params, wrong, cache, False)
    cache = replace(cache, length=cache.length - back)
    one, cache = model.read(cache, 50, 51)
    several, cache = model.read(cache, 51, 60)
    assert_equal(one, reference[:, 50:51], 50)
    assert_equal(several, reference[:, 51:60], 51)


def test_more_tokens_than_fit_are_not_taken_back_unnoticed(path: Path, reference: np.ndarray) -> None:
    """What the test before relies on: with too small a ring the results are others."""
    model = Model(path)
    _, cache = model.read(model.cache(), 0, 50, fresh=True)
    _, cache = model.run(model.params, np.full((len(TOKENS), 28), 7, np.int32), cache, False)
    one, _ = model.read(replace(cache, length=cache.length - 28), 50, 51)
    assert np.abs(one - reference[:, 50:51]).max() > 1e-3


def test_a_layer_that_others_read_keeps_what_they_see(path: Path) -> None:
    spec = limited(default_registry().architecture(open_checkpoint(path).config).spec, window=WINDOW)
    first, second, third = spec.layers
    reader = replace(third, mixer=replace(third.mixer, kv_from_layer=1, window=None))
    cache = empty_cache(replace(spec, layers=(first, second, reader)), 1, SLOTS, local_placement(None), FLOAT32)
    layers = cache.layers
    assert isinstance(layers[1], LayerCache) and layers[1].slots == SLOTS and layers[2] is None


def test_slots_of_windows() -> None:
    attention = AttentionSpec(num_heads=8, num_kv_heads=4, head_dim=16)
    assert kept_slots(attention, 2048) == 2048
    assert kept_slots(replace(attention, window=1024), 2048) == 1152
    assert kept_slots(replace(attention, window=1024), 512) == 512
    assert kept_slots(replace(attention, chunk=8192), 32768) == 8320
    assert kept_slots(replace(attention, window=100, chunk=50), 4096) == 80
    assert kept_slots(replace(attention, window=100, causal=False), 4096) == 4096, "which sees ahead"
    for window in range(1, 700, 7):
        for rewound in (0, REWOUND, 50):
            assert kept_slots(replace(attention, window=window), 10_000, rewound) >= window + rewound
