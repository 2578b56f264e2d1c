"""Everything but one package knows the runtime by its protocol only: another one, found by its entry point, is asked
for what its tensors need, and torch_xla is imported in its own package alone."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ttpu_torch_xla
from ttpu_core import ModelConfig, default_registry
from ttpu_core.errors import MissingDependencyError, PluginError, RequestError
from ttpu_core.plugin_records import TORCH_RUNTIMES
from ttpu_core.registry import Registry
from ttpu_torch_xla.attention import interface
from ttpu_torch_xla.checkpointing import checkpoint_or_recompute
from ttpu_torch_xla.patches import experts, linalg, packing, tracing
from ttpu_torch_xla.patches.patch import Patch
from ttpu_torch_xla.quantization.ops import quantized_linear
from ttpu_torch_xla.runtime import (
    Counters,
    JaxOperation,
    PartitionSpec,
    TorchRuntime,
    choice,
    current,
    device_type,
    is_device,
)
from ttpu_torch_xla.saving import save_pretrained
from ttpu_torch_xla.scanning import scan_layers

pytestmark = pytest.mark.torch

PACKAGE = Path(next(iter(ttpu_torch_xla.__path__)))
OWN = PACKAGE / "xla"


class EagerRuntime:
    """A runtime on torch's own CPU tensors that runs everything at once and whose barrier returns new tensors. It notes
    what it was asked for."""

    name: ClassVar[str] = "eager"
    device_type: ClassVar[str] = "cpu"
    packages: ClassVar[tuple[str, ...]] = ()
    patches: ClassVar[tuple[Patch, ...]] = ()

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.random_states: list[torch.Tensor] = []

    @classmethod
    def start(cls) -> EagerRuntime:
        return cls()

    def device(self) -> torch.device:
        return torch.device("cpu")

    def platform(self) -> str:
        return "cpu"

    def device_kind(self) -> str:
        return "cpu"

    def num_devices(self) -> int:
        return 1

    def chip(self) -> str | None:
        return None

    def num_slices(self) -> int:
        return 1

    def process(self) -> tuple[int, int]:
        return 0, 1

    def is_spmd(self) -> bool:
        return False

    def use_spmd(self) -> None: ...

    def mesh(self, sizes: Mapping[str, int], dcn: Mapping[str, int] | None = None) -> Any: ...

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(tensors)

    def shard(self, tensor: torch.Tensor, mesh: Any, partition_spec: PartitionSpec) -> None: ...

    def sharding_of(self, tensor: torch.Tensor) -> str:
        return ""

    def wrap_fsdp(self, layers: torch.nn.ModuleList, mesh: Any) -> None: ...

    def barrier(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.asked.append("barrier")
        return [one.detach().clone().requires_grad_(one.requires_grad) for one in tensors]

    def dot(
        self, x: torch.Tensor, w: torch.Tensor, contracted: tuple[Sequence[int], Sequence[int]], sums: torch.dtype
    ) -> torch.Tensor:
        self.asked.append(f"dot in {sums}")
        return torch.tensordot(x.to(sums), w.to(sums), dims=contracted)

    def jax_operation(self, name: str, hlo_module: bytes) -> JaxOperation:
        raise NotImplementedError

    def scan(
        self, step: Callable[..., Any], carry: list[torch.Tensor], stacked: dict[str, torch.Tensor], *, recompute: bool
    ) -> list[torch.Tensor]:
        self.asked.append("scan")
        for turn in range(len(next(iter(stacked.values())))):
            carry, _ = step(carry, {name: one[turn] for name, one in stacked.items()})
        return carry

    def differentiates(self) -> bool:
        return True

    def random_state(self) -> int:
        self.random_states.append(torch.get_rng_state())
        return len(self.random_states) - 1

    @contextmanager
    def use_random_state(self, state: int) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.random_states[state])
        yield
        torch.set_rng_state(before)

    def sync(self, wait: bool = False) -> None: ...

    def counters(self) -> Counters:
        return Counters()

    def reset_counters(self) -> None: ...


if TYPE_CHECKING:
    _fits: type[TorchRuntime] = EagerRuntime


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As if distributions with these runtimes, and no others, were installed."""
    common: dict[str, Any] = {"group": TORCH_RUNTIMES, "value": "theirs:Runtime", "dist": None}
    points = [SimpleNamespace(name=name, load=lambda: EagerRuntime, **common) for name in names]
    registry = Registry(points)  # type: ignore[arg-type]
    monkeypatch.setattr(choice, "default_registry", lambda: registry)
    choice.runtime_class.cache_clear()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[EagerRuntime]:
    """Another runtime than torch_xla, in place for a test."""
    install(monkeypatch, "eager")
    runtime = current()
    assert isinstance(runtime, EagerRuntime)
    runtime.asked.clear()
    yield runtime
    monkeypatch.undo()
    choice.runtime_class.cache_clear()


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    choice.runtime_class.cache_clear()


# Where torch_xla is known


def modules() -> list[Path]:
    return [file for file in PACKAGE.rglob("*.py") if OWN not in file.parents]


def imported(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_torch_xla_is_imported_in_its_own_package_only() -> None:
    found = {file.name: imported(ast.parse(file.read_text())) for file in modules()}
    assert {name for name, names in found.items() if any(one.split(".")[0] == "torch_xla" for one in names)} == set()


def test_only_programs_for_absent_tpus_know_the_package_of_torch_xla() -> None:
    outside = [file for file in modules() if file.parent.name != "aot"]
    found = {file.name: imported(ast.parse(file.read_text())) for file in outside}
    assert {
        name for name, names in found.items() if any(one.startswith("ttpu_torch_xla.xla") for one in names)
    } == set()


def test_no_module_compares_with_the_name_of_a_device() -> None:
    named = [
        f"{file.name}:{node.lineno}"
        for file in modules()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value == "xla"
    ]
    assert named == []


# How it is found


def test_torch_xla_is_found_by_its_entry_point() -> None:
    assert (choice.runtime_class().name, device_type()) == ("torch_xla", "xla")
    assert is_device(torch.zeros(1, device=current().device())) and not is_device(torch.zeros(1))


def test_several_runtimes_need_a_choice(monkeypatch: pytest.MonkeyPatch, restored: None) -> None:
    install(monkeypatch, "eager", "other")
    with pytest.raises(RequestError, match="installed are eager, other: set TTPU_TORCH_RUNTIME to one of them"):
        current()
    monkeypatch.setenv(choice.VARIABLE, "other")
    assert choice.runtime_class() is EagerRuntime


def test_a_runtime_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch, restored: None) -> None:
    def fail() -> None:
        raise OSError("no libtpu")

    point = SimpleNamespace(name="eager", group=TORCH_RUNTIMES, value="theirs:Runtime", dist=None, load=fail)
    registry = Registry([point])  # type: ignore[list-item]
    monkeypatch.setattr(choice, "default_registry", lambda: registry)
    choice.runtime_class.cache_clear()
    with pytest.raises(PluginError, match="importing 'theirs:Runtime' failed with OSError: no libtpu"):
        current()


def test_without_a_runtime_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, restored: None) -> None:
    install(monkeypatch)
    with pytest.raises(MissingDependencyError, match=r'`pip install "ttpu-core\[torch-xla\]"`'):
        current()


# What acts on the tensors of another runtime


def test_attention_of_its_tensors_is_computed_by_a_kernel(eager: EagerRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def attend(name: str, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        called.append(name)
        return query.transpose(1, 2)

    monkeypatch.setattr(interface, "attend", attend)
    monkeypatch.setattr(interface, "objection", lambda *_: None)
    x = torch.zeros(1, 2, 4, 8)
    interface.xla_flash_attention(SimpleNamespace(is_causal=True), x, x, x, None)
    assert called == ["xla_flash_attention"]


def test_its_layers_are_computed_again_from_what_the_barrier_returns(eager: EagerRuntime) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x.exp() * x.sin(), 0.5).tanh()

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("torch's own checkpointing was asked")

    gradients = []
    for run in (lambda x: checkpoint_or_recompute(never)(layer, x), layer):
        torch.manual_seed(0)
        x = torch.linspace(0, 1, 64, requires_grad=True)
        run(x).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
    assert eager.asked == ["barrier"]


def test_its_quantized_products_are_the_runtimes(eager: EagerRuntime) -> None:
    x, weight, scale = torch.randn(3, 8), torch.randint(-127, 128, (5, 8), dtype=torch.int8), torch.rand(5)
    found = quantized_linear(x, weight, scale)
    torch.testing.assert_close(found, x @ (weight * scale[:, None]).mT, rtol=1e-5, atol=1e-4)
    quantized_linear(x, weight, scale, quantize_activation=True)
    assert eager.asked == ["dot in torch.float32", "dot in torch.int32"]


def test_its_models_are_fetched_before_they_are_saved(eager: EagerRuntime) -> None:
    given: dict[str, Any] = {}
    save = save_pretrained(lambda self, folder, state_dict=None: given.update(state_dict or {}))
    model: Any = torch.nn.Linear(2, 2)
    model.device = torch.device("cpu")
    save(model, "folder")
    assert given.keys() == {"weight", "bias"}


def test_patches_act_on_its_tensors(eager: EagerRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the stock function was asked")

    assert tracing.is_tracing(lambda tensor: False)(torch.zeros(1))
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    found = packing.find_packed_sequence_indices(never)(positions)
    assert found is not None and found.tolist() == [[0, 0, 1, 1, 1]]
    matrix, right = torch.eye(3) * 2, torch.ones(3, 1)
    assert linalg.solve_triangular(never)(matrix, right, upper=True).tolist() == [[0.5]] * 3
    monkeypatch.setattr(experts, "all_experts", lambda *_: torch.ones(1))
    made = SimpleNamespace(_is_expert_parallel=False, num_experts=2)
    chosen = torch.zeros(4, 2, dtype=torch.long)
    assert experts.grouped_experts(never)(made, torch.zeros(4, 8), chosen, torch.zeros(4, 2)).tolist() == [1]


def test_its_loop_runs_the_layers(eager: EagerRuntime) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    looped = copy.deepcopy(model)
    scan_layers(looped, default_registry().architecture(ModelConfig.from_dict(config.to_dict())))
    ids = torch.arange(1, 9)[None]
    torch.testing.assert_close(looped(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert eager.asked == ["scan"]
