"""JAX functions as operations of torch_xla's graph."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

pytest.importorskip("torch_xla")
pytest.importorskip("ttpu_jax")

import jax
import jax.numpy as jnp

from ttpu_core.errors import MissingDependencyError, UnsupportedError
from ttpu_torch_xla import bridge
from ttpu_torch_xla.bridge import abstract_mesh, call_jax, differentiable, lowering_for, target
from ttpu_torch_xla.runtime import current

pytestmark = pytest.mark.torch

traced: list[str] = []


def scores(query: Any, key: Any, ids: Any, bias: Any = None, *, scale: float = 1.0) -> Any:
    """Products where segments are equal."""
    traced.append("scores")
    product = jnp.einsum("btd,bsd->bts", query, key) * scale
    product = product if bias is None else product + bias
    return jnp.where(ids[:, :, None] == ids[:, None, :], product, 0.0)


def host_scores(query: torch.Tensor, key: torch.Tensor, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return torch.where(ids[:, :, None] == ids[:, None, :], query @ key.mT * scale, 0.0)


def arrays() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 5, 8, generator=generator) for _ in range(2))
    return query, key, torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])


def there(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(current().device()) for tensor in tensors]


def stablehlo(*tensors: torch.Tensor) -> str:
    import torch_xla.core.xla_model as model

    return model.get_stablehlo(list(tensors))


def test_a_jax_function_computes_on_torch_tensors() -> None:
    found = call_jax(scores, *there(*arrays()), static={"scale": 0.5})
    assert isinstance(found, torch.Tensor) and found.device.type == "xla"
    query, key, ids = arrays()
    torch.testing.assert_close(found.cpu(), host_scores(query, key, ids, scale=0.5))


def test_what_is_none_stays_none_and_what_is_static_is_part_of_the_signature() -> None:
    device = there(*arrays())
    without, bias = call_jax(scores, *device, None), torch.ones((), device="xla")
    torch.testing.assert_close(without.cpu(), call_jax(scores, *device).cpu())
    added = call_jax(scores, *device, bias, static={"scale": 2.0}).cpu()
    query, key, ids = arrays()
    same = ids[:, :, None] == ids[:, None, :]
    torch.testing.assert_close(added, host_scores(query, key, ids, scale=2.0) + same)


def test_results_keep_their_structure() -> None:
    def both(x: Any) -> Any:
        return {"sum": x.sum(), "parts": (x + 1, x.astype(jnp.bfloat16))}

    found = call_jax(both, *there(torch.arange(4.0)))
    assert found["sum"].cpu() == 6
    assert found["parts"][0].cpu().tolist() == [1, 2, 3, 4] and found["parts"][1].dtype == torch.bfloat16


def test_gradients_are_jaxs_and_the_function_is_not_computed_twice() -> None:
    query, key, ids = arrays()
    on_host = [one.requires_grad_() for one in (query, key)]
    (host_scores(query, key, ids, scale=0.5) ** 2).sum().backward()
    on_device = [one.requires_grad_() for one in there(*arrays()[:2])]
    traced.clear()
    attention = differentiable(scores)
    for _ in range(2):
        result = attention(*on_device, *there(ids), static={"scale": 0.5})
        (result**2).sum().backward()
    assert traced == ["scores"]
    for one, other in zip(on_device, on_host, strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.cpu(), 2 * other.grad, rtol=1e-5, atol=1e-5)


def test_only_what_wants_a_gradient_gets_one() -> None:
    query, key, ids = there(*arrays())
    attention = differentiable(scores)
    assert not attention(query, key, ids).requires_grad
    key.requires_grad_()
    attention(query, key, ids).sum().backward()
    assert query.grad is None and key.grad is not None
    with torch.no_grad():
        assert not attention(query, key, ids).requires_grad


def test_a_signature_is_traced_once_and_compiled_once() -> None:
    def doubled(x: Any) -> Any:
        traced.append("doubled")
        return 2 * x

    traced.clear()
    runtime, device = current(), current().device()
    runtime.sync()
    for compiled in (True, False):
        runtime.reset_counters()
        result = call_jax(doubled, torch.ones(7, 3, device=device) + 1)
        runtime.sync(wait=True)
        assert bool((result.cpu() == 4).all())
        assert (runtime.counters().compiles > 0) == compiled
    assert traced == ["doubled"]
    call_jax(doubled, torch.ones(8, 3, device=device))
    assert traced == ["doubled"] * 2


def test_indices_of_64_bits_become_32() -> None:
    found = call_jax(lambda x: x + 1, *there(torch.arange(3)))
    assert found.dtype == torch.int32 and found.cpu().tolist() == [1, 2, 3]


def test_what_jax_cannot_take_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"a tensor of torch.float64, but it takes float32.*cast the tensor"):
        call_jax(scores, *there(torch.ones(1, dtype=torch.float64)))
    with pytest.raises(UnsupportedError, match=r"shape \(2, 5, 8\) on cpu, .* move the tensor there"):
        call_jax(scores, *arrays())


def kernel(x: Any) -> Any:
    from jax.experimental import pallas as pl

    def body(source: Any, destination: Any) -> None:
        destination[...] = source[...] * 2

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_what_is_recorded_for_a_slice_is_lowered_for_its_chip() -> None:
    kinds = []

    def asking(x: Any) -> Any:
        from jax.experimental.pallas import tpu as pltpu

        kinds.append(str(pltpu.get_tpu_info().chip_version))
        return kernel(x)

    before = target()
    x = torch.ones(8, 128, device=current().device())
    for topology in ("v5e:2x4", "v6e:2x4"):
        with lowering_for(topology):
            assert target().platform == "tpu"
            assert "tpu_custom_call" in stablehlo(call_jax(asking, x))
    assert len(set(kinds)) == 2 and target() == before
    doubled = call_jax(lambda x: 2 * x, x)  # and the process computes on its own device as before
    assert bool((doubled.cpu() == 2).all())


def test_a_function_cut_along_a_mesh_needs_no_devices_in_jax() -> None:
    with lowering_for("v5e:2x4"):
        mesh = abstract_mesh({"data": 4, "tensor": 2})

        def cut(x: Any) -> Any:
            spec = jax.sharding.PartitionSpec("data", "tensor")
            return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)

        text = stablehlo(call_jax(cut, torch.ones(8, 6, device=current().device()), mesh=mesh))
    assert "{devices=[4,2]<=[8]}" in text and "tensor<2x3xf32>" in text


def test_jax_is_left_as_it_was() -> None:
    before = jax.config.values["jax_use_shardy_partitioner"]
    call_jax(scores, *there(*arrays()))
    assert jax.config.values["jax_use_shardy_partitioner"] == before
    mesh = jax.make_mesh((1,), ("x",))
    sharded = jax.jit(lambda x: x + 1, out_shardings=jax.NamedSharding(mesh, jax.P("x")))(jnp.ones(4))
    assert sharded.tolist() == [2.0] * 4


def test_without_the_kernels_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ttpu_jax.ops.attention", None)
    bridge._jax.cache_clear()
    with pytest.raises(MissingDependencyError, match=r'pip install "ttpu-torch-xla\[kernels\]"'):
        call_jax(scores, *there(*arrays()))
