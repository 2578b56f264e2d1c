"""`ttpu plan`: what it prints, writes and draws, and what it says when nothing fits. A backend made for the test stands
in for the compiler."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_import_time import HEAVY, loaded_after
from test_plan_memory import LLAMA, published
from typer.testing import CliRunner

from ttpu_core import registry as registry_module
from ttpu_core.cli.main import app
from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_core.loading import Purpose
from ttpu_core.pictures import check_picture
from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.sharding.serving import ServedShapes
from ttpu_core.sharding.verification import Verification
from ttpu_plan.cli import _used_with
from ttpu_plan.picture import COLOURS, ENDINGS, html_picture, save_picture
from ttpu_plan.plan import Plan
from ttpu_plan.plan_file import load_plan
from ttpu_plan.planner import plans
from ttpu_plan.service import PLANNER


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The config.json of Llama-3.1-8B, alone in a folder."""
    published(LLAMA)  # skips without the family
    import ttpu_llama

    assert ttpu_llama.__file__ is not None
    path = tmp_path / "config.json"
    path.write_bytes((Path(ttpu_llama.__file__).parent / "configs" / "llama-3.1-8b.json").read_bytes())
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def as_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_without_a_topology_each_generations_smallest_slice_is_named(config: Path) -> None:
    result = run(config)
    assert result.exit_code == 0, result.output
    for words in ("v5e:2x2", "v6e:1x1", "tensor=4", "one device", "8,030,261,248 parameters", "Nothing ran on a TPU"):
        assert words in result.stdout


def test_with_a_topology_its_meshes_come_fastest_first(config: Path) -> None:
    found = as_json(config, "--topology", "v5e:2x4")["plans"]
    assert found[0]["parallelism"] == "tensor=8"
    seconds = [one["seconds"] for one in found]
    assert seconds == sorted(seconds)
    assert all(one["fits"] and one["topology"] == "v5e:2x4" for one in found)


def test_the_options_reach_the_plan(config: Path) -> None:
    (serving, *_) = as_json(
        config, "--topology", "v5e:2x4", "--batch", 16, "--context", 4096, "--quantization", "int8"
    )["plans"]
    workload = serving["programs"][0]["workload"]
    assert (workload["batch"], workload["context"], workload["quantization"]) == (16, 4096, "int8")
    assert workload["step"] == {"tokens": 16, "sequences": 16, "rows": 16}
    (generation, *_) = as_json(config, "--topology", "v5e:2x4", "--task", "generation")["plans"]
    assert [one["workload"]["task"] for one in generation["programs"]] == ["decode", "prefill"]
    (training, *_) = as_json(config, "--topology", "v5e:4x4", "--task", "training")["plans"]
    assert [one["workload"]["task"] for one in training["programs"]] == ["train"]
    assert training["programs"][0]["workload"]["batch"] == 16  # a row a device


def test_a_saved_plan_is_the_first_one(config: Path, tmp_path: Path) -> None:
    result = run(config, "--topology", "v5e:2x4", "--save", tmp_path / "plan.json")
    assert result.exit_code == 0
    plan = load_plan(tmp_path / "plan.json")
    assert str(plan.parallelism) == "tensor=8"
    plan.check(published(LLAMA))
    assert f"--plan {tmp_path / 'plan.json'} --max-num-seqs 32 --max-model-len 2048`" in result.stderr


@pytest.mark.parametrize(("task", "purpose"), [("inference", "serve"), ("generation", "generate")])
def test_the_command_that_is_printed_takes_the_plan(config: Path, tmp_path: Path, task: str, purpose: Purpose) -> None:
    """It used to lack the quantization, and was refused; and a path with a blank fell apart."""
    folder = tmp_path / "my model"
    folder.mkdir()
    config, saved = config.rename(folder / "config.json"), folder / "plan.json"
    result = run(config, "--topology", "v5e:2x4", "--task", task, "--quantization", "int8", "--save", saved)
    assert result.exit_code == 0, result.output
    for printed, packs in (
        (" ".join(result.stderr.split()).split("`")[1], []),
        (_used_with(str(folder), load_plan(saved), saved, ["one", "two"]).split("`")[1], ["one", "two"]),
    ):
        ttpu, name, *words = shlex.split(printed)
        assert (ttpu, name, words[0]) == ("ttpu", purpose, str(folder))
        given = {option: words[at + 1] for at, option in enumerate(words) if option.startswith("--")}
        assert [words[at + 1] for at, option in enumerate(words) if option == "--patch-pack"] == packs
        assert given["--plan"] == str(saved)
        PLANNER.plan_for(
            given["--plan"], published(LLAMA), dtype="bfloat16", quantization=given["--quantization"], purpose=purpose,
            backend="JAX",
        )  # fmt: skip


def test_the_printed_command_of_a_plan_to_train_names_its_packs(config: Path, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    result = run(config, "--topology", "v5e:4x4", "--task", "training", "--batch", 16, "--save", saved)
    assert f"train with `ttpu train run.yaml model={tmp_path} plan={saved}`" in " ".join(result.stderr.split())
    words = _used_with("it's", load_plan(saved), saved, ["one", "two"]).split("`")[1]
    assert shlex.split(words)[3:] == ["model=it's", f"plan={saved}", "load_options.patch_packs=one,two"]


def test_a_plan_is_saved_though_nobody_reads_what_is_printed(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("ttpu_plan.command_output.print_plans", closed)
    run(config, "--topology", "v5e:2x4", "--save", tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").topology == "v5e:2x4"


def test_when_nothing_fits_the_status_is_one_and_the_reason_has_numbers(config: Path, tmp_path: Path) -> None:
    result = run(config, "--topology", "v5e:1x1", "--save", tmp_path / "plan.json")
    assert result.exit_code == 1
    assert "nothing fits: llama needs 23.3 GiB on each device of v5e:1x1" in result.stderr
    assert "4 chips (v5e:2x2) would fit" in result.stderr
    assert not (tmp_path / "plan.json").exists()
    printed = json.loads(run(config, "--topology", "v5e:1x1", "--json").stdout)
    assert printed["nothing_fits"]["missing_bytes"] > 0
    assert all(remedy["plan"]["fits"] for remedy in printed["nothing_fits"]["remedies"])


def test_a_generation_that_does_not_serve_is_named(config: Path) -> None:
    asked = (config, "--batch", 1024, "--context", 32768)
    result = run(*asked)
    assert result.exit_code == 0, result.output
    printed = as_json(*asked)
    assert printed["without"] == ["v5e"]
    assert "v5e: not on 256 chips" in result.stdout
    assert {one["topology"].partition(":")[0] for one in printed["plans"]} == {"v4", "v5p", "v6e", "tpu7x"}


def test_when_no_generation_serves_the_reason_has_numbers_and_remedies(config: Path) -> None:
    asked = (config, "--batch", 4096, "--context", 131072)
    result = run(*asked)
    assert result.exit_code == 1
    assert "nothing fits: llama needs" in result.stderr
    assert "GiB on each device of tpu7x:4x8x8" in result.stderr
    assert "would fit" in result.stderr
    assert "v5p: not on 256 chips" in result.stdout
    printed = json.loads(run(*asked, "--json").stdout)
    assert printed["without"] == ["v4", "v5e", "v5p", "v6e", "tpu7x"]
    assert [one["fits"] for one in printed["plans"]] == [False]
    assert printed["nothing_fits"]["missing_bytes"] > 0
    assert printed["nothing_fits"]["remedies"]


def test_the_first_plan_says_which_attention_it_gets_and_why(config: Path) -> None:
    pytest.importorskip("ttpu_jax")
    of_generate = "splash_attention for prefill and training, decode_attention for decode: the default on a TPU"
    of_engine = "paged_decode_attention for decode steps, paged_prompt_attention for others: the default on a TPU"
    for task, reason in (("inference", of_engine), ("generation", of_generate)):
        asked = config, "--topology", "v5e:2x4", "--task", task
        assert f"attention (full): {reason}" in " ".join(run(*asked).stdout.split())
        found = as_json(*asked)
        assert found["kernels"]["attention (full)"].startswith(reason) and found["patch_packs"] == []


def test_a_patch_pack_that_is_not_installed_is_refused(config: Path) -> None:
    result = run(config, "--patch-pack", "nope")
    assert result.exit_code != 0
    assert "patch pack 'nope' was asked for" in result.output + str(result.exception)


def test_the_request_is_part_of_what_is_printed_as_json(config: Path) -> None:
    asked = as_json(config, "--topology", "v5e:4x4", "--task", "training")
    assert asked["request"] == {
        "task": "training",
        "topology": "v5e:4x4",
        "batch": 16,
        "context": 2048,
        "dtype": "bfloat16",
        "quantization": None,
        "kv_cache": None,
        "new_tokens": None,
        "update": None,
    }
    serving = as_json(config, "--quantization", "int8")
    assert (serving["request"]["topology"], serving["request"]["batch"]) == (None, 32)
    assert serving["request"]["quantization"] == "int8"
    assert "XLA multiplies by scales per channel" in serving["kernels"]["products (int8, one scale per channel)"]
    assert as_json(config, "--task", "training")["request"]["batch"] is None  # one a device of each slice
    assert (serving["nothing_fits"], serving["without"]) == (None, [])


def test_a_topology_that_is_not_sold_is_planned_with_a_note(config: Path) -> None:
    assert "v5e:2x3 is not a size that v5e comes in" in run(config, "--topology", "v5e:2x3").stdout
    printed = as_json(config, "--topology", "v5e:2x3")
    assert {one["note"] for one in printed["plans"]} == {"v5e:2x3 is not a size that v5e comes in"}
    assert {one["note"] for one in as_json(config, "--topology", "v5e:2x4")["plans"]} == {None}


@pytest.mark.parametrize("option", ["--save", "--picture"])
@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nowhere/plan.html", "its folder does not exist"),
        ("folder.html", "it is a directory"),
        ("config.json/plan.html", "its folder does not exist"),
        ("locked/plan.html", "its folder is not writable"),
    ],
)
def test_where_nothing_can_be_written_nothing_is_planned(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, target: str, why: str
) -> None:
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: "locked" not in str(path))  # a superuser may write anywhere
    monkeypatch.setattr("ttpu_plan.planner.plans", lambda *_: pytest.fail("it was planned"))
    result = run(config, "--topology", "v5e:2x4", option, tmp_path / target)
    assert result.exit_code == 2, result.output
    assert why in result.stderr
    assert "name a file in a folder that exists and may be written to" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--topology", "v9:2x2"), "the chips are v4, v5e, v5p, v6e, tpu7x"),
        (("--batch", "0"), "batch 0 was asked for, but it must be at least 1"),
        (("--task", "training", "--quantization", "int8"), "leave the quantization out"),
        (("--zero-stage", "1"), "only a training step has an optimizer, parts, and stages of ZeRO"),
        (("--task", "training", "--optim", "adam"), "optim 'adam' of a training step was asked for, but it is one of"),
        (("--task", "training", "--optim", "muon", "--offload-optimizer"), "but only the state of adamw, lion, sgd"),
        (("--task", "training", "--batch", "9", "--gradient-accumulation-steps", "2"), "a multiple of gradient_acc"),
        (("--task", "training", "--zero-stage", "1", "--verify"), "whose mesh decides the stage of ZeRO"),
        (("--task", "generation", "--kv-cache-dtype", "int8"), "only a serving engine quantizes them"),
        (("--kv-cache-dtype", "int4"), "only int8, fp8 are known"),
        (("--picture", "memory.gif"), "a picture is written as .html or .png"),
        (("--context", "500000"), "context is 500,000, but this model's context holds 131,072: lower it."),
        (("--task", "training", "--momentum", "0.9"), "it has no effect without optim: sgd or muon"),
        (("--topology", "v5e:2x4", "--candidates", "9"), "--candidates was given, but it has no effect without --v"),
        (("--verify", "--candidates", "9"), "--candidates was given, but it has no effect without --topology"),
    ],
)
def test_an_impossible_request_is_one_sentence_and_status_two(
    config: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run(config, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_rows_to_train_on_that_are_longer_than_the_models_context_are_warned_of(config: Path) -> None:
    result = run(config, "--task", "training", "--topology", "v5p:4x4x4", "--batch", 32, "--context", 262144)
    assert result.exit_code == 0, result.output
    assert "warning: context=262,144 was given, but the model's config names 131,072 positions" in result.stderr


def test_without_a_context_the_plan_has_the_models_where_that_is_shorter(config: Path) -> None:
    changes = {"max_position_embeddings": 512, "rope_scaling": None}
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    assert as_json(config, "--topology", "v5e:2x4", "--best", 1)["request"]["context"] == 512


class Compiler:
    """A backend whose compiler finds decode steps over fewer devices faster, and refuses what it is told to."""

    name = "jax"

    def planned_kernels(self, architecture: Any, **_: bool) -> dict[str, str]:
        return {}

    def served_shapes(self, *asked: Any) -> ServedShapes:
        from ttpu_jax.backend import JaxBackend

        return JaxBackend().served_shapes(*asked)

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses

    def verify_plan(
        self, architecture: Any, plan: Plan, *, progress: Callable[[str], None]
    ) -> tuple[Verification, ...]:
        progress("decode")
        if plan.layout == self.refuses:
            refused = Verification("mixed", None, 0.0, (), 0.0, "libtpu 1", refused="it needs 20 GiB")
        else:
            refused = Verification("mixed", 2**30, 0.0, (), 11.0, "libtpu 1")
        seconds = 0.001 * dict(plan.mesh).get("tensor", 1)
        return Verification("decode", 3 * 2**30, seconds, (("all-reduce", 65, 2**24),), 11.0, "libtpu 1"), refused


def compile_with(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module.default_registry(), "backend", lambda name: compiler)


def test_verified_plans_show_the_compilers_figures_beside_the_prediction(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(Compiler(), monkeypatch)
    result = run(config, "--topology", "v5e:2x4", "--verify")
    assert result.exit_code == 0, result.output
    for words in ("2.91", "2 replicas × tensor=4", "3.00", "65 all-reduces (16.0 MiB)", "compiled in 11 s by libtpu 1"):
        assert words in result.stdout
    asked = (config, "--topology", "v5e:2x4", "--verify", "--candidates", 1)
    first, *others = as_json(*asked)["plans"]
    assert [one["peak_bytes"] for one in first["compiled"]] == [3 * 2**30, 2**30]
    assert others and not any("compiled" in one for one in others)


def test_of_several_candidates_the_one_that_compiles_to_the_fastest_is_first(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(Compiler(), monkeypatch)
    asked = (config, "--topology", "v5e:2x4", "--verify", "--candidates", 2, "--save", tmp_path / "plan.json")
    assert [one["layout"] for one in as_json(*asked)["plans"]][:2] == ["2 replicas × tensor=4", "tensor=8"]
    assert load_plan(tmp_path / "plan.json").layout == "2 replicas × tensor=4"


def test_three_plans_are_compiled_unless_another_number_is_asked_for(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(Compiler(), monkeypatch)
    found = as_json(config, "--topology", "v6e:2x4", "--verify", "--best", 5)["plans"]
    assert [("compiled" in one) for one in found] == [True] * 3 + [False] * (len(found) - 3)
    assert len(found) > 3
    assert len(as_json(config, "--topology", "v6e:2x4", "--best", 1)["plans"]) == 1


def test_a_plan_that_the_compiler_refuses_is_not_saved(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(Compiler(refuses="tensor=8"), monkeypatch)
    asked = (config, "--topology", "v5e:2x4", "--verify", "--save", tmp_path / "plan.json")
    result = run(*asked, "--candidates", 1)
    assert result.exit_code == 1
    assert "does not fit" in result.stdout
    assert "it needs 20 GiB" in result.stdout
    assert "the compiler refuses what was predicted to fit: take more of --candidates" in result.stderr
    assert not (tmp_path / "plan.json").exists()
    nothing = json.loads(run(*asked, "--candidates", 1, "--json").stdout)["nothing_fits"]
    assert nothing["reason"].startswith("the compiler refuses what was predicted to fit")
    assert run(*asked, "--candidates", 2).exit_code == 0
    assert str(load_plan(tmp_path / "plan.json").parallelism) == "data=2,tensor=4"


def test_a_quantized_checkpoint_is_planned_in_its_own_format(
    config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = (config, "--topology", "v5e:2x2")
    dense, rounded = as_json(*here), as_json(*here, "--quantization", "w4a16-g128")
    written = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": written}))
    compile_with(Compiler(), monkeypatch)
    saved = tmp_path / "plan.json"
    found = as_json(*here, "--verify", "--save", saved)
    assert found["kernel_formats"] == {"int4, groups of 128": 4 * 32}
    assert (dense["kernel_formats"], found["request"]["quantization"]) == ({}, None)
    memory = [
        {plan["layout"]: plan["programs"][0]["memory"]["weights"] for plan in one["plans"]}["tensor=4"]
        for one in (dense, rounded, found)
    ]
    assert memory[0] > 2 * memory[1] == 2 * memory[2]
    assert found["plans"][0]["compiled"]
    assert load_plan(saved).fingerprint not in (dense["plans"][0]["fingerprint"], rounded["plans"][0]["fingerprint"])
    assert "parameters in int4, groups of 128" in run(*here).stdout
    for more, why in (
        (("--quantization", "int8"), "are quantized already: leave it out"),
        (("--task", "training"), "the weights that a training step updates are float32"),
    ):
        result = run(config, *more)
        assert result.exit_code == 2, result.output
        assert why in result.stderr


def test_what_only_the_files_of_a_quantized_checkpoint_say_is_asked_for(config: Path) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    result = run(config)
    assert result.exit_code == 2, result.output
    assert "which of them are quantized only the files say" in result.stderr


def test_quantized_plans_are_verified(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(Compiler(), monkeypatch)
    found = as_json(config, "--topology", "v5e:2x4", "--quantization", "w8a8", "--verify")["plans"]
    assert found[0]["compiled"]
    assert found[0]["programs"][0]["workload"]["quantization"] == "w8a8"


def test_the_page_has_a_bar_a_limit_and_a_row_of_numbers_for_each_plan(tmp_path: Path) -> None:
    found = plans(published(LLAMA), parse_topology("v5e:2x4"))
    page = html_picture([(f"plan <{number}>", one) for number, one in enumerate(found)], "a & b")
    assert "<title>a &amp; b</title>" in page
    assert page.count("<tr><td>plan &lt;") == len(found)
    assert page.count("available: 15.75 GiB") == len(found)
    parts = [part for one in found for part in one.memory.parts()]
    assert page.count("<rect ") == len(parts)
    assert "http" not in page  # nothing is fetched
    assert set(parts) <= set(COLOURS)


def test_a_picture_is_written_as_png_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = plans(published(LLAMA), parse_topology("v5e:2x4"))
    save_picture([("one", found[0])], tmp_path / "memory.png", "title")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttpu_core.pictures.find_spec", lambda name: None)
    found = plans(published(LLAMA), parse_topology("v5e:2x4"))
    with pytest.raises(MissingDependencyError, match=r'pip install "ttpu-core\[plot\]"'):
        save_picture([("one", found[0])], tmp_path / "memory.png", "title")


def test_a_picture_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    found = plans(published(LLAMA), parse_topology("v5e:2x4"))
    with pytest.raises(RequestError, match="name a file in a folder that exists"):
        save_picture([("one", found[0])], tmp_path / "nowhere" / "memory.html", "title")


def test_a_picture_of_any_size_has_lines_at_round_numbers(tmp_path: Path) -> None:
    plan = plans(published(LLAMA), parse_topology("v5e:2x4"))[0]
    program = plan.programs[0]
    for factor, step in ((1, 2), (40_000, 50_000)):  # up to 400,000 GiB on a device
        memory = replace(program.memory, weights=program.memory.weights * factor)
        large = replace(plan, programs=(replace(program, memory=memory),))
        assert f'text-anchor="middle">{step}</text>' in html_picture([("one", large)], "title")


def test_what_cannot_be_drawn_is_said_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttpu_core.pictures.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r'pip install "ttpu-core\[plot\]"'):
        check_picture(tmp_path / "memory.png", ENDINGS)
    check_picture(tmp_path / "memory.html", ENDINGS)


def test_planning_loads_no_framework(config: Path) -> None:
    """But for serving, whose steps and pages a backend tells."""
    code = f"""
from ttpu_core import default_registry
from ttpu_core.checkpoint import open_config
from ttpu_core.sharding.hardware import parse_topology
from ttpu_plan.planner import Request, plans, smallest_slices
spec = default_registry().architecture(open_config({str(config)!r})).spec
for purpose in ("generation", "training"):
    assert plans(spec, parse_topology("v5e:2x4"), Request(purpose)) and smallest_slices(spec, Request(purpose))
"""
    assert loaded_after(code, HEAVY) == []


def test_without_a_backend_the_plan_is_made_all_the_same(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise MissingDependencyError("the backend is not installed.")

    monkeypatch.setattr(registry_module.default_registry(), "backend", missing)
    found = as_json(config, "--topology", "v5e:2x4", "--task", "generation")
    assert found["plans"] and found["kernels"] == {}


class TrainingCompiler(Compiler):
    """One that finds updates slow, but for those whose recomputation it prefers, and refuses all others if told to."""

    def __init__(self, prefers: str, *, alone: bool = False) -> None:
        super().__init__()
        self.prefers, self.alone = prefers, alone

    def verify_plan(
        self, architecture: Any, plan: Plan, *, progress: Callable[[str], None]
    ) -> tuple[Verification, ...]:
        settings = plan.programs[0].workload.settings
        if settings.remat == self.prefers:
            return (Verification("train", 2**33, 0.5, (), 60.0, "libtpu 1"),)
        refused = "it needs 20 GiB" if self.alone and settings.remat != "full" else None
        return (Verification("train", None if refused else 2**33, 9.0, (), 60.0, "libtpu 1", refused=refused),)


def test_the_best_batches_are_compiled_and_the_fastest_is_proposed(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (config, "--task", "training", "--topology", "v5e:4x4", "--verify", "--best", 1, "--candidates", 2)
    compile_with(TrainingCompiler("dots"), monkeypatch)
    shown = " ".join(run(*asked).stdout.split())
    assert "--remat dots" in shown and "Compiled: 8.0 GiB, 500 ms, MFU" in shown
    found = as_json(*asked)
    assert found["best_batch"]["remat"] == "dots" and found["best_batch"]["compiled"]["seconds"] == 0.5
    assert [one["remat"] for one in found["compiled_batches"]] == ["dots", "mlp"]
    of_one = as_json(*asked, "--remat", "attention")
    assert [one["remat"] for one in of_one["compiled_batches"]] == ["attention"]


def test_that_all_best_batches_are_refused_is_said(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (config, "--task", "training", "--topology", "v5e:4x4", "--verify", "--best", 1, "--candidates", 2)
    compile_with(TrainingCompiler("none", alone=True), monkeypatch)
    assert "the compiler refuses the best predictions (16 rows with mlp, 16 rows with dots)" in " ".join(
        run(*asked).stdout.split()
    )
    found = as_json(*asked)
    assert found["best_batch"] is None
    assert found["compiled_batches"][0]["compiled"] == {"refused": "it needs 20 GiB"}
