"""Updates are compiled with the options of their chips, as far as the compiler and the environment let them."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ttpu_core.sharding.hardware import CHIPS
from ttpu_jax import compiler_flags
from ttpu_jax.aot.compile import compile_for
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.compiler_flags import engine_options, fetch_options, program_options, training_options
from ttpu_jax.compiling import compiled_with
from ttpu_jax.ops.fetched import FETCH_BEGIN
from ttpu_jax.ops.matmul import trained

VMEM = "xla_tpu_scoped_vmem_limit_kib"
TOKENS = 2048
PREFETCHES = ("xla_tpu_async_copy_bandwidth_scaling_factor", "xla_tpu_sliced_prefetch_preferred_slice_size")
ROWS_ON_THEIR_WAY = "xla_tpu_enable_async_ragged_all_to_all"
SPARSE_CORES = "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter"


def test_other_platforms_have_no_options() -> None:
    assert training_options("cpu", None, TOKENS) == program_options("cpu") == program_options(None) == {}
    assert engine_options("cpu").keys() == {"xla_cpu_scheduler_type"} and engine_options("gpu") == {}


def test_every_tpu_program_shares_the_code_of_equal_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (program_options("tpu"), engine_options("tpu"), training_options("tpu", None, TOKENS)):
        assert options["xla_tpu_enable_deduplicated_calls"] == "ENABLED"
    monkeypatch.setitem(compiler_flags._AT_IMPORT, "LIBTPU_INIT_ARGS", "--xla_tpu_enable_deduplicated_calls=DISABLED")
    assert program_options("tpu") == engine_options("tpu") == {ROWS_ON_THEIR_WAY: True}
    monkeypatch.setitem(compiler_flags._AT_IMPORT, "XLA_FLAGS", "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_DEFAULT")
    assert engine_options("cpu") == {}


@pytest.mark.parametrize("name", PREFETCHES)
def test_prefetches_of_a_v5e_leave_bandwidth_to_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In programs of generation, not in those of an engine or in training, nor where the environment sets it."""
    assert {chip_name for chip_name, chip in CHIPS.items() if name in program_options("tpu", chip)} == {"v5e"}
    assert name not in program_options("tpu") and program_options("cpu", CHIPS["v5e"]) == {}
    assert name not in engine_options("tpu") and name not in training_options("tpu", CHIPS["v5e"], TOKENS)
    monkeypatch.setitem(compiler_flags._AT_IMPORT, "LIBTPU_INIT_ARGS", f"--{name}=1")
    assert {*PREFETCHES} - program_options("tpu", CHIPS["v5e"]).keys() == {name}


def test_an_unknown_tpu_has_those_of_every_tpu() -> None:
    common = training_options("tpu", None, TOKENS)
    assert common == training_options("tpu", CHIPS["v4"], TOKENS)
    for name in ("v5e", "v5p", "v6e", "tpu7x"):
        assert training_options("tpu", CHIPS[name], TOKENS).items() > common.items()


def test_products_of_few_tokens_on_v5e_leave_more_vmem_to_gathers() -> None:
    few = {name: training_options("tpu", chip, 4096) for name, chip in CHIPS.items()}
    many = {name: training_options("tpu", chip, 4097) for name, chip in CHIPS.items()}
    assert {name for name in CHIPS if few[name] != many[name]} == {"v5e"}
    assert few["v5e"][VMEM] < many["v5e"][VMEM]


def test_operations_on_the_vector_unit_carry_gathers_where_that_is_faster() -> None:
    carries = "xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions"
    assert {name for name, chip in CHIPS.items() if carries in training_options("tpu", chip, TOKENS)} == {"v5e", "v6e"}


def test_sparse_cores_are_asked_where_there_are_some() -> None:
    asked = {name for name, chip in CHIPS.items() if SPARSE_CORES in training_options("tpu", chip, TOKENS)}
    assert asked == {"v5p", "v6e", "tpu7x"}


@pytest.mark.parametrize("name", CHIPS)
def test_chips_with_sparse_cores_take_no_rings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "chip_of_device_kind", lambda kind: CHIPS[name])
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    ring = trained.gradient_ring(mesh, ((), ("fsdp",)), (("fsdp",), ()))
    assert ring is not None and ring.by_compiler == (name in ("v5p", "v6e", "tpu7x"))


def test_what_the_environment_sets_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VMEM in training_options("tpu", CHIPS["v6e"], TOKENS)
    monkeypatch.setitem(compiler_flags._AT_IMPORT, "LIBTPU_INIT_ARGS", f"--{VMEM}=98304 --{SPARSE_CORES}=false")
    options = training_options("tpu", CHIPS["v6e"], TOKENS)
    assert options and not {VMEM, SPARSE_CORES} & set(options)
    monkeypatch.setitem(compiler_flags._AT_IMPORT, "XLA_FLAGS", "--xla_tpu_enable_async_collective_fusion=false")
    assert "xla_tpu_enable_async_collective_fusion" not in training_options("tpu", None, TOKENS)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("name", CHIPS)
def test_libtpu_knows_the_options_of_each_chip(name: str) -> None:
    topology = tpu_topology(CHIPS[name].example)
    x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16, sharding=_whole(topology))
    options = training_options("tpu", topology.chip, TOKENS) | program_options("tpu", topology.chip) | fetch_options()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_for(topology, lambda x: x @ x, x, compiler_options=options).peak_bytes


@pytest.mark.parametrize("name", [FETCH_BEGIN, "another"])
def test_a_program_that_fetches_arrays_is_compiled_with_what_that_takes(name: str) -> None:
    class Lowered:
        def as_text(self) -> str:
            return f'custom_call @tpu_custom_call() {{kernel_name = "{name}"}}'

        def compile(self, compiler_options: dict[str, Any]) -> dict[str, Any]:
            return compiler_options

    compiled: Any = compiled_with(Lowered(), {"other": 1})  # type: ignore[arg-type]
    assert compiled == {"other": 1, **(fetch_options() if name == FETCH_BEGIN else {})} and fetch_options()


def test_an_option_that_the_compiler_does_not_know_is_left_out() -> None:
    options = {"xla_of_no_kind": True, "xla_of_no_other_kind": 3}
    with pytest.warns(UserWarning, match="does not know the option xla_of_no") as warned:
        program = compiled_with(jax.jit(jnp.sin).lower(jnp.zeros(3)), options)
    assert len(warned) == 2 and program(jnp.zeros(3)).tolist() == [0, 0, 0]


def test_other_errors_of_the_compiler_are_not_hidden() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="many"):
        compiled_with(jax.jit(jnp.sin).lower(jnp.zeros(3)), {"xla_cpu_parallel_codegen_split_count": "many"})


def _whole(topology: object) -> NamedSharding:
    return NamedSharding(make_mesh(topology, {"data": len(topology.devices)}), PartitionSpec())  # type: ignore[attr-defined, arg-type]
