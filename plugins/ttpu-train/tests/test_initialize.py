"""`ttpu.initialize`: a loop written for DeepSpeed trains as the trainer does."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy_train_runner import BigramModel, NumpyBackend

import ttpu_train.trainer
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_train.arguments import TrainingArguments
from ttpu_train.engine import Engine
from ttpu_train.initialize import DEFAULTS, OF_THE_LOOP, initialize
from ttpu_train.micro_batches import batch_of, joined
from ttpu_train.reporting import picture
from ttpu_train.trainer import Trainer

VOCAB, LENGTH, UPDATES = 11, 8, 6
CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 5.0}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear", "total_num_steps": UPDATES}},
}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> NumpyBackend:
    made = NumpyBackend()
    monkeypatch.setattr(ttpu_train.trainer, "training_backend", lambda name: made)
    monkeypatch.setattr(picture, "draw", lambda *_: None)
    return made


def examples(count: int = 20) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    starts = random.integers(VOCAB, size=count)
    return [{"input_ids": [(int(start) + place) % VOCAB for place in range(LENGTH)]} for start in starts]


def engine_of(config: dict[str, Any] = CONFIG, **given: Any) -> Any:
    return initialize(model=BigramModel(VOCAB), config=config, max_length=LENGTH, disable_tqdm=True, **given)


def test_a_loop_of_deepspeed_trains_as_the_trainer(backend: NumpyBackend, tmp_path: Path) -> None:
    engine, optimizer, loader, schedule = engine_of(training_data=examples())
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps(), len(loader)) == (8, 2, 6)
    losses, boundaries = [], []
    for _ in range(2):
        for batch in loader:
            loss = engine(batch)
            engine.backward(loss)
            boundaries.append(engine.is_gradient_accumulation_boundary())
            engine.step()
            if boundaries[-1]:
                losses.append(loss.item())
    assert boundaries == [False, True] * UPDATES and engine.global_steps == UPDATES
    assert (engine.micro_steps, engine.global_samples, engine.skipped_steps) == (12, 48, 0)
    trainer = Trainer(
        BigramModel(VOCAB),
        deepspeed={**CONFIG, "train_batch_size": "auto", "gradient_accumulation_steps": 2},
        train_dataset=examples(),
        max_length=LENGTH,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        output_dir=tmp_path,
    )
    trainer.train()
    assert losses == [line["loss"] for line in trainer.state.log_history]
    assert (trainer.loaded.table == engine.module.table).all()
    assert (
        schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [trainer.state.log_history[-1]["learning_rate"]]
    )
    assert engine.get_global_grad_norm() == trainer.state.log_history[-1]["grad_norm"] and engine.was_step_applied()


def test_rows_of_the_users_own_loader_are_trained_on_and_evaluated(backend: NumpyBackend) -> None:
    engine, _, loader, schedule = engine_of({"gradient_accumulation_steps": 2, "optimizer": {}})
    assert loader is None and schedule is None
    assert engine.runner.settings.optimizer.max_grad_norm is None  # as DeepSpeed without gradient_clipping
    tokens = np.asarray([one["input_ids"] for one in examples(4)])
    labels = np.where(np.arange(LENGTH) < 3, -100, tokens)
    mask = (np.arange(LENGTH) < 7).astype(int)[None].repeat(4, 0)
    before = engine(input_ids=tokens)
    assert f"{before:.3f}" == f"{np.log(VOCAB):.3f}" and float(before) == before.item()
    for batch in ({"input_ids": tokens, "labels": labels}, {"input_ids": tokens[:, :7], "attention_mask": mask[:, :7]}):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
    assert engine.runner.rows[0].shape == (8, LENGTH)  # padded to the longest
    assert engine._update.values().tokens == 4 * 5 + 4 * 6
    engine.eval()
    assert engine(input_ids=tokens).item() < before.item() and engine.micro_steps == 2


def test_rows_are_weighed_and_padded() -> None:
    long = batch_of({"input_ids": [[5, 6, 7]], "labels": [[5, -100, 7]]})
    short = batch_of({"input_ids": [[0, 8]], "attention_mask": [[0, 1]]})
    rows = joined((long, short))
    assert rows.tokens.tolist() == [[5, 6, 7], [0, 8, 0]]
    assert rows.weights.tolist() == [[0, 0, 1], [0, 0, 0]]  # nothing comes before the first token
    assert rows.positions.tolist() == [[0, 1, 2], [-1, 0, -1]]


def test_checkpoints_restore_weights_counters_and_the_clients_state(backend: NumpyBackend, tmp_path: Path) -> None:
    engine, _, loader, _ = engine_of(training_data=examples())
    update(engine, loader)
    table = engine.module.table.copy()
    assert engine.save_checkpoint(tmp_path, client_state={"data": loader.state(), "note": 1})
    assert (tmp_path / "latest").read_text() == "global_step1"
    update(engine, loader)
    other, _, data, _ = engine_of(training_data=examples())
    place, client_state = other.load_checkpoint(tmp_path)
    assert place == str(tmp_path / "global_step1") and client_state["note"] == 1
    assert (other.module.table == table).all() and (other.global_steps, other.micro_steps) == (1, 2)
    data.restore(client_state["data"])
    update(other, data)
    assert (other.module.table == engine.module.table).all()
    with pytest.raises(RequestError, match=r"'best' was to be loaded.*name one of global_step1"):
        other.load_checkpoint(tmp_path, "best")
    with pytest.warns(UserWarning, match="has no file 'latest'"):
        assert other.load_checkpoint(tmp_path / "global_step1") == (None, {})
    loss = other(next(iter(data)))
    other.backward(loss)
    with pytest.raises(RequestError, match="after 1 of 2 micro-batches of an update"):
        other.save_checkpoint(tmp_path)


def test_a_tag_holds_the_weights_that_were_saved_last(backend: NumpyBackend, tmp_path: Path) -> None:
    engine, _, loader, _ = engine_of(training_data=examples())
    update(engine, loader)
    engine.save_checkpoint(tmp_path, "best")
    update(engine, loader)
    engine.save_checkpoint(tmp_path, "best", {"saved": 2})  # another update
    assert engine.load_checkpoint(tmp_path, "best")[1] == {"saved": 2} and engine.global_steps == 2
    engine.module.table[:] = 7
    engine.save_checkpoint(tmp_path, "best")  # the same update
    engine.module.table[:] = 0
    engine.load_checkpoint(tmp_path)
    assert (engine.module.table == 7).all()
    earlier, _, data, _ = engine_of(training_data=examples())
    update(earlier, data)
    earlier.save_checkpoint(tmp_path, tag="best")  # of fewer updates than what the tag held
    assert [one.name for one in (tmp_path / "best").iterdir()] == ["1"]
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 1 and (engine.module.table == earlier.module.table).all()


def test_a_saved_model_has_the_tokenizer_that_was_given(backend: NumpyBackend, tmp_path: Path) -> None:
    saved: list[str] = []
    engine, *_ = engine_of(tokenizer=SimpleNamespace(save_pretrained=saved.append))
    engine.runner.save_pretrained = lambda folder, dtype: folder.mkdir()
    engine.save_16bit_model(tmp_path / "model")
    assert saved == [str(tmp_path / "model")]


def test_tags_and_arguments_of_checkpoints_are_deepspeeds(backend: NumpyBackend, tmp_path: Path) -> None:
    engine, _, loader, _ = engine_of(training_data=examples())
    engine.save_checkpoint(tmp_path, 5, exclude_frozen_parameters=False)
    assert engine.load_checkpoint(tmp_path, 5, load_module_strict=True)[0] == str(tmp_path / "5")
    with pytest.raises(UnsupportedError, match="load_checkpoint was given load_module_only=True, but a checkpoint is"):
        engine.load_checkpoint(tmp_path, load_module_only=True)
    for tag in ("a/b", "latest", "model", ".."):
        with pytest.raises(RequestError, match="a tag is the name of a folder"):
            engine.save_checkpoint(tmp_path, tag)
    theirs = tmp_path / "global_step9" / "mp_rank_00_model_states.pt"
    theirs.parent.mkdir()
    theirs.touch()
    with pytest.raises(RequestError, match=r"global_step9 was to be loaded, but it is a checkpoint of DeepSpeed"):
        engine.load_checkpoint(tmp_path, "global_step9")
    with pytest.raises(RequestError, match="but it is not there: name one of 5\\."):
        engine.load_checkpoint(tmp_path, "6")
    with pytest.raises(RequestError, match="no JSON"):
        engine.save_checkpoint(tmp_path, 5, {"tensor": object()})
    update(engine, loader)


def update(engine: Engine, loader: Any) -> None:
    for _, batch in zip(range(2), loader, strict=False):
        engine.backward(engine(batch))
        engine.step()


def test_what_a_compiled_update_cannot_do_is_refused_by_name(backend: NumpyBackend) -> None:
    engine, optimizer, _, schedule = engine_of()
    rows = {"input_ids": np.ones((4, LENGTH), int)}
    with pytest.raises(RequestError, match=r"backward\(\) was given a float that is not what the engine's last call"):
        engine.backward(2.0 * float(engine(rows)))
    with pytest.raises(RequestError, match=r"step\(\) was called without a backward"):
        engine.step()
    engine.backward(engine(rows))
    with pytest.raises(RequestError, match=r"micro-batch of 2 rows was given after one of 4"):
        engine(input_ids=np.ones((2, LENGTH), int))
    with pytest.raises(RequestError, match="labels are other tokens than its input_ids"):
        engine(input_ids=np.ones((4, LENGTH), int), labels=np.zeros((4, LENGTH), int))
    with pytest.raises(RequestError, match="was given with tokens, but it holds input_ids"):
        engine(tokens=1)
    with pytest.raises(RequestError, match=r"labels has the shape \[4\] and input_ids \[4, 8\]"):
        engine({**rows, "labels": np.ones(4)})
    for what in (lambda: engine.parameters(), lambda: engine.no_sync(), optimizer.step, schedule.step):
        with pytest.raises(UnsupportedError, match=r"compiled update|held by the backend"):
            what()
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        engine.unknown  # noqa: B018
    with pytest.raises(UnsupportedError, match="was given optimizer, but the optimizer is part of the compiled update"):
        engine_of(optimizer=object())
    with pytest.raises(RequestError, match=r"train_batch_size = 9, but.*here 4 x 2 x 1"):
        engine_of({**CONFIG, "train_batch_size": 9})
    with pytest.raises(RequestError, match=r"'cosine' was asked for, but it ends after a number of updates"):
        engine_of({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_type": "linear"}}})
    with pytest.raises(RequestError, match="called without config"):
        initialize(model=BigramModel(VOCAB))


def test_every_argument_is_taken_or_refused_by_name(backend: NumpyBackend) -> None:
    names = {one.name for one in fields(TrainingArguments)}
    assert set(OF_THE_LOOP) <= names
    for name, value in (("save_steps", 5), ("eval_strategy", "steps"), ("nan_limit", 3), ("hung_step_seconds", 1.0),
                        ("resume_from_checkpoint", True), ("load_best_model_at_end", True)):  # fmt: skip
        with pytest.raises(UnsupportedError, match=rf"was given {name}, but the loop is yours: \w+"):
            engine_of(**{name: value})
    engine_of(save_strategy="no", eval_strategy="no", resume_from_checkpoint=None)
    taken = names - set(OF_THE_LOOP)
    assert taken == {
        "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps",
        "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim",
        "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "momentum", "max_grad_norm", "bf16", "z_loss",
        "label_smoothing_factor", "router_aux_loss_coef", "gradient_checkpointing", "remat", "zero_stage",
        "pipeline_schedule",
        "parallelism_strategy", "trainable", "peft_config", "adapter_name_or_path", "max_length", "packing",
        "dataset_text_field", "assistant_only_loss", "completion_only_loss", "document_separator", "mixture_weights",
        "overlong", "dataloader_num_workers", "dataloader_drop_last", "logging_steps", "logging_first_step",
        "report_to", "run_name", "disable_tqdm", "seed", "data_seed", "profile_steps", "offload_optimizer", "plan",
    }, "a new argument is honoured by ttpu.initialize, or in OF_THE_LOOP"  # fmt: skip


def test_the_number_of_updates_is_given_or_counted(backend: NumpyBackend) -> None:
    def schedule(config: Any, **given: Any) -> Any:
        return engine_of({"train_batch_size": 8, **config}, **given)[0].runner.settings.optimizer.schedule

    warm = {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_num_steps": "auto"}}}
    assert schedule(warm, warmup_ratio=0.5, max_steps=10).warmup_steps == 5
    counted = {"training_data": examples(), "num_train_epochs": 2}
    assert schedule(warm, warmup_ratio=0.5, **counted).warmup_steps == 3
    assert schedule({}, lr_scheduler_type="linear", **counted).total_steps == 6
    assert schedule({}, lr_scheduler_type="inverse_sqrt").name == "inverse_sqrt"
    for wrong, said in (
        ({"warmup_ratio": 0.1}, "warmup_ratio=0.1 was given, but it is a share of a number of updates that is not"),
        ({"logging_steps": 0.5}, "logging_steps=0.5 was given"),
        ({"num_train_epochs": 3}, "num_train_epochs was given without training_data"),
        ({**counted, "max_steps": 4}, "num_train_epochs=2 was given, but the schedule has 4 updates"),
    ):
        with pytest.raises(RequestError, match=said):
            schedule(warm, **wrong)
    for config, rate in ((CONFIG, 5.0), ({"train_batch_size": 8}, DEFAULTS["learning_rate"])):
        assert engine_of(config, learning_rate=None)[0].runner.settings.optimizer.learning_rate == rate
    engine, _, loader, _ = engine_of(training_data=examples())
    with pytest.warns(UserWarning, match=r"update 7 begins, but the learning rate's schedule ended after 6"):
        for _ in range(UPDATES + 1):
            update(engine, loader)


def test_updates_are_logged_as_often_as_steps_per_print_says(
    backend: NumpyBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[Any] = []
    ended: list[bool] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            sent.append(folder)

        def add_text(self, *_: Any) -> None: ...
        def flush(self) -> None: ...
        def add_scalar(self, key: str, value: float, step: int) -> None:
            sent.append((key, value, step)) if key == "train/loss" else None

        def close(self) -> None:
            ended.append(True)

    module = type(sys)("tensorboardX")
    module.__spec__, module.SummaryWriter = object(), Writer  # type: ignore[assignment, attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    config = {**CONFIG, "steps_per_print": 2, "tensorboard": {"enabled": True}}
    engine, _, loader, _ = engine_of(config, training_data=examples(), output_dir=tmp_path, logging_first_step=True)
    engine.runner.break_at = {5}
    losses = []
    for _ in range(5):
        for _, batch in zip(range(2), loader, strict=False):
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    assert sent == [str(tmp_path / "tensorboard"), ("train/loss", losses[0], 1), ("train/loss", losses[1], 2),
                    ("train/loss", np.mean(losses[2:4]), 4)]  # fmt: skip
    printed = capsys.readouterr().err
    assert printed.count("step ") == 3 and f"step 4: loss {np.mean(losses[2:4]):.4f}" in printed
    assert engine.skipped_steps == 1 and not ended
    engine.destroy()
    assert ended == [True] and engine.steps_per_print() == 2
    assert [one.name for one in tmp_path.iterdir()] == []  # the writer is not tensorboardX
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert engine.skipped_steps == 1


def test_a_loss_stands_for_the_output_of_a_model_of_transformers(backend: NumpyBackend) -> None:
    engine, _, _, _ = engine_of()
    outputs = engine(input_ids=np.ones((4, LENGTH), int))
    assert outputs.loss is outputs and outputs[0] is outputs and outputs.detach() is outputs
    assert sum([outputs, outputs]) / 2 == outputs.item() == outputs / 2 * 2 == 0.5 * outputs + outputs / 2
    for name in ("backward", "logits"):
        with pytest.raises(UnsupportedError, match=rf"loss.{name} was asked for, but the engine gives a number"):
            getattr(outputs, name)
    with pytest.raises(RequestError, match="was given a float"):
        engine.backward(outputs / 2)
    engine.backward(outputs.loss)


def test_a_careless_users_batches_and_models_are_refused_in_one_sentence(
    backend: NumpyBackend,
) -> None:
    engine, _, _, _ = engine_of()
    tokens = np.ones((4, LENGTH), int)
    assert engine(tokens, labels=tokens).item() == engine(input_ids=tokens).item()
    engine._vocabulary = VOCAB
    for wrong, said in (
        (tokens.astype(float), r"input_ids are float64 \[4, 8\], but they are whole numbers"),
        (tokens[0], r"input_ids are int64 \[8\], but they are whole numbers \[rows, seq\]"),
        (tokens * VOCAB, "the token 11, but the model's are from 0 to below 11"),
        (tokens * -100, "the token -100"),
    ):
        with pytest.raises(RequestError, match=said):
            engine(wrong)
    engine(tokens * -100, attention_mask=tokens * 0)
    for name in ("set_lr", "to", "local_rank", "loss_scale"):
        with pytest.raises(UnsupportedError, match=rf"engine.{name} was asked for"):
            getattr(engine, name)
    assert (engine.gradient_clipping(), engine.bfloat16_enabled(), engine.fp16_enabled()) == (0.0, None, False)
    assert engine.training_dataloader is None
    with pytest.raises(RequestError, match="model=a Engine was given, but it is a checkpoint's folder or Hub id"):
        initialize(model=engine, config=CONFIG)
