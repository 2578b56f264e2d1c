"""Predicted memory against what the TPU compiler reported for the same programs (tests/plan_peaks.json)."""

import json
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ttpu_core.config import ModelConfig
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.registry import default_registry
from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.sharding.serving import ServingLimits, StepSize
from ttpu_core.sharding.training_state import REMATS, UpdateSettings
from ttpu_core.spec import ArchitectureSpec, SharedSpec
from ttpu_plan.estimate import MemoryEstimate
from ttpu_plan.memory import estimate_memory
from ttpu_plan.served import planning_backend, served_workloads, shapes_for
from ttpu_plan.shards import shard_model, tiled_bytes
from ttpu_plan.workload import Workload

PEAKS: dict[str, Any] = json.loads((Path(__file__).parent / "plan_peaks.json").read_text())
NEAR_LIMIT = 0.8  # of a device's memory: the compiler saves where memory is short, and spends where it is not


@cache
def published(config: str) -> ArchitectureSpec:
    package, _, rest = config.partition("/")
    found = find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    return default_registry().architecture(ModelConfig.from_file(Path(found.origin).parent / rest)).spec


def predicted(row: dict[str, Any]) -> MemoryEstimate:
    spec = published(row["config"])
    if "num_layers" in row:
        spec = replace(spec, layers=spec.layers[: row["num_layers"]])
    if "vocab_size" in row:
        spec = replace(spec, embedding=replace(spec.embedding, vocab_size=row["vocab_size"]))
    chip = parse_topology(row["topology"]).chip
    if "layers" not in row:  # an engine's step
        limits, quantization = ServingLimits.of(row["batch"], row["context"]), row.get("quantization")
        shapes = shapes_for(planning_backend(), shard_model(spec, row["mesh"]), limits, "bfloat16")
        steps = {one.task: one for one in served_workloads(shapes, limits, "bfloat16", quantization)}
        return estimate_memory(spec, row["mesh"], steps[row["task"]], chip=chip, shapes=shapes)
    workload = Workload(row["task"], row["batch"], row["context"], layers=row["layers"])
    return estimate_memory(spec, row["mesh"], workload, chip=chip)


def named(row: dict[str, Any]) -> str:
    mesh = ",".join(f"{axis}={size}" for axis, size in row["mesh"].items())
    return f"{row['model']}-{row['task']}-{row['topology']}-{mesh}-{row.get('quantization', 'bfloat16')}"


@pytest.mark.parametrize("row", PEAKS["published"] + PEAKS["shortened"], ids=named)
def test_memory_is_predicted_within_ten_percent_of_the_compiler(row: dict[str, Any]) -> None:
    assert predicted(row).total == pytest.approx(row["peak_bytes"], rel=0.1)


@pytest.mark.parametrize("row", PEAKS["missed"], ids=named)
def test_what_is_missed_is_missed_by_less_than_a_quarter(row: dict[str, Any]) -> None:
    """A row that comes within ten percent belongs to the others."""
    assert 0.1 < abs(predicted(row).total / row["peak_bytes"] - 1) < 0.25


@pytest.mark.parametrize("row", PEAKS["unseen"], ids=named)
def test_models_that_chose_no_constant_are_predicted_within_three_percent(row: dict[str, Any]) -> None:
    assert predicted(row).total == pytest.approx(row["peak_bytes"], rel=0.03)


@pytest.mark.parametrize("row", PEAKS["served"], ids=named)
def test_an_engines_steps_are_predicted_within_three_percent(row: dict[str, Any]) -> None:
    found = predicted(row)
    assert found.of_program == pytest.approx(row["peak_bytes"], rel=0.03)
    assert found.total > found.of_program == found.total - found.sampling


@pytest.mark.parametrize("row", PEAKS["published"] + PEAKS["unseen"] + PEAKS["served"], ids=named)
def test_what_compiled_is_predicted_to_fit(row: dict[str, Any]) -> None:
    assert predicted(row).total <= parse_topology(row["topology"]).chip.hbm_bytes


@pytest.mark.parametrize("row", PEAKS["refused"], ids=named)
def test_what_the_compiler_refused_is_predicted_not_to_fit(row: dict[str, Any]) -> None:
    assert predicted(row).total > parse_topology(row["topology"]).chip.hbm_bytes
    assert predicted(row).total == pytest.approx(row["needed_bytes"], rel=0.1)


def test_where_memory_is_short_it_is_not_underestimated_by_more_than_the_headroom() -> None:
    from ttpu_plan.plan import HEADROOM

    rows = [(row, row["peak_bytes"]) for row in PEAKS["published"]]
    rows += [(row, row["needed_bytes"]) for row in PEAKS["refused"]]
    near = [(row, size) for row, size in rows if size > NEAR_LIMIT * hbm(row)]
    assert len(near) >= 3
    for row, size in near:
        assert predicted(row).total >= HEADROOM * size, named(row)


def test_the_documented_table_is_what_is_predicted_now() -> None:
    parts = "served", "published", "unseen", "shortened", "missed"
    rows = [row for part in parts for row in PEAKS[part]]
    documented = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in (Path(__file__).parents[3] / "docs" / "planner.md").read_text().splitlines()
        if line.endswith("% |")
    ]
    assert len(documented) == len(rows)
    for (*_, task, written, compiled, _error), row in zip(documented, rows, strict=True):
        assert task == row["task"]
        assert float(written) == pytest.approx(predicted(row).of_program / 2**30, abs=0.006), named(row)
        assert float(compiled) == pytest.approx(row["peak_bytes"] / 2**30, abs=0.006), named(row)


def hbm(row: dict[str, Any]) -> int:
    return parse_topology(row["topology"]).chip.hbm_bytes


@pytest.mark.parametrize(
    ("shape", "bits", "size"),
    [
        # layouts of libtpu 0.0.42: argument sizes of `x + 1`, compiled for v5e
        ((32, 8, 2048, 64), 16, 67108864),
        ((1000,), 16, 2048),
        ((1, 4096), 16, 16384),
        ((3, 4096), 16, 32768),
        ((128, 3), 16, 1024),
        ((7, 96), 32, 4096),
        ((32, 4, 1, 64), 16, 32768),
        ((60, 100, 200), 16, 3072000),
        ((5120, 576), 16, 5898240),
        ((), 32, 512),
    ],
)
def test_tiles_are_filled_up_as_the_compiler_fills_them(shape: tuple[int, ...], bits: int, size: int) -> None:
    assert tiled_bytes(shape, bits) == size


LLAMA = "ttpu_llama/configs/llama-3.1-8b.json"
DECODE = Workload("decode", 32, 2048)


def test_the_total_is_the_sum_of_its_parts() -> None:
    estimate = estimate_memory(published(LLAMA), {"tensor": 4}, DECODE)
    assert estimate.total == sum(estimate.parts().values())


def test_weights_are_the_parameters_over_the_devices_that_cut_them() -> None:
    spec = published(LLAMA)
    estimate = estimate_memory(spec, {"data": 2, "tensor": 8}, DECODE)
    assert estimate.weights == pytest.approx(2 * spec.num_parameters / 8, rel=0.001)


def test_the_cache_is_cut_by_rows_heads_and_slots() -> None:
    spec = published(LLAMA)
    whole = spec.kv_bytes_per_token(2) * 32 * 2048
    for mesh in ({"data": 4}, {"tensor": 4}, {"sequence": 4}, {"data": 2, "tensor": 2}):
        assert estimate_memory(spec, mesh, DECODE).cache == whole // 4, mesh


def test_int8_pages_have_a_scale_for_each_key_and_value() -> None:
    """32 layers, 2 of 8 KV heads on each device, pages of 128 tokens for 8 sequences of 2,048 and the null page."""
    model = shard_model(published(LLAMA), {"tensor": 4})
    limits = ServingLimits.of(8, 2048, "int8")
    shapes = shapes_for(planning_backend(), model, limits, "bfloat16")
    assert shapes.cache_bytes == 32 * (8 * 16 + 1) * 128 * 2 * 2 * (128 + 4)
    assert {one.kv_cache for one in served_workloads(shapes, limits, "bfloat16", None)} == {"int8"}


def test_heads_that_do_not_divide_cost_their_padding() -> None:
    """8 KV heads on 16 devices are held twice, so that a device's cache is that of 8 devices."""
    spec = published(LLAMA)
    assert estimate_memory(spec, {"tensor": 16}, DECODE).cache == estimate_memory(spec, {"tensor": 8}, DECODE).cache


def test_quantized_weights_shrink_the_layers_and_not_the_ends() -> None:
    spec = published(LLAMA)
    ends = 2 * 2 * spec.vocab_size * spec.hidden_size
    plain = estimate_memory(spec, {}, DECODE).weights - ends
    int8 = estimate_memory(spec, {}, replace(DECODE, quantization="int8")).weights - ends
    int4 = estimate_memory(spec, {}, replace(DECODE, quantization="w4a16-g128")).weights - ends
    assert int8 == pytest.approx(plain / 2, rel=0.01)
    assert int4 == pytest.approx(plain / 4 * (1 + 8 / 128), rel=0.01)  # and a float32 scale for every 128


def test_training_holds_three_float32_copies_and_keeps_less_with_remat() -> None:
    spec = published(LLAMA)
    step = Workload("train", 16, 2048, layers="scan")
    kept = estimate_memory(spec, {"fsdp": 16}, step)
    assert kept.weights + kept.optimizer == pytest.approx(12 * spec.num_parameters / 16, rel=0.001)
    dots, none = (
        estimate_memory(spec, {"fsdp": 16}, replace(step, update=UpdateSettings(remat=one))) for one in ("dots", "none")
    )
    assert kept.total < dots.total < none.total and none.total > 1.5 * kept.total


def test_gradients_of_kernels_lie_over_what_is_kept_of_layers() -> None:
    """On each of eight devices 128 MiB of attention's output kernel over the inputs of layers, where its 512 features
    fit over a row, and with `mlp` 448 MiB of the MLP's last kernel over its first products."""
    spec, mesh, eight = published(LLAMA), {"fsdp": 8}, Workload("train", 8, 2048, layers="scan")

    def gradients(mesh: dict[str, int], workload: Workload) -> int:
        return estimate_memory(spec, mesh, workload).gradients

    over = gradients(mesh, eight)
    assert gradients(mesh, replace(eight, batch=16)) == over
    assert gradients(mesh, replace(eight, batch=24)) == over + 32 * 512 * 4096 * 2, "three rows do not divide them"
    kept = replace(eight, update=UpdateSettings(remat="mlp"))
    assert gradients(mesh, replace(kept, batch=24)) - gradients(mesh, kept) == 32 * 512 * (4096 + 14336) * 2
    assert gradients({"fsdp": 4, "data": 2}, eight) == gradients({"fsdp": 4, "data": 2}, replace(eight, batch=24))


@pytest.mark.parametrize(("stage", "compiled"), [(0, 27.20), (1, 13.34), (2, 10.78), (3, 7.15)])
def test_the_stages_of_zero_take_what_the_compiler_says(stage: int, compiled: float) -> None:
    # GiB of an update of Llama-3.1-8B on v5e:4x4: benchmarks/training_programs.py --only zero
    spec, mesh = published(LLAMA), {"data": 4, "tensor": 4}
    step = Workload("train", 4, 2048, layers="scan", update=UpdateSettings(zero_stage=stage))
    found = estimate_memory(spec, mesh, step)
    assert found.total / 2**30 == pytest.approx(compiled, rel=0.04)
    assert (found.weights + found.optimizer) / 2**30 == pytest.approx(22.44 if stage == 0 else 5.61, rel=0.001)
    if stage in (0, 3):  # what a mesh takes unless a stage is asked for
        usual = estimate_memory(spec, {"fsdp" if stage else "data": 4, "tensor": 4}, replace(step, update=None))
        assert usual == found


@pytest.mark.parametrize(
    ("change", "each"),
    [
        ({"optim": "lion"}, 4),
        ({"optim": "sgd"}, 0),
        ({"optim": "sgd", "momentum": 0.9}, 4),
        ({"optim": "adamw_8bit"}, 2.03),
        ({"optim": "adafactor"}, 0.072),  # on each of 16 devices whole
        ({"optim": "muon"}, 4.527),  # 8 for the embedding and the head, which are 13 % of it
        ({"offload_optimizer": True}, 0),
    ],
)
def test_an_optimizer_keeps_what_its_name_says(change: dict[str, Any], each: float) -> None:
    """Bytes a parameter of Llama-3.1-8B, as docs/training.md tells of each optimizer."""
    spec, step = published(LLAMA), Workload("train", 16, 2048, layers="scan", update=UpdateSettings(**change))
    found = estimate_memory(spec, {"fsdp": 16}, step)
    assert 16 * found.optimizer / spec.num_parameters == pytest.approx(each, abs=0.005)


def test_an_update_in_parts_and_one_with_its_state_on_the_host_take_what_the_compiler_says() -> None:
    # GiB of an update of Llama-3.1-8B: benchmarks/training_programs.py --only pipeline, and --only offload
    spec, step = published(LLAMA), Workload("train", 256, 2048, layers="scan")
    parts = replace(step, update=UpdateSettings(gradient_accumulation_steps=8))
    assert estimate_memory(spec, {"data": 2, "fsdp": 16}, parts).total / 2**30 == pytest.approx(9.81, rel=0.02)
    on_host = replace(step, batch=16, update=UpdateSettings(offload_optimizer=True))
    assert estimate_memory(spec, {"fsdp": 16}, on_host).total / 2**30 == pytest.approx(4.86, rel=0.02)


def sharing(spec: ArchitectureSpec) -> ArchitectureSpec:
    """The model with one block of norms, attention and MLP for all of its layers."""
    layers = tuple(replace(layer, block=replace(layer.block, shared=SharedSpec(0))) for layer in spec.layers)
    return replace(spec, layers=layers)


@pytest.mark.parametrize("task", ["decode", "train"])
def test_what_layers_share_is_held_once_and_what_they_keep_is_not(task: str) -> None:
    spec, workload = published(LLAMA), Workload(task, 32, 2048, layers="scan")
    found, whole, one = (
        estimate_memory(each, {"fsdp": 8}, workload)
        for each in (sharing(spec), spec, replace(spec, layers=spec.layers[:1]))
    )
    held = [(each.weights, each.optimizer, each.gradients) for each in (found, one)]
    assert held[0] == held[1]
    if task == "decode":
        assert (found.cache, found.activations) == (whole.cache, whole.activations)


def test_a_mesh_that_cannot_cut_the_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="mesh axis 'fsdp' has 3 devices"):
        shard_model(published(LLAMA), {"fsdp": 3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "chat"}, "task 'chat' was asked for, but only decode, prefill, mixed, train are known"),
        ({"batch": 0}, "batch 0 was asked for, but it must be at least 1"),
        ({"quantization": "int2"}, "quantization 'int2'"),
        ({"task": "train", "quantization": "int8"}, "leave the quantization out"),
        ({"task": "mixed"}, "a mixed program without the sizes of an engine's step was asked for"),
        ({"task": "prefill", "step": StepSize(8, 1, 1)}, "a prefill program with the sizes of an engine's step"),
        ({"update": UpdateSettings()}, "settings of training were asked for with a decode program"),
        ({"task": "train", "update": UpdateSettings(gradient_accumulation_steps=2)}, "1 rows was asked for in 2 parts"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Workload(**{"task": "decode", "batch": 1, "context": 8, **change})


def test_each_policy_keeps_more_than_the_one_before() -> None:
    spec, step = published(LLAMA), Workload("train", 16, 2048, layers="scan")
    kept = [estimate_memory(spec, {"fsdp": 16}, replace(step, update=UpdateSettings(remat=one))) for one in REMATS]
    totals = [one.total for one in kept]
    assert totals == sorted(totals) and len(set(totals)) == len(REMATS)


@pytest.mark.parametrize(
    ("topology", "mesh", "rows", "remat", "compiled"),
    [
        # GiB of `ttpu compile-report --task train --layers scan --remat`, libtpu 0.0.42
        ("v5e:4x4", 16, 1, "attention", 9.52),
        ("v5e:4x4", 16, 2, "attention", 12.09),
        ("v5e:4x4", 16, 1, "mlp", 12.66),
        ("v6e:4x4", 16, 2, "mlp", 18.95),
        ("v5p:2x2x2", 8, 12, "mlp", 86.58),
    ],
)
def test_what_is_kept_by_name_takes_what_the_compiler_says(
    topology: str, mesh: int, rows: int, remat: str, compiled: float
) -> None:
    step = Workload("train", rows * mesh, 2048, layers="scan", update=UpdateSettings(remat=remat))
    found = estimate_memory(published(LLAMA), {"fsdp": mesh}, step, chip=parse_topology(topology).chip)
    assert found.total / 2**30 == pytest.approx(compiled, rel=0.02)


def test_weights_that_do_not_fill_lanes_are_counted_rounded_for_all_layers() -> None:
    """Of Mixtral-8x7B on 64 devices: queries, keys and values of 64 features each, and the table of tokens with its
    moments, which is laid out anew. Experts are divided by rows and fill lanes."""
    spec = published("ttpu_mistral/configs/mixtral-8x7b.json")
    step = Workload("train", 64, 2048, layers="scan")
    found, wide = (estimate_memory(spec, {"fsdp": devices}, step) for devices in (64, 32))
    assert found.total / 2**30 == pytest.approx(14.48, rel=0.02)  # compiled; 14.79 with experts divided by features
    copied = 32 * 48 * 128 * 64 * 2 + 3 * 32000 * 64 * 4
    assert found.temporaries - wide.temporaries == pytest.approx(copied, rel=0.01)
