"""`ttpu plan`: what it prints, writes and draws, and what it says when nothing fits. A backend made for the test stands
in for the compiler."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_import_time import HEAVY, loaded_after
from test_plan_memory import LLAMA, published
from typer.testing import CliRunner

from ttpu_core import registry as registry_module
from ttpu_core.cli.main import app
from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_core.plan.hardware import parse_topology
from ttpu_core.plan.picture import COLOURS, html_picture, save_picture
from ttpu_core.plan.plan import Plan, load_plan
from ttpu_core.plan.planner import plans
from ttpu_core.plan.verification import Verification


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
    (training, *_) = as_json(config, "--topology", "v5e:4x4", "--task", "training")["plans"]
    assert [one["workload"]["task"] for one in training["programs"]] == ["train"]
    assert training["programs"][0]["workload"]["batch"] == 16  # a row a device


def test_a_saved_plan_is_the_first_one(config: Path, tmp_path: Path) -> None:
    result = run(config, "--topology", "v5e:2x4", "--save", tmp_path / "plan.json")
    assert result.exit_code == 0
    plan = load_plan(tmp_path / "plan.json")
    assert str(plan.parallelism) == "tensor=8"
    plan.check(published(LLAMA))


def test_when_nothing_fits_the_status_is_one_and_the_reason_has_numbers(config: Path, tmp_path: Path) -> None:
    result = run(config, "--topology", "v5e:1x1", "--save", tmp_path / "plan.json")
    assert result.exit_code == 1
    assert "nothing fits: llama needs 23.3 GiB on each device of v5e:1x1" in result.stderr
    assert "4 chips (v5e:2x2) would fit" in result.stderr
    assert not (tmp_path / "plan.json").exists()
    printed = json.loads(run(config, "--topology", "v5e:1x1", "--json").stdout)
    assert printed["nothing_fits"]["missing_bytes"] > 0
    assert all(remedy["plan"]["fits"] for remedy in printed["nothing_fits"]["remedies"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--topology", "v9:2x2"), "the chips are v4, v5e, v5p, v6e, tpu7x"),
        (("--batch", "0"), "batch 0 was asked for, but it must be at least 1"),
        (("--task", "training", "--quantization", "int8"), "leave the quantization out"),
        (("--picture", "memory.gif"), "a picture is written as .html or .png"),
    ],
)
def test_an_impossible_request_is_one_sentence_and_status_two(
    config: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run(config, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


class Compiler:
    """A backend whose compiler finds decode steps over fewer devices faster, and refuses what it is told to."""

    name = "jax"

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses

    def verify_plan(
        self, architecture: Any, plan: Plan, *, progress: Callable[[str], None]
    ) -> tuple[Verification, ...]:
        progress("decode")
        if str(plan.parallelism) == self.refuses:
            refused = Verification("prefill", None, 0.0, (), 0.0, "libtpu 1", refused="it needs 20 GiB")
        else:
            refused = Verification("prefill", 2**30, 0.0, (), 11.0, "libtpu 1")
        seconds = 0.001 * dict(plan.mesh)["tensor"]
        return Verification("decode", 3 * 2**30, seconds, (("all-reduce", 65, 2**24),), 11.0, "libtpu 1"), refused


def compile_with(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module.default_registry(), "backend", lambda name: compiler)


def test_verified_plans_show_the_compilers_figures_beside_the_prediction(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(Compiler(), monkeypatch)
    result = run(config, "--topology", "v5e:2x4", "--verify")
    assert result.exit_code == 0, result.output
    for words in ("2.91", "3.00", "65 all-reduces (16.0 MiB)", "compiled in 11 s by libtpu 1"):
        assert words in result.stdout
    first, *others = as_json(config, "--topology", "v5e:2x4", "--verify")["plans"]
    assert [one["peak_bytes"] for one in first["compiled"]] == [3 * 2**30, 2**30]
    assert others and not any("compiled" in one for one in others)


def test_of_several_candidates_the_one_that_compiles_to_the_fastest_is_first(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(Compiler(), monkeypatch)
    asked = (config, "--topology", "v5e:2x4", "--verify", "--candidates", 2, "--save", tmp_path / "plan.json")
    assert [one["parallelism"] for one in as_json(*asked)["plans"]][:2] == ["data=2,tensor=4", "tensor=8"]
    assert str(load_plan(tmp_path / "plan.json").parallelism) == "data=2,tensor=4"


def test_a_plan_that_the_compiler_refuses_is_not_saved(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(Compiler(refuses="tensor=8"), monkeypatch)
    asked = (config, "--topology", "v5e:2x4", "--verify", "--save", tmp_path / "plan.json")
    result = run(*asked)
    assert result.exit_code == 1
    assert "does not fit" in result.stdout
    assert "it needs 20 GiB" in result.stdout
    assert "the compiler refuses what was predicted to fit: take more of --candidates" in result.stderr
    assert not (tmp_path / "plan.json").exists()
    assert run(*asked, "--candidates", 2).exit_code == 0
    assert str(load_plan(tmp_path / "plan.json").parallelism) == "data=2,tensor=4"


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
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    found = plans(published(LLAMA), parse_topology("v5e:2x4"))
    with pytest.raises(MissingDependencyError, match=r'pip install "ttpu-core\[plot\]"'):
        save_picture([("one", found[0])], tmp_path / "memory.png", "title")


def test_a_picture_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    found = plans(published(LLAMA), parse_topology("v5e:2x4"))
    with pytest.raises(RequestError, match="name a file in a folder that exists"):
        save_picture([("one", found[0])], tmp_path / "nowhere" / "memory.html", "title")


def test_planning_loads_no_framework(config: Path) -> None:
    code = f"""
import sys
sys.argv = ["ttpu", "plan", {str(config)!r}, "--topology", "v5e:2x4", "--json"]
from ttpu_core.cli.main import main
import contextlib, io
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
"""
    assert loaded_after(code, HEAVY) == []
