"""Programs of a model type without a plugin are compiled for a TPU slice by `ttpu compile-report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from ttpu_core.cli.main import app

ROWS, CONTEXT, LAYERS, HEADS, FEATURES = 4, 32, 2, 4, 64


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("biogpt")
    transformers.BioGptConfig(
        vocab_size=96, hidden_size=HEADS * FEATURES, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, max_position_embeddings=64,
    ).save_pretrained(folder)  # fmt: skip
    return folder / "config.json"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["compile-report", *map(str, arguments)])


@pytest.mark.tpu_compile
def test_a_decode_step_and_a_prefill_are_compiled_on_a_mesh(config: Path) -> None:
    said = run(
        config, "--topology", "v5e:2x2", "--mesh", "data=2,tensor=2", "--batch", ROWS, "--context", CONTEXT,
        "--prefill", CONTEXT, "--json",
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    content = json.loads(said.stdout)
    assert content["described"] is False
    decode, prefill = content["programs"]
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(config.parent))
    assert decode["num_parameters"] == model.num_parameters()
    cache = 2 * LAYERS * ROWS * CONTEXT * HEADS * FEATURES * 2  # keys and values in bfloat16
    assert decode["cache_bytes"] == pytest.approx(cache / 4, abs=64)  # rows over data, heads over tensor
    assert decode["cache_in_place"] is True
    assert (decode["tokens"], prefill["tokens"], prefill["batch"]) == (1, CONTEXT, 1)
    matrices = LAYERS * (4 * 256 * 256 + 2 * 256 * 512) + 96 * 256
    for program in (decode, prefill):
        assert 0 < program["roofline_seconds"] < program["predicted_seconds"]
        assert {one["op"] for one in program["collectives"]} >= {"all-reduce"}
        held = program["argument_bytes"] - program["cache_bytes"]
        assert matrices < held < 2 * matrices, "half of the matrices in bfloat16, and tables of positions"


@pytest.mark.tpu_compile
def test_what_reads_texts_of_an_encoder_is_compiled(tmp_path: Path) -> None:
    transformers.BertConfig(
        vocab_size=96, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=HEADS,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path)  # fmt: skip
    config = tmp_path / "config.json"
    said = run(config, "--topology", "v5e:1x1", "--task", "prefill", "--prefill", 64, "--json")
    assert said.exit_code == 0, said.output
    (program,) = json.loads(said.stdout)["programs"]
    assert program["tokens"] == 64 and program["cache_bytes"] == 0 < program["roofline_seconds"]
    for options, refused in (
        (["--task", "decode"], "a decode step of a model of type 'bert' was to be compiled, but it is a text encoder"),
        (["--task", "prefill", "--prefill", "65"], "a context of 65 tokens was asked for, but BertModel has 64"),
    ):
        found = run(config, "--topology", "v5e:1x1", *options)
        assert found.exit_code != 0
        assert refused in " ".join(str(found.exception).split()) + " ".join(found.output.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layers", "scan"], "--layers scan was asked for, but no plugin describes model type 'biogpt'"),
        (["--quantization", "w8a16"], "--quantization w8a16 was asked for, but no plugin"),
        (["--experts", "few"], "--experts few was asked for, but no plugin"),
        (["--sharding-rules", "mlp=none"], "--sharding-rules mlp=none was asked for, but no plugin"),
        (["--task", "train"], "a training step of a model of type 'biogpt' was to be compiled, but no plugin"),
        (["--context", "65"], "a context of 65 tokens was asked for, but BioGptForCausalLM has 64 positions"),
        (["--mesh", "sequence=4"], "the mesh has the axis 'sequence', but a model without a plugin is sharded along"),
    ],
)
@pytest.mark.tpu_compile
def test_what_is_not_compiled_is_refused_in_a_sentence(config: Path, options: list[str], said: str) -> None:
    found = run(config, "--topology", "v5e:2x2", "--task", "decode", *options)
    assert found.exit_code != 0
    assert said in " ".join(str(found.exception).split()) + " ".join(found.output.split())
