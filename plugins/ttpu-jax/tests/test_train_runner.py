"""The trainer's runner: its updates are torch's, whatever the mesh and the stage of ZeRO."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint
import pytest
from safetensors.numpy import load_file
from tiny import llama_checkpoint

import ttpu
from ttpu import AutoModelForTPU
from ttpu_core.errors import CheckpointError, RequestError, UnsupportedError
from ttpu_jax.backend import JaxBackend
from ttpu_jax.compiling import compiled_with
from ttpu_jax.train import runner as train_runner
from ttpu_jax.train.checkpoints import pass_over_closed_loops
from ttpu_jax.train.export import Parameters
from ttpu_jax.train.runner import JaxTrainRunner
from ttpu_train.adapters import AdapterSettings
from ttpu_train.checkpoints import Checkpoints
from ttpu_train.export import export_run
from ttpu_train.micro_batches import batch_of
from ttpu_train.runner import Batch, CheckpointPolicy, OptimizerSettings, ScheduleSettings, StepSettings

ROWS, SEQ, STEPS = 16, 12, 10
SCHEDULE = ScheduleSettings("cosine", warmup_steps=3, total_steps=STEPS)
OPTIMIZER = OptimizerSettings(
    learning_rate=3e-3, schedule=SCHEDULE, weight_decay=0.1, max_grad_norm=0.5, no_decay=("*.scale",)
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runner") / "llama"
    return llama_checkpoint(folder, num_attention_heads=3, num_key_value_heads=3, hidden_size=24, head_dim=8)


def batch(seed: int) -> Batch:
    """Rows of different lengths, padded."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 255, (ROWS, SEQ)).astype(np.int32)
    lengths = random.integers(4, SEQ + 1, ROWS)
    places = np.arange(SEQ)[None]
    real = places < lengths[:, None]
    return Batch(tokens, (real & (places > 0)).astype(np.float32), np.where(real, places, -1).astype(np.int32))


def runner(checkpoint: Path, mesh: str | None = None, **settings: Any) -> JaxTrainRunner:
    model = AutoModelForTPU.from_pretrained(str(checkpoint), dtype="float32", mesh=mesh)
    return JaxBackend().train_runner(model, StepSettings(**({"optimizer": OPTIMIZER} | settings)))


def trained(one: JaxTrainRunner, first: int, last: int) -> list[list[float]]:
    figures = [one.step(batch(number)) for number in range(first, last)]
    return [[f.loss, f.tokens, f.grad_norm, f.learning_rate] for f in (each.values() for each in figures)]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> tuple[list[list[float]], dict[str, np.ndarray]]:
    one = runner(checkpoint)
    figures = trained(one, 0, STEPS)
    return figures, {path: np.asarray(value) for path, value in one.model().params.items()}


@pytest.mark.torch
def test_updates_are_those_of_torch(checkpoint: Path, plain: Any) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    decayed = [value for name, value in model.named_parameters() if "norm" not in name]
    others = [value for name, value in model.named_parameters() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.learning_rate)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 3, STEPS)
    found = []
    for number in range(STEPS):
        rows = batch(number)
        tokens, weights = torch.tensor(rows.tokens).long(), torch.tensor(rows.weights)
        logits = model(tokens, attention_mask=torch.tensor(rows.positions >= 0).long()).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        loss = (losses * weights[:, 1:].flatten()).sum() / weights.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append([loss.item(), weights.sum().item(), norm.item(), schedule.get_last_lr()[0]])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    np.testing.assert_allclose(plain[0], found, rtol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "stage", "accumulation"),
    [
        ("data=8", 0, 2),
        ("data=8", 1, 1),
        ("data=8", 2, 2),
        ("fsdp=8", None, 1),
        ("fsdp=4,tensor=2", 3, 2),
        ("fsdp=4,tensor=2", 2, 1),
    ],
)
def test_every_stage_trains_as_one_device(
    checkpoint: Path, plain: Any, mesh: str, stage: Any, accumulation: int
) -> None:
    one = runner(checkpoint, mesh, zero_stage=stage, accumulation=accumulation)
    np.testing.assert_allclose(trained(one, 0, 4), plain[0][:4], rtol=1e-5)


def test_updates_are_lowered_for_shardy_after_torch_xla_has_turned_it_off(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []

    def compiled(program: jax.stages.Lowered, options: Any) -> jax.stages.Compiled:
        texts.append(program.as_text())
        return compiled_with(program, options)

    monkeypatch.setattr(train_runner, "compiled_with", compiled)
    one, option = runner(checkpoint, "fsdp=2"), "jax_use_shardy_partitioner"
    before = getattr(jax.config, option)
    jax.config.update(option, False)
    try:
        trained(one, 0, 1)
    finally:
        jax.config.update(option, before)
    assert len(texts) == 1 and "sdy.sharding" in texts[0]


@pytest.fixture(scope="module")
def light(checkpoint: Path) -> JaxTrainRunner:
    """A runner that has computed an update."""
    with pytest.MonkeyPatch.context() as patch:
        asked: list[Any] = []
        patch.setattr("ttpu_jax.train.runner.training_options", lambda *given: asked.append(given) or {})
        one = runner(checkpoint, trainable=("final_norm.*",))
        one.step(batch(0))
        assert asked == [("cpu", None, ROWS * SEQ)]
    return one


def test_an_update_takes_its_rows_from_the_host(light: JaxTrainRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_put", None)  # 0.7 ms of each update
    assert light.step(batch(1)).values().loss > 0


def test_a_save_converts_one_array_at_a_time(
    light: JaxTrainRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[int] = []

    def counted(array: jax.Array) -> np.ndarray:
        converted.append(sum(one.dtype == "bfloat16" for one in jax.live_arrays()))
        return np.asarray(array)

    monkeypatch.setattr("ttpu_jax.train.runner.on_host", counted)
    light.save_pretrained(tmp_path, "bfloat16")
    assert converted == [1] * len(light.params)


def test_updates_are_traced(light: JaxTrainRunner, tmp_path: Path) -> None:
    one = light
    one.start_trace(tmp_path / "profile")
    one.step(batch(1))
    one.stop_trace()
    (trace,) = (tmp_path / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any("update" in str(event.get("name")) for event in events)
    assert one.gathered(2.5) == (2.5,)


def test_packed_rows_of_a_users_loader_have_the_loss_of_their_sequences(light: JaxTrainRunner) -> None:
    random, lengths = np.random.default_rng(0), (5, 4, 3)
    packed = {"input_ids": random.integers(0, 255, (2, SEQ)), "position_ids": [[*range(5), *range(4), *range(3)]] * 2}
    sequences = [one for row in packed["input_ids"] for one in np.split(row, np.cumsum(lengths)[:-1])]
    rows, masks = np.zeros((6, 5), int), np.zeros((6, 5), int)
    for place, one in enumerate(sequences):
        rows[place, : len(one)], masks[place, : len(one)] = one, 1
    separate = light.evaluate(batch_of({"input_ids": rows, "attention_mask": masks})).values()
    together = light.evaluate(batch_of(packed)).values()
    assert together.tokens == separate.tokens == 2 * (4 + 3 + 2)
    np.testing.assert_allclose(together.cross_entropy, separate.cross_entropy, rtol=1e-5)


def test_a_loop_of_deepspeed_trains_as_one_device(checkpoint: Path, plain: Any) -> None:
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": 3, "total_num_steps": STEPS, "warmup_type": "linear"},
        },
    }
    engine, optimizer, _, _ = ttpu.initialize(model=str(checkpoint), config=config, load_options={"dtype": "float32"})
    assert engine.world_size == 8 and engine.train_micro_batch_size_per_gpu() == 1
    for number in range(2):
        rows = batch(number)
        for half in (slice(0, 8), slice(8, 16)):
            loss = engine(input_ids=rows.tokens[half], attention_mask=rows.positions[half] >= 0)
            engine.backward(loss)
            engine.step()
        found = [loss.item(), rows.weights.sum(), engine.get_global_grad_norm(), optimizer.param_groups[0]["lr"]]
        np.testing.assert_allclose(found, plain[0][number], rtol=1e-5)


def stored(one: JaxTrainRunner) -> dict[str, np.ndarray]:
    params, state = one.stored_arrays()
    return {name: np.asarray(value) for name, value in {**params, **state}.items()}


def assert_bits(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.fixture(scope="module")
def run(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, np.ndarray]]]:
    """A run's folder with checkpoints of steps 2 and 4, and what was in the runner then."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    one = runner(checkpoint, "fsdp=4,tensor=2", zero_stage=2)
    store = Checkpoints(one, folder, CheckpointPolicy())
    states = {}
    for step in (2, 4):
        trained(one, step - 2, step)
        store.save(step, {"position": step})
        states[step] = stored(one)
    store.close()
    return folder, states


def test_a_restored_run_goes_on_bit_for_bit(checkpoint: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, states = run
    one = runner(checkpoint, "fsdp=4,tensor=2", zero_stage=2)
    restore = orbax.checkpoint.AsyncCheckpointer.restore

    def in_free_memory(*args: Any, **kwargs: Any) -> Any:
        assert all(array.is_deleted() for array in jax.tree.leaves((one.params, one.optimizer_state)))
        return restore(*args, **kwargs)

    monkeypatch.setattr(orbax.checkpoint.AsyncCheckpointer, "restore", in_free_memory)
    assert Checkpoints(one, folder, CheckpointPolicy()).restore(2) == {"position": 2}
    assert_bits(stored(one), states[2])
    trained(one, 2, 4)
    assert one.step_count == 4
    assert_bits(stored(one), states[4])


@pytest.mark.parametrize(("mesh", "stage"), [("fsdp=8", 3), (None, None)])
def test_other_meshes_and_stages_restore_the_same_bits(checkpoint: Path, run: Any, mesh: Any, stage: Any) -> None:
    folder, states = run
    one = runner(checkpoint, mesh, zero_stage=stage)
    assert Checkpoints(one, folder, CheckpointPolicy()).restore() == {"position": 4}
    assert_bits(stored(one), states[4])


def test_an_optimizer_on_the_host_trains_alike_and_is_restored_bit_for_bit(checkpoint: Path, tmp_path: Path) -> None:
    """The same gradients give the same moments bit for bit, and weights that differ in their last bits."""
    usual, host = (runner(checkpoint, "fsdp=8", offload_optimizer=offload) for offload in (False, True))
    np.testing.assert_allclose(trained(host, 0, 3), trained(usual, 0, 3), rtol=1e-5)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(host.optimizer_state) if leaf.ndim}
    assert kinds == {"pinned_host"}
    update = partial(host._step._updated, np.float32(1e-3), np.asarray(False))
    assert host._step.offload is not None
    weights, moments = jax.jit(partial(host._step.offload, update))(host.params, host.optimizer_state, host.params)
    on_devices = jax.device_put(host.optimizer_state, usual._state_shardings)
    expected = jax.jit(partial(update, usual._step.optimizer))(host.params, on_devices, host.params)
    jax.tree.map(np.testing.assert_array_equal, moments, expected[1])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), weights, expected[0])
    before = stored(host)
    not_finite = replace(batch(4), weights=np.full((ROWS, SEQ), np.inf, np.float32))
    assert host.step(not_finite).values().skipped
    assert_bits(stored(host), before)
    store = Checkpoints(host, tmp_path / "checkpoints", CheckpointPolicy())
    store.save(4, {})
    store.close()
    trained(host, 4, 5)
    for one in (usual, host):
        Checkpoints(one, tmp_path / "checkpoints", CheckpointPolicy()).restore()
        assert_bits(stored(one), before)


@pytest.mark.parametrize(
    ("mesh", "settings", "said"),
    [
        ("fsdp=8", {"optimizer": replace(OPTIMIZER, name="muon")}, "only the state of adamw, lion, sgd"),
        ("tensor=2", {}, "on a mesh that pads parameters"),
        (None, {"adapters": AdapterSettings(target_modules="all-linear")}, "with adapters"),
        (None, {}, "on one device"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(checkpoint: Path, mesh: Any, settings: Any, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        runner(checkpoint, mesh, offload_optimizer=True, **settings)


def test_moments_of_8_bits_are_sharded_and_restored_on_another_mesh_bit_for_bit(
    checkpoint: Path, plain: Any, tmp_path: Path
) -> None:
    settings = {"optimizer": replace(OPTIMIZER, name="adamw_8bit"), "trainable": ("embed.*", "final_norm.*")}
    one = runner(checkpoint, "fsdp=8", **settings)
    np.testing.assert_allclose([row[0] for row in trained(one, 0, 3)], [row[0] for row in plain[0][:3]], rtol=0.02)
    codes = one.optimizer_state[0].mu["embed.embedding"].codes
    assert codes.dtype == np.int8 and codes.sharding == one.params["embed.embedding"].sharding
    store = Checkpoints(one, tmp_path / "8bit", CheckpointPolicy())
    store.save(3, {}, wait=True)
    other = runner(checkpoint, **settings)
    assert Checkpoints(other, tmp_path / "8bit", CheckpointPolicy()).restore() == {}
    assert_bits(stored(other), stored(one))
    with pytest.raises(UnsupportedError, match="'adamw_8bit' was asked for on a mesh that pads"):
        runner(checkpoint, "tensor=2", **settings)


def test_a_damaged_checkpoint_is_passed_over_with_a_warning_and_written_anew(
    checkpoint: Path,
    run: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(run[0], folder)
    for file in (folder / "4" / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    one = runner(checkpoint)
    store = Checkpoints(one, folder, CheckpointPolicy(keep=2))
    with pytest.raises(CheckpointError, match=r"was to be restored, but its files are damaged"):
        store.restore(4)
    with pytest.raises(CheckpointError, match=r"step 3 was to be restored.*it has those of \[2, 4\]"):
        store.restore(3)
    assert store.restore() == {"position": 2} and "4 is damaged" in caplog.text
    assert_bits(stored(one), run[1][2])
    assert store.steps() == (2,) and (folder / "4.damaged").is_dir()
    store.save(4, {"position": 40}, wait=True)
    assert store.steps() == (2, 4) and store.restore() == {"position": 40}
    monkeypatch.setattr(orbax.checkpoint.AsyncCheckpointer, "restore", None)
    with pytest.raises(CheckpointError, match=r"was to be restored, but its files are damaged"):
        store.restore(4)
    with pytest.raises(RequestError, match=r"freed for a checkpoint that could not be read: restore another one"):
        one.step(batch(4))
    with pytest.raises(RequestError, match=r"freed for a checkpoint"):
        one.evaluate(batch(4))
    store.close()


def test_writes_that_outlive_a_failed_save_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    pass_over_closed_loops.__wrapped__()
    for words in ("Event loop is closed", "another error"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(words), object=None))
    assert [str(one.exc_value) for one in shown] == ["another error"]


def test_later_steps_of_other_runs_and_backends_do_not_count(checkpoint: Path, run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step, other in ((9, "torch_xla"), (1, "torch_xla"), (8, "jax")):
        shutil.copytree(run[0] / "4", folder / str(step))
        written = json.loads((folder / str(step) / "run.json").read_text())
        (folder / str(step) / "run.json").write_text(json.dumps(written | {"backend": other}))
    shutil.rmtree(folder / "8" / "params")
    one = runner(checkpoint, trainable=("final_norm.*",))
    store = Checkpoints(one, folder, CheckpointPolicy(keep=2, best_metric="eval_loss"))
    for step in (1, 2, 3):
        store.save(step, {"position": step}, {"eval_loss": 1.0 / step}, wait=True)
    assert store.steps() == (2, 3, 8, 9)
    assert sorted(file.name for file in folder.iterdir()) == ["1.other", "2", "3", "8", "9"]
    with pytest.raises(CheckpointError, match="another backend wrote it, 'torch_xla': train on"):
        store.restore()
    assert store.restore(2) == {"position": 2}
    store.close()


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(checkpoint: Path, run: Any, tmp_path: Path) -> None:
    other = llama_checkpoint(tmp_path / "other", intermediate_size=32, attention_dropout=0.1)
    with pytest.warns(UserWarning, match=r"has attention_dropout=0.1, but the JAX backend trains without dropout"):
        dropping = runner(other)
    with pytest.raises(CheckpointError, match="is of another llama model"):
        Checkpoints(dropping, run[0], CheckpointPolicy()).restore()
    lion = runner(checkpoint, optimizer=OptimizerSettings("lion"))
    with pytest.raises(CheckpointError, match="state of another optimizer"):
        Checkpoints(lion, run[0], CheckpointPolicy()).restore()


@pytest.mark.torch
def test_an_export_is_read_by_transformers_with_the_same_logits(checkpoint: Path, run: Any, tmp_path: Path) -> None:
    import torch
    import transformers

    assert export_run(run[0].parent, tmp_path / "out", JaxBackend(), dtype="float32") == 4
    one = runner(checkpoint)
    Checkpoints(one, run[0], CheckpointPolicy()).restore()
    rows = batch(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    mask = torch.tensor(rows.positions >= 0)
    with torch.no_grad():
        wanted = model(torch.tensor(rows.tokens).long(), attention_mask=mask.long()).logits[mask].numpy()
    np.testing.assert_allclose(one.predict(rows)[1][mask.numpy()], wanted, atol=2e-5)
    one.save_pretrained(tmp_path / "saved", "float32")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "out"))
    assert_bits(ours, theirs)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_an_export_reads_one_parameter_at_a_time(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[np.ndarray]] = []
    most, read = 0, Parameters.read

    def counted(self: Parameters, path: str) -> np.ndarray:
        nonlocal most
        value = read(self, path)
        alive.append(weakref.ref(value))
        most = max(most, sum(one() is not None for one in alive))
        return value

    monkeypatch.setattr(Parameters, "read", counted)
    export_run(run[0].parent, tmp_path / "out", JaxBackend(), step=2, dtype="float32")
    assert most == 1 and len(alive) > 5
    (tmp_path / "run").mkdir()
    shutil.copytree(run[0], tmp_path / "run" / "checkpoints")
    for file in (tmp_path / "run" / "checkpoints" / "4" / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="was to be exported, but its files are damaged"):
        export_run(tmp_path / "run", tmp_path / "no", JaxBackend(), step=4, dtype="float32")


def test_what_is_not_trained_stays_and_updates_that_are_not_finite_change_nothing(checkpoint: Path) -> None:
    one = runner(checkpoint, trainable=("layers.*.mlp.*", "final_norm.*"))
    before, state = stored(one), one.params["embed.embedding"]
    assert 0 < one.trained_count < one.parameter_count and one.compiled_bytes() is None
    rows = batch(0)
    broken = Batch(rows.tokens, np.where(rows.weights > 0, np.float32(np.inf), 0), rows.positions)
    assert one.step(broken).values().skipped and one.step_count == 1
    assert_bits(stored(one), before)
    figures = one.step(rows).values()
    assert not figures.skipped and figures.learning_rate == pytest.approx(1e-3) and one.compiled_bytes() > 0
    moved = {path for path in one.params if not np.array_equal(one.params[path], before[path])}
    assert moved == {path for path in one.params if ".mlp." in path or path.startswith("final_norm")}
    assert state is one.params["embed.embedding"] or np.array_equal(state, before["embed.embedding"])
    found = one.evaluate(rows).values()
    assert found.tokens == figures.tokens and 0 <= found.correct <= found.tokens
    assert found.cross_entropy / found.tokens < figures.cross_entropy
    logits = one.model()(rows.tokens[:1, :5]).logits
    values, predicted = one.predict(rows)
    np.testing.assert_allclose(logits, predicted[:1, :5], atol=1e-5)
    again = values.values()
    assert (again.tokens, again.correct) == (found.tokens, found.correct)
    assert again.cross_entropy == pytest.approx(found.cross_entropy, rel=1e-6)
    with pytest.raises(RequestError, match="another trainer has taken them over"):
        model = AutoModelForTPU.from_pretrained(str(checkpoint), dtype="float32")
        JaxBackend().train_runner(model, StepSettings())
        JaxBackend().train_runner(model, StepSettings())


def test_settings_that_contradict_the_model_are_refused(checkpoint: Path) -> None:
    with pytest.raises(RequestError, match=r"zero_stage=2 divides.*one device computes all rows"):
        runner(checkpoint, zero_stage=2)
    with pytest.raises(RequestError, match=r"'\*.router' was asked for, but no parameter"):
        runner(checkpoint, trainable=("*.router",))
    with pytest.raises(UnsupportedError, match="equal layers are trained together"):
        runner(checkpoint, trainable=("layers.1.*",))
    with pytest.raises(UnsupportedError, match="'muon' was asked for on a mesh that pads"):
        runner(checkpoint, "tensor=2", optimizer=OptimizerSettings("muon"))
    with pytest.raises(RequestError, match=r"16 rows was given, but 8 devices.*in 3 parts.*multiple of 24"):
        runner(checkpoint, "data=8", accumulation=3).step(batch(0))


def test_the_newest_and_the_best_checkpoints_stay_and_a_failed_save_is_told(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = runner(checkpoint, trainable=("final_norm.*",))
    store = Checkpoints(one, tmp_path / "run", CheckpointPolicy(keep=2, best_metric="eval_loss"))
    assert store.best_step() is None and store.steps() == ()
    for step, loss in enumerate((3.0, 1.0, 2.0, 2.5, None), 1):
        store.save(step, {}, None if loss is None else {"eval_loss": loss}, wait=True)
    assert store.steps() == (2, 5) and store.best_step() == 2
    again = Checkpoints(one, tmp_path / "run", CheckpointPolicy(keep=2, best_metric="eval_loss"))
    assert again.best_step() == 2

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(orbax.checkpoint.PyTreeCheckpointHandler, "async_save", full)
        with pytest.raises(CheckpointError, match=r"No space left on device.*earlier checkpoints are whole"):
            store.save(6, {})
            store.wait()
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: <Task of orbax>")  # as orbax does
    logging.getLogger("asyncio").error("another error")
    assert [record.message for record in caplog.records if record.name == "asyncio"] == ["another error"]
    assert store.steps() == (2, 5)
    shutil.rmtree(tmp_path / ".model")
    with monkeypatch.context() as patch:
        patch.setattr("ttpu_jax.train.checkpoints.copy_small_files", full)
        with pytest.raises(CheckpointError, match=r"No space left on device.*earlier checkpoints are whole"):
            store.save(7, {})
    store.save(7, {}, wait=True)
    assert (tmp_path / ".model" / "config.json").is_file()
    assert 7 in store.steps()
    store.close()
    again.close()
