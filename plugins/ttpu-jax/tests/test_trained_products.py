"""Products of training and their gradients are those of one device, and master weights that layers round train as a
rounded copy of them does."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import NamedSharding, PartitionSpec
from test_padded import GQA

from ttpu_core.spec import ArchitectureSpec, EmbeddingSpec, HeadSpec, LayerSpec, MLPSpec, MoESpec, NormSpec
from ttpu_jax.aot.compile import compile_for
from ttpu_jax.aot.steps import train_step
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.compiler_flags import training_options
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.loss import token_batch
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.ops.masters import Master, rounded
from ttpu_jax.ops.matmul import trained as trained_module
from ttpu_jax.ops.matmul.trained import gradient_ring, trained_product, trained_products
from ttpu_jax.params.initialize import abstract_parameters, random_parameters
from ttpu_jax.params.placement import Placement, local_placement
from ttpu_jax.train.step import TrainStep

RANDOM = np.random.default_rng(0)
MESHES: dict[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]] = {
    "inputs": (("fsdp",), ((), (), ("fsdp",)), (("fsdp",), ())),
    "outputs": (("fsdp",), (("fsdp",), (), ()), (("fsdp",), ())),
    "inputs and heads": (("data", "fsdp", "tensor"), (("tensor",), (), ("fsdp",)), (("data", "fsdp"), ())),
    "outputs and inputs": (("data", "fsdp", "tensor"), (("fsdp",), (), ("tensor",)), (("data", "fsdp"), ())),
    "rows of a sequence": (("fsdp", "sequence"), ((), (), ("fsdp",)), (("fsdp",), ("sequence",))),
}
"""Name → mesh axes, those of each dimension of the kernel, those of each of the rows."""


def mesh_of(names: tuple[str, ...]) -> jax.sharding.Mesh:
    sizes = {1: (8,), 2: (4, 2), 3: (2, 2, 2)}[len(names)]
    return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


@pytest.mark.parametrize(
    ("features", "seq", "dtype"),
    [(8, 6, jnp.float32), (8, 6, jnp.bfloat16), (256, 6, jnp.float32), (256, 520, jnp.bfloat16)],
    ids=["few", "few in bfloat16", "halves", "two blocks at once"],
)
@pytest.mark.parametrize("case", MESHES)
def test_gradients_summed_in_a_ring_are_those_of_one_device(case: str, features: int, seq: int, dtype: Any) -> None:
    names, of_kernel, of_rows = MESHES[case]
    mesh = mesh_of(names)
    ring = gradient_ring(mesh, of_kernel, of_rows)
    assert ring is not None and ring.axis == "fsdp"
    x, kernel = RANDOM.standard_normal((8, seq, 2 * features)), RANDOM.standard_normal((8, features // 4, 2 * features))
    wanted = jnp.asarray(RANDOM.standard_normal((8, seq, 8, features // 4)), jnp.float32)

    def total(x: Any, kernel: Any, ring: Any) -> jax.Array:
        return (trained_product(x, kernel, dtype, ring).astype(jnp.float32) * wanted).sum()

    def plain(x: Any, kernel: Any) -> jax.Array:
        return (jnp.einsum("bsi,kdi->bskd", x, kernel, precision="highest") * wanted).sum()

    given = [jnp.asarray(each, dtype) for each in (x, kernel)]
    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(*(each.astype(jnp.float32) for each in given))
    shardings = (
        NamedSharding(mesh, PartitionSpec(*of_rows)), NamedSharding(mesh, PartitionSpec(*of_kernel)),
    )  # fmt: skip
    placed = [jax.device_put(each, sharding) for each, sharding in zip(given, shardings, strict=True)]
    found = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=2, out_shardings=shardings)(*placed, ring)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        close = 1e-5 if dtype == jnp.float32 else 2e-2
        np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, atol=close * np.abs(theirs).max())


@pytest.mark.parametrize("seq", [3, 40])
def test_two_kernels_go_around_both_ways(seq: int) -> None:
    mesh = mesh_of(("fsdp",))
    ring = gradient_ring(mesh, ((), ("fsdp",)), (("fsdp",), ()))
    x = jnp.asarray(RANDOM.standard_normal((8, seq, 16)), jnp.float32)
    kernels = jnp.asarray(RANDOM.standard_normal((2, 5, 16)), jnp.float32)

    def total(x: Any, kernels: Any, ring: Any) -> jax.Array:
        one, other = trained_products(x, tuple(kernels), jnp.float32, ring)
        return (jnp.sin(one) * other).sum()

    def plain(x: Any, kernels: Any) -> jax.Array:
        pair = jnp.einsum("bsi,noi->nbso", x, kernels, precision="highest")
        return (jnp.sin(pair[0]) * pair[1]).sum()

    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(x, kernels)
    found = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=2)(x, kernels, ring)
    text = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=2).lower(x, kernels, ring).as_text()
    assert len(set(re.findall(r"source_target_pairs = dense<([^>]*)>", text))) == 2
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_what_is_recomputed_may_keep_products(capsys: pytest.CaptureFixture[str]) -> None:
    """As remat="dots" does."""
    x, kernel = jnp.ones((2, 3, 4)), jnp.ones((5, 4))

    def total(x: Any, kernel: Any) -> jax.Array:
        return jnp.sin(trained_product(jnp.sin(x), kernel, jnp.float32, None)).sum()

    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    print_saved_residuals(jax.checkpoint(total, policy=policy), x, kernel)
    assert "f32[2,3,5]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kernel", "rows"),
    [
        (((), ()), (("data",), ())),  # no axis in common
        (((), ("data", "fsdp")), (("data", "fsdp"), ())),  # two
        (((), ("fsdp",), ()), (("fsdp",), ())),  # a dimension between others
        (((), ("tensor", "fsdp")), (("fsdp",), ())),
    ],
)
def test_other_kernels_are_left_to_the_compiler(kernel: Any, rows: Any) -> None:
    assert gradient_ring(mesh_of(("data", "fsdp", "tensor")), kernel, rows) is None
    assert gradient_ring(None, ((), ("fsdp",)), (("fsdp",), ())) is None


def test_a_master_has_the_gradient_of_the_rounded_weight_in_its_slot() -> None:
    value = jnp.asarray(RANDOM.standard_normal((3, 4)), jnp.float32)

    def total(value: jax.Array, slot: jax.Array) -> jax.Array:
        weight = rounded({"a": Master(value, slot, np.dtype(jnp.bfloat16))})["a"]
        assert weight.dtype == jnp.bfloat16
        return (weight.astype(jnp.float32) ** 2).sum()

    of_value, of_slot = jax.grad(total, argnums=(0, 1))(value, jnp.zeros((3, 4), jnp.bfloat16))
    assert of_slot.dtype == jnp.bfloat16 and not of_value.any()
    np.testing.assert_allclose(of_slot.astype(jnp.float32), 2 * value, rtol=1e-2)


NORM = NormSpec()
SPEC = ArchitectureSpec(
    "tiny", EmbeddingSpec(64, 32),
    (LayerSpec(replace(GQA, num_heads=4, num_kv_heads=2), MLPSpec(16, bias=True), NORM),) * 3, NORM, HeadSpec(), 32,
)  # fmt: skip
TOKENS = jnp.asarray(RANDOM.integers(0, 64, (8, 12)), jnp.int32)


class CopiedFirst(TrainStep):
    """A step that rounds all weights before it begins."""

    @property
    def _rounds_where_used(self) -> bool:
        return False


def trained(
    kind: type[TrainStep],
    mesh: str | None,
    dtype: Any,
    *,
    trains: bool = True,
    spec: ArchitectureSpec = SPEC,
    **more: Any,
) -> tuple[list[float], dict[str, np.ndarray]]:
    placement = local_placement(mesh)
    runtime = Runtime(placement, ropes=different_ropes(spec.layers), dtype=np.dtype(dtype), trains=trains)
    model = causal_model(spec, runtime, stacked=True, remat="full")
    whole = random_parameters(model.parameters, local_placement(), np.dtype(np.float32))
    params: dict[str, Any] = {path: jax.device_put(value, model.placements[path]) for path, value in whole.items()}
    step = kind(model, np.dtype(dtype), optimizer=optax.sgd(0.5), **more)
    state, update, losses = jax.jit(step.init)(params), jax.jit(step), []
    for _ in range(3):
        params, state, figures = update(params, state, token_batch(TOKENS))
        losses.append(float(figures.loss))
    return losses, {path: np.asarray(value) for path, value in params.items()}


@cache
def on_one_device(kind: type[TrainStep], dtype: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    """What meshes are compared with."""
    return trained(kind, None, dtype, trains=False)


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,fsdp=2,tensor=2", "fsdp=4,sequence=2"])
def test_in_float32_steps_are_those_of_one_device(mesh: str) -> None:
    expected, theirs = on_one_device(TrainStep, np.float32)
    losses, ours = trained(TrainStep, mesh, np.float32)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for path, value in theirs.items():
        np.testing.assert_allclose(ours[path], value, atol=2e-5, err_msg=path)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"accumulation": 2}, {"trainable": lambda path: "mlp" in path or "embed" in path}]
)
def test_layers_that_round_their_masters_train_as_with_a_rounded_copy(more: dict[str, Any], tied: bool) -> None:
    """Equal bits but for the rows of the table, whose gradients are added up in float32."""
    spec = replace(SPEC, head=HeadSpec(tied=tied))
    expected, theirs = trained(CopiedFirst, None, jnp.bfloat16, trains=False, spec=spec, **more)
    losses, ours = trained(TrainStep, None, jnp.bfloat16, trains=False, spec=spec, **more)
    np.testing.assert_allclose(losses, expected, rtol=2e-3)
    assert losses[0] == expected[0] and losses[-1] < losses[0]
    for path, value in theirs.items():
        np.testing.assert_allclose(ours[path], value, atol=5e-3, err_msg=path)


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,fsdp=2,tensor=2"])
def test_in_bfloat16_devices_train_as_one(mesh: str) -> None:
    expected, theirs = on_one_device(CopiedFirst, jnp.bfloat16)
    losses, ours = trained(TrainStep, mesh, jnp.bfloat16)
    np.testing.assert_allclose(losses, expected, rtol=5e-3)
    for path, value in theirs.items():
        np.testing.assert_allclose(ours[path], value, atol=2e-2, err_msg=path)


@pytest.mark.usefixtures("little_effort")
@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("slice_name", "chips", "summed_by"), [("v5e:2x2", 4, "collective-permute"), ("v6e:2x2", 4, "reduce-scatter")]
)
def test_what_a_tpu_exchanges_is_rounded_and_no_rounded_copy_of_the_layers_exists(
    slice_name: str, chips: int, summed_by: str
) -> None:
    """The compiled step: weights and their gradients cross the links in bfloat16, and loops over layers are given
    float32 masters alone. v5e sums gradients in rings, and v6e leaves that to SparseCores."""
    layer = LayerSpec(replace(GQA, num_heads=8, num_kv_heads=4, head_dim=128, rope=replace(GQA.rope, rotary_dim=128)),
                      MLPSpec(256 * chips), NORM)  # fmt: skip
    spec = ArchitectureSpec("tiny", EmbeddingSpec(4096, 128 * chips), (layer,) * 6, NORM, HeadSpec(), 1024)
    topology = tpu_topology(slice_name)
    placement = Placement(make_mesh(topology, {"fsdp": chips}))
    runtime = Runtime(placement, ropes=different_ropes(spec.layers), dtype=np.dtype(jnp.bfloat16))
    step = train_step(spec, runtime, np.dtype(jnp.bfloat16), batch=chips, tokens=128, stacked=True)
    options = training_options("tpu", topology.chip, 2048)
    del options["xla_tpu_scoped_vmem_limit_kib"]  # products in smaller pieces compile sooner
    program = compile_for(
        topology, step.function, *step.arguments, donate_argnums=step.donated, compiler_options=options
    )
    found = re.findall(
        r"= \(?(\w+)\[([\d,]*)\][^=\n]* (all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(",
        program.hlo_text,
    )
    sizes = [(kind, op, int(np.prod([int(size) for size in shape.split(",") if size]))) for kind, shape, op in found]
    large = {op for _, op, size in sizes if size >= 1024 * 128}
    assert {kind for kind, _, size in sizes if size >= 1024 * 128} == {"bf16"}
    assert "all-gather" in large and large & {"collective-permute", "reduce-scatter"} == {summed_by}
    in_background = re.search(r"%reduce-scatter\S* = .* call-start\(", program.hlo_text)
    assert bool(in_background) == (summed_by == "reduce-scatter")
    loops = re.findall(r" = \((.*)\) while\(", program.hlo_text)
    width = 256 * chips
    assert any(f"f32[6,{width},128]" in loop or f"f32[6,128,{width}]" in loop for loop in loops)
    assert not any(f"bf16[6,2,{width},128]" in loop and f"f32[6,2,{width},128]" not in loop for loop in loops)
    entry = program.hlo_text[program.hlo_text.index("ENTRY") :]
    zeros = re.findall(r"= bf16\[6,([\d,]+)\][^=]* broadcast\(", entry)
    assert all(np.prod([int(size) for size in shape.split(",")]) < 1024 for shape in zeros), "but for those of biases"
    unset = rf"= bf16\[6,2,{width},128\][^=]* custom-call\(\), custom_call_target=.AllocateBuffer"
    assert re.search(unset, entry), "gradients of kernels begin with unset memory"
    assert any(f"bf16[6,1,128,{128 * chips}]" in loop for loop in loops), "activations of each layer"
    over = f"bf16[6,128,{128 * chips}]"
    assert not any(over in loop for loop in loops), "gradients of attention's output kernel lie over activations"


@pytest.mark.usefixtures("little_effort")
@pytest.mark.tpu_compile
@pytest.mark.parametrize("case", ["inputs and heads", "outputs and inputs", "rows of a sequence", "slices"])
def test_sparse_cores_sum_gradients_where_two_axes_shard_them(case: str) -> None:
    """Nobody gathers what is multiplied: of 70 billion parameters on 128 chips that took ten times as long. Slices
    exchange sums, and not their rows."""
    if case == "slices":
        topology = tpu_topology("2*v6e:2x2")
        mesh, (_, of_kernel, _) = make_mesh(topology, {"data": 2, "fsdp": 4}), MESHES["inputs"]
        names, of_rows = mesh.axis_names, (("data", "fsdp"), ())
    else:
        topology, (names, of_kernel, of_rows) = tpu_topology("v6e:2x4"), MESHES[case]
        mesh = make_mesh(topology, dict(zip(names, (1, 4, 2)[-len(names) :], strict=True)))
    ring = gradient_ring(mesh, of_kernel, of_rows, across=Placement(mesh).axes_across_slices)
    assert ring is not None and ring.by_compiler

    def array(shape: tuple[int, ...], *cut: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*cut)))

    def gradient(x: Any, kernel: Any, wanted: Any) -> jax.Array:
        return jax.vjp(lambda one: trained_product(x, one, jnp.bfloat16, ring), kernel)[1](wanted)[0]

    sizes = 2048, 8, 1024
    kernel = array(sizes, *(each or None for each in of_kernel))
    of_outputs = [tuple(axis for axis in each if axis != "fsdp") or None for each in of_kernel]
    rows = [each or None for each in of_rows]
    x, wanted = array((8, 256, sizes[2]), *rows, of_outputs[2]), array((8, 256, *sizes[:2]), *rows, *of_outputs[:2])
    step = jax.jit(gradient, out_shardings=kernel.sharding)
    options = training_options("tpu", topology.chip, 2048)
    del options["xla_tpu_scoped_vmem_limit_kib"]  # products in smaller pieces compile sooner
    program = compile_for(topology, step, x, kernel, wanted, compiler_options=options)
    others = {"all-reduce"} if "sequence" in names else {"dcn-all-reduce"} if case == "slices" else set()
    assert {one.op for one in program.collectives if one.count} == {"reduce-scatter"} | others


@pytest.mark.tpu_compile
@pytest.mark.parametrize(("in_hbm", "small"), [(False, True), (True, True), (True, False)])
def test_sums_stay_in_hbm_on_their_way(in_hbm: bool, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large sums what has arrived does."""
    assert trained_module._IN_HBM_BYTES == 8 << 20
    if not small:
        monkeypatch.setattr(trained_module, "_IN_HBM_BYTES", 1 << 20)
    topology = tpu_topology("v5e:2x2")
    mesh = make_mesh(topology, {"fsdp": 4})
    ring = gradient_ring(mesh, ((), ("fsdp",)), (("fsdp",), ()), sums_in_hbm=in_hbm)
    x, kernel, wanted = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*cut)))
        for shape, cut in [((4, 1024, 8192), ("fsdp",)), ((1024, 8192), (None, "fsdp")), ((4, 1024, 1024), ("fsdp",))]
    )

    def gradient(x: Any, kernel: Any, wanted: Any) -> jax.Array:
        return jax.vjp(lambda one: trained_product(x, one, jnp.bfloat16, ring), kernel)[1](wanted)[0]

    step = jax.jit(gradient, out_shardings=kernel.sharding)
    options = training_options("tpu", topology.chip, 1024)
    text = compile_for(topology, step, x, kernel, wanted, compiler_options=options).hlo_text
    block = r"bf16\[512,2048\]"
    arrived = re.findall(rf"= ({block}\S*) collective-permute-done\(", text)
    products = re.findall(rf"add_convert_fusion\S* = ({block}\S*) fusion\(", text)
    assert len(arrived) == len(products) == 6
    assert all("S(1)" not in one for one in arrived) == in_hbm
    assert all("S(1)" not in one for one in products) == (in_hbm and small)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("name", "axes", "in_hbm"),
    [("v5e:2x4", {"data": 2, "fsdp": 4}, True), ("v5e:2x4", {"stage": 2, "fsdp": 4}, False),
     ("2*v5e:2x2", {"data": 2, "fsdp": 4}, False)],
    ids=["devices", "stages", "slices"],
)  # fmt: skip
def test_sums_of_stages_and_slices_are_where_the_compiler_likes_them(
    name: str, axes: dict[str, int], in_hbm: bool
) -> None:
    """What tells it is a call that is not mapped over stages, and that libtpu fails at where there are several slices.
    """
    mesh = make_mesh(tpu_topology(name), axes)
    across = Placement(mesh).axes_across_slices
    ring = gradient_ring(mesh, ((), ("fsdp",)), (("fsdp",), ()), sums_in_hbm=True, across=across)
    assert ring is not None and ring.sums_in_hbm == in_hbm
    if "stage" in axes:
        product = jax.vmap(lambda x, kernel: trained_product(x, kernel, jnp.bfloat16, ring))
        x, kernel = jnp.zeros((2, 4, 1024, 512)), jnp.zeros((2, 128, 512))
        jax.eval_shape(jax.grad(lambda kernel: product(x, kernel).sum()), kernel)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("hidden", [512, 1024])
def test_weights_that_do_not_fill_lanes_are_rounded_before_the_loop(hidden: int) -> None:
    """Of 512 features each of eight v5e chips has 64, and the compiler would copy the float32 weights of all layers."""
    experts = MoESpec(8, 2, 256)
    layer = LayerSpec(replace(GQA, num_heads=8, num_kv_heads=4, head_dim=128, rope=replace(GQA.rope, rotary_dim=128)),
                      MLPSpec(2048), NORM)  # fmt: skip
    mixture = replace(layer, mlp=experts)
    spec = ArchitectureSpec("tiny", EmbeddingSpec(4096, hidden), (layer,) * 3 + (mixture,) * 3, NORM, HeadSpec(), 1024)
    placement = Placement(make_mesh(tpu_topology("v5e:2x4"), {"fsdp": 8}))
    runtime = Runtime(placement, ropes=different_ropes(spec.layers), dtype=np.dtype(jnp.bfloat16), trains=True)
    model = causal_model(spec, runtime, stacked=True, remat="full")
    step = TrainStep(model, np.dtype(jnp.bfloat16))
    params = abstract_parameters(model.parameters, placement, np.dtype(np.float32))
    weights, trained = jax.eval_shape(step._weights, params)
    masters = {path for path, value in weights.items() if isinstance(value, Master)}
    narrow = {path for path in params if path.endswith("qkv.kernel")}
    of_experts = {path for path in params if ".experts." in path}
    taken_apart = {path for path in params if path.endswith(".mlp.gate_up.kernel")}
    assert len(narrow) == 2 and taken_apart | of_experts <= masters
    assert {path for path in masters if weights[path].of_experts} == of_experts
    assert not narrow & masters if hidden == 512 else narrow <= masters
    assert all(weights[path].dtype == trained[path].dtype == jnp.bfloat16 for path in narrow - masters)
    found = step._in_layers(None, trained)
    assert not narrow & set(found.unset) if hidden == 512 else narrow <= set(found.unset)
    by_rows = {path for path in params if path.endswith(("attention.output.kernel", "mlp.down.kernel"))}
    assert found.devices == 8 and set(found.unset) >= set(found.by_rows) >= by_rows


@pytest.mark.usefixtures("little_effort")
@pytest.mark.tpu_compile
def test_experts_are_gathered_and_their_gradients_scattered_without_copies() -> None:
    """8 experts are divided by experts, 6 by their rows. Parts of their last dimension, which devices divided before,
    were copied to their places; so were the float32 weights of all layers for experts gathered by the first one."""
    topology = tpu_topology("v6e:2x2")
    layer = LayerSpec(replace(GQA, num_heads=2, num_kv_heads=1, head_dim=128, rope=replace(GQA.rope, rotary_dim=128)),
                      MoESpec(8, 2, 512), NORM)  # fmt: skip
    layers = (layer, layer, *(replace(layer, mlp=MoESpec(6, 2, 1024)),) * 2)
    spec = ArchitectureSpec("tiny", EmbeddingSpec(4096, 1024), layers, NORM, HeadSpec(), 1024)
    runtime = Runtime(
        Placement(make_mesh(topology, {"fsdp": 4})), ropes=different_ropes(spec.layers), dtype=np.dtype(jnp.bfloat16)
    )
    step = train_step(spec, runtime, np.dtype(jnp.bfloat16), batch=4, tokens=128, stacked=True)
    options = training_options("tpu", topology.chip, 2048)
    del options["xla_tpu_scoped_vmem_limit_kib"]  # products in smaller pieces compile sooner
    program = compile_for(
        topology, step.function, *step.arguments, donate_argnums=step.donated, compiler_options=options
    )
    copies = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose|copy-start)\(", program.hlo_text)
    shapes = [[int(size) for size in each.split(",")] for each in copies]
    for experts in {one.mlp for one in layers}:
        assert isinstance(experts, MoESpec)
        inner, of_a_device = experts.intermediate_size, experts.num_experts * experts.intermediate_size * 1024 // 4
        assert not [each for each in shapes if inner in each and np.prod(each) >= of_a_device]
    assert {one.op for one in program.collectives if one.count == 2} >= {"all-gather", "reduce-scatter"}
