"""The training loops of others on models of this backend, with the packages themselves: transformers' Trainer,
accelerate, TRL and peft. docs/accelerate.md says what works, and with which arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader
from xla_spmd import said
from xla_training_cases import checkpoint_at, losses_of, rows_of_text, stock_trainer

from ttpu import AutoModelForTPU
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_torch_xla.attention.choice import refused
from ttpu_torch_xla.runtime import current

pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_at(tmp_path_factory.mktemp("trainers") / "model")


def opened(checkpoint: Path, **options: Any) -> Any:
    return AutoModelForTPU.from_pretrained(checkpoint, backend="torch_xla", dtype="float32", **options)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[float]:
    """The losses of torch's AdamW on the host, used as by transformers' Trainer: one batch, a falling rate, clipped."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    batch = {name: torch.stack([row[name] for row in rows_of_text()]) for name in ("input_ids", "labels")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, 5)
    losses = []
    for _ in range(5):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


# transformers' Trainer


def test_transformers_trainer_trains_with_its_defaults_and_resumes(
    checkpoint: Path, expected: list[float], tmp_path: Path
) -> None:
    model, runtime = opened(checkpoint), current()
    trainer = stock_trainer(model, tmp_path / "run", rows_of_text(), save_steps=3)
    runtime.sync(wait=True)
    runtime.reset_counters()
    assert trainer.train().global_step == 5
    assert losses_of(trainer) == pytest.approx(expected, rel=1e-4)
    assert runtime.counters().compiles <= 8
    weights = {name: one.detach().cpu() for name, one in model.state_dict().items()}
    again = stock_trainer(model, tmp_path / "run", rows_of_text(), save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert all(torch.equal(one.detach().cpu(), weights[name]) for name, one in model.state_dict().items())
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-5")
    assert all(torch.equal(one, weights[name]) for name, one in back.state_dict().items())


def test_transformers_trainer_trains_on_eight_devices_with_its_defaults(
    expected: list[float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = said(tmp_path_factory)["training"]["stock"]
    assert found["steps"] == 5
    assert found["losses"] == pytest.approx(expected, rel=1e-4)
    assert found["compiles"] <= 8  # the updates' and the logs': a checkpoint compiles nothing
    assert found["compiles_of_saving"] == 0
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt"} <= set(found["written"])


def test_what_fails_in_a_loaders_thread_reaches_the_loop(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert said(tmp_path_factory)["training"]["stock"]["broken"] == "the third example is damaged"


def test_transformers_fsdp_arguments_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    message = said(tmp_path_factory)["training"]["stock"]["wrapped"]
    assert "leave fsdp out of the Trainer's arguments, and pass parallelism_strategy='fsdp'" in message


# accelerate and TRL


def test_an_accelerate_loop_trains_and_saves(checkpoint: Path, tmp_path: Path) -> None:
    from accelerate import Accelerator

    model, accelerator = opened(checkpoint), Accelerator(gradient_accumulation_steps=2)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    loader: Any = DataLoader(rows_of_text(), batch_size=4, pin_memory=True)  # type: ignore[arg-type]
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert prepared is model
    losses = []
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
    first, last = torch.stack(losses).cpu()[[0, 4]].tolist()
    assert last < first - 0.2
    accelerator.unwrap_model(prepared).save_pretrained(tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert torch.equal(back["model.norm.weight"], model.model.norm.weight.detach().cpu())


def test_trl_trains_packed_sequences_as_if_apart(checkpoint: Path, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    model = opened(checkpoint)
    lengths = (9, 14, 6, 11)
    sequences = [list(range(10 * number, 10 * number + length)) for number, length in enumerate(lengths, start=1)]
    config = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=1, logging_steps=1, packing=True, max_length=24, report_to="none",
        disable_tqdm=True, save_strategy="no", bf16=False,
    )  # fmt: skip
    host = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    total = 0.0
    with torch.no_grad():
        for one in sequences:
            ids = torch.tensor([one])
            total += float(host(ids, labels=ids).loss) * (len(one) - 1)
    trainer = trl.SFTTrainer(
        model,
        args=config,
        train_dataset=datasets.Dataset.from_list([{"input_ids": one} for one in sequences]),
        processing_class=model.ttpu.tokenizer,
        peft_config=peft.LoraConfig(**LORA),
    )
    trainer.train()
    assert losses_of(trainer) == pytest.approx([total / (sum(lengths) - len(lengths))], rel=1e-4)


# peft


def test_peft_trains_saves_and_merges_adapters(checkpoint: Path, tmp_path: Path) -> None:
    model = peft.get_peft_model(opened(checkpoint), peft.LoraConfig(**LORA))
    trainer = stock_trainer(model, tmp_path / "run", rows_of_text(), learning_rate=3e-2, save_strategy="no")
    trainer.train()
    losses = losses_of(trainer)
    assert losses[-1] < losses[0] - 0.1
    model.save_pretrained(tmp_path / "adapter")
    ids = rows_of_text()[0]["input_ids"][None]
    host = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    host = peft.PeftModel.from_pretrained(host, tmp_path / "adapter").eval()
    model.eval()
    with torch.no_grad():
        expected = host(ids).logits
        found = model(ids.to(current().device())).logits.cpu()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        model.merge_and_unload().save_pretrained(tmp_path / "merged")
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)


def test_peft_trains_adapters_beside_quantized_layers(checkpoint: Path, tmp_path: Path) -> None:
    model = peft.get_peft_model(opened(checkpoint, quantization="w4a16-g16"), peft.LoraConfig(**LORA))
    trainer = stock_trainer(model, tmp_path / "run", rows_of_text(), learning_rate=3e-2, save_strategy="no")
    trainer.train()
    losses = losses_of(trainer)
    assert losses[-1] < losses[0] - 0.1
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    with pytest.raises(UnsupportedError, match="merge it into the model that is not quantized"):
        model.merge_and_unload()


# Arguments of from_pretrained


@pytest.mark.parametrize("name", ["flex_attention", "flash_attention_2", "paged|sdpa", "kernels-community/flash-attn"])
def test_attentions_for_gpus_are_refused(checkpoint: Path, name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"which torch_xla does not run: use splash_attention, or auto"):
        opened(checkpoint, attn_implementation=name)


def test_what_is_offered_can_run(checkpoint: Path) -> None:
    with pytest.raises(RequestError, match=r"use auto, eager, .*sdpa") as raised:
        opened(checkpoint, attn_implementation="spda")
    offered = str(raised.value).rpartition("registers (")[2].partition(")")[0].split(", ")
    assert "sdpa" in offered
    assert [name for name in offered if refused(name)] == []


def test_the_old_name_of_dtype_leads_to_the_new_one(checkpoint: Path) -> None:
    with pytest.raises(RequestError, match=r"torch_dtype \(did you mean dtype\?\)"):
        AutoModelForTPU.from_pretrained(checkpoint, backend="torch_xla", torch_dtype="float32")
