"""The shared decoder agrees with itself in every way that it can be run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import llama_checkpoint

from ttpu_core import default_registry, open_checkpoint
from ttpu_core.architecture import Architecture
from ttpu_core.errors import UnsupportedError
from ttpu_core.mapping import stack_layers
from ttpu_core.spec import ActivationSpec, AttentionSpec, BlockSpec, KernelChoice, MLPSpec, MoESpec
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.model import decoder as decoder_module
from ttpu_jax.model.cache import empty_cache
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.decoder import Decoder
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.model.support import check_supported
from ttpu_jax.params.load import load_parameters
from ttpu_jax.params.placement import local_placement

FLOAT32 = np.dtype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, 259, (4, 24)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(24, dtype=np.int32), TOKENS.shape)
TOLERANCE = 2e-5


class Model:
    """A tiny llama whose decoder is called directly."""

    def __init__(self, path: Path, mesh: str | None = None, *, stacked: bool = False) -> None:
        checkpoint = open_checkpoint(path)
        architecture = default_registry().architecture(checkpoint.config)
        self.spec, self.stacked = architecture.spec, stacked
        self.placement = local_placement(mesh)
        self.table = stacked_parameters(self.spec) if stacked else self.spec.parameters
        mapping = stack_layers(architecture.mapping, self.spec) if stacked else architecture.mapping
        self.params = load_parameters(checkpoint, mapping, self.table, self.placement, FLOAT32)
        self.runtime = Runtime(self.placement, "eager", different_ropes(self.spec.layers))

    def decoder(self, params: Any) -> Decoder:
        return causal_model(self.spec, self.runtime, stacked=self.stacked).module(params)

    def logits(self) -> np.ndarray:
        run = jax.jit(lambda params, tokens, positions: self.decoder(params)(tokens, positions)[0])
        return np.asarray(run(self.params, TOKENS, POSITIONS))

    def logits_in_parts(self, lengths: list[int], *, fresh: bool) -> np.ndarray:
        """Logits of TOKENS when they come in parts, each written into the cache after the one before."""
        cache = empty_cache(self.spec, len(TOKENS), 32, self.placement, FLOAT32, stacked=self.stacked)
        run = jax.jit(
            lambda params, tokens, cache, fresh: self.decoder(params)(tokens, None, cache, fresh=fresh),
            static_argnums=3,
        )
        parts, begin = [], 0
        for length in lengths:
            part, cache = run(self.params, TOKENS[:, begin : begin + length], cache, fresh and begin == 0)
            parts.append(np.asarray(part))
            begin += length
        return np.concatenate(parts, axis=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(
        tmp_path_factory.mktemp("decoder") / "llama",
        num_hidden_layers=3,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=264,  # three tokens more than the tokenizer, so that eight devices can share the table
    )


@pytest.fixture(scope="module")
def reference(path: Path) -> np.ndarray:
    return Model(path).logits()


def assert_equal(ours: np.ndarray, reference: np.ndarray) -> None:
    assert np.abs(ours - reference).max() <= TOLERANCE * np.abs(reference).max()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("lengths", [[24], [1] * 24, [8, 8, 8], [13, 1, 1, 9]], ids=str)
def test_prefill_in_parts_and_token_by_token_equal_the_whole(
    path: Path, reference: np.ndarray, lengths: list[int], stacked: bool
) -> None:
    model = Model(path, stacked=stacked)
    assert_equal(model.logits_in_parts(lengths, fresh=True), reference)
    assert_equal(model.logits_in_parts(lengths, fresh=False), reference)


def test_stacked_layers_equal_unrolled_ones(path: Path, reference: np.ndarray) -> None:
    assert_equal(Model(path, stacked=True).logits(), reference)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("mesh", ["tensor=4", "fsdp=8", "fsdp=2,tensor=4", "data=2,tensor=2"])
def test_sharded_equals_unsharded(path: Path, reference: np.ndarray, mesh: str, stacked: bool) -> None:
    model = Model(path, mesh, stacked=stacked)
    assert_equal(model.logits(), reference)
    assert_equal(model.logits_in_parts([20, 1, 1, 1, 1], fresh=True), reference)


def test_parameters_are_cut_and_not_copied(path: Path) -> None:
    model = Model(path, "tensor=4")
    qkv = model.params["layers.0.attention.qkv.kernel"]
    assert qkv.addressable_shards[0].data.shape == (1, *qkv.shape[1:])
    whole = [p for p, a in model.params.items() if a.sharding.is_fully_replicated]
    assert all("norm" in path for path in whole)


def test_every_parameter_carries_its_logical_axes(path: Path) -> None:
    from flax import nnx

    model = Model(path)
    state = nnx.to_flat_state(nnx.state(model.decoder(model.params), nnx.Param))
    found = {".".join(map(str, at)): variable.get_metadata("axis_names") for at, variable in state}
    assert found == {name: parameter.axes for name, parameter in model.spec.parameters.items()}


def test_equal_layers_are_traced_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    original = decoder_module.DecoderLayer.__call__
    monkeypatch.setattr(
        decoder_module.DecoderLayer, "__call__", lambda self, *args: (traced.append(1), original(self, *args))[1]
    )
    jax.clear_caches()
    model = Model(path)
    jax.jit(lambda params, tokens, positions: model.decoder(params)(tokens, positions)[0]).lower(
        model.params, TOKENS, POSITIONS
    )
    assert len(traced) == 1


def test_padding_on_the_left_changes_nothing(path: Path, reference: np.ndarray) -> None:
    model = Model(path)
    padded = np.concatenate([np.zeros((4, 6), np.int32), TOKENS], axis=1)
    cache = empty_cache(model.spec, 4, 40, model.placement, FLOAT32)
    cache = replace(cache, start=jnp.full(4, 6, jnp.int32))
    logits, _ = model.decoder(model.params)(padded, None, cache, fresh=True)
    assert_equal(np.asarray(logits)[:, 6:], reference)


def test_a_mesh_that_does_not_divide_the_heads_is_refused_with_the_sizes_that_do(path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"8 devices.*kv_heads: use 1, 2, 4 devices"):
        Model(path, "tensor=8")


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("tensor=64", "which is 64 devices, but there are 8"),
        ("tensors=2", "not an axis"),
        ("tensor=0", "not an axis"),
        ("", "no strategy"),
    ],
)
def test_impossible_meshes_are_refused(mesh: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        local_placement(mesh)


def test_what_the_decoder_cannot_run_is_refused_by_name(path: Path) -> None:
    architecture: Architecture = default_registry().architecture(open_checkpoint(path).config)
    spec = architecture.spec
    layer = spec.layers[1]
    assert isinstance(layer.mixer, AttentionSpec)
    assert isinstance(layer.mlp, MLPSpec)
    learned = replace(layer, mlp=replace(layer.mlp, activation=ActivationSpec("xielu")))
    with pytest.raises(UnsupportedError, match=r"layer 1 .*the activation 'xielu' in experts or a gated MLP"):
        check_supported(replace(spec, layers=(spec.layers[0], learned, *spec.layers[2:])))
    detour = replace(layer, mlp=MoESpec(4, 2, 8, shortcut=True))
    for last in ((detour,), (detour, detour, layer)):
        with pytest.raises(UnsupportedError, match=r"layer 0 .*experts on a shortcut that a layer .* follows"):
            check_supported(replace(spec, layers=last))
    for block in (BlockSpec("sandwich"), BlockSpec(normed_residual=True)):
        with pytest.raises(UnsupportedError, match=r"layer 1 .*experts on a shortcut beside norms that are not before"):
            check_supported(replace(spec, layers=(layer, replace(detour, block=block), layer)))
    check_supported(replace(spec, layers=(detour, layer)))
    norm = replace(spec, kernels=(KernelChoice("norm", "pack:norm", "jax", "a pack"),))
    with pytest.raises(UnsupportedError, match=r"a pack replaces the operation 'norm'.*only 'attention'"):
        check_supported(norm)
    check_supported(replace(spec, kernels=(KernelChoice("norm", "pack:norm", "torch_xla"),)))


@pytest.mark.parametrize("stacked", [False, True])
def test_logits_of_the_last_token_alone_are_those_of_the_whole(
    path: Path, reference: np.ndarray, stacked: bool
) -> None:
    model = Model(path, stacked=stacked)
    last, _ = model.decoder(model.params)(TOKENS, POSITIONS, last_only=True)
    assert last.shape == (4, 1, 264)
    assert_equal(np.asarray(last), reference[:, -1:])
    cache = empty_cache(model.spec, 4, 32, model.placement, FLOAT32, stacked=stacked)
    first, cache = model.decoder(model.params)(TOKENS[:, :20], None, cache, last_only=True, fresh=True)
    rest, _ = model.decoder(model.params)(TOKENS[:, 20:], None, cache, last_only=True)
    assert_equal(np.asarray(first), reference[:, 19:20])
    assert_equal(np.asarray(rest), reference[:, -1:])


def test_a_long_sequence_is_attended_to_in_blocks_with_the_same_result() -> None:
    from ttpu_jax.ops.attention import SMALLEST_BLOCK, eager

    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, window=200)
    seq = 3 * SMALLEST_BLOCK + 17
    query, key, value = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate(((2, seq, 2, 2, 8), (2, 2, seq, 8), (2, 2, seq, 8)))
    )
    positions = jnp.arange(seq)[None] - jnp.array([[0], [5]])  # the second row is padded on the left
    blocks = eager(query, key, value, positions, positions, spec)
    row_by_row = jnp.concatenate(
        [eager(query[:, i : i + 1], key, value, positions[:, i : i + 1], positions, spec) for i in (5, 130, 400)],
        axis=1,
    )
    assert_equal(np.asarray(blocks[:, jnp.array([5, 130, 400])]), np.asarray(row_by_row))
