"""Products around a ring of devices equal those of whole rows, in each layer that rings serve and in whole models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from paged_cases import ragged
from ring_cases import LAYERS, NORM, ROPE, Model, architecture, assert_close, tokens

from ttpu_core.quantization import QuantizationConfig, quantize_spec
from ttpu_core.sharding.hardware import CHIPS
from ttpu_core.spec import AttentionSpec, LayerSpec, MLPSpec
from ttpu_core.spec.short_convolution import short_convolution
from ttpu_jax.model import step_cache
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.modules import Runtime, ring_of
from ttpu_jax.model.paged import paged_layout
from ttpu_jax.model.step_cache import Keys, PagedCache
from ttpu_jax.ops.matmul import rings
from ttpu_jax.ops.matmul.rings import (
    Ring,
    StreamForm,
    exchanged_rows,
    gathered_product,
    ring_mlp,
    scattered_product,
    scattered_rows,
)
from ttpu_jax.ops.paged_attention import empty_pages, paged_attention
from ttpu_jax.params.placement import local_placement

SIZES = (2, 3, 4, 5, 8)
ROWS, HIDDEN, INNER = 6, 5, 3  # of each device: rows, and inner features; all of them have all features


def ring(size: int, data: int = 1) -> Ring:
    devices = np.array(jax.devices()[: data * size]).reshape(data, size)
    return Ring(Mesh(devices, ("data", "tensor")), "tensor", ("data",) if data > 1 else ())


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("size", SIZES)
class TestProducts:
    @pytest.mark.parametrize("in_halves", [False, True])
    def test_rows_are_gathered(self, size: int, in_halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if in_halves:
            monkeypatch.setattr(rings, "_IN_VMEM_BYTES", 0)
        x, kernel, bias = draw(2, size * ROWS, HIDDEN), draw(2 * size, 3, HIDDEN), draw(2 * size, 3)
        found = jax.jit(partial(gathered_product, ring=ring(size)))(x, kernel, bias)
        assert_close(found, jnp.einsum("bsi,koi->bsko", x, kernel) + bias)
        assert found.sharding.spec[2] == "tensor" and found.sharding.spec[1] is None

    def test_sums_are_scattered(self, size: int) -> None:
        x, kernel, bias = draw(2, size * ROWS, size * INNER), draw(HIDDEN, size * INNER), draw(HIDDEN)
        found = jax.jit(partial(scattered_product, ring=ring(size)))(x, kernel, bias)
        assert_close(found, jnp.einsum("bsi,oi->bso", x, kernel) + bias)
        assert found.sharding.spec[1] == "tensor"

    @pytest.mark.parametrize("rows_each", [1, 5, ROWS])
    def test_rows_of_a_table_are_scattered(self, size: int, rows_each: int) -> None:
        table = draw(7 * size, HIDDEN)
        rows = np.random.default_rng(0).integers(0, 7 * size, (2, size * rows_each))
        found = jax.jit(partial(scattered_rows, ring=ring(size)))(table, jnp.asarray(rows, jnp.int32))
        np.testing.assert_array_equal(found, table[rows])
        assert found.sharding.spec[1] == "tensor"

    @pytest.mark.parametrize("rows_each", [1, 5, ROWS])
    def test_parts_of_rows_of_a_table_are_exchanged(self, size: int, rows_each: int) -> None:
        table = draw(9, HIDDEN * size)
        rows = np.random.default_rng(0).integers(0, 9, (3, size * rows_each))
        found = jax.jit(partial(exchanged_rows, ring=ring(size)))(table, jnp.asarray(rows, jnp.int32))
        np.testing.assert_array_equal(found, table[rows])
        assert found.sharding.spec[1] == "tensor"

    @pytest.mark.parametrize("early", [False, True])
    def test_an_mlp_gathers_and_scatters(self, size: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rings, "_links_take_longer", lambda *_: early)
        x = draw(2, size * ROWS, HIDDEN)
        up, down = (draw(2, size * INNER, HIDDEN), draw(2, size * INNER)), (draw(HIDDEN, size * INNER), draw(HIDDEN))

        def activate(pair: jax.Array) -> jax.Array:
            return jax.nn.silu(pair[..., 0, :]) * pair[..., 1, :]

        mlp = partial(ring_mlp, activate=activate, ring=ring(size))
        found = jax.jit(mlp)(x, up, down)
        inner = activate(jnp.einsum("bsi,poi->bspo", x, up[0]) + up[1])
        assert_close(found, jnp.einsum("bsi,oi->bso", inner, down[0]) + down[1])
        assert found.sharding.spec[1] == "tensor"


def test_rows_of_the_batch_that_devices_share_have_rings_of_their_own() -> None:
    x, kernel, both = draw(4, 4 * ROWS, HIDDEN), draw(4, 1, HIDDEN), ring(4, data=2)
    found = jax.jit(lambda x, kernel: gathered_product(x, kernel, None, both))(x, kernel)
    assert_close(found, jnp.einsum("bsi,koi->bsko", x, kernel))
    back = jax.jit(lambda x, kernel: scattered_product(x, kernel, None, both))(found[..., 0], kernel[:, 0].T)
    assert_close(back, jnp.einsum("bsk,ki->bsi", found[..., 0], kernel[:, 0]))
    assert tuple(back.sharding.spec)[:2] == ("data", "tensor")


def test_sums_travel_in_the_dtype_of_the_activations() -> None:
    x, kernel = draw(1, 4 * ROWS, 4 * INNER).astype(jnp.bfloat16), draw(HIDDEN, 4 * INNER).astype(jnp.bfloat16)
    text = str(jax.make_jaxpr(lambda x, kernel: scattered_product(x, kernel, None, ring(4)))(x, kernel))
    sent = [line for line in text.splitlines() if "reduce_scatter[" in line]
    assert sent and all(":bf16[" in line for line in sent)


@pytest.mark.parametrize("mesh", ["tensor=8", "data=2,fsdp=2,tensor=2"])
@pytest.mark.parametrize("name", LAYERS)
def test_logits_are_those_of_one_device(name: str, mesh: str) -> None:
    spec = architecture(LAYERS[name], LAYERS[name])
    batch = tokens(4)
    found = Model(spec, mesh)
    assert_close(found.logits(batch), Model(spec, None).logits(batch), 2e-5)
    assert "ppermute" in found.text(batch)


def test_experts_and_rows_are_cut_by_different_axes() -> None:
    spec = architecture(*(LAYERS["experts beside a shared one and a dense MLP"],) * 2)
    batch = tokens(2)
    assert_close(Model(spec, "expert=2,tensor=4").logits(batch), Model(spec, None).logits(batch), 2e-5)


def test_a_prompt_fills_the_cache_as_on_one_device() -> None:
    spec = architecture(*(LAYERS["norms behind the sub-layers too, and soft caps"],) * 3)
    of_rings, of_whole = Model(spec, "tensor=4"), Model(spec, "tensor=4", "whole")
    last, held, following = of_rings.prefill(tokens())
    expected_last, expected_held, expected_following = of_whole.prefill(tokens())
    assert_close(last, expected_last, 2e-5)
    assert_close(following, expected_following, 2e-5)
    for one, other in zip(held, expected_held, strict=True):
        assert_close(one, other, 2e-5)


@pytest.mark.parametrize("seq", [1, 9, 20])
def test_tokens_that_the_devices_do_not_divide_are_whole(seq: int) -> None:
    spec = architecture(LAYERS["no MLP"])
    found = Model(spec, "tensor=8")
    assert "ppermute" not in found.text(tokens(seq=seq))
    assert_close(found.logits(tokens(seq=seq)), Model(spec, None).logits(tokens(seq=seq)), 2e-5)


def test_models_with_other_layers_or_quantized_kernels_are_whole() -> None:
    runtime = Runtime(local_placement("tensor=2"), stream="rings")
    dense = architecture(LAYERS["sub-layers side by side"], LAYERS["experts"])
    assert causal_model(dense, runtime).runtime.stream == "rings"
    quantized = quantize_spec(dense, QuantizationConfig.parse("w8a16"))
    assert causal_model(quantized, runtime).runtime.stream == "whole"
    other = replace(LAYERS["experts"], mixer=short_convolution(hidden_size=12, kernel=3))
    assert causal_model(architecture(LAYERS["no MLP"], other), runtime).runtime.stream == "whole"


def test_rings_are_for_tpus_unless_they_are_asked_for() -> None:
    x, placement = jnp.zeros((1, 2048, 4)), local_placement("tensor=8")
    assert ring_of(x, Runtime(placement, stream="rings")) == Ring(placement.mesh, "tensor")  # type: ignore[arg-type]
    assert ring_of(x, Runtime(placement, stream="auto")) is None
    assert ring_of(x, Runtime(placement)) is None, "training"
    assert ring_of(x, Runtime(local_placement(None), stream="rings")) is None


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=8", "sequence=2,tensor=4"])
def test_other_meshes_have_no_ring(mesh: str) -> None:
    assert ring_of(jnp.zeros((8, 2048, 4)), Runtime(local_placement(mesh), stream="rings")) is None


class TestOnTPUs:
    @pytest.fixture(autouse=True)
    def on_tpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ttpu_jax.params.placement.Placement.platform", "tpu")
        self.on("v5e", monkeypatch)

    def on(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take this machine's devices for chips of a generation."""
        monkeypatch.setattr("ttpu_jax.params.placement.chip_of_device_kind", lambda _: CHIPS[name])

    @pytest.mark.parametrize(
        ("batch", "seq", "cut"), [(1, 2048, True), (1, 1024, True), (1, 1023, False), (1, 512, False), (4, 512, True)]
    )
    def test_each_device_gets_tokens_enough_and_whole_tiles(self, batch: int, seq: int, cut: bool) -> None:
        runtime = Runtime(local_placement("tensor=8"), stream="auto")
        assert (ring_of(jnp.zeros((batch, seq, 4)), runtime) is not None) == cut

    def test_rows_of_the_batch_on_other_devices_do_not_count(self) -> None:
        runtime = Runtime(local_placement("data=2,tensor=4"), stream="auto")
        assert ring_of(jnp.zeros((2, 512, 4)), runtime) is not None
        assert ring_of(jnp.zeros((2, 256, 4)), runtime) is None

    @pytest.mark.parametrize("name", sorted(CHIPS))
    def test_links_of_three_dimensions_sum_faster(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on(name, monkeypatch)
        found = ring_of(jnp.zeros((1, 2048, 4)), Runtime(local_placement("tensor=8"), stream="auto"))
        assert (found is not None) == (name in ("v5e", "v6e"))


@pytest.mark.parametrize(
    ("stream", "name", "in_pairs"),
    [
        ("rings", "fewer KV heads than devices, with biases", True),
        ("rings", "norms behind the sub-layers too, and soft caps", True),
        ("rings", "norms of heads and an MLP without a gate", False),
        ("rings", "values of another size and gates of features", False),
        ("whole", "fewer KV heads than devices, with biases", True),
        ("whole", "norms of each head", True),
        ("whole", "norms of heads and an MLP without a gate", False),
        ("whole", "values of another size and gates of features", False),
    ],
)
def test_pages_get_the_same_keys_and_values_in_pairs(
    stream: StreamForm, name: str, in_pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a value that is infinite, which must not be multiplied by the sine of 0. Of rows that no ring exchanges, a
    TPU turns queries, keys and values together."""
    of_each_head = LayerSpec(AttentionSpec(8, 4, 8, rope=ROPE, q_norm=NORM, k_norm=NORM), MLPSpec(16), NORM)
    spec = architecture(*((LAYERS | {"norms of each head": of_each_head})[name],) * 2)
    case = ragged([3, 7, 6], [3, 7, 6], tokens=16)
    found = Model(spec, "tensor=4", stream)
    layout, written = paged_layout(found.spec, 64), []
    for path, bias in found.params.items():
        if path.endswith("qkv.bias"):  # [kv_heads, slots, head_dim], values last
            found.params[path] = bias.at[0, -1, 0].set(jnp.inf)

    def step() -> list[np.ndarray]:
        kind = np.dtype(np.float32)
        caches = found.model.empty_paged_cache(layout, (case.num_pages,) * len(layout.groups), 3, 4, kind, kind)
        _, after = jax.jit(found.model.ragged_forward)(found.params, tokens(1)[0], case.batch, caches)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(after)]

    def split(cache: PagedCache, pairs: jax.Array) -> tuple[PagedCache, Keys]:
        written.append(pairs.shape)
        return cache.write(*(pairs[..., plane, :].transpose(0, 2, 1, 3) for plane in range(2)))

    expected = step()
    monkeypatch.setattr(Runtime, "rotates_by_product", stream == "whole")
    monkeypatch.setattr(PagedCache, "takes_pairs", True)
    monkeypatch.setattr(PagedCache, "write_pairs", split)
    jax.clear_caches()
    found_in_pairs = step()
    jax.clear_caches()  # of what was traced with the stand-ins
    for one, other in zip(found_in_pairs, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert bool(written) == in_pairs
    if "biases" in name:
        assert np.isinf(expected[0]).any() and not np.isnan(expected[0]).any()


def test_only_pages_that_the_kernel_writes_take_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, batch = AttentionSpec(8, 4, 128), ragged([3], [3]).batch
    for platform, dtype, in_ring, kernels, takes in [
        ("tpu", jnp.bfloat16, True, True, True),
        ("tpu", jnp.bfloat16, False, True, True),
        ("tpu", jnp.bfloat16, True, False, False),
        ("tpu", jnp.int8, True, True, False),
        ("cpu", jnp.bfloat16, True, True, False),
    ]:
        monkeypatch.setattr("ttpu_jax.params.placement.Placement.platform", platform)
        placement = local_placement(None)
        pages = empty_pages(spec, 2, 32, placement, dtype)
        assert PagedCache(pages, batch, placement, kernels, in_ring).takes_pairs == takes
    assert not PagedCache(None, batch, placement, in_ring=True).takes_pairs, "a layer that reads another's pages"


class TestWhatTakesLonger:
    """Of a turn of an MLP with 4,096 features, rows and sums on their way, or products."""

    @pytest.mark.parametrize(("kind", "links"), [("TPU v5 lite", False), ("TPU v6 lite", True), ("cpu", False)])
    def test_rows_leave_early_where_links_do(self, kind: str, links: bool) -> None:
        device = SimpleNamespace(device_kind=kind)
        mesh: Any = SimpleNamespace(devices=np.array([device], object))
        x = jnp.zeros((1, 256, 4096), jnp.bfloat16)
        assert rings._links_take_longer(x, 3 * 4096 * 1792, rings.Ring(mesh, "tensor")) == links


@pytest.mark.parametrize("stream", ["rings", "whole"])
def test_padding_that_a_kernel_leaves_uninitialised_goes_no_further(
    stream: StreamForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = architecture(*(LAYERS["norms behind the sub-layers too, and soft caps"],) * 2)
    case = ragged([3, 7], [3, 7], tokens=16)
    found, padding = Model(spec, "tensor=4", stream), np.asarray(case.batch.positions) < 0
    layout = paged_layout(found.spec, 64)

    def step() -> np.ndarray:
        kind = np.dtype(np.float32)
        caches = found.model.empty_paged_cache(layout, (case.num_pages,) * len(layout.groups), 2, 4, kind, kind)
        hidden, _ = jax.jit(found.model.ragged_forward)(found.params, tokens(1)[0], case.batch, caches)
        return np.asarray(hidden)

    expected = step()

    def uninitialised(*arguments: Any, **options: Any) -> jax.Array:
        return jnp.where(padding[:, None, None, None], jnp.nan, paged_attention(*arguments, **options))

    monkeypatch.setattr(step_cache, "paged_attention", uninitialised)
    jax.clear_caches()
    left = step()
    np.testing.assert_array_equal(left[~padding], expected[~padding])
    assert np.isfinite(left).all()
