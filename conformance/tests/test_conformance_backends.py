"""The kit checks any backend: it imports none of them, finds one by its entry point, and says of a check that a backend
cannot answer why it does not apply."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from broken import LLAMA, cases

from ttpu_conformance import model_under_test
from ttpu_conformance.case import Case, Options
from ttpu_conformance.diagnosis import diagnose
from ttpu_conformance.model_under_test import BackendUnderTest, ModelUnderTest, backend_under_test
from ttpu_conformance.report import make_report
from ttpu_conformance.runner import run, run_one
from ttpu_conformance.selection import checks_for
from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.errors import MissingDependencyError, UnsupportedError
from ttpu_core.plugin_records import MODELS_UNDER_TEST, installed_entry_points
from ttpu_core.registry import Registry
from ttpu_core.spec import ArchitectureSpec

WITHOUT_BACKENDS = """
import sys
for name in ("jax", "jaxlib", "flax", "torch_xla", "ttpu_jax", "ttpu_torch_xla"):
    sys.modules[name] = None
from importlib import import_module
from pathlib import Path
import ttpu_conformance
folder = Path(ttpu_conformance.__file__).parent
for file in sorted(folder.rglob("*.py")):
    parts = file.relative_to(folder.parent).with_suffix("").parts
    if parts[-1] != "__init__":
        import_module(".".join(parts))
from ttpu_conformance.case import cases_of
from ttpu_conformance.runner import run_one
from ttpu_conformance.selection import checks_for
print({run_one(item).status for item in checks_for(cases_of("llama"), levels=["contract"], only=["logical_axes"])})
"""


def test_the_kit_needs_no_backend_to_be_imported_and_to_check_contracts() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_BACKENDS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "{'passed'}"


def test_installed_backends_are_found_by_their_entry_points() -> None:
    assert backend_under_test("jax").name == backend_under_test().name == "jax"
    with pytest.raises(
        MissingDependencyError, match="on the backend 'jacks' was asked for, but the installed"
    ):
        backend_under_test("jacks")


class StockModel:
    """transformers' model of a checkpoint on torch's CPU: a backend that can do little, but that rightly."""

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            checkpoint.path, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()

    def logits(self, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        import torch

        given: dict[str, Any] = {"input_ids": torch.tensor(ids)}
        if mask is not None:
            given["attention_mask"] = torch.tensor(mask)
        with torch.no_grad():
            return np.asarray(self.model(**given).logits.float().numpy())

    def logits_in_parts(self, ids: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        import torch

        cache, parts, begin = None, [], 0
        for length in lengths:
            with torch.no_grad():
                output = self.model(torch.tensor(ids[:, begin : begin + length]), past_key_values=cache, use_cache=True)
            cache, begin = output.past_key_values, begin + length
            parts.append(output.logits.float().numpy())
        return np.concatenate(parts, axis=1)

    def greedy_tokens(self, ids: np.ndarray, mask: np.ndarray, new_tokens: int) -> np.ndarray:
        import torch

        prompt, seen = torch.tensor(ids), torch.tensor(mask)
        whole = self.model.generate(
            prompt, attention_mask=seen, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return np.asarray(whole[:, ids.shape[1] :].numpy())

    def loss_and_gradients(self, ids: np.ndarray) -> tuple[float, Mapping[str, np.ndarray]]:
        import torch

        tokens = torch.tensor(ids)
        loss = self.model(tokens, labels=tokens).loss
        loss.backward()
        named = {name: one.grad.numpy() for name, one in self.model.named_parameters()}
        return float(loss.detach()), named

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


class StockBackend:
    """A backend that nobody in this repository knows."""

    name = "stock"
    distributions: tuple[str, ...] = ("torch",)

    def prepare(self, device: Any, virtual_devices: int) -> None: ...

    def missing_device(self, device: Any) -> str | None:
        return None if device == "cpu" else "there is no TPU here: this is torch on a CPU"

    def missing_devices(self, count: int) -> str | None:
        return "torch on a CPU is one device"

    def device_kinds(self) -> tuple[str, ...]:
        return ("cpu",)

    def load(
        self, architecture: Architecture, checkpoint: Checkpoint, *, dtype: str, mesh: str | None,
        attn_implementation: str,
    ) -> StockModel:  # fmt: skip
        return StockModel(checkpoint, dtype)

    def refuse_mesh(self, spec: ArchitectureSpec, mesh: str) -> None:
        raise UnsupportedError("torch on a CPU is one device")

    def forget_programs(self) -> None: ...


if TYPE_CHECKING:
    _backend: type[BackendUnderTest] = StockBackend
    _model: type[ModelUnderTest] = StockModel


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """A llama on that backend, which is found as an installed one would be."""
    pytest.importorskip("torch")

    point: Any = SimpleNamespace(
        name="stock", group=MODELS_UNDER_TEST, value="theirs:Backend", dist=None, load=lambda: StockBackend
    )
    others = [one for one in installed_entry_points() if one.group != MODELS_UNDER_TEST]
    registry = Registry([*others, point])
    monkeypatch.setattr(model_under_test, "default_registry", lambda: registry)
    backend_under_test.cache_clear()
    (case,) = cases(tmp_path, "llama", LLAMA, "stock")
    case.options = Options(backend="stock")
    yield case
    backend_under_test.cache_clear()


@pytest.mark.torch
def test_a_backend_of_a_third_party_is_checked_and_told_what_does_not_apply(stock: Case) -> None:
    results = list(run(checks_for([stock])))
    failed = {result.check: result.reason for result in results if result.status == "failed"}
    assert list(failed) == ["raw_json"]  # this plugin has no defaults for keys that a config.json lacks
    reasons = {result.check: result.reason for result in results if result.status == "not applicable"}
    assert reasons["served_tokens"] == "this backend serves nothing: the engine has no runner for it"
    assert reasons["stacked_layers"] == "this backend runs its layers one by one"
    assert "decode_compiles_once" in reasons and "forward_is_one_program" in reasons
    skipped = {result.check for result in results if result.status == "skipped"}
    assert skipped == {"sharded_fsdp", "sharded_tensor"}
    counts = Counter(result.status for result in results)
    assert counts["passed"] >= 18
    report = make_report(results, "full", stock.backend).to_json()
    assert (report["backend"], report["device"]) == ("stock", "cpu") and "torch" in report["versions"]


@pytest.mark.torch
def test_what_differs_on_a_backend_that_is_not_built_from_the_description_is_told_without_a_hook(
    stock: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = StockModel.logits
    monkeypatch.setattr(StockModel, "logits", lambda self, ids, mask=None: right(self, ids, mask) * 1.1)
    (item,) = checks_for([stock], only=["float32_logits"])
    result = run_one(item)
    assert result.status == "failed"
    assert "the logits differ from transformers'" in result.reason and "ttpu_" not in result.reason


def test_a_diagnosis_that_fails_is_logged_and_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    broken: Any = SimpleNamespace(name="llama-base")  # of which nothing can be asked
    with caplog.at_level("WARNING", logger="ttpu.conformance"):
        assert diagnose(broken) == ""
    (record,) = caplog.records
    assert "no diagnosis of llama-base" in record.message and record.exc_info is not None
