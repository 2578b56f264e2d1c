"""`ttpu plan` of a model type without a plugin: its weights and its cache on each mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from ttpu_core.cli.main import app

ROWS, CONTEXT, LAYERS, HEADS, FEATURES = 4, 32, 2, 4, 8
HIDDEN = HEADS * FEATURES


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt_neo")
    transformers.GPTNeoConfig(
        vocab_size=96, hidden_size=HIDDEN, num_layers=LAYERS, num_heads=HEADS, max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]],
    ).save_pretrained(folder)  # fmt: skip
    return folder / "config.json"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.mark.torch
def test_each_mesh_holds_its_share_of_weights_and_cache(config: Path) -> None:
    said = run(config, "--topology", "v5e:2x2", "--batch", ROWS, "--context", CONTEXT, "--json")
    assert said.exit_code == 0, said.output
    content = json.loads(said.stdout)
    assert (content["described"], content["nothing_fits"], content["batch"]) == (False, None, ROWS)
    asked = {"task": "inference", "topology": "v5e:2x2", "batch": ROWS, "context": CONTEXT, "quantization": None}
    assert content["purpose"] == "inference" and asked.items() <= content["request"].items()
    plans = {tuple(one["mesh"].items()): one for one in content["plans"]}
    assert set(plans) == {(("fsdp", 4),), (("fsdp", 2), ("tensor", 2)), (("tensor", 4),)}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(config.parent))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    vectors = (parameters - matrices) * 2
    masks = sum(buffer.nbytes for buffer in model.buffers())
    keys_and_values = 2 * LAYERS * ROWS * CONTEXT * HIDDEN * 2
    for mesh, plan in plans.items():
        # transformers has no plan for this type, so that all axes spread the matrices; masks are spread too.
        assert matrices * 2 / 4 + vectors <= plan["weight_bytes"] <= matrices * 2 / 4 + vectors + masks
        assert plan["cache_bytes"] == pytest.approx(keys_and_values / 4, abs=4 * LAYERS * 4), mesh
        assert plan["tokens_per_second"] == pytest.approx(ROWS / plan["decode_seconds"])
        assert plan["decode_seconds"] >= (parameters * 2 + plan["cache_bytes"]) / 819e9


@pytest.mark.torch
def test_without_a_slice_the_smallest_of_each_generation_is_shown(config: Path) -> None:
    plans = json.loads(run(config, "--context", CONTEXT, "--json").stdout)["plans"]
    assert [one["topology"] for one in plans] == ["v4:2x2x1", "v5e:1x1", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1"]
    said = run(config)
    assert "32 rows, 64 tokens of context" in said.output  # its positions, which are fewer than the usual 2,048
    assert "No plugin describes this model type" in said.output and "v5e:1x1" in said.output


@pytest.mark.torch
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--task", "training"], "--task training was given, but no plugin describes model type 'gpt_neo'"),
        (["--quantization", "w8a16"], "--quantization was given, but no plugin"),
        (["--save", "plan.json"], "--save was given, but no plugin"),
        (["--context", "100"], "a context of 100 tokens was asked for, but GPTNeoForCausalLM has 64 positions"),
    ],
)
def test_what_is_not_known_is_refused_in_a_sentence(config: Path, options: list[str], said: str) -> None:
    found = run(config, "--context", CONTEXT, *options)
    assert found.exit_code == 2
    assert said in " ".join(found.output.split())


@pytest.mark.torch
def test_a_model_that_fits_nowhere_ends_with_status_1(config: Path) -> None:
    asked = (config, "--topology", "v5e:1x1", "--batch", 2**27, "--context", CONTEXT)
    found = run(*asked)
    assert found.exit_code == 1
    assert "nothing fits: take more chips" in found.output
    nothing = json.loads(run(*asked, "--json").stdout)["nothing_fits"]
    assert nothing["reason"].startswith("take more chips") and nothing["remedies"] == []
    assert nothing["missing_bytes"] > 2 * LAYERS * 2**27 * CONTEXT * HIDDEN * 2 - 16 * 2**30
