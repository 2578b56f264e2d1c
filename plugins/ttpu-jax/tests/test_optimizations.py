"""Each optimization that can be left out is in a program, is not in it where it is left out, and changes no result."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from test_padded import GQA
from tiny import llama_checkpoint
from typer.testing import CliRunner
from updates import losses_of

from ttpu import AutoModelForTPU
from ttpu_core import open_checkpoint
from ttpu_core.config import ModelConfig
from ttpu_core.errors import RequestError
from ttpu_core.registry import default_registry
from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.spec import ArchitectureSpec, EmbeddingSpec, HeadSpec, LayerSpec, MLPSpec, NormSpec
from ttpu_jax import compiler_flags
from ttpu_jax.aot.report import compile_report
from ttpu_jax.aot.steps import inference_step, train_step
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.aot.training import compile_update
from ttpu_jax.backend import JaxBackend
from ttpu_jax.cli.compile_report import compile_report as command
from ttpu_jax.compiler_flags import program_options
from ttpu_jax.compiling import compiled_with, lower
from ttpu_jax.generation import programs as generation_programs
from ttpu_jax.load_options import JaxLoadOptions
from ttpu_jax.model import causal_model as causal_models
from ttpu_jax.model.causal_model import cache_dtype, causal_model
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.optimizations import OF_PROGRAMS, Optimization, left_out_by, read_without
from ttpu_jax.params.mesh import arrange
from ttpu_jax.params.placement import Placement, local_placement
from ttpu_jax.train.from_settings import step_from_settings
from ttpu_plan.planner import Request, best_plan
from ttpu_serve.api.engine_config import EngineConfig
from ttpu_train.runner import StepSettings

NORM, BF16 = NormSpec(), np.dtype(jnp.bfloat16)
WIDE = LayerSpec(
    replace(GQA, num_heads=8, num_kv_heads=4, head_dim=128, rope=replace(GQA.rope, rotary_dim=128)),
    MLPSpec(1024), NORM,
)  # fmt: skip
WINDOWED = replace(WIDE, mixer=replace(WIDE.mixer, window=256))
SPEC = ArchitectureSpec("tiny", EmbeddingSpec(4096, 512), (WIDE, WINDOWED), NORM, HeadSpec(), 1024)
LLAMA = ModelConfig.from_dict({
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 64,
})  # fmt: skip
DECODE = {
    Optimization.CACHE_WRITE: ("= dynamic_update_slice", False),
    Optimization.WINDOW_CACHE: ("[8,4,272,128]", True),  # 256 tokens and those that can be taken back
    Optimization.ROPE_PRODUCT: ("= split", False),
    Optimization.FUSED_NORMS: ("= min ", True),
}
"""What is in the program more often, or else less often, with an optimization than without it."""
TRAINING = {
    Optimization.TRAINED_PRODUCTS: ("= ppermute", True),
    Optimization.GRADIENT_RINGS: ("= ppermute", True),
    Optimization.SUMS_IN_HBM: ("target_name=PinToDevice", True),
    Optimization.VOCABULARY_LOSS: ("= sharding_constraint", True),
    Optimization.UNSET_GRADIENTS: ("= empty", True),
    Optimization.ROPE_PRODUCT: ("= split", False),
}


def program(task: str, *without: Optimization) -> str:
    """The jaxpr of a decode step or of a training step for four v5e chips."""
    pytest.importorskip("libtpu")
    axis = "tensor" if task == "decode" else "fsdp"
    placement = Placement(make_mesh(tpu_topology("v5e:2x2"), {axis: 4}))
    layers = SPEC.layers if task == "decode" else (WIDE,) * 3
    spec, attention = replace(SPEC, layers=layers), "decode_attention" if task == "decode" else "eager"
    runtime = Runtime(placement, attention, different_ropes(layers), dtype=BF16, without=frozenset(without))
    if task == "decode":
        step = inference_step(spec, runtime, BF16, batch=8, tokens=1, context=1024, stacked=False)
    else:
        step = train_step(spec, runtime, BF16, batch=4, tokens=128, stacked=True)
    return str(jax.make_jaxpr(step.function)(*step.arguments))


@pytest.mark.tpu_compile
@pytest.mark.parametrize("task", ["decode", "train"])
def test_each_is_in_the_program_unless_it_is_left_out(task: str) -> None:
    usual, looked_for = program(task), DECODE if task == "decode" else TRAINING
    assert looked_for.keys() == OF_PROGRAMS[task] - {Optimization.MESH_ORDER}
    for one, (text, more) in looked_for.items():
        counts = [found.count(text) for found in (usual, program(task, one))]
        assert counts[0] > counts[1] if more else counts[0] < counts[1], (one, counts)
        assert text != "= ppermute" or counts[1] == 0, one
        assert task == "decode" or "= min " not in usual + program(task, one), "norms of training are not fused"


@pytest.mark.tpu_compile
def test_devices_keep_their_order_where_the_order_of_a_mesh_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libtpu")
    found: list[list[int]] = []

    def stand_in(_: Any, function: Any, *arguments: Any, **options: Any) -> None:
        sharding = jax.tree.leaves(arguments)[0].sharding
        found.append([device.id for device in sharding.mesh.devices.flat])
        raise RequestError("that is enough")

    monkeypatch.setattr("ttpu_jax.aot.report.compile_for", stand_in)
    traced: list[frozenset[Optimization]] = []

    def counted(spec: Any, runtime: Runtime, *given: Any, **sizes: Any) -> Any:
        traced.append(runtime.without)
        return inference_step(spec, runtime, *given, **sizes)

    monkeypatch.setattr("ttpu_jax.aot.report.inference_step", counted)
    for without in ((), "mesh_order"):
        with pytest.raises(RequestError, match="that is enough"):
            compile_report(default_registry().architecture(LLAMA), "v5e:2x4", without=without)
    assert traced == [frozenset(), {Optimization.MESH_ORDER}]
    given = [device.id for device in tpu_topology("v5e:2x4").devices]
    assert found[1] == given and sorted(found[0]) == sorted(given) and found[0] != given


@pytest.mark.parametrize("without", [(), ("mesh_order",)])
@pytest.mark.parametrize("by", ["shorthand", "auto", "plan"])
def test_a_loaded_model_is_asked_for_the_order_of_its_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...], by: str
) -> None:
    asked: list[bool] = []

    def stand_in(*given: Any, by_links: bool) -> np.ndarray:
        asked.append(by_links)
        return arrange(*given, by_links=by_links)

    monkeypatch.setattr("ttpu_jax.params.placement.arrange", stand_in)
    path = llama_checkpoint(tmp_path)
    given: dict[str, Any] = {"parallelism_strategy": "auto" if by == "auto" else "data=2"}
    if by == "plan":
        spec = default_registry().architecture(open_checkpoint(path).config).spec
        given = {"plan": best_plan(spec, parse_topology("v5e:2x4"), Request(dtype="float32"))}
    AutoModelForTPU.from_pretrained(path, without=without, **given)
    assert asked == [not without]


@pytest.mark.tpu_compile
@pytest.mark.parametrize("without", [frozenset(), {Optimization.TRAINED_PRODUCTS}])
def test_the_step_of_a_run_has_the_products_that_are_not_left_out(without: frozenset[Optimization]) -> None:
    pytest.importorskip("libtpu")
    placement = Placement(make_mesh(tpu_topology("v5e:2x2"), {"fsdp": 4}))
    runtime = Runtime(placement, ropes=different_ropes(SPEC.layers), without=frozenset(without))
    table = causal_model(SPEC, runtime, stacked=True).parameters
    step = step_from_settings(StepSettings(), SPEC, runtime, {}, LLAMA, table, frozenset(table))
    assert step.model.runtime.trains == (not without) and not step.model.runtime.fuses_norms


def test_a_window_is_generated_the_same_from_a_whole_cache(tmp_path: Path) -> None:
    path = llama_checkpoint(tmp_path, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=8)
    ids = np.random.default_rng(0).integers(3, 250, (2, 40))
    answers = [
        AutoModelForTPU.from_pretrained(path, without=without).generate(ids, max_new_tokens=24, ignore_eos=True)
        for without in ((), "window_cache")
    ]
    np.testing.assert_array_equal(*(np.asarray(answer) for answer in answers))


def test_a_whole_cache_has_all_slots_of_a_window() -> None:
    def slots(*without: Optimization) -> list[int]:
        runtime = Runtime(local_placement(), without=frozenset(without))
        layers = causal_model(SPEC, runtime).empty_cache(1, 1024, BF16, abstract=True).layers
        return [layer.slots for layer in layers]

    assert slots() == [1024, 272] and slots(Optimization.WINDOW_CACHE) == [1024, 1024]


def test_steps_of_training_are_the_same_without_all_of_them() -> None:
    def losses(without: frozenset[Optimization]) -> list[float]:
        placement = local_placement("fsdp=4")
        trains = Optimization.TRAINED_PRODUCTS not in without
        runtime = Runtime(placement, ropes=different_ropes(spec.layers), trains=trains, without=without)
        return losses_of(spec, runtime, tokens, 0.5)

    layer = LayerSpec(replace(GQA, num_heads=4, num_kv_heads=2), MLPSpec(16), NORM)
    spec = ArchitectureSpec("tiny", EmbeddingSpec(64, 32), (layer,) * 2, NORM, HeadSpec(), 32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (8, 12)), jnp.int32)
    usual, plain = losses(frozenset()), losses(frozenset(Optimization))
    assert usual[-1] < usual[0]
    np.testing.assert_allclose(plain, usual, rtol=1e-5)


def test_names_are_read_and_unknown_ones_refused() -> None:
    both = frozenset({Optimization.CACHE_WRITE, Optimization.MESH_ORDER})
    assert read_without("cache_write, mesh_order,") == read_without(["mesh_order", "cache_write"]) == both
    assert read_without("") == read_without(()) == frozenset()
    with pytest.raises(RequestError, match=r"without='rings' was asked for, but .* gradient_rings"):
        JaxLoadOptions(without="cache_write,rings")
    with pytest.raises(RequestError, match=r"without=3 was asked for, but it takes names"):
        JaxLoadOptions(without=3)  # type: ignore[arg-type]


@pytest.mark.tpu_compile
def test_updates_are_compiled_for_the_tokens_that_a_device_computes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("libtpu")

    def stand_in(_: str, __: Any, tokens: int) -> Any:
        raise RequestError(f"{tokens} tokens")

    architecture = default_registry().architecture(LLAMA)
    for module in ("report", "training"):
        monkeypatch.setattr(f"ttpu_jax.aot.{module}.training_options", stand_in)
    for mesh, tokens in ({"fsdp": 8}, 2 * 64), ({"fsdp": 4, "tensor": 2}, 4 * 64), ({"data": 2, "fsdp": 4}, 2 * 64):
        with pytest.raises(RequestError, match=rf"^{tokens} tokens"):
            compile_report(architecture, "v5e:2x4", task="train", batch=16, context=64, mesh=mesh)
    with pytest.raises(RequestError, match=r"^192 tokens"):
        compile_update(architecture, "v5e:2x4", StepSettings(accumulation=4), rows=3, length=64)


@pytest.mark.parametrize(
    ("task", "names"), [("decode", "unset_gradients"), ("prefill", "cache_write"), ("train", "window_cache")]
)
def test_a_report_refuses_what_its_program_does_not_have(task: Any, names: str) -> None:
    architecture = default_registry().architecture(LLAMA)
    with pytest.raises(RequestError, match=f"without={names} was asked for, but {task} programs .* mesh_order"):
        compile_report(architecture, "v5e:2x4", task=task, without=f"mesh_order,{names}")
    assert set.union(*map(set, OF_PROGRAMS.values())) == set(Optimization) - {Optimization.BFLOAT16_CACHE}


@pytest.mark.parametrize("asked", [{"task": "sing"}, {"residual_stream": "sing"}])
def test_a_report_refuses_values_that_it_does_not_know(asked: Any) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(asked))}='sing' was asked for, but .* write one of them"):
        compile_report(default_registry().architecture(LLAMA), "v5e:2x4", **asked)


def test_programs_compiled_ahead_refuse_a_stream_that_they_do_not_know() -> None:
    architecture, settings = default_registry().architecture(LLAMA), EngineConfig()
    with pytest.raises(RequestError, match="residual_stream='sing' was asked for, but it is one of whole, auto, rings"):
        JaxBackend().compile_ahead(architecture, "v5e:2x4", settings, dtype="bfloat16", residual_stream="sing")


def test_each_program_leaves_out_what_it_has() -> None:
    fused, written = Optimization.FUSED_NORMS, Optimization.CACHE_WRITE
    found = left_out_by(["decode", "prefill"], "cache_write,fused_norms")
    assert found == {"decode": {written, fused}, "prefill": {fused}}


def test_the_command_lists_them_all_and_leaves_out_what_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []

    def stand_in(*_: object, without: object, **__: object) -> None:
        found.append(without)
        raise RequestError("that is enough")

    monkeypatch.setattr("ttpu_jax.aot.report.compile_report", stand_in)
    app = typer.Typer()
    app.command()(command)
    path = llama_checkpoint(tmp_path)
    for given in ((), ("--without", "cache_write"), ("--task", "prefill", "--without", "rope_product")):
        CliRunner().invoke(app, [str(path), "--topology", "v5e:1x1", *given])
    refused = CliRunner().invoke(app, [str(path), "--topology", "v5e:1x1", "--without", "unset_gradients"])
    assert found == ["", "cache_write", "rope_product"]
    assert "decode and prefill programs for TPUs do not have it" in str(refused.exception)
    told = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    of_tpus = set(Optimization) - {Optimization.BFLOAT16_CACHE}
    assert not [one for one in of_tpus if one not in told]


@pytest.mark.parametrize("left_out", [False, True])
def test_a_cpu_with_amx_keeps_bfloat16_and_writes_it_in_place(
    left_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_models, "multiplies_bfloat16_tiles", lambda: True)
    without = ("bfloat16_cache",) if left_out else ()
    model = AutoModelForTPU.from_pretrained(llama_checkpoint(tmp_path), dtype="bfloat16", without=without)
    assert model.programs.cache_dtype == (np.float32 if left_out else BF16)
    model.generate([[3, 4, 5]], max_new_tokens=3, ignore_eos=True)
    (text,) = (one.as_text() for key, one in model.programs._programs.items() if key[0] == "decode")
    assert re.search(r"dynamic_update_slice\S* = bf16\[1,2,128,8\]", text) is not None or left_out
    assert ("f32[1,2,128,8]" in text) == left_out, "nothing converts the cache"


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16"},
        {"attn_implementation": "decode_attention"},
        {"quantization": "w8a16"},
        {"flags": "some"},
        {},
    ],
)
def test_other_caches_on_a_cpu_are_float32(
    changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of float16 and quantized models, for other kernels, where the user disables passes, and where the processor has
    no AMX."""
    monkeypatch.setattr(causal_models, "multiplies_bfloat16_tiles", lambda: bool(changes))
    if flags := changes.get("flags"):
        monkeypatch.setitem(compiler_flags._AT_IMPORT, "XLA_FLAGS", f"--xla_disable_hlo_passes={flags}")
    given = {"dtype": "bfloat16", **{name: value for name, value in changes.items() if name != "flags"}}
    model = AutoModelForTPU.from_pretrained(llama_checkpoint(tmp_path), **given)
    assert model.programs.cache_dtype == np.float32


@pytest.mark.tpu_compile
def test_a_tpu_keeps_the_dtype_of_the_model() -> None:
    pytest.importorskip("libtpu")
    runtime = Runtime(Placement(make_mesh(tpu_topology("v5e:2x2"), {"tensor": 4})), without=frozenset(Optimization))
    assert cache_dtype(SPEC, runtime, BF16) == BF16
    assert "xla_disable_hlo_passes" not in program_options("tpu", writes_bfloat16=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_that_write_a_bfloat16_cache_are_compiled_so(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps, those of beams, and of an assistant's guesses; not prompts."""
    monkeypatch.setattr(causal_models, "multiplies_bfloat16_tiles", lambda: True)
    asked: list[bool] = []

    def stand_in(*given: Any, writes_bfloat16: bool = False) -> Any:
        asked.append(writes_bfloat16)
        return {}

    monkeypatch.setattr(generation_programs, "program_options", stand_in)
    model = AutoModelForTPU.from_pretrained(llama_checkpoint(tmp_path), dtype=dtype)
    for more in ({}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}):
        model.generate([[3, 4, 3, 4, 3]], max_new_tokens=4, ignore_eos=True, **more)
    steps = {"decode", "decode logits", "block logits"}
    names = [key[0] for key in model.programs._programs]
    assert asked == [name in steps and dtype == "bfloat16" for name in names] and steps <= set(names)


@pytest.mark.parametrize("slices", [{}, {"data": 2}])
def test_devices_of_several_slices_keep_their_order_too(slices: dict[str, int]) -> None:
    devices = jax.devices()[:4]
    found = arrange(devices, {"data": 2, "tensor": 2}, slices, by_links=False)
    assert [device.id for device in found.flat] == [device.id for device in devices]


def test_options_are_read_once_and_passed_on(tmp_path: Path) -> None:
    options = JaxLoadOptions(without=(name for name in ["mesh_order"]))
    assert options.without == ("mesh_order",)
    model = AutoModelForTPU.from_pretrained(llama_checkpoint(tmp_path), without=iter(["rope_product"]))
    assert model.programs.runtime.without == {Optimization.ROPE_PRODUCT}
    assert JaxBackend().options_beside(model).without == ("rope_product",)


def test_a_step_that_needs_a_pass_is_compiled_with_it() -> None:
    """XLA:CPU refuses products that are bfloat16 where nothing makes them float32."""
    arrays = [jnp.ones((3, 5), jnp.bfloat16), jnp.ones((5, 4), jnp.bfloat16)]
    options = program_options("cpu", writes_bfloat16=True)
    assert options == {"xla_disable_hlo_passes": "float-normalization-bf16"} and not program_options("cpu")
    program = compiled_with(lower(jax.jit(jnp.matmul), *arrays), options)
    np.testing.assert_array_equal(program(*arrays), np.full((3, 4), 5, BF16))
