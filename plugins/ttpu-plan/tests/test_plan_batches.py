"""The batch that the planner proposes: as many rows as fit, with the recomputation that is predicted to be fastest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from test_plan_memory import LLAMA, published
from typer.testing import CliRunner

from ttpu_core.sharding.hardware import GIB, parse_topology
from ttpu_core.sharding.training_state import UpdateSettings
from ttpu_core.sharding.verification import Verification
from ttpu_core.spec.training_flops import training_flops
from ttpu_plan.batches import best_batches
from ttpu_plan.plan import Plan
from ttpu_plan.planner import Request, plan_of_mesh, plans
from ttpu_plan.proposal import in_words, proposals

TRAINING = Request("training")


@pytest.mark.parametrize(
    ("topology", "rows_each", "remat"), [("v5e:4x4", 1, "mlp"), ("v6e:4x4", 3, "mlp"), ("v5p:2x2x2", 12, "mlp")]
)
def test_the_batch_is_the_largest_that_fits_with_the_best_policy(topology: str, rows_each: int, remat: str) -> None:
    spec, slices = published(LLAMA), parse_topology(topology)
    found, *others = best_batches(spec, slices, TRAINING)
    assert found.plan.fits and len({one.remat for one in (found, *others)}) == 1 + len(others)
    assert all(found.plan.tokens_per_second >= one.plan.tokens_per_second for one in others)
    assert (found.rows_each, found.remat, str(found.plan.parallelism)) == (
        rows_each, remat, f"fsdp={slices.num_devices}",
    )  # fmt: skip
    assert found.rows == rows_each * slices.num_devices
    one_more = replace(TRAINING, batch=(rows_each + 1) * slices.num_devices, update=UpdateSettings(remat=remat))
    assert not plan_of_mesh(spec, slices, dict(found.plan.mesh), one_more).fits
    usual = next(one for one in plans(spec, slices, TRAINING) if one.mesh == found.plan.mesh)
    assert found.plan.tokens_per_second > usual.tokens_per_second
    rate = found.plan.tokens_per_second * training_flops(spec, 2048)
    assert found.mfu(spec) == pytest.approx(rate / slices.num_devices / slices.chip.bf16_flops)


def test_parts_and_a_given_policy_are_kept() -> None:
    spec, slices = published(LLAMA), parse_topology("v5e:4x4")
    request = replace(TRAINING, update=UpdateSettings("lion", gradient_accumulation_steps=4))
    (found,) = best_batches(spec, slices, request, ("attention",))
    assert found.plan.programs[0].workload.settings == UpdateSettings(
        "lion", gradient_accumulation_steps=4, remat="attention"
    )
    assert found.rows == 4 * 16 * found.rows_each


def test_what_is_compiled_fastest_is_proposed_and_what_is_refused_is_not() -> None:
    spec, asked = published(LLAMA), []
    compiled_ms = {"mlp": 1000.0, "dots": None, "attention": 2500.0, "gate": 1.0}

    def verify(plan: Plan) -> tuple[Verification, ...]:
        remat = plan.programs[0].workload.settings.remat
        asked.append(remat)
        took = compiled_ms[remat]
        if took is None:
            return (Verification("train", None, 0.0, (), 1.0, "libtpu", refused="too large"),)
        return (Verification("train", GIB, took / 1e3, (), 1.0, "libtpu"),)

    found, other, refused = proposals(spec, "v5e:4x4", TRAINING, None, 3, verify)
    assert asked == ["mlp", "dots", "attention"] == [other.batch.remat, refused.batch.remat, found.batch.remat]
    assert (found.batch.rows, found.seconds, other.seconds) == (48, 2.5, 1.0)
    flops = found.batch.rows * 2048 * training_flops(spec, 2048)
    assert found.mfu(spec) == pytest.approx(flops / 2.5 / 16 / 197e12)
    assert found.words(spec).endswith(f"Compiled: 1.0 GiB, 2,500 ms, MFU {found.mfu(spec):.0%}.")
    assert in_words([found, other, refused], spec) == found.words(spec)
    assert found.as_json(spec)["compiled"] == {"peak_bytes": GIB, "seconds": 2.5, "mfu": found.mfu(spec)}
    assert refused.as_json(spec)["compiled"] == {"refused": "too large"}
    assert "refuses the best predictions (16 rows with dots). Take more" in in_words([refused], spec)
    predicted = proposals(spec, "v5e:4x4", TRAINING, "auto", 3, None)
    assert predicted[0].batch.remat == "mlp" and "compiled" not in predicted[0].as_json(spec)


def test_words_that_keep_the_same_of_a_mixture_are_one_batch() -> None:
    found = best_batches(published("ttpu_mistral/configs/mixtral-8x7b.json"), parse_topology("v5p:4x4x4"), TRAINING)
    remats = [one.remat for one in found]
    assert "attention" in remats and not {"gate", "mlp"} & set(remats)


def test_where_not_one_row_fits_nothing_is_proposed() -> None:
    assert best_batches(published(LLAMA), parse_topology("v5e:2x2"), TRAINING) == []


def test_the_command_prints_it() -> None:
    from ttpu_core.cli.main import app

    def run(*more: str) -> str:
        package, _, rest = LLAMA.partition("/")
        from importlib.resources import files

        done = CliRunner().invoke(app, ["plan", str(files(package) / rest), "--task", "training", *more])
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    shown = run("--topology", "v5e:4x4", "--best", "1")
    assert "Best batch for v5e:4x4, fsdp=16: 16 rows (--batch 16 --remat mlp), 1 on each device" in shown
    assert "MFU" in shown
    content = json.loads(run("--topology", "v5e:4x4", "--best", "1", "--json", "--remat", "full"))
    assert content["best_batch"]["remat"] == "full" and content["best_batch"]["rows_each"] > 2
    assert "best_batch" not in json.loads(run("--topology", "v5e:4x4", "--best", "1", "--json", "--batch", "16"))
