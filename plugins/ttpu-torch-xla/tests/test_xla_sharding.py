"""A stock model is cut by the logical axes that its family declared: the same words, refusals and mesh axes as for JAX,
and on eight simulated devices the same logits, losses and parameters as on none."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM
from xla_spmd import said

from ttpu_conformance.case import plugin_record
from ttpu_conformance.declaration import declaration_for
from ttpu_conformance.tiny import reference_class, tiny_config, written_config
from ttpu_core import ModelConfig, default_registry
from ttpu_core.errors import PlanError, RequestError, TTPUError, UnsupportedError
from ttpu_core.sharding.parallelism import resolve_parallelism
from ttpu_plan.planner import Request
from ttpu_torch_xla.handle import Handle
from ttpu_torch_xla.sharding.apply import Sharding, decoder_layers, linears_sharded_along, parameter_partition_specs
from ttpu_torch_xla.sharding.axes import Dimensions, parameter_axes
from ttpu_torch_xla.sharding.fsdp import refuse_without_axis
from ttpu_torch_xla.sharding.loader import ShardedLoader
from ttpu_torch_xla.sharding.resolve import resolve

pytestmark = pytest.mark.torch

TYPES = default_registry().model_types()
OTHER_PARTS = ("vision", "visual", "audio", "multi_modal_projector", "embed_vision", "embed_audio")
"""What names of parameters that see or hear have in them."""

DEVICES = 8
SHARDED_ALONG = {
    "fsdp": "fsdp=8",
    "dp": "data=8",
    "3d": "data=2,fsdp=2,tensor=2",
    "mixtral": "data=2,fsdp=2,expert=2",
}
# XLA's notation: devices along each dimension, and last those that hold the same part.
QUERY = {
    "fsdp": "[1,8]",
    "dp": "{replicated}",
    "3d": "[2,2,2]",
    "mixtral": "[1,2,4]",
}
LOGITS = {
    "fsdp": "[8,1,1]",
    "dp": "[8,1,1]",
    "3d": "[4,1,1,2]",
    "mixtral": "[4,1,1,2]",
}
"""The vocabulary of 93 is cut in the table, where XLA pads it; in the logits where nothing else of them is."""
INPUT = {case: f"{{devices={sharding.split(',')[0]}," for case, sharding in LOGITS.items()}


def architecture_of(model: Any) -> Any:
    return default_registry().architecture(ModelConfig.from_dict(json.loads(model.config.to_json_string(False))))


def on_meta(model_type: str) -> tuple[Any, Any]:
    """The kit's tiny model without values, and its architecture."""
    record = plugin_record(default_registry(), model_type)
    declaration = declaration_for(model_type, record.value.partition(":")[0])
    variant = declaration.variant("base")
    config = tiny_config(declaration, variant)
    architecture = default_registry().architecture(ModelConfig.from_dict(written_config(declaration, variant)))
    try:
        with torch.device("meta"):
            return reference_class(declaration)._from_config(config), architecture
    except ImportError as error:
        pytest.skip(f"transformers cannot make a {model_type} here: {' '.join(str(error).split())[:80]}")


class Runtime:
    """A stand-in for the runtime: as many devices as a test wants, and no runtime behind them."""

    def __init__(self, devices: int = DEVICES) -> None:
        self.devices = devices

    def use_spmd(self) -> None: ...

    def num_devices(self) -> int:
        return self.devices

    def num_slices(self) -> int:
        return 1

    def chip(self) -> str | None:
        return None


def tiny_llama(**sizes: Any) -> tuple[Any, Any]:
    values = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, **sizes,
    }  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**values))
    return model, architecture_of(model)


# What dimensions mean


@pytest.mark.parametrize("model_type", TYPES)
def test_every_parameter_of_the_text_model_is_described(model_type: str) -> None:
    model, architecture = on_meta(model_type)
    described = parameter_axes(architecture, model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in parameters if name not in described and not any(p in name for p in OTHER_PARTS)]
    assert not missing
    assert set(described) <= set(parameters)
    for name, dimensions in described.items():
        assert len(dimensions) == parameters[name].ndim
        for merged, size in zip(dimensions, parameters[name].shape, strict=True):
            assert all(size % count == 0 for _, count in merged), name


CHANNELS = ("conv1d", ".conv.conv.", ".A_log", ".x_proj.", ".dt_proj.")
"""Matrices of recurrent mixers without an axis of the residual stream, which is what fsdp shards."""


@pytest.mark.parametrize("model_type", TYPES)
def test_every_matrix_of_the_layers_is_cut_by_fsdp(model_type: str) -> None:
    model, architecture = on_meta(model_type)
    partition_specs = parameter_partition_specs(model, architecture, resolve_parallelism("fsdp=2", 2))
    matrices = [
        name
        for name, parameter in model.named_parameters()
        if name in partition_specs and re.search(r"\.\d+\.", name) and parameter.ndim > 1
        if model_type not in ("gemma3n", "gemma3n_text") or "altup" not in name  # four predictions, not of `hidden`
        if not any(part in name for part in CHANNELS)
        if not name.endswith("bias")  # a vector an expert, or ernie4_5_moe's one number an expert as one row
    ]
    assert matrices
    assert [name for name in matrices if not any(partition_specs[name])] == []


def first_axes(dimensions: Dimensions) -> list[tuple[str, int] | None]:
    return [merged[0] if merged else None for merged in dimensions]


def test_heads_are_the_slowest_axis_of_projections_and_their_number_must_divide() -> None:
    model, architecture = tiny_llama(num_key_value_heads=2)
    described = parameter_axes(architecture, model)
    layer = "model.layers.1."
    assert first_axes(described[f"{layer}self_attn.q_proj.weight"]) == [("kv_heads", 2), ("embed", 32)]
    assert first_axes(described[f"{layer}self_attn.k_proj.weight"]) == [("kv_heads", 2), ("embed", 32)]
    assert first_axes(described[f"{layer}mlp.down_proj.weight"]) == [("embed", 32), ("mlp", 64)]
    assert first_axes(described["lm_head.weight"]) == [("vocab", 96), ("embed", 32)]
    assert first_axes(described["model.norm.weight"]) == [("norm", 32)]


def test_one_key_value_head_counts_as_one() -> None:
    model, architecture = tiny_llama(num_key_value_heads=1)
    described = parameter_axes(architecture, model)
    assert described["model.layers.0.self_attn.q_proj.weight"][0][0] == ("kv_heads", 1)


def test_experts_that_transformers_stacks_in_memory_have_an_expert_axis() -> None:
    model, architecture = on_meta("mixtral")
    described = parameter_axes(architecture, model)
    layer = "model.layers.0.mlp.experts."
    assert first_axes(described[f"{layer}gate_up_proj"]) == [("expert", 6), ("mlp", 112), ("embed", 64)]
    assert first_axes(described[f"{layer}down_proj"]) == [("expert", 6), ("embed", 64), ("mlp", 112)]


def test_gates_and_ups_in_one_dimension_are_cut_by_the_inner_size() -> None:
    model, architecture = on_meta("llama4_text")
    name = "model.layers.0.feed_forward.experts.gate_up_proj"
    assert parameter_axes(architecture, model)[name][2] == (("gate_up", 2), ("mlp", 112))
    partition_specs = parameter_partition_specs(model, architecture, resolve_parallelism("expert=2,fsdp=2,tensor=2", 8))
    assert partition_specs[name] == (("expert",), ("fsdp",), ("tensor",))


def test_tied_parameters_are_described_under_both_names() -> None:
    model, architecture = tiny_llama(tie_word_embeddings=True)
    described = parameter_axes(architecture, model)
    assert described["lm_head.weight"] == described["model.embed_tokens.weight"]


def test_the_layers_of_a_multimodal_model_are_those_of_its_text_part() -> None:
    model, architecture = on_meta("gemma3")
    assert decoder_layers(model, architecture) is model.model.language_model.layers


@pytest.mark.parametrize("block_size", [-1, 16])
def test_quantized_weights_are_cut_as_the_weights_would_be(block_size: int) -> None:
    from ttpu_torch_xla.quantization import QuantizationConfig, quantize

    model, architecture = tiny_llama()
    quantize(model, QuantizationConfig(bits=8, block_size=block_size, symmetric=False))
    partition_specs = parameter_partition_specs(model, architecture, resolve_parallelism("2d", 8))
    layer, blockwise = "model.layers.0.", block_size != -1
    # 32 inputs are two blocks of 16 for two devices along fsdp; of 64, four along tensor.
    assert partition_specs[f"{layer}self_attn.q_proj.weight_q"] == (
        (("fsdp",), (), ("tensor",)) if blockwise else (("tensor",), ("fsdp",))
    )
    assert partition_specs[f"{layer}mlp.down_proj.weight_q"] == (
        (("tensor",), (), ("fsdp",)) if blockwise else (("fsdp",), ("tensor",))
    )
    assert partition_specs[f"{layer}mlp.up_proj.scale"] == ((("fsdp",), ("tensor",)) if blockwise else (("tensor",),))
    narrow = parameter_partition_specs(model, architecture, resolve_parallelism("fsdp", 8))
    # Two blocks are fewer than the devices; a scale for each output is cut by nothing that cuts the inputs.
    assert narrow[f"{layer}self_attn.q_proj.scale"] == (((), ()) if blockwise else ((),))


# What users write


@pytest.mark.parametrize(("what", "mesh"), [(what, mesh) for what, mesh in SHARDED_ALONG.items() if what != "mixtral"])
def test_a_strategy_is_the_same_mesh_as_elsewhere(what: str, mesh: str) -> None:
    spec = tiny_llama()[1].spec
    for option in ("parallelism_strategy", "sharding_strategy", "mesh"):
        assert str(resolve(spec, Runtime(), **{option: what})) == mesh  # type: ignore[arg-type]


def test_nothing_asked_for_is_one_device_and_starts_no_runtime() -> None:
    assert resolve(tiny_llama()[1].spec, None) is None  # type: ignore[arg-type]


def test_on_one_device_a_strategy_cuts_nothing() -> None:
    assert resolve(tiny_llama()[1].spec, Runtime(1), parallelism_strategy="fsdp") is None  # type: ignore[arg-type]


def test_slices_are_kept() -> None:
    found = resolve(tiny_llama()[1].spec, Runtime(), mesh="dcn.data=2,fsdp=4")  # type: ignore[arg-type]
    assert found is not None
    assert (dict(found.mesh), dict(found.dcn)) == ({"data": 2, "fsdp": 4}, {"data": 2})


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "uneven heads": ({"num_key_value_heads": 2}, {"mesh": "mp"}, 8, "has 2 kv_heads: use 1, 2 devices"),
    "too few devices for 3d": ({}, {"sharding_strategy": "3d"}, 4, "4 devices cannot be shared by 3 axes"),
    "a part of the devices": ({}, {"mesh": "tensor=4"}, 8, "on all 8 that there are"),
    "one device of several": ({}, {"mesh": "tensor=1"}, 8, "the mesh 'tensor=1', which is 1 device, but torch_xla"),
    "more devices than there are": ({}, {"mesh": "tensor=16"}, 8, "CPU_NUM_DEVICES=16 simulates"),
    "an axis that cuts nothing": ({}, {"mesh": "expert=2,tensor=4"}, 8, "nothing of this llama is sharded along it"),
    "no such strategy": ({}, {"sharding_strategy": "fdsp"}, 8, "sharding_strategy 'fdsp' was asked for"),
    "no such mesh": ({}, {"mesh": "fdsp"}, 8, "mesh 'fdsp' was asked for, but it is no strategy"),
    "rules alone": ({}, {"sharding_rules": {"mlp": None}}, 8, "sharding_rules for mlp were given, but nothing says"),
    "no such axis": ({}, {"mesh": "2d", "sharding_rules": {"mlpp": None}}, 1, "the logical axis 'mlpp'"),
    "two at once": ({}, {"mesh": "mp", "sharding_strategy": "mp"}, 8, "pass one of them"),
    "no text": ({}, {"mesh": 8}, 8, "is the int '8'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(case: str) -> None:
    sizes, asked, devices, said = REFUSED[case]
    with pytest.raises(TTPUError) as caught:
        resolve(tiny_llama(**sizes)[1].spec, Runtime(devices), **asked)  # type: ignore[arg-type]
    assert isinstance(caught.value, UnsupportedError | RequestError)
    assert said in str(caught.value)


def test_auto_takes_no_mesh_that_would_need_padded_heads() -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48, "head_dim": 8}
    spec = tiny_llama(**sizes)[1].spec
    found = resolve(spec, Runtime(), parallelism_strategy="auto")  # type: ignore[arg-type]
    assert found is not None and found.num_devices == DEVICES
    assert dict(found.mesh).get("tensor", 1) in (1, 2)


def test_auto_takes_no_rules_that_gather_tokens_for_experts() -> None:
    from ttpu_core.loading import planned_architecture
    from ttpu_core.sharding.hardware import parse_topology
    from ttpu_core.sharding.strategy import DEFAULT_STRATEGY
    from ttpu_plan.planner import best_plan

    ttpu_qwen = pytest.importorskip("ttpu_qwen")
    spec = planned_architecture(str(Path(ttpu_qwen.__file__).parent / "configs" / "qwen3-30b-a3b.json")).spec
    assert best_plan(spec, parse_topology("v5p:2x2x2"), Request("generation")).rules == "expert=data+tensor"
    found = resolve(spec, Runtime(), parallelism_strategy="auto")  # type: ignore[arg-type]
    assert found is not None and found.strategy == DEFAULT_STRATEGY


def test_a_plan_is_taken_and_its_rules_are_its_own() -> None:
    from ttpu_core.sharding.hardware import parse_topology
    from ttpu_plan.planner import plans

    spec = tiny_llama()[1].spec
    plan = plans(spec, parse_topology("v5e:2x4"), Request("generation"))[0]
    found = resolve(spec, Runtime(), plan=plan)  # type: ignore[arg-type]
    assert found == plan.parallelism
    with pytest.raises(RequestError, match="a plan has its own rules"):
        resolve(spec, Runtime(), plan=plan, sharding_rules={"mlp": None})  # type: ignore[arg-type]


def test_a_users_rules_say_what_is_cut() -> None:
    model, architecture = tiny_llama()
    rules = {"mlp": ["fsdp", "tensor"], "embed": None}
    found = resolve(architecture.spec, Runtime(), mesh="2d", sharding_rules=rules)  # type: ignore[arg-type]
    assert found is not None
    partition_specs = parameter_partition_specs(model, architecture, found)
    assert partition_specs["model.layers.0.mlp.up_proj.weight"] == (("fsdp", "tensor"), ())
    assert partition_specs["model.layers.0.self_attn.q_proj.weight"] == (("tensor",), ())


def test_an_activation_that_does_not_divide_stays_whole() -> None:
    sharding = Sharding(resolve_parallelism("3d", 8), None, None)  # type: ignore[arg-type]
    assert sharding.partition_spec(("batch", "sequence", "vocab"), (8, 5, 96)) == (("data", "fsdp"), (), ("tensor",))
    assert sharding.partition_spec(("batch", "sequence", "vocab"), (1, 5, 93)) == ((), (), ())


def test_fsdp_wrapping_needs_an_axis_to_cut_along() -> None:
    refuse_without_axis(resolve_parallelism("2d", 8))
    with pytest.raises(UnsupportedError, match="the mesh is tensor=8, and FSDPv2 shards along 'fsdp'"):
        refuse_without_axis(resolve_parallelism("mp", 8))
    with pytest.raises(UnsupportedError, match="the model is on one device"):
        refuse_without_axis(None)


def test_a_plan_is_for_weights_as_they_are_loaded() -> None:
    from ttpu_core.sharding.hardware import parse_topology
    from ttpu_plan.planner import plans

    spec = tiny_llama()[1].spec
    plan = plans(spec, parse_topology("v5e:2x4"), Request("generation", quantization="int8"))[0]
    assert resolve(spec, Runtime(), plan=plan, quantization="int8") is not None  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="the plan is for int8 weights, but the torch_xla backend loads them in auto"):
        resolve(spec, Runtime(), plan=plan)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="make a plan with --quantization int4"):
        resolve(spec, Runtime(), plan=plan, quantization="int4")  # type: ignore[arg-type]


def test_a_plan_for_smaller_weights_than_are_held_is_warned_of() -> None:
    from ttpu_core.sharding.hardware import parse_topology
    from ttpu_plan.planner import plans

    spec = tiny_llama()[1].spec
    plan = plans(spec, parse_topology("v5e:2x4"), Request("generation", dtype="bfloat16"))[0]
    for dtype in ("float32", torch.float32):
        with pytest.warns(UserWarning, match="made for weights in bfloat16, but they are held in float32"):
            resolve(spec, Runtime(), plan=plan, dtype=dtype)  # type: ignore[arg-type]


def test_the_planner_is_told_what_weights_are_held_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[resolve.__module__]
    asked: list[str] = []

    def planned(spec: Any, adapter: Any, strategy: Any, dtype: str, quantization: Any, purpose: Any) -> Any:
        asked.append(dtype)
        return resolve_parallelism("fsdp", 8)

    monkeypatch.setattr(module, "planned", planned)
    for dtype in ("float32", torch.float16, "auto"):
        resolve(tiny_llama()[1].spec, Runtime(), mesh="auto", dtype=dtype)  # type: ignore[arg-type]
    assert asked == ["float32", "float16", "bfloat16"]


def test_products_are_summed_where_devices_have_parts_of_them() -> None:
    model, architecture = tiny_llama()
    parallelism = resolve_parallelism("3d", 8)
    partition_specs = parameter_partition_specs(model, architecture, parallelism)
    names = {id(module): name.removeprefix("model.layers.0.") for name, module in model.named_modules()}
    found = {
        dimension: {names[id(one)] for one in linears_sharded_along(dimension, model, partition_specs, parallelism)}
        for dimension in ("in", "out")
    }
    first = {which: {name for name in of_which if "layers" not in name} for which, of_which in found.items()}
    assert first["in"] == {"self_attn.o_proj", "mlp.down_proj"}
    assert first["out"] == {*(f"self_attn.{x}_proj" for x in "qkv"), "mlp.gate_proj", "mlp.up_proj", "lm_head"}
    fsdp = resolve_parallelism("fsdp", 8)
    of_fsdp = parameter_partition_specs(model, architecture, fsdp)
    assert not linears_sharded_along("in", model, of_fsdp, fsdp) + linears_sharded_along("out", model, of_fsdp, fsdp)


def test_quantized_products_are_summed_too() -> None:
    from ttpu_torch_xla.quantization import QuantizationConfig, quantize

    parallelism = resolve_parallelism("3d", 8)
    for block_size in (-1, 16):
        model, architecture = tiny_llama()
        quantize(model, QuantizationConfig(block_size=block_size))
        partition_specs = parameter_partition_specs(model, architecture, parallelism)
        found = linears_sharded_along("in", model, partition_specs, parallelism)
        layer = model.model.layers[0]
        assert layer.mlp.down_proj in found and layer.self_attn.o_proj in found
        assert layer.mlp.up_proj not in found


@pytest.mark.parametrize(
    ("model_type", "kept"),
    [
        ("gemma3n_text", {"per_layer_model_projection", "per_layer_projection", "prediction_coefs"}),
        ("qwen3_next", {"gate", "in_proj_ba", "shared_expert_gate"}),
    ],
)
def test_layers_that_the_core_does_not_quantize_stay_dense(model_type: str, kept: set[str]) -> None:
    from ttpu_torch_xla.quantization import QuantizationConfig, quantize
    from ttpu_torch_xla.quantization.choice import kept_layers

    model, architecture = on_meta(model_type)
    names = {leaf.name: leaf.name for _, rule in architecture.mapping.rules for leaf in rule.leaves()}
    report = quantize(model, QuantizationConfig(), kept_layers(model, architecture.spec, architecture.mapping, names))
    quantized = {name.rpartition(".")[2] for name in report.quantized}
    assert not kept & quantized
    assert {"q_proj", "o_proj"} <= quantized
    assert kept <= {name.removesuffix(".weight").rpartition(".")[2] for name in report.kept}


def test_a_loader_is_for_prepared_models() -> None:
    with pytest.raises(RequestError, match="was not loaded by this backend"):
        ShardedLoader([], tiny_llama()[0])


def test_every_tensor_of_a_batch_is_put_on_the_device() -> None:
    class Pair(NamedTuple):
        left: Any
        right: Any

    class Device(Runtime):
        def put(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to("meta")

        def sync(self) -> None: ...

    model: Any = torch.nn.Linear(1, 1)
    model.ttpu = Handle(None, Device())  # type: ignore[arg-type]
    ids = torch.zeros(2, 3)
    encoding = BatchEncoding({"input_ids": ids, "more": [ids, {"deep": ids, "name": "x"}]})
    for batch in (encoding, (encoding, ids), [encoding], {"one": encoding}, Pair(encoding, ids)):
        [found] = ShardedLoader([batch], model)
        leaves = tree_leaves(found)
        assert {one.device.type for one in leaves if isinstance(one, torch.Tensor)} == {"meta"}
        assert sum(isinstance(one, torch.Tensor) for one in leaves) == 3 + (len(leaves) > 4)
        assert "x" in leaves
    assert isinstance(found, Pair)


# Eight devices


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script says of each case."""
    found: dict[str, Any] = said(tmp_path_factory)["cases"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARDED_ALONG)
class TestOnEightDevices:
    def test_logits_equal_those_of_the_host(self, case: str, cases: dict[str, Any]) -> None:
        assert cases[case]["mesh"] == SHARDED_ALONG[case]
        assert cases[case]["logits"] < 1e-5
        assert cases[case]["logits_of_one_row"] < 1e-5

    def test_three_steps_of_adamw_equal_those_of_the_host(self, case: str, cases: dict[str, Any]) -> None:
        assert max(cases[case]["losses"]) < 1e-5
        assert cases[case]["parameters"] < 1e-5

    def test_a_training_step_compiles_at_most_twice(self, case: str, cases: dict[str, Any]) -> None:
        assert cases[case]["compiles"] <= 2

    def test_parameters_and_optimizer_state_are_cut(self, case: str, cases: dict[str, Any]) -> None:
        query = cases[case]["sharding"]["model.layers.0.self_attn.q_proj.weight"]
        assert QUERY[case] in query
        assert cases[case]["state_sharding"] == query
        shardings = cases[case]["sharding"].items()
        whole = [name for name, sharding in shardings if sharding == "{replicated}" and "norm" not in name]
        assert not whole or case == "dp"

    def test_rows_stay_on_their_devices(self, case: str, cases: dict[str, Any]) -> None:
        assert LOGITS[case] in cases[case]["logits_sharding"]
        assert INPUT[case] in cases[case]["input_sharding"]

    def test_the_model_keeps_its_class_its_names_and_its_ties(self, case: str, cases: dict[str, Any]) -> None:
        sparse = case == "mixtral"
        assert cases[case]["class"] == ("MixtralForCausalLM" if sparse else "LlamaForCausalLM")
        assert cases[case]["names_kept"]
        assert cases[case]["tied"] is not sparse


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma3n_text", "qwen3_next", "mistral4"])
class TestOtherLayersOnThreeAxes:
    def test_logits_equal_those_of_the_host(self, model_type: str, cases: dict[str, Any]) -> None:
        assert cases[model_type]["mesh"] == SHARDED_ALONG["3d"]
        assert cases[model_type]["logits"] < 1e-5

    def test_training_equals_the_hosts(self, model_type: str, cases: dict[str, Any]) -> None:
        assert max(cases[model_type]["losses"]) < 1e-5
        assert cases[model_type]["parameters"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", "3d"])
def test_a_checkpoint_is_loaded_cut_and_generates_what_the_host_does(strategy: str, cases: dict[str, Any]) -> None:
    found = cases["loaded"][strategy]
    assert found["mesh"] == SHARDED_ALONG[strategy]
    assert found["logits"] < 1e-5
    assert found["generates_the_same"]


@pytest.mark.slow
def test_experts_are_cut_along_their_own_axis(cases: dict[str, Any]) -> None:
    sharding = cases["mixtral"]["sharding"]
    assert "[2,1,2,2]" in sharding["model.layers.0.mlp.experts.gate_up_proj"]
    assert "[2,2,1,2]" in sharding["model.layers.0.mlp.experts.down_proj"]


@pytest.mark.slow
def test_transformers_loads_what_a_wrapped_and_sharded_model_saves(cases: dict[str, Any]) -> None:
    assert cases["mixtral"]["saved"]


@pytest.mark.slow
def test_a_wrapped_model_takes_a_state_of_the_stock_model(cases: dict[str, Any]) -> None:
    assert cases["mixtral"]["loaded"] < 1e-5


@pytest.mark.slow
def test_simulated_slices_are_equal_parts_of_the_devices_in_their_order(cases: dict[str, Any]) -> None:
    assert cases["slices"] == [[0, 1, 4, 5], [2, 3, 6, 7]]  # fsdp is two slices of two devices


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "packed"), [("gptq", True), ("fp8", False)])
def test_quantized_checkpoints_are_cut_with_their_scales(scheme: str, packed: bool, cases: dict[str, Any]) -> None:
    """Groups of 16 of 48 inputs become groups of 4, so that each of four devices has whole ones."""
    found = cases["quantized"][scheme]
    assert found["logits"] < 1e-5
    assert found["blocks"] == 4
    assert "[4,1,2]" in found["sharding"]["weight_q"]
    assert all("[4,2]" in found["sharding"][name] for name in ("scale", "zero_point") if name in found["sharding"])
    assert ("input_order" in found["sharding"]) == packed


@pytest.mark.slow
def test_quantized_experts_are_cut_by_experts_and_along_their_inner_size(cases: dict[str, Any]) -> None:
    found = cases["experts"]
    assert found["logits"] < 1e-5
    assert found["blocks"] == 16  # a part of the stored 32, so that each of four devices has one of 64 inputs' groups
    assert all("[2,1,4]" in found["sharding"][name] for name in ("weight_q", "scale", "zero_point"))
    assert "[2,1,4]" in found["sharding"]["input_place"]


@pytest.mark.slow
def test_weights_rounded_on_a_mesh_are_those_of_the_host(cases: dict[str, Any]) -> None:
    assert cases["while_loading"]["logits"] < 1e-5
    assert cases["while_loading"]["blocks"] == 4


@pytest.mark.slow
def test_a_model_without_a_plugin_is_spread_over_the_devices_by_size(cases: dict[str, Any]) -> None:
    found = cases["without a plugin"]
    assert found["error"] < 1e-5
    assert found["sharding"].startswith("{devices=[8,1]")


def test_the_chips_of_a_slice_are_a_ring_of_neighbours(cases: dict[str, Any]) -> None:
    coordinates = [divmod(number, 2) for number in cases["ring"]]
    assert cases["chip"] == "v5e"  # of a machine that Google Cloud calls v5litepod-8
    assert sorted(cases["ring"]) == list(range(8))
    for (x, y), (next_x, next_y) in zip(coordinates, [*coordinates[1:], coordinates[0]], strict=True):
        assert abs(x - next_x) + abs(y - next_y) == 1
