"""Both doors: what pytest collects, what the command prints and writes, and the rules about expected failures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from broken import LLAMA, cases
from typer.testing import CliRunner

from ttpu_conformance import parametrize_with_checks
from ttpu_conformance.check import check
from ttpu_conformance.errors import CheckFailure, DeclarationError, NoReference, NotApplicable, NotProven
from ttpu_conformance.measure import Measured
from ttpu_conformance.pytest_door import LEVEL_VARIABLE
from ttpu_conformance.report import Report
from ttpu_conformance.runner import Result, run_one
from ttpu_conformance.selection import Item, all_checks, checks_for
from ttpu_core.cli.main import app
from ttpu_core.errors import PluginError, RequestError

EXPECTED = [{"check": "float32_logits", "reason": "known to be off"}]


def items(folder: Path, *only: str, **section: Any) -> list[Item]:
    return list(checks_for(cases(folder, "llama", LLAMA, "doors", **section), only=only))


def replaced(item: Item, function: Any) -> Item:
    """The item with a check that does something else."""
    from dataclasses import replace

    return replace(item, check=replace(item.check, function=function))


def raising(error: Exception) -> Any:
    def function(case: Any) -> None:
        raise error

    return function


# -- pytest


def test_pytest_collects_one_test_for_each_check_and_case(tmp_path: Path) -> None:
    made = cases(tmp_path, "llama", LLAMA, "doors", variants={"biased": {"attention_bias": True}})
    mark = parametrize_with_checks("llama", registry=made[0].registry, declaration=made[0].declaration)
    names, parameters = mark.mark.args
    assert names == ("case", "check")
    ids = [parameter.id for parameter in parameters]
    assert "llama-base-float32_logits" in ids and "llama-biased-float32_logits" in ids
    assert (
        "llama-base-gradients" in ids and "llama-biased-gradients" not in ids
    )  # heavy: the base, and what asks for it
    assert len(ids) == len(set(ids))


def in_pytest(item: Item, function: Any) -> None:
    """What a test does with the item, if its check does something else."""
    from ttpu_conformance.pytest_door import PytestCheck

    PytestCheck(replaced(item, function))(item.case)


def test_pytest_takes_expected_failures_as_xfails_that_must_fail(tmp_path: Path) -> None:
    (item,) = items(tmp_path, "float32_logits", expected_failures=EXPECTED)
    with pytest.raises(pytest.xfail.Exception, match=r"known to be off \(off by one\)"):
        in_pytest(item, raising(CheckFailure("off by one")))
    with pytest.raises(CheckFailure, match=r"declared to fail .* but it passes"):
        in_pytest(item, lambda case: Measured())


def test_pytest_shows_what_a_check_raised(tmp_path: Path) -> None:
    (item,) = items(tmp_path, "logical_axes")
    with pytest.raises(CheckFailure, match="off by one"):
        in_pytest(item, raising(CheckFailure("off by one")))
    with pytest.raises(CheckFailure, match="raised KeyError: 'x'") as failure:
        in_pytest(item, raising(KeyError("x")))
    assert isinstance(failure.value.__cause__, KeyError)


def test_pytest_skips_what_cannot_be_asked_with_the_reason(tmp_path: Path) -> None:
    (item,) = items(tmp_path, "logical_axes")
    for reason in (NotApplicable("no rope"), NotProven("no TPU")):
        with pytest.raises(pytest.skip.Exception, match=str(reason)):
            in_pytest(item, raising(reason))


@pytest.mark.parametrize(("device", "check_id"), [("cpu", "attention_kernels"), ("tpu", "float32_logits")])
def test_a_missing_device_is_the_same_behind_both_doors(tmp_path: Path, device: Any, check_id: str) -> None:
    made = cases(tmp_path, "llama", LLAMA, "doors")
    mark = parametrize_with_checks(
        "llama",
        registry=made[0].registry,
        declaration=made[0].declaration,
        device=device,
        levels=["numerics", "device"],
        only=[check_id],
    )
    (parameter,) = mark.mark.args[1]
    case, test = parameter.values
    assert run_one(test.item).status == "skipped"
    with pytest.raises(pytest.skip.Exception, match="there is no TPU here"):
        test(case)


@pytest.mark.parametrize(
    ("check_id", "message"),
    [("compiled_decode", "add --compile-for"), ("attention_kernels", "add --device tpu, or device='tpu' in a test")],
)
def test_a_check_that_would_never_run_is_refused(tmp_path: Path, check_id: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        items(tmp_path, check_id)


def test_a_model_type_that_nobody_describes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="conformance of 'olive' was asked for, but no installed plugin describes it"):
        parametrize_with_checks("olive")


def test_a_check_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match=r"check 'float31_logits' was asked for, but the checks are .*float32"):
        items(tmp_path, "float31_logits")


# -- expected failures


def test_a_failure_that_is_expected_is_reported_as_such(tmp_path: Path) -> None:
    (item,) = items(tmp_path, "float32_logits", expected_failures=EXPECTED)
    result = run_one(replaced(item, raising(CheckFailure("off by one", error=0.5, tolerance=0.1))))
    assert (result.status, result.error, result.tolerance) == ("expected failure", 0.5, 0.1)
    assert result.reason == "known to be off (off by one)"


def test_an_expected_failure_that_passes_is_a_failure(tmp_path: Path) -> None:
    (item,) = items(tmp_path, "float32_logits", expected_failures=EXPECTED)
    result = run_one(replaced(item, lambda case: Measured(0.0, 1.0)))
    assert result.status == "failed"
    assert "declared to fail (known to be off), but it passes: remove" in result.reason
    result = run_one(replaced(item, raising(NotApplicable("no rope"))))
    assert result.status == "failed" and "but it does not apply" in result.reason


def test_an_expected_failure_of_a_missing_device_stays_unproven(tmp_path: Path) -> None:
    (item,) = items(tmp_path, "float32_logits", expected_failures=EXPECTED)
    assert run_one(replaced(item, raising(NotProven("no TPU")))).status == "skipped"


# -- a reference that cannot be made


def test_a_reference_that_cannot_be_made_is_a_failure(tmp_path: Path) -> None:
    (item,) = items(tmp_path, "float32_logits")
    found = run_one(replaced(item, raising(NoReference("timm is missing."))))
    assert found.status == "failed"
    assert "timm is missing: install what is missing, or say with not_proven = " in found.reason


def test_a_reference_that_is_declared_not_to_be_everywhere_is_skipped_with_that_reason(tmp_path: Path) -> None:
    (item,) = items(tmp_path, "float32_logits", not_proven="its pictures need timm", expected_failures=EXPECTED)
    found = run_one(replaced(item, raising(NoReference("no timm"))))
    assert (found.status, found.reason) == ("expected skip", "its pictures need timm")
    assert run_one(replaced(item, raising(CheckFailure("off")))).status == "expected failure"


@pytest.mark.torch
def test_contracts_are_held_without_the_reference_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("ttpu_conformance.case.random_model", raising(NoReference("no timm")))
    made = cases(tmp_path, "llama", LLAMA, "doors")
    held = [item for item in checks_for(made, levels=["contract"]) if item.check.id != "raw_json"]
    assert {run_one(item).status for item in held} <= {"passed", "not applicable"}


def test_a_check_that_stumbles_fails_and_says_over_what(tmp_path: Path) -> None:
    (item,) = items(tmp_path, "logical_axes")
    result = run_one(replaced(item, raising(KeyError("x"))))
    assert result.status == "failed"
    assert result.reason.startswith("running the model that the plugin describes raised KeyError: 'x' (")


# -- the report


def result(status: Any, **values: Any) -> Result:
    return Result(
        **{
            "model_type": "llama",
            "variant": "base",
            "plugin": "ttpu-llama 0.1.0",
            "check": "float32_logits",
            "level": "numerics",
            "status": status,
            "reason": "",
            "error": 1e-6,
            "tolerance": 2e-5,
            "seconds": 0.5,
            "details": {},
        }
        | values
    )


def report(*results: Result) -> Report:
    return Report({"jax": "0.10.2", "libtpu": None}, "cpu", "full", results)


@pytest.mark.parametrize(
    ("statuses", "message", "color"),
    [
        (["passed", "passed"], "2 passed", "brightgreen"),
        (["passed", "not applicable"], "1 passed", "brightgreen"),
        (["passed", "expected failure", "expected failure"], "1 passed, 2 expected failures", "yellow"),
        (["passed", "skipped"], "1 passed, 1 skipped", "yellow"),
        (["passed", "failed"], "1 passed, 1 failed", "red"),
        (["skipped"], "0 passed, 1 skipped", "red"),
        (["passed", "expected skip", "expected skip"], "1 passed, 2 expected skips", "yellow"),
    ],
)
def test_the_badge_says_what_was_proven(statuses: list[str], message: str, color: str) -> None:
    badge = report(*map(result, statuses)).badge()
    assert badge == {"schemaVersion": 1, "label": "ttpu conformance", "message": message, "color": color}


def test_json_holds_every_result_and_is_read_back() -> None:
    made = report(result("passed"), result("failed", reason="off"))
    document = json.loads(json.dumps(made.to_json()))
    assert (document["suite"], document["passed"], document["plugins"]) == (
        "ttpu-conformance",
        False,
        ["ttpu-llama 0.1.0"],
    )
    assert set(document["results"][0]) == {
        "model_type", "variant", "plugin", "check", "level", "status", "reason", "error", "tolerance", "seconds",
        "details",
    }  # fmt: skip
    assert Report.joined([document]) == made


@pytest.mark.parametrize(
    ("statuses", "unproven"),
    [
        (["passed", "skipped"], False),
        (["skipped", "not applicable"], True),
        (["expected failure"], True),
        (["not applicable"], False),
        (["expected skip", "not applicable"], False),
    ],
)
def test_a_type_of_which_nothing_is_proven_fails_the_run(statuses: list[str], *, unproven: bool) -> None:
    made = report(result("passed"), *(result(status, model_type="qwen2") for status in statuses))
    assert (not made.passed, list(made.unproven)) == (unproven, ["qwen2"] if unproven else [])
    if unproven:
        assert "nothing was proven of 'qwen2'" in made.to_json()["unproven"]["qwen2"]


@pytest.mark.parametrize("error", [float("inf"), float("nan")])
def test_a_number_that_is_not_finite_is_null_in_json(error: float) -> None:
    made = report(result("failed", reason="not numbers", error=error, details={"sizes": [error, 1]}))
    (written,) = json.loads(json.dumps(made.to_json(), allow_nan=False))["results"]
    assert (written["error"], written["reason"], written["details"]) == (None, "not numbers", {"sizes": [None, 1]})


def test_markdown_has_a_row_for_each_type_and_program_and_every_reason() -> None:
    from ttpu_conformance.markdown import markdown

    about = {
        "slice": "v5e:2x4", "mesh": {"tensor": 8}, "task": "decode", "batch": 32, "context": 2048,
        "peak_bytes": 3 * 2**30, "hbm_bytes": 16 * 2**30, "collectives": {"all-reduce": {"count": 65, "bytes": 1}},
        "predicted_seconds": 0.004, "compile_seconds": 6.2,
    }  # fmt: skip
    text = markdown(
        report(
            result("passed"),
            result("expected failure", variant="sliding", check="bfloat16_logits", reason="rounds twice"),
            result("passed", variant="Llama-8B@v5e", check="compiled_decode", level="compile", details=about),
        )
    )
    assert "| `llama` | 2 | 1 | 1 | 1.0e-06 |" in text
    assert "| Llama-8B | decode 32 × 2048 | v5e:2x4 | tensor=8 | 3.00 of 16.00 | 65 all-reduce | 4.0 | 6 |" in text
    assert "- `llama` sliding, bfloat16_logits: rounds twice" in text


# -- the command


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["conformance", *arguments])


def test_the_command_refuses_what_makes_no_sense() -> None:
    assert invoke().exit_code == 2
    assert invoke("llama", "--all").exit_code == 2
    assert invoke("llama", "--only", "float31_logits").exit_code == 2
    assert invoke("llama", "--compile-for", "v9").exit_code == 2
    assert invoke("llama", "--only", "compiled_decode").exit_code == 2


@pytest.mark.parametrize("option", ["--json", "--badge", "--markdown"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, option: str) -> None:
    for path, why in ((tmp_path, "it is a directory"), (tmp_path / "none" / "a", "its folder does not exist")):
        finished = invoke("llama", option, str(path))
        assert finished.exit_code == 2
        assert f"{option} was given" in finished.stderr and why in " ".join(finished.stderr.split())


def test_types_that_have_not_begun_are_let_go_when_nobody_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import Future

    from ttpu_conformance import session
    from ttpu_conformance.case import Options

    ends: list[dict[str, bool]] = []

    class Pool:
        def __init__(self, *arguments: Any, **options: Any) -> None: ...

        def submit(self, *arguments: Any) -> Future[list[Result]]:
            done: Future[list[Result]] = Future()
            done.set_result([])
            return done

        def shutdown(self, **options: bool) -> None:
            ends.append(options)

    monkeypatch.setattr(session, "ProcessPoolExecutor", Pool)
    running = session.check_types(["llama", "qwen2"], session.Request("quick", (), (), (), Options()), jobs=2)
    next(running)
    running.close()
    assert ends == [{"cancel_futures": True}]


def test_a_missing_tpu_fails_if_it_is_required() -> None:
    finished = invoke("llama", "--require-tpu", "--only", "logical_axes")
    assert finished.exit_code == 2
    assert "there is no TPU here" in finished.stderr


@pytest.mark.torch
def test_a_missing_tpu_is_said_and_counts_as_not_proven(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "result.json"
    finished = invoke("llama", "--device", "tpu", "--only", "float32_logits", "--json", str(file))
    assert finished.exit_code == 1  # nothing was proven
    results = json.loads(file.read_text())["results"]
    assert {one["status"] for one in results} == {"skipped"}
    assert all("there is no TPU here" in one["reason"] for one in results)


@pytest.mark.torch
def test_the_command_writes_json_badge_and_markdown(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    files = [str(tmp_path / name) for name in ("a.json", "b.json", "c.md")]
    finished = invoke(
        "llama", "--only", "spec_is_frozen", "--json", files[0], "--badge", files[1], "--markdown", files[2]
    )
    assert finished.exit_code == 0, finished.output
    assert "spec_is_frozen" in finished.output and "passed" in finished.output
    document = json.loads(Path(files[0]).read_text())
    assert document["passed"] and document["versions"]["ttpu-core"]
    assert json.loads(Path(files[1]).read_text())["color"] == "brightgreen"
    assert Path(files[2]).read_text().startswith("# Conformance")


@pytest.mark.torch
def test_the_command_fails_where_a_promise_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from ttpu_conformance import check as registered

    all_checks()
    monkeypatch.setattr(registered, "_CHECKS", dict(registered._CHECKS))

    @check("contract", scope="type")
    def check_that_fails(case: Any) -> None:
        """It never holds."""
        raise CheckFailure("the moon is not made of cheese")

    finished = invoke("llama", "--only", "that_fails")
    assert finished.exit_code == 1
    assert "llama-base-that_fails: the moon is not made of cheese" in finished.output


@pytest.mark.torch
@pytest.mark.slow
def test_several_processes_give_the_results_of_one(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = []
    for jobs in ("1", "2"):
        file = tmp_path / f"{jobs}.json"
        finished = invoke("llama", "llama4_text", "--only", "spec_is_frozen", "--jobs", jobs, "--json", str(file))
        assert finished.exit_code == 0, finished.output
        found.append(
            [(one["model_type"], one["check"], one["status"]) for one in json.loads(file.read_text())["results"]]
        )
    assert found[0] == found[1] == [(kind, "spec_is_frozen", "passed") for kind in ("llama", "llama4_text")]


def test_a_run_that_is_not_over_has_not_passed() -> None:
    over = report(result("passed"))
    assert over.passed and over.badge()["color"] == "brightgreen"
    cut_off = replace(over, missing=("qwen3",))
    assert not cut_off.passed and cut_off.to_json()["missing"] == ["qwen3"]
    assert cut_off.badge() == {**over.badge(), "message": "1 passed, 1 not run", "color": "red"}
    assert Report.joined([cut_off.to_json()]).missing == ("qwen3",)


def checks_of(model_type: str, **chosen: Any) -> set[str]:
    """The ids `variant-check` that a test of this type would have."""
    mark = parametrize_with_checks(model_type, **chosen).mark
    return {parameter.id.removeprefix(f"{model_type}-") for parameter in mark.args[1]}


def test_the_standard_level_proves_a_base_wholly_and_logits_of_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    full = checks_of("gemma2")
    assert full == checks_of("gemma2", level="full")
    monkeypatch.setenv(LEVEL_VARIABLE, "standard")
    standard = checks_of("gemma2")
    assert standard < full
    assert {one for one in full if one.startswith("base-")} - standard == {"base-every_knob"}
    assert {"everything-float32_logits", "everything-checkpoint_round_trip", "everything-logical_axes"} <= standard
    left_out = {one.partition("-")[2] for one in full - standard}
    assert {"gradients", "greedy_tokens", "cached_decode", "sharded_fsdp"} <= left_out
    assert not {"float32_logits", "config_keys_are_read"} & left_out


def test_the_standard_level_of_relatives_is_the_quick_one_with_one_check_of_caches() -> None:
    quick, found = checks_of("gemma", level="quick"), checks_of("gemma", level="standard", relatives=True)
    assert quick - found == {"base-served_tokens", "base-cached_decode", "base-decode_compiles_once"} and found < quick
    assert checks_of("gemma", level="full", relatives=True) == checks_of("gemma", level="full")


def test_the_standard_level_leaves_a_wrapped_text_models_proofs_to_its_own_type() -> None:
    wrapper, text = (checks_of(name, level="standard") for name in ("gemma3", "gemma3_text"))
    assert {"base-gradients", "base-served_tokens", "base-cached_decode"} <= text - wrapper
    assert {"base-float32_logits", "base-checkpoint_round_trip", "base-greedy_tokens"} <= wrapper


def test_a_level_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "thorough")
    with pytest.raises(RequestError, match="'thorough', but the levels are quick, standard, full"):
        checks_of("llama")
