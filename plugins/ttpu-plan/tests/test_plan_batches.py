"""The batch that the planner proposes: as many rows as fit, with the recomputation that is predicted to be fastest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from test_plan_memory import LLAMA, published
from typer.testing import CliRunner

from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.sharding.training_state import UpdateSettings
from ttpu_core.spec.training_flops import training_flops
from ttpu_plan.batches import best_batch
from ttpu_plan.planner import Request, plan_of_mesh, plans

TRAINING = Request("training")


@pytest.mark.parametrize(
    ("topology", "rows_each", "remat"), [("v5e:4x4", 1, "mlp"), ("v6e:4x4", 3, "mlp"), ("v5p:2x2x2", 12, "mlp")]
)
def test_the_batch_is_the_largest_that_fits_with_the_best_policy(topology: str, rows_each: int, remat: str) -> None:
    spec, slices = published(LLAMA), parse_topology(topology)
    found = best_batch(spec, slices, TRAINING)
    assert found is not None and found.plan.fits
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
    found = best_batch(spec, slices, request, ("attention",))
    assert found is not None
    assert found.plan.programs[0].workload.settings == UpdateSettings(
        "lion", gradient_accumulation_steps=4, remat="attention"
    )
    assert found.rows == 4 * 16 * found.rows_each


def test_where_not_one_row_fits_nothing_is_proposed() -> None:
    assert best_batch(published(LLAMA), parse_topology("v5e:2x2"), TRAINING) is None


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
