"""Fine-tuning on packed rows, of text and of chats, and with adapters, has the losses of TRL's SFTTrainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import llama_checkpoint

import ttpu

pytestmark = pytest.mark.torch
STEPS, LENGTH, ROWS = 3, 64, 4
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
)
WORDS = ("one loop", "a longer answer, of two", "yes", "nothing else", "why not?", "a class has bases")
TEXTS = [{"text": f"{first} and {second}"} for first in WORDS[:3] for second in WORDS]
CHATS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question in WORDS[:3]
    for answer in WORDS[2:5]
]
PEFT = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch_xla is installed, accelerate trains on its device whatever `use_cpu` says."""
    from trl import SFTTrainer  # noqa: F401  its modules are to be changed

    for name, module in list(sys.modules.items()):
        if name.startswith(("accelerate.", "transformers.train")) and hasattr(module, "is_torch_xla_available"):
            monkeypatch.setattr(module, "is_torch_xla_available", lambda *_, **__: False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = llama_checkpoint(tmp_path_factory.mktemp("sft") / "llama", chat=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("data", "adapted"), [("texts", False), ("chats", True)])
def test_packed_losses_are_those_of_trl(checkpoint: Path, tmp_path: Path, data: str, adapted: bool) -> None:
    examples: list[dict[str, Any]] = TEXTS if data == "texts" else CHATS
    own = ttpu.Trainer(
        str(checkpoint),
        train_dataset=examples,
        output_dir=tmp_path / "ours",
        max_steps=STEPS,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_length=LENGTH,
        packing=True,
        per_device_train_batch_size=4 * ROWS,  # the whole data in every update: how they are packed changes nothing
        assistant_only_loss=data == "chats",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        peft_config=PEFT if adapted else None,
        load_options={"dtype": "float32"},
    )
    if adapted:
        own.save_model(tmp_path / "before", "float32")
    own.train()
    losses = [line["loss"] for line in own.state.log_history if "loss" in line]
    np.testing.assert_allclose(losses, trl_losses(checkpoint, tmp_path, examples, adapted=adapted), rtol=1e-4)


def trl_losses(checkpoint: Path, folder: Path, examples: list[dict[str, Any]], *, adapted: bool) -> list[float]:
    import datasets
    import peft
    import torch
    import transformers
    import trl

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if adapted:
        model = peft.PeftModel.from_pretrained(model, folder / "before", is_trainable=True)
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(
            output_dir=str(folder / "theirs"),
            max_steps=STEPS,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            max_length=LENGTH,
            packing=True,
            per_device_train_batch_size=4 * ROWS,
            assistant_only_loss="messages" in examples[0],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            weight_decay=0.0,
        ),
        train_dataset=datasets.Dataset.from_list(examples),
        processing_class=transformers.AutoTokenizer.from_pretrained(checkpoint),
    )
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]
