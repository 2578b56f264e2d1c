"""The inspector finds what makes a stock model slow on a lazy runtime, and says which patch removes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, MixtralConfig, Qwen3NextConfig

from ttpu_core import ModelConfig, default_registry
from ttpu_core.cli.main import main
from ttpu_torch_xla.adapter import current
from ttpu_torch_xla.inspector.observe import Finding, observe
from ttpu_torch_xla.inspector.shrink import small_config

pytestmark = pytest.mark.torch


def test_a_pass_is_found_out_that_reads_from_the_device_and_compiles_again() -> None:
    device = current().device()
    table = torch.arange(12.0).to(device)

    def run(step: int) -> None:
        if bool(table.sum() > 0):  # the host waits here
            (table[: 3 + step] * 2).cpu()

    found = observe(current(), run)
    kinds = {finding.kind for finding in found}
    reads = [finding for finding in found if finding.what == "aten::_local_scalar_dense"]
    assert kinds >= {"graph break", "recompilation"}
    assert any("test_xla_inspect.py" in finding.where and finding.where.endswith("run") for finding in reads)


def test_a_pass_that_only_computes_is_not_found_at_fault() -> None:
    device = current().device()
    x = torch.ones(4, 4).to(device)
    assert not observe(current(), lambda _: (x @ x).relu())


def test_what_does_not_run_is_a_finding_with_its_place() -> None:
    def run(_: int) -> None:
        raise NotImplementedError("no such operation")

    ((found, _),) = observe(current(), run).items()
    assert (found.kind, found.what) == ("error", "NotImplementedError: no such operation")
    assert isinstance(found, Finding)
    assert "test_xla_inspect.py" in found.where


def kinds_of(architecture: Any) -> set[Any]:
    """The kinds of layers that a model has."""
    return {(type(layer.mixer), layer.mixer.kind, type(layer.mlp)) for layer in architecture.spec.layers}


@pytest.mark.parametrize(
    ("config", "layers"),
    [(LlamaConfig(), 1), (MixtralConfig(), 1), (Gemma3TextConfig(), 6), (Qwen3NextConfig(), 4)],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_published_config_becomes_a_model_of_a_few_narrow_layers_of_every_kind(config: Any, layers: int) -> None:
    described = default_registry().architecture(ModelConfig.from_dict(config.to_dict()), [])
    small = small_config(config, described)
    assert small.num_hidden_layers == layers
    again = default_registry().architecture(ModelConfig.from_dict(small.to_dict()), [])
    assert kinds_of(again) == kinds_of(described)
    assert again.spec.num_parameters < 1_000_000


class CommandLine:
    """`ttpu` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of a command."""
        self.monkeypatch.setattr("sys.argv", ["ttpu", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = self.capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err


@pytest.fixture
def ttpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line."""
    return CommandLine(monkeypatch, capsys)


def inspected(folder: Path, config: Any, ttpu: CommandLine) -> dict[str, Any]:
    """What `ttpu inspect --json` prints for a config without weights."""
    config.save_pretrained(folder)
    status, out, _ = ttpu("inspect", str(folder / "config.json"), "--json", "--quiet")
    assert status == 0
    said: dict[str, Any] = json.loads(out)
    return said


@pytest.mark.slow
def test_a_llama_loses_its_recompilations_to_the_mask_patch_and_its_host_reads_to_generation(
    tmp_path: Path, ttpu: CommandLine
) -> None:
    said = inspected(tmp_path, LlamaConfig(), ttpu)
    removed = {(one["kind"], one["what"]): one["removed_by"] for one in said["found"]}
    assert removed["fallback", "aten::_local_scalar_dense"] == "generation"
    assert removed["fallback", "aten::isin.Tensor_Tensor"] == "generation"
    assert "recompilation" in {kind for kind, _ in removed}
    assert said["left"] == []


@pytest.mark.slow
def test_experts_that_do_not_run_in_the_stock_model_run_with_the_patch(
    tmp_path: Path, ttpu: CommandLine
) -> None:
    said = inspected(tmp_path, MixtralConfig(), ttpu)
    errors = [one for one in said["found"] if one["kind"] == "error"]
    assert {one["removed_by"] for one in errors} == {"experts of fixed shape"}
    assert all("moe.py" in one["where"] for one in errors)
    assert said["left"] == []


def test_only_the_backend_that_runs_stock_models_is_inspected(tmp_path: Path, ttpu: CommandLine) -> None:
    status, _, err = ttpu("inspect", str(tmp_path), "--backend", "jax")
    assert status == 2
    assert "only torch_xla" in err
