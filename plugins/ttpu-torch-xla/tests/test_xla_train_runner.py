"""The trainer's runner on torch_xla: its updates are those of the JAX runner, one program each, on one device and on
eight simulated ones, and go on from checkpoints bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from xla_spmd import said
from xla_training_cases import LAYOUTS, OPTIMIZER, SEQ, STEPS, batch, checkpoint_at, runner, same, stored, trained

from ttpu import AutoModelForTPU
from ttpu_core.errors import CheckpointError, RequestError, UnsupportedError
from ttpu_torch_xla.backend import TorchXlaBackend
from ttpu_torch_xla.runtime import current
from ttpu_torch_xla.train.loss import balance_coefficient
from ttpu_torch_xla.train.parameters import matches, paths_of, trained_names
from ttpu_torch_xla.train.runner import TorchXlaTrainRunner
from ttpu_torch_xla.train.schedule import share_of
from ttpu_train.adapters import AdapterSettings
from ttpu_train.checkpoints import Checkpoints
from ttpu_train.export import export_run
from ttpu_train.objectives import DPO
from ttpu_train.runner import (
    Batch,
    CheckpointPolicy,
    LossSettings,
    OptimizerSettings,
    ScheduleSettings,
    StepSettings,
)
from ttpu_train.trainer import Trainer

pytestmark = pytest.mark.torch

Figures = list[list[float]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_at(tmp_path_factory.mktemp("training") / "model")


class Run:
    """A run of ten updates on one device, with checkpoints of updates 4 and 10."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.runner, self.folder = runner(checkpoint), folder
        current().sync(wait=True)
        current().reset_counters()
        store = Checkpoints(self.runner, folder, CheckpointPolicy())
        self.figures = trained(self.runner, 0, 4)
        store.save(4, {"position": 4})
        self.figures += trained(self.runner, 4, STEPS)
        self.compiles = current().counters().compiles
        store.save(STEPS, {"position": STEPS})
        store.close()
        self.state = stored(self.runner)
        self.host = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.host.load_state_dict({name: self.state[name] for name in self.host.state_dict()})


@pytest.fixture(scope="module")
def run(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(checkpoint, tmp_path_factory.mktemp("run") / "checkpoints")


# Updates


def test_updates_are_those_of_the_jax_runner(checkpoint: Path, run: Run) -> None:
    from ttpu_jax.backend import JaxBackend

    model = AutoModelForTPU.from_pretrained(checkpoint, backend="jax", dtype="float32")
    theirs = JaxBackend().train_runner(model, StepSettings(optimizer=OPTIMIZER))
    expected = [theirs.step(batch(number)).values() for number in range(STEPS)]
    np.testing.assert_allclose(
        run.figures, [[one.loss, one.tokens, one.grad_norm, one.learning_rate] for one in expected], rtol=1e-5
    )


def test_all_updates_are_one_program(run: Run) -> None:
    assert run.compiles == 1


def test_parts_of_a_batch_make_the_same_update(checkpoint: Path, run: Run) -> None:
    one = runner(checkpoint, accumulation=2, remat="none")
    np.testing.assert_allclose(trained(one, 0, 3), run.figures[:3], rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_on_eight_devices_are_those_of_one(
    layout: str, run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = said(tmp_path_factory)["training"]["layouts"][layout]
    np.testing.assert_allclose(found["figures"], run.figures[:3], rtol=1e-5)
    accumulation = LAYOUTS[layout][1].get("accumulation", 1)
    assert found["compiles"] == (1 if accumulation == 1 else 2)
    assert found["compiles_of_saving"] == 0


def test_zero_shards_what_its_stage_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = said(tmp_path_factory)["training"]["layouts"]
    shardings = {name: (one["weight"].partition("]")[0], one["state"].partition("]")[0]) for name, one in found.items()}
    assert shardings == {
        "everything sharded": ("{devices=[2,2,2", "{devices=[2,2,2"),
        "parts": ("{devices=[1,8", "{devices=[1,8"),
        "optimizer state": ("{replicated}", "{devices=[8,1"),
        "gradients": ("{replicated}", "{devices=[8,1"),
    }


def test_another_mesh_and_stage_restores_the_same_bits(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = said(tmp_path_factory)["training"]["moved"]
    assert found["answer"] == {"position": 1}
    assert found["same"]
    np.testing.assert_allclose(found["next"], run.figures[1:2], rtol=1e-5)


def test_an_update_without_finite_gradients_changes_nothing(checkpoint: Path, run: Run) -> None:
    one = runner(checkpoint)
    trained(one, 0, 1)
    before, rows = stored(one), batch(1)
    values = one.step(replace(rows, weights=np.where(rows.weights > 0, np.float32(np.inf), 0))).values()
    assert values.skipped
    assert same(stored(one), before)
    assert one.step_count == 2
    assert not one.step(rows).values().skipped


def test_dropout_is_drawn_anew_for_each_update_and_again_by_a_resumed_run(tmp_path: Path) -> None:
    dropping = checkpoint_at(tmp_path / "model", attention_dropout=0.5)
    still = replace(OPTIMIZER, learning_rate=0.0)
    one, resumed = (runner(dropping, optimizer=still) for _ in range(2))
    first, second = (one.step(batch(0)).values().loss for _ in range(2))
    assert first != second
    resumed.step_count = 1
    assert resumed.step(batch(0)).values().loss == second


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_decays_weights_apart_from_gradients(checkpoint: Path, momentum: float) -> None:
    settings = OptimizerSettings(
        "sgd", 0.1, ScheduleSettings("constant"), weight_decay=0.5, momentum=momentum, max_grad_norm=None
    )
    one = runner(checkpoint, optimizer=settings)
    host = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    optimizer = torch.optim.SGD(host.parameters(), lr=0.1, momentum=momentum)
    for number in range(2):
        rows = batch(number)
        one.step(rows)
        _loss_on_host(host, rows).backward()
        with torch.no_grad():
            for name, weight in host.named_parameters():
                weight.mul_(1.0 if "norm" in name else 1 - 0.1 * 0.5)
        optimizer.step()
        optimizer.zero_grad()
    found = stored(one)
    for name, weight in host.named_parameters():
        torch.testing.assert_close(found[name], weight.detach(), rtol=1e-4, atol=1e-6)


def _loss_on_host(model: Any, rows: Batch) -> torch.Tensor:
    tokens, weights = torch.tensor(rows.tokens).long(), torch.tensor(rows.weights)[:, 1:]
    logits = model(tokens, attention_mask=torch.tensor(rows.positions >= 0).long()).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def test_only_what_is_trainable_changes(checkpoint: Path) -> None:
    one = runner(checkpoint, trainable=("layers.*.mlp.*",), loss=LossSettings(label_smoothing=0.1, z_loss=0.01))
    before = stored(one)
    values = [one.step(batch(number)).values() for number in range(2)]
    changed = {name for name, tensor in stored(one).items() if name in before and not torch.equal(tensor, before[name])}
    assert {name for name in changed if name.startswith("model.")} == {
        f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
    }
    assert one.trained_count == 3 * 32 * 48
    assert values[0].loss > values[0].cross_entropy + 0.1  # z_loss alone is 0.01 times more than 5 squared


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "inverse_sqrt", "warmup_stable_decay"])
def test_schedules_are_those_of_the_jax_backend(name: Any) -> None:
    from ttpu_jax.train.optimizers import schedule_of

    settings = ScheduleSettings(name, warmup_steps=3, total_steps=20, decay_steps=5, min_ratio=0.1)
    numbers = np.arange(24)
    found = [share_of(settings, int(number)) for number in numbers]
    np.testing.assert_allclose(found, np.asarray(schedule_of(settings)(numbers)), rtol=1e-5, atol=1e-7)


# Evaluation


def test_evaluation_and_logits_are_those_of_transformers(run: Run) -> None:
    rows = batch(0)
    found = run.runner.evaluate(rows).values()
    with torch.no_grad():
        expected = _loss_on_host(run.host, rows)
        logits = run.host(
            torch.tensor(rows.tokens).long(), attention_mask=torch.tensor(rows.positions >= 0).long()
        ).logits
    assert found.tokens == rows.weights.sum()
    every = replace(rows, weights=np.ones_like(rows.weights))  # the first token of a row is never predicted
    assert run.runner.evaluate(every).values().tokens == rows.tokens.size - len(rows.tokens)
    assert found.cross_entropy / found.tokens == pytest.approx(float(expected), rel=1e-5)
    assert found.total / found.divisor == pytest.approx(float(expected), rel=1e-5)
    likeliest = logits[:, :-1].argmax(-1).numpy() == rows.tokens[:, 1:]
    assert found.correct == (likeliest * rows.weights[:, 1:]).sum()
    real = rows.positions >= 0
    np.testing.assert_allclose(run.runner.predict(rows)[1][real], logits.numpy()[real], atol=2e-5)


def test_packed_rows_are_as_if_apart(run: Run) -> None:
    """Two sequences of 5 and 4 tokens in a row, and padding."""
    tokens = batch(0).tokens[:2]
    packed = np.concatenate([tokens[:1, :5], tokens[1:, :4], np.zeros((1, SEQ - 9), np.int32)], axis=1)
    positions = np.array([[*range(5), *range(4), *([-1] * (SEQ - 9))]], np.int32)
    segments = np.array([[*([1] * 5), *([2] * 4), *([0] * (SEQ - 9))]], np.int32)
    together = run.runner.evaluate(Batch(packed, (positions > 0).astype(np.float32), positions, segments)).values()
    lengths = np.array([[5], [4]])
    places = np.arange(SEQ)[None]
    alone = np.where(places < lengths, places, -1).astype(np.int32)
    apart = run.runner.evaluate(Batch(tokens, (alone > 0).astype(np.float32), alone)).values()
    assert together.cross_entropy == pytest.approx(apart.cross_entropy, rel=1e-5)
    assert together.tokens == apart.tokens == 7


# Checkpoints


def test_a_restored_run_goes_on_bit_for_bit(checkpoint: Path, run: Run) -> None:
    one = runner(checkpoint)
    assert Checkpoints(one, run.folder, CheckpointPolicy()).restore(4) == {"position": 4}
    assert one.step_count == 4
    trained(one, 4, STEPS)
    assert same(stored(one), run.state)


def test_a_damaged_checkpoint_is_passed_over_or_refused(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(run.folder, tmp_path / "checkpoints")
    weights = tmp_path / "checkpoints" / str(STEPS) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    store = Checkpoints(run.runner, tmp_path / "checkpoints", CheckpointPolicy())
    with pytest.raises(CheckpointError, match=r"its files are damaged .*model.safetensors has .* bytes of"):
        store.restore(STEPS)
    assert store.restore() == {"position": 4}
    assert "is damaged" in caplog.text
    Checkpoints(run.runner, run.folder, CheckpointPolicy()).restore(STEPS)
    assert same(stored(run.runner), run.state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run["identity"].update(parameters="x", model_type="gemma"), "it is of another gemma model"),
        (lambda run: run.update(format=0), "has format 0, but this version reads"),
    ],
)
def test_a_foreign_checkpoint_is_refused(run: Run, tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    shutil.copytree(run.folder, tmp_path / "checkpoints")
    file = tmp_path / "checkpoints" / "4" / "run.json"
    written = json.loads(file.read_text())
    change(written)
    file.write_text(json.dumps(written))
    with pytest.raises(CheckpointError, match=message):
        Checkpoints(run.runner, tmp_path / "checkpoints", CheckpointPolicy()).restore(4)


def test_another_optimizers_state_is_refused(checkpoint: Path, run: Run) -> None:
    one = runner(checkpoint, optimizer=replace(OPTIMIZER, name="sgd"))
    with pytest.raises(CheckpointError, match="holds the state of another optimizer"):
        Checkpoints(one, run.folder, CheckpointPolicy()).restore()


def test_a_save_that_fails_leaves_no_checkpoint(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Checkpoints(run.runner, tmp_path / "checkpoints", CheckpointPolicy())
    store.save(1, {}, wait=True)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("ttpu_torch_xla.train.checkpoints.save_file", full)
    with pytest.raises(CheckpointError, match=r"no space left on device.*earlier checkpoints are whole"):
        store.save(2, {}, wait=True)
    assert sorted(one.name for one in (tmp_path / "checkpoints").iterdir()) == ["1"]


def test_the_newest_and_the_best_checkpoints_stay(run: Run, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".unfinished-7").mkdir(parents=True)
    store = Checkpoints(run.runner, tmp_path / "checkpoints", CheckpointPolicy(keep=1, best_metric="eval_loss"))
    for step, loss in enumerate([3.0, 1.0, 2.0]):
        store.save(step, {}, {"eval_loss": loss}, wait=True)
    assert store.steps() == (1, 2)
    assert store.best_step() == 1
    assert sorted(one.name for one in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]


def test_what_is_exported_is_what_was_trained(run: Run, tmp_path: Path) -> None:
    assert export_run(run.folder.parent, tmp_path / "float", TorchXlaBackend(), dtype="float32") == STEPS
    run.runner.save_pretrained(tmp_path / "half", "bfloat16")
    whole, half = (load_file(tmp_path / name / "model.safetensors") for name in ("float", "half"))
    assert whole.keys() == half.keys()
    for name, one in whole.items():
        assert torch.equal(one, run.state[name])
        assert torch.equal(half[name], one.bfloat16())
    for name, dtype in (("float", "float32"), ("half", "bfloat16")):
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == dtype
        assert (tmp_path / name / "tokenizer.json").is_file()
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.float32)
    assert all(torch.equal(one, run.state[name]) for name, one in back.state_dict().items())


def test_another_backends_checkpoint_is_not_exported(run: Run, tmp_path: Path) -> None:
    from ttpu_jax.backend import JaxBackend

    with pytest.raises(CheckpointError, match="another backend wrote it, 'torch_xla': name that with --backend"):
        export_run(run.folder.parent, tmp_path / "out", JaxBackend(), dtype="float32")


def test_an_export_of_nothing_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="trains the weights and no adapters: leave --merge out"):
        export_run(run.folder.parent, tmp_path / "out", TorchXlaBackend(), merge=True)
    with pytest.raises(CheckpointError, match="to be exported, but there is none"):
        export_run(tmp_path, tmp_path / "out", TorchXlaBackend())


# The trainer's front


def test_the_trainer_trains_evaluates_and_resumes(checkpoint: Path, tmp_path: Path) -> None:
    data = [{"input_ids": [int(one) for one in row]} for row in batch(0).tokens]
    given: dict[str, Any] = {
        "backend": "torch_xla", "train_dataset": data, "eval_dataset": data, "per_device_train_batch_size": 4,
        "max_length": SEQ, "save_steps": 1, "learning_rate": 1e-2, "disable_tqdm": True, "bf16": False,
    }  # fmt: skip
    whole = Trainer(str(checkpoint), output_dir=tmp_path / "whole", max_steps=2, **given)
    before = whole.evaluate()["eval_loss"]
    whole.train()
    assert whole.evaluate()["eval_loss"] < before
    assert whole.state.total_flos > 0
    # A model that is open already says its backend and its tokenizer itself.
    opened = AutoModelForTPU.from_pretrained(checkpoint, backend="torch_xla", dtype="float32")
    resumed = Trainer(opened, output_dir=tmp_path / "resumed", max_steps=2, **(given | {"backend": None}))
    resumed.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoints" / "1")
    assert resumed.tokenizer is not None
    assert same(stored(resumed.runner), stored(whole.runner))  # type: ignore[arg-type]


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": DPO()}, "method='dpo' was asked for, .* minimizes the cross-entropy of the next token alone"),
        ({"adapters": AdapterSettings("all-linear")}, "^adapters were asked for .* or use backend='jax'"),
        ({"loss": LossSettings(tokens_at_once=8)}, "tokens_at_once=8 was asked for"),
        ({"optimizer": OptimizerSettings("lion")}, "the optimizer 'lion' .* has adamw, sgd"),
        ({"optimizer": OptimizerSettings(schedule=ScheduleSettings("polynomial"))}, "the schedule 'polynomial'"),  # type: ignore[arg-type]
        ({"remat": "dots"}, "remat='dots' .* use 'full', 'none', or 'auto'"),
        ({"remat": "attention"}, "remat='attention' .* keeps no activations by name: use 'full', 'none', or 'auto'"),
        ({"compute_dtype": "float16"}, "compute_dtype='float16' .* float32 and bfloat16"),
        ({"zero_stage": 1}, "zero_stage=1 .* the model is on one device"),
        ({"accumulation": 0}, "an accumulation of 0 parts"),
        ({"trainable": ("layers.*.nothing",)}, "no parameter of this llama model has such a path"),
    ],
)
def test_settings_that_are_not_followed_are_refused(run: Run, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((RequestError, UnsupportedError), match=message):
        TorchXlaTrainRunner(run.runner.source, StepSettings(**settings))


def test_a_stage_that_the_mesh_contradicts_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from ttpu_core.sharding.parallelism import resolve_parallelism
    from ttpu_torch_xla.train.parameters import placements

    model, architecture = run.runner.source, run.runner.source.ttpu.architecture

    def place(mesh: str, stage: int) -> Any:
        return placements(model, architecture, resolve_parallelism(mesh, 8, None, "", "mesh"), stage)

    with pytest.raises(UnsupportedError, match=r"zero_stage=2 .* which is stage 3 alone there"):
        place("fsdp=8", 2)
    with pytest.raises(UnsupportedError, match=r"zero_stage=3 .* which is stage 0, 1 or 2 there"):
        place("data=8", 3)
    with pytest.raises(RequestError, match="every device of the mesh tensor=8 computes all rows"):
        place("tensor=8", 1)


def test_models_that_cannot_be_trained_are_refused(checkpoint: Path) -> None:
    half = AutoModelForTPU.from_pretrained(checkpoint, backend="torch_xla", dtype="bfloat16")
    with pytest.raises(RequestError, match=r"weights in bfloat16 .* load it with dtype='float32'"):
        TorchXlaTrainRunner(half, StepSettings())
    quantized = AutoModelForTPU.from_pretrained(checkpoint, backend="torch_xla", quantization="w8a16")
    with pytest.raises(UnsupportedError, match="a quantized model was to be trained"):
        TorchXlaTrainRunner(quantized, StepSettings())
    with pytest.raises(RequestError, match="it was not loaded by this backend"):
        TorchXlaBackend().row_layout(torch.nn.Linear(1, 1))


def test_rows_that_parts_do_not_divide_are_refused(run: Run) -> None:
    with pytest.raises(RequestError, match="a batch of 0 rows"):
        run.runner.step(batch(0, rows=0))


def test_packed_rows_for_layers_without_attention_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = run.runner.source.ttpu.architecture.spec
    layers = (replace(spec.layers[0], mixer=object()),)
    architecture = replace(run.runner.source.ttpu.architecture, spec=replace(spec, layers=layers))
    monkeypatch.setattr(run.runner.source.ttpu, "architecture", architecture)
    rows = batch(0)
    with pytest.raises(UnsupportedError, match="packed rows were given to a llama model"):
        run.runner.evaluate(replace(rows, segments=np.ones_like(rows.tokens)))


# Parameters of stock models


def test_parameters_have_the_paths_of_the_architecture() -> None:
    from xla_tiny import tiny

    with tiny("qwen3_moe") as one:
        from test_xla_sharding import architecture_of

        paths = paths_of(one.model, architecture_of(one.model))
        assert {path for held in paths.values() for path in held} == set(architecture_of(one.model).spec.parameters)
        norms = [held for name, held in paths.items() if "norm" in name]
        assert norms
        assert all(matches(path, OptimizerSettings().no_decay) for held in norms for path in held)
        one.model.config.output_router_logits = True
        one.model.config.router_aux_loss_coef = 0.25
        assert balance_coefficient(LossSettings(), one.model.config) == 0.25
        assert balance_coefficient(LossSettings(router_aux_loss=0.0), one.model.config) == 0.0


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text", "qwen3_next"])
def test_what_is_trained_and_what_is_decayed_is_what_transformers_trains_and_decays(model_type: str) -> None:
    from test_xla_sharding import on_meta

    model, architecture = on_meta(model_type)
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    paths, spared = paths_of(model, architecture), OptimizerSettings().no_decay
    for name, held in paths.items():
        assert {matches(path, spared) for path in held} == {name not in decayed}, name
    table = architecture.spec.parameters
    assert {path for held in paths.values() for path in held} == {path for path, one in table.items() if one.trained}


def test_patterns_that_divide_one_tensor_are_refused() -> None:
    held = {"qkv.weight": ("attn.q.kernel", "attn.k.kernel"), "o.weight": ("attn.o.kernel",)}
    assert trained_names(("attn.*",), held, "llama") == ("qkv.weight", "o.weight")
    assert trained_names(("attn.o.*",), held, "llama") == ("o.weight",)
    with pytest.raises(UnsupportedError, match=r"chooses some of qkv.weight and not attn.k.kernel"):
        trained_names(("attn.q.*",), held, "llama")
