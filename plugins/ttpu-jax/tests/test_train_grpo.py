"""GRPO on JAX: the loss and its gradients are TRL's, the engine reads the trainer's weights, and a run goes on bit for
bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import llama_checkpoint

from ttpu import AutoModelForTPU, Trainer
from ttpu_core.errors import RequestError
from ttpu_jax.backend import JaxBackend
from ttpu_jax.runner.rollouts import RolloutRunner
from ttpu_jax.train.runner import JaxTrainRunner
from ttpu_train.grpo.arguments import GRPOArguments
from ttpu_train.grpo.method import GRPOMethod
from ttpu_train.grpo.rollouts import Rollout, update_rows
from ttpu_train.grpo.worker import RolloutWorker
from ttpu_train.runner import Batch, StepSettings

ENGINE = {"sequence_buckets": (8,), "token_buckets": (32,), "max_num_batched_tokens": 32, "page_size": 8}
"""Few shapes, to compile few programs."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("grpo") / "llama")


def spaces(completions: list[str], **_: Any) -> list[float]:
    """A toy reward: low bytes are better."""
    return [-float(np.mean([*text.encode(), 128])) for text in completions]


def runner(checkpoint: Path, **settings: Any) -> JaxTrainRunner:
    model = AutoModelForTPU.from_pretrained(str(checkpoint), dtype="float32")
    return JaxBackend().train_runner(model, StepSettings(**settings))


PROMPT, LENGTH, TEMPERATURE = 3, 5, 0.7


def rollout() -> Rollout:
    """Completions of different lengths, and probabilities of other weights that are far enough for clipping."""
    random = np.random.default_rng(1)
    lengths = np.array([[3, 5], [3, 2], [2, 4], [2, 1]], np.int32)
    tokens = random.integers(0, 255, (4, PROMPT + LENGTH)).astype(np.int32)
    apart = [random.normal(size=tokens.shape).astype(np.float32) for _ in range(3)]
    old, ref = (-5.5 + 0.3 * one for one in apart[:2])
    advantages = random.normal(size=4).astype(np.float32)
    return Rollout(tokens, lengths, np.ones(4, np.float32), advantages, old, ref, np.exp(0.2 * apart[2]))


VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "biased": {"loss_type": "grpo", "use_bias_correction_kl": False},
    "dapo": {"loss_type": "dapo"},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 1.5, "beta": 0.0},
}


@pytest.fixture(scope="module")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        str(tmp_path_factory.mktemp("trl")), use_cpu=True, bf16=False, per_device_train_batch_size=4, num_generations=2,
        max_completion_length=LENGTH, temperature=TEMPERATURE, gradient_checkpointing=False, report_to="none",
        epsilon_high=0.3, beta=0.0,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer: Any = GRPOTrainer(
        str(checkpoint), reward_funcs=cast(Any, spaces), args=args, train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=tokenizer,
    )  # fmt: skip
    # Where torch_xla is installed, accelerate takes its devices: the loss is computed on the CPU, by one process.
    trainer.model.to("cpu")
    trainer.accelerator = SimpleNamespace(
        num_processes=1, is_main_process=True, gather=lambda x: x, reduce=lambda x, reduction: x, autocast=nullcontext
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.use_vllm = True
    return trainer


def of_trl(
    trainer: Any, one: Rollout, variant: Mapping[str, Any]
) -> tuple[float, dict[str, np.ndarray], dict[str, float]]:
    """TRL's loss, gradients by name, and metrics."""
    import torch

    prompts, completions = torch.zeros(4, PROMPT, dtype=torch.long), torch.zeros(4, LENGTH, dtype=torch.long)
    masks = [torch.zeros_like(prompts), torch.zeros_like(completions)]
    numbers = {name: torch.zeros(4, LENGTH) for name in ("old_logprobs", "ref_logprobs", "importance")}
    for row, (prompt, length) in enumerate(one.lengths):
        whole = torch.tensor(one.tokens[row]).long()
        prompts[row, PROMPT - prompt :], masks[0][row, PROMPT - prompt :] = whole[:prompt], 1
        completions[row, :length], masks[1][row, :length] = whole[prompt : prompt + length], 1
        for name, values in numbers.items():
            values[row, :length] = torch.tensor(getattr(one, name)[row, prompt : prompt + length])
    trainer.loss_type = variant["loss_type"]
    trainer.beta = variant.get("beta", 0.04)
    trainer.importance_sampling_level = variant.get("importance_sampling_level", "token")
    trainer.args.delta = variant.get("delta")
    trainer.args.use_bias_correction_kl = variant.get("use_bias_correction_kl", True)
    trainer._metrics["train"].clear()
    trainer.model.train().zero_grad()
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": prompts, "prompt_mask": masks[0], "completion_ids": completions, "completion_mask": masks[1],
            "advantages": torch.tensor(one.advantages), "old_per_token_logps": numbers["old_logprobs"],
            "ref_per_token_logps": numbers["ref_logprobs"], "importance_sampling_ratio": numbers["importance"],
            "num_items_in_batch": masks[1].sum(),
        },
    )  # fmt: skip
    loss.backward()
    gradients = {name: value.grad.numpy().copy() for name, value in trainer.model.named_parameters()}
    return loss.item(), gradients, {name: value[0] for name, value in trainer._metrics["train"].items()}


@pytest.mark.torch
def test_loss_and_gradients_are_those_of_trl(checkpoint: Path, reference: Any, tmp_path: Path) -> None:
    one = rollout()
    programs: dict[Any, Any] = {}
    for name, variant in VARIANTS.items():
        given = {"beta": 0.04, "epsilon_high": 0.3, "temperature": TEMPERATURE} | variant
        args = GRPOArguments(reward_funcs=spaces, max_completion_length=LENGTH, **given)
        objective = GRPOMethod(args).objective
        if objective not in programs:
            trained = runner(checkpoint, objective=objective)
            step = trained._step
            programs[objective] = trained, jax.jit(lambda p, b, s=step: s._gradients(s.computed(p), b, 0))
        trained, program = programs[objective]
        sums, gradients = program(trained.params, trained._placed(update_rows(args, one, slice(0, 4))))
        held, trained.params = trained.params, gradients
        ours = load_file(trained.save_pretrained(tmp_path / name, "float32") / "model.safetensors")
        trained.params = held
        loss, theirs, metrics = of_trl(reference, one, variant)
        np.testing.assert_allclose(float(sums.total / sums.divisor), loss, rtol=1e-4, err_msg=name)
        for path, value in theirs.items():
            scale = np.abs(value).max()
            np.testing.assert_allclose(ours[path], value, rtol=1e-4, atol=1e-4 * scale, err_msg=f"{name} {path}")
        for path, (total, count) in sums.metrics.items():
            np.testing.assert_allclose(float(total / count), metrics[path], rtol=1e-4, err_msg=f"{name} {path}")
        assert 0 < metrics["clip_ratio/region_mean"] < 1  # or the test would not see the clipping


def trainer(checkpoint: Path, folder: Path, **given: Any) -> Trainer:
    prompts = [{"prompt": text} for text in ("one", "two", "three", "four", "five")]
    return Trainer(
        str(checkpoint), method="grpo", train_dataset=prompts, reward_funcs=spaces, output_dir=folder, max_steps=3,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=6, num_iterations=2, beta=0.01,
        learning_rate=1e-2, lr_scheduler_type="constant", remat="none", logging_steps=1, save_steps=1,
        disable_tqdm=True, engine_options=ENGINE, **given,
    )  # fmt: skip


def arrays(one: Trainer) -> dict[str, np.ndarray]:
    return {path: np.asarray(value) for path, value in one.runner.params.items()}  # type: ignore[attr-defined]


def test_a_run_is_rewarded_and_goes_on_bit_for_bit(checkpoint: Path, tmp_path: Path) -> None:
    """The checkpoint lies between the two updates of one rollout."""
    straight = trainer(checkpoint, tmp_path / "straight")
    straight.train()
    log = [json.loads(line) for line in (tmp_path / "straight" / "log.jsonl").read_text().splitlines()]
    first, second = log[:2]
    assert {"reward", "reward_std", "rewards/spaces/mean", "completions/mean_length"} <= first.keys()
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 0
    assert first["clip_ratio/region_mean"] == 0 and "reward" not in second  # nothing was sampled for it
    resumed = trainer(checkpoint, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=tmp_path / "straight" / "checkpoints" / "1")
    for path, value in arrays(straight).items():
        np.testing.assert_array_equal(arrays(resumed)[path], value, err_msg=path)
    again = [json.loads(line) for line in (tmp_path / "resumed" / "log.jsonl").read_text().splitlines()]
    assert again[2]["reward"] == log[2]["reward"]


def test_the_engine_reads_the_arrays_of_the_trainer(checkpoint: Path) -> None:
    """In float32 no weight is copied; the engine's greedy tokens are those of the model in training."""
    trained: Any = runner(checkpoint)
    args = GRPOArguments(reward_funcs=spaces, max_completion_length=6, temperature=1e-6, engine_options=ENGINE)
    worker = RolloutWorker(trained, args, 16, 8)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 255, 5).tolist() for _ in range(4)]
    before = [one.tokens for one in worker.generate(prompts, range(4))]
    engine: Any = worker.live.engine
    assert isinstance(engine.runner, RolloutRunner) and not engine.runner.params and not engine.runner.caches
    tokens = random.integers(0, 255, (4, 12)).astype(np.int32)
    places = np.broadcast_to(np.arange(12, dtype=np.int32), tokens.shape)
    trained.step(Batch(tokens, (places > 0).astype(np.float32), places)).values()
    weights = trained.rollout_weights()
    assert weights.converted == frozenset()
    engine.update_weights(weights)
    assert all(engine.runner.params[path] is value for path, value in trained.params.items())
    engine.sleep()
    after = [one.tokens for one in worker.generate(prompts, range(4))]
    model = trained.model()
    expected = [
        model.generate(np.array([prompt]), max_new_tokens=6, do_sample=False)[0, 5 : 5 + len(own)].tolist()
        for prompt, own in zip(prompts, after, strict=True)
    ]
    assert after == expected and len(before) == 4
    with pytest.raises(RequestError, match="without weights"):
        engine.wake_up()
    with pytest.raises(RequestError, match="its trainer alone"):
        engine.update_weights({})
    worker.close()


def test_bfloat16_rollouts_convert_what_they_read_and_free_it(checkpoint: Path) -> None:
    trained = runner(checkpoint, compute_dtype="bfloat16")
    handed = trained.rollout_weights()
    assert handed.converted == set(trained.params)
    for path, value in trained.params.items():
        np.testing.assert_array_equal(np.asarray(handed.params[path]), np.asarray(value.astype("bfloat16")))


def test_token_logprobs_are_those_of_the_logits(checkpoint: Path) -> None:
    one = rollout().plain()
    trained = runner(checkpoint)
    found = trained.token_logprobs(one, 0.5)
    scores = jax.nn.log_softmax(trained.predict(one)[1] / 0.5, axis=-1)
    expected = np.take_along_axis(np.asarray(scores)[:, :-1], one.tokens[:, 1:, None], -1)[..., 0] * one.weights[:, 1:]
    np.testing.assert_allclose(found[:, 1:], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RequestError, match="set its beta"):
        trained.token_logprobs(one, 0.5, initial=True)
