"""The inspector finds what makes a stock model slow on a lazy runtime, and says which patch removes it."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Gemma3nTextConfig, Gemma3TextConfig, LlamaConfig, MixtralConfig, Qwen3NextConfig

from ttpu_core import ModelConfig, default_registry
from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import open_checkpoint
from ttpu_core.cli.main import main
from ttpu_core.errors import CheckpointError, UnsupportedError
from ttpu_core.plugin_records import ARCHITECTURES
from ttpu_core.spec import AttentionSpec
from ttpu_torch_xla.inspector.inspect import Observed, build, inspect_model
from ttpu_torch_xla.inspector.observe import Finding, observe
from ttpu_torch_xla.inspector.shrink import small_config
from ttpu_torch_xla.load import model_class
from ttpu_torch_xla.patches.patch import Patch
from ttpu_torch_xla.runtime import current

pytestmark = pytest.mark.torch

TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def test_a_pass_is_found_out_that_reads_from_the_device_and_compiles_again() -> None:
    device = current().device()
    table = torch.arange(12.0).to(device)

    def run(step: int) -> None:
        if bool(table.sum() > 0):  # the host waits here
            (table[: 3 + step] * 2).cpu()

    found = observe(current(), run)
    kinds = {finding.kind for finding in found}
    assert all(finding.what.endswith("with the same shapes") for finding in found if finding.kind == "recompilation")
    names = [finding.what for finding in found]
    assert "aten::_local_scalar_dense" in names
    assert not any(finding.kind == "fallback" and names.count(finding.what) > 1 for finding in found)
    reads = [finding for finding in found if finding.what == "aten::_local_scalar_dense"]
    assert kinds >= {"graph break", "recompilation"}
    assert any("test_xla_inspect.py" in finding.where and finding.where.endswith("run") for finding in reads)


def test_a_pass_that_only_computes_is_not_found_at_fault() -> None:
    device = current().device()
    x = torch.ones(4, 4).to(device)

    def run(_: int) -> None:
        (x @ x).relu()

    assert not observe(current(), run)


def test_what_does_not_run_is_a_finding_with_its_place() -> None:
    def run(_: int) -> None:
        raise NotImplementedError("no such operation")

    ((found, _),) = observe(current(), run).items()
    assert (found.kind, found.what) == ("error", "NotImplementedError: no such operation")
    assert isinstance(found, Finding)
    assert "test_xla_inspect.py" in found.where


def kinds_of(architecture: Architecture) -> set[Any]:
    """The kinds of layers that a model has: all that decides which code runs, and no sizes."""
    kinds: set[Any] = set()
    for layer in architecture.spec.layers:
        mixer, mlp = layer.mixer, layer.mlp
        kind: tuple[Any, ...] = (type(mixer), mixer.kind, type(mlp), getattr(mlp, "sparsity", None))
        if isinstance(mixer, AttentionSpec):
            rope = mixer.rope and mixer.rope.type
            kind += (mixer.window is None, mixer.chunk is None, mixer.kv_from_layer is None, rope, mixer.value_is_key)
        kinds.add(kind)
    return kinds


def described(config: Any) -> Architecture:
    """The architecture of a transformers config."""
    return default_registry().architecture(ModelConfig.from_dict(config.to_dict()), [])


def published(name: str) -> Any:
    """The transformers config of one of the files that the family plugins describe."""
    package, _, file = name.partition("/")
    with resources.as_file(resources.files(package) / "configs" / f"{file}.json") as path:
        return transformers.AutoConfig.from_pretrained(str(path))


FAMILIES = ("ttpu-gemma", "ttpu-llama", "ttpu-mistral", "ttpu-qwen")
TYPES = sorted(
    record.name
    for record in default_registry().plugins(ARCHITECTURES)
    if record.distribution in FAMILIES and record.name != "mistral4"  # of which transformers has no text model
)
INCOMPLETE = {"ministral": {"head_dim": 128}}
"""What some config classes have no default for."""

SHARED = ("ttpu_gemma/gemma-3n-E2B-text", "ttpu_gemma/gemma-4-E4B", "ttpu_gemma/gemma-4-26B-A4B-text")
"""Published models whose last layers read others' keys and values, or whose layers differ in their heads."""


def small_model_runs(small: Any) -> None:
    """On the host: transformers builds it, and generates with it."""
    model = build(small, shrunk=True)
    ids = torch.randint(1, small.vocab_size, (2, 24))
    answer = model.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=[255], pad_token_id=0)
    assert answer.shape == (2, 26)


def test_the_model_types_of_all_families_are_made_small() -> None:
    assert set(TYPES) >= {"llama", "llama4", "mixtral", "ministral", "qwen3_next", "gemma3n", "gemma4"}


@pytest.mark.parametrize("kind", TYPES)
def test_a_model_type_becomes_a_few_narrow_layers_of_every_kind_which_run(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **INCOMPLETE.get(kind, {}))
    small = small_config(config.get_text_config(), described(config))
    again = described(small)
    assert small.num_hidden_layers <= 8
    assert kinds_of(again) == kinds_of(described(config))
    assert again.spec.num_parameters < 1_000_000
    small_model_runs(small)


@pytest.mark.parametrize("kind", ["bloom", "gpt2", "gpt_bigcode", "gptj", "mpt"])
def test_sizes_with_names_of_their_own_are_made_small_too(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind)
    small = small_config(config, described(config))
    assert (small.num_hidden_layers, small.num_attention_heads, small.hidden_size) == (1, 4, 64)
    assert set(small.to_dict()) == set(config.to_dict())
    small_model_runs(small)


@pytest.mark.parametrize("name", SHARED)
def test_layers_that_read_others_keys_keep_one_of_their_kind_to_read_from(name: str) -> None:
    config = published(name)
    small = small_config(config.get_text_config(), described(config))
    again = described(small)
    assert kinds_of(again) == kinds_of(described(config))
    assert again.spec.num_parameters < 1_000_000
    small_model_runs(small)


def test_a_layers_own_head_size_stays_larger_than_that_of_the_others() -> None:
    config = published("ttpu_gemma/gemma-4-E4B").get_text_config()
    small = small_config(config, described(config))
    sizes = {kind: layer.head_dim for kind, layer in zip(small.layer_types, small.per_layer_config, strict=True)}
    assert sizes == {"sliding_attention": 16, "full_attention": 32}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (LlamaConfig(), 1),
        (MixtralConfig(), 1),
        (Gemma3TextConfig(), 6),
        (Qwen3NextConfig(), 4),
        (Gemma3nTextConfig(), 6),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_no_more_layers_are_kept_than_it_takes_to_have_each_kind(config: Any, layers: int) -> None:
    assert small_config(config, described(config)).num_hidden_layers == layers


def test_a_small_config_that_does_not_fit_is_called_ours_and_not_transformers_fault() -> None:
    with pytest.raises(UnsupportedError, match=r"that was made of it .*--as-it-is") as refused:
        build(LlamaConfig(**TINY, pad_token_id=1000), shrunk=True)
    assert "jax" not in str(refused.value)


@pytest.mark.parametrize(("kind", "remedy"), [("mistral4", "use backend='jax'"), ("t5", "take another model")])
def test_a_model_type_without_a_text_model_is_for_the_other_backend_if_that_has_it(kind: str, remedy: str) -> None:
    with pytest.raises(UnsupportedError, match=f"no causal language model of this type: .*, or {remedy}"):
        build(transformers.AutoConfig.for_model(kind), shrunk=True)


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
def test_a_llama_loses_reads_of_its_mask_to_the_mask_patch_and_its_recompilations_to_generation(
    tmp_path: Path, ttpu: CommandLine
) -> None:
    said = inspected(tmp_path, LlamaConfig(), ttpu)
    removed = {(one["during"], one["kind"], one["what"]): one["removed_by"] for one in said["found"]}
    assert removed["forward", "graph break", "aten::_local_scalar_dense"] == "masks without reading them"
    assert removed["generate", "fallback", "aten::isin.Tensor_Tensor"] == "generation"
    assert {remover for (_, kind, _), remover in removed.items() if kind == "recompilation"} == {"generation"}
    assert said["left"] == []


def test_a_stage_that_changes_nothing_removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "transformers.masking_utils:is_tracing"
    nothing = [Patch(name, target, target, "no reason") for name in ("nothing", "nothing again", "nothing more")]
    monkeypatch.setattr("ttpu_torch_xla.inspector.inspect.patches_for", lambda *_: tuple(nothing))
    config, told = LlamaConfig(**TINY), list[tuple[str, int]]()
    architecture = described(config)
    found = inspect_model(
        build(config, shrunk=False), architecture, current(), lambda stage, settled: told.append((stage, settled))
    )
    removers = {one.finding.kind: one.removed_by for one in found if one.during == "generate"}
    assert "nothing" not in {one.removed_by for one in found}
    assert removers["recompilation"] == "generation"
    again = [one.finding.what for one in found if one.finding.kind == "recompilation" and one.during == "generate"]
    assert again == ["programs compiled when it runs again for an answer of one token more, a new shape"]
    # Both ends of the stretch of patches find the same, so that what is between is not run.
    assert told == [("stock", 0), ("nothing more", 1), ("generation", 4)]


def test_an_error_that_quotes_shapes_is_the_same_error_for_other_shapes() -> None:
    assert Finding("error", "ValueError: [2, 24]").key == Finding("error", "ValueError: [3, 24]").key
    assert Finding("fallback", "aten::_unique").key != Finding("fallback", "aten::_unique2").key


@pytest.mark.slow
def test_experts_that_do_not_run_in_the_stock_model_run_with_the_patch(tmp_path: Path, ttpu: CommandLine) -> None:
    said = inspected(tmp_path, MixtralConfig(), ttpu)
    errors = [one for one in said["found"] if one["kind"] == "error"]
    assert {one["removed_by"] for one in errors} == {"experts of fixed shape"}
    assert all("moe.py" in one["where"] for one in errors)
    assert said["left"] == []


@pytest.fixture
def inspector(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """In the place of the inspection, which is slow: the configs that were to be inspected."""
    asked: list[Any] = []
    place = "transformers/generation/stopping_criteria.py:470 StoppingCriteriaList.__call__"
    answer = (
        Observed("generate", Finding("graph break", "aten::_local_scalar_dense", place), 4, "generation"),
        Observed("forward", Finding("recompilation", "programs compiled again"), 1, None),
    )

    def inspect_model(model: Any, *_: Any, **__: Any) -> tuple[Observed, ...]:
        asked.append(model.config)
        return answer

    monkeypatch.setattr("ttpu_torch_xla.inspector.inspect.inspect_model", inspect_model)
    return asked


def test_a_config_is_read_from_the_very_file_that_is_named(
    tmp_path: Path, ttpu: CommandLine, inspector: list[Any]
) -> None:
    LlamaConfig(**TINY).save_pretrained(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    LlamaConfig(**TINY | {"num_hidden_layers": 3}).save_pretrained(tmp_path)
    status, out, _ = ttpu("inspect", str(tmp_path / "other.json"), "--as-it-is", "--quiet")
    assert status == 0
    assert [config.num_hidden_layers for config in inspector] == [1]
    assert "llama (1 layer): 2 findings" in out


def test_the_words_say_whether_the_model_was_made_small_and_fit_in_80_columns(
    tmp_path: Path, ttpu: CommandLine, inspector: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttpu_core.cli.console.WIDTH_WITHOUT_TERMINAL", 80)
    LlamaConfig(**TINY).save_pretrained(tmp_path)
    _, out, err = ttpu("inspect", str(tmp_path), "--quiet")
    assert len(inspector) == 1
    assert "llama (1 small layer): 2 findings, of which this backend's patches leave 1." in out
    assert "graph break: aten::_local_scalar_dense" in out
    assert "transformers/generation/stopping_criteria" in out
    assert max(map(len, out.splitlines())) <= 80
    assert err == "still there during forward: recompilation, programs compiled again, 1 time\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "of-no-library"}, "of-no-library"),
        ({"initializer_range": "wide"}, "refuses its config"),
    ],
    ids=["a type that nobody knows", "a value that transformers refuses"],
)
def test_a_config_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, ttpu: CommandLine, changes: dict[str, Any], words: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LlamaConfig(**TINY).to_dict() | changes))
    status, _, err = ttpu("inspect", str(path), "--quiet")
    assert status == 2
    assert err.startswith("error: ") and err.count("\n") == 1
    assert words in err


def test_loading_a_type_that_transformers_does_not_know_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of-no-library"}))
    with pytest.raises(UnsupportedError, match=r"'of-no-library', for which transformers .*, or take another model"):
        model_class(transformers, open_checkpoint(str(tmp_path)))


def test_loading_a_config_that_transformers_refuses_says_what_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(CheckpointError, match=r"refuses it .*hidden_size"):
        model_class(transformers, open_checkpoint(str(tmp_path)))


def test_only_the_backend_that_runs_stock_models_is_inspected(tmp_path: Path, ttpu: CommandLine) -> None:
    status, _, err = ttpu("inspect", str(tmp_path), "--backend", "jax")
    assert status == 2
    assert "only torch_xla" in err
