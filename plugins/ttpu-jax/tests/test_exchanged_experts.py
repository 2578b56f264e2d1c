"""Experts whose tokens devices exchange give what they give on one device, however unevenly tokens choose."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from moe_cases import BASE, KINDS, Arrays, arrays, assert_close, assert_same, loss, module, table, tokens

from ttpu_core.sharding import experts
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, Strategy
from ttpu_core.spec import MLPSpec, MoESpec, axes
from ttpu_jax.model.moe import MoE, RealTokens
from ttpu_jax.ops import exchanged_experts
from ttpu_jax.ops.exchange import Pieces, deliveries, exchange
from ttpu_jax.ops.kernels import QuantizedKernel
from ttpu_jax.params.placement import Placement, local_placement

ROWS_TOO = {axes.BATCH: ("data", "fsdp", "expert")}
BY_DATA = {axes.EXPERT: ("data", "tensor")}
BY_FSDP = {axes.EXPERT: ("fsdp",)}


def placed(mesh: str, rules: dict[str, tuple[str, ...]]) -> Placement:
    return local_placement(mesh, Strategy(tuple({**dict(DEFAULT_STRATEGY.rules), **rules}.items())))


def with_gradients(
    spec: MoESpec, values: Arrays, x: jax.Array, placement: Placement | None = None, real: jax.Array | None = None
) -> tuple[jax.Array, Arrays, jax.Array]:
    """The output, and the gradients to the parameters and to x, of the tokens that are real: bool [batch, seq]."""
    if placement is not None:
        values = {path: jax.device_put(a, placement.parameter(path, table(spec)[path])) for path, a in values.items()}
        assert exchanges(module(spec, values, placement, "exchanged"), x)

    def objective(values: Arrays, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        layer = module(spec, values, placement, "exchanged" if placement else "auto")
        if real is None:
            out = layer(x)
        else:
            layer.set_attributes(real_tokens=RealTokens(real), raise_if_not_found=False)
            out = jnp.where(real[..., None], layer(x), 0)
        return loss(out), out

    (to_values, to_x), out = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))(values, x)
    return out, to_values, to_x


def exchanges(layer: MoE, x: jax.Array) -> bool:
    return layer.experts._exchange(x) is not None


@cache
def on_one_device(spec: MoESpec, seed: int = 1) -> tuple[jax.Array, Arrays, jax.Array]:
    return with_gradients(spec, arrays(spec), tokens(seed=seed))


@pytest.mark.parametrize(
    ("kind", "mesh", "rules"),
    [
        ("topk_softmax", "expert=4,tensor=2", ROWS_TOO),
        ("sigmoid_on_input", "fsdp=2,expert=4", ROWS_TOO),
        ("corrected_groups", "expert=8", ROWS_TOO),
        ("identities", "expert=4,tensor=2", ROWS_TOO),
        ("ungated", "data=2,expert=2,tensor=2", ROWS_TOO),
        ("clamped", "data=2,tensor=4", BY_DATA),
        ("identities", "data=4,tensor=2", BY_DATA),
        ("gated_shared", "fsdp=4,tensor=2", BY_FSDP),
        ("renormalized", "data=2,fsdp=4", {axes.EXPERT: ("fsdp", "data")}),
        ("softmax", "data=2,sequence=2", {axes.EXPERT: ("sequence", "data")}),
    ],
)
def test_output_and_gradients_are_those_of_one_device(kind: str, mesh: str, rules: dict[str, tuple[str, ...]]) -> None:
    spec = KINDS[kind]
    assert_same(with_gradients(spec, arrays(spec), tokens(), placed(mesh, rules)), on_one_device(spec))


@pytest.mark.parametrize(("kind", "room"), [("topk_softmax", 0.3), ("identities", 1.0)])
def test_rows_that_have_no_room_are_exchanged_later(kind: str, room: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "ROOM", room)
    spec = KINDS[kind]
    placement = placed("expert=4,tensor=2", ROWS_TOO)
    assert_same(with_gradients(spec, arrays(spec), tokens(), placement), on_one_device(spec))


@pytest.mark.parametrize(("kind", "room"), [("topk_softmax", 0.3), ("ungated", 1.5), ("identities", 0.3)])
def test_one_part_of_the_tokens_is_exchanged_while_another_is_multiplied(
    kind: str, room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of both parts, and of rows that had no room, are added up."""
    monkeypatch.setattr(experts, "ROOM", room)
    monkeypatch.setattr(exchanged_experts, "PART", 1)
    sizes: list[int] = []
    sorted_rows = exchanged_experts._sorted_rows
    monkeypatch.setattr(exchanged_experts, "_sorted_rows", lambda x, *a: sizes.append(len(x)) or sorted_rows(x, *a))
    spec, x = KINDS[kind], tokens()
    assert_same(with_gradients(spec, arrays(spec), x, placed("expert=4,tensor=2", ROWS_TOO)), on_one_device(spec))
    assert set(sizes) == {x.shape[0] * x.shape[1] // 4 // 2}


@pytest.mark.parametrize(
    ("kind", "mesh", "rules"),
    [
        ("topk_softmax", "expert=4,tensor=2", ROWS_TOO),
        ("corrected_groups", "expert=4,tensor=2", ROWS_TOO),
        ("identities", "data=4,tensor=2", BY_DATA),
    ],
)
def test_rows_that_nobody_sends_do_not_count(
    kind: str, mesh: str, rules: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanged_experts, "unset", lambda shape, dtype, *_, **__: jnp.full(shape, jnp.nan, dtype))
    spec = KINDS[kind]
    assert_same(with_gradients(spec, arrays(spec), tokens(), placed(mesh, rules)), on_one_device(spec))


@pytest.mark.parametrize(
    ("kind", "mesh", "rules", "copies"),
    [
        ("topk_softmax", "expert=4,tensor=2", ROWS_TOO, 2),
        ("gated_shared", "fsdp=4,tensor=2", BY_FSDP, 2),
        ("clamped", "data=2,tensor=4", BY_DATA, 1),
        ("identities", "data=4,tensor=2", BY_DATA, None),  # random choices of theirs are sent nowhere either
    ],
)
def test_tokens_of_padding_are_sent_nowhere(
    kind: str, mesh: str, rules: dict[str, tuple[str, ...]], copies: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`copies` devices send the rows of a token."""
    monkeypatch.setattr(exchanged_experts, "unset", lambda shape, dtype, *_, **__: jnp.full(shape, jnp.nan, dtype))
    sent: list[jax.Array] = []
    sorted_by = exchanged_experts.sorted_by

    def counted(*given: Any) -> Any:
        sorting, sizes = sorted_by(*given)
        jax.debug.callback(sent.append, sizes.sum())
        return sorting, sizes

    monkeypatch.setattr(exchanged_experts, "sorted_by", counted)
    spec, x = KINDS[kind], tokens()
    real = jnp.arange(x.shape[1]) < jnp.arange(1, x.shape[0] + 1)[:, None]
    found = with_gradients(spec, arrays(spec), x, placed(mesh, rules), real)
    assert_same(found, with_gradients(spec, arrays(spec), x, None, real))
    jax.effects_barrier()
    assert copies is None or sum(map(int, sent)) == copies * spec.experts_per_token * int(real.sum())


def test_all_tokens_may_choose_one_expert() -> None:
    spec = KINDS["topk_softmax"]
    values = arrays(spec)
    values["router.bias"] = values["router.bias"].at[7].add(1000.0)
    placement = placed("fsdp=2,expert=4", ROWS_TOO)
    assert_same(with_gradients(spec, values, tokens(), placement), with_gradients(spec, values, tokens()))


def test_tokens_that_the_mesh_does_not_divide_are_not_exchanged() -> None:
    values, x = arrays(BASE), tokens(batch=3)
    layer = module(BASE, values, placed("expert=4,tensor=2", ROWS_TOO))
    assert not exchanges(layer, x)
    assert_close(jax.jit(lambda x: layer(x))(x), module(BASE, values)(x))


def test_auto_exchanges_tokens_and_grouped_gathers_them() -> None:
    placement, values, x = placed("expert=4,tensor=2", ROWS_TOO), arrays(BASE), tokens()
    assert exchanges(module(BASE, values, placement), x)
    grouped = module(BASE, values, placement, "grouped")
    assert not exchanges(grouped, x)
    assert_close(jax.jit(lambda x: grouped(x))(x), module(BASE, values)(x))
    assert not exchanges(module(BASE, values, local_placement("expert=4,tensor=2")), x)


def test_with_a_shared_expert_in_bfloat16() -> None:
    spec = replace(KINDS["renormalized"], shared=MLPSpec(8))
    values = arrays(spec, dtype=jnp.bfloat16)
    x = tokens().astype(jnp.bfloat16)
    out, to_values, to_x = with_gradients(spec, values, x, placed("expert=4,tensor=2", ROWS_TOO))
    assert (out.dtype, to_x.dtype, to_values["experts.down.kernel"].dtype) == (jnp.bfloat16,) * 3
    wide = {path: a.astype(jnp.float32) for path, a in values.items()}
    expected = with_gradients(spec, wide, x.astype(jnp.float32))
    assert_close(out, expected[0], 0.02)
    assert_close(to_x, expected[2], 0.02)


def test_quantized_experts_give_their_rows_gradients_too() -> None:
    values = arrays(BASE)
    for path in ("experts.gate_up.kernel", "experts.down.kernel"):
        scale = jnp.abs(values[path]).max(-1) / 127
        values[path] = QuantizedKernel(jnp.round(values[path] / scale[..., None]).astype(jnp.int8), scale)

    def run(placement: Placement | None) -> tuple[jax.Array, jax.Array]:
        def objective(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = module(BASE, values, placement)(x)
            return loss(out), out

        gradient, out = jax.jit(jax.grad(objective, has_aux=True))(tokens())
        return out, gradient

    for ours, theirs in zip(run(placed("expert=4,tensor=2", ROWS_TOO)), run(None), strict=True):
        assert_close(ours, theirs, 2e-5)


def test_rows_are_exchanged_as_ragged_all_to_all_says() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 4, size=(4, 4, 2)).astype(np.int32)
    found = deliveries(jnp.asarray(sizes))
    rows = [[(source, place) for place in range(sizes[source].sum())] for source in range(4)]
    expected: list[list[tuple[int, int]]] = [[] for _ in range(4)]
    for device in range(4):
        for expert in range(2):
            for source in range(4):
                start = sizes[source].reshape(-1)[: device * 2 + expert].sum()
                expected[device] += rows[source][start : start + sizes[source, device, expert]]
    assert int(found.busiest) == max(map(len, expected))
    most, mesh = 24, jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    numbers = jnp.stack([jnp.arange(most) + 100 * source for source in range(4)]).reshape(-1, 1)

    def there_and_back(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        device = jax.lax.axis_index("expert")
        there, back, _ = found.window(2, 5, device)
        got = exchange(rows, jnp.full((5, 1), -1), there, ("expert",), "cpu")
        return got, exchange(got, jnp.full_like(rows, -1), back, ("expert",), "cpu")

    by_row = PartitionSpec("expert")
    got, returned = jax.jit(
        jax.shard_map(there_and_back, mesh=mesh, in_specs=by_row, out_specs=(by_row, by_row), check_vma=False)
    )(numbers)
    wanted = [[100 * source + place for source, place in rows[2:7]] for rows in expected]
    assert [[int(n) for n in part if n >= 0] for part in got.reshape(4, 5)] == wanted
    there = {number for part in wanted for number in part}
    assert [int(n) for n in returned.reshape(-1)] == [n if n in there else -1 for n in numbers.reshape(-1).tolist()]


def test_pieces_name_rows_of_both_ends() -> None:
    sizes = jnp.asarray([[[1, 2], [0, 3]], [[4, 0], [2, 1]]], jnp.int32)
    there, back, of_experts = deliveries(sizes).window(0, 100, jnp.int32(1))
    assert there == Pieces(*there)
    assert of_experts.tolist() == [2, 4]
    assert there.sizes.tolist() == [4, 0, 2, 1]
    assert there.arriving.tolist() == [0, 3, 2, 1]
    assert there.lands.tolist() == [1, 7, 0, 5]  # on device 0 after one row of device 0's, on device 1 first
    assert back.starts.tolist() == [0, 2, 0, 5]
