"""DPO, ORPO and KTO: losses, gradients and figures are TRL's, whatever the mesh and the accumulation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import jax
import numpy as np
import pytest
from tiny import llama_checkpoint
from transformers import AutoTokenizer

from ttpu import AutoModelForTPU
from ttpu_core.errors import RequestError
from ttpu_jax.backend import JaxBackend
from ttpu_jax.model.loss import LossSums, TokenBatch
from ttpu_jax.train.figures import names_of, of_update, updated
from ttpu_jax.train.from_settings import OBJECTIVES
from ttpu_jax.train.objectives.preference import dpo_losses
from ttpu_jax.train.runner import JaxTrainRunner
from ttpu_jax.train.step import Figures
from ttpu_train.objectives import DPO, GRPO, KTO, ORPO, DPOLoss
from ttpu_train.runner import Batch, LossSettings, OptimizerSettings, ScheduleSettings, StepSettings
from ttpu_train.trainer import Trainer

ROWS, SEQ, STEPS = 16, 10, 3
EXPERTS = {
    "vocab_size": 256, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2, "num_local_experts": 4,
    "output_router_logits": True, "router_aux_loss_coef": 0.3,
}  # fmt: skip
OPTIMIZER = OptimizerSettings("sgd", 0.5, ScheduleSettings("constant"), max_grad_norm=None)
METHODS = [DPO(label_smoothing=0.1), ORPO(beta=0.5), KTO(desirable_weight=2.0)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("preference") / "llama")


def batch(objective: Any) -> Batch:
    """Prompts of three tokens with completions of different lengths; the last example only fills the batch."""
    random = np.random.default_rng(7)
    tokens = random.integers(1, 255, (ROWS, SEQ)).astype(np.int32)
    places, lengths = np.arange(SEQ)[None], random.integers(5, SEQ + 1, ROWS)
    lengths[-2:] = 0
    real = places < lengths[:, None]
    labels = np.where(np.arange(ROWS) % 2, -1, np.arange(ROWS) // 2 % 3 > 0)
    extra: dict[str, np.ndarray] = {"ref_logps": random.normal(-33, 3, ROWS) * (lengths > 0)}
    if isinstance(objective, KTO):
        extra["labels"] = np.where(lengths > 0, labels, -1)
    weights = (real & (places >= 3)).astype(np.float32)
    return Batch(tokens * real, weights, np.where(real, places, -1).astype(np.int32), None, extra)


def runner(checkpoint: Path, objective: Any, mesh: str | None = None, accumulation: int = 1) -> JaxTrainRunner:
    model = AutoModelForTPU.from_pretrained(str(checkpoint), dtype="float32", mesh=mesh)
    settings = StepSettings(OPTIMIZER, accumulation=accumulation, objective=objective)
    return JaxBackend().train_runner(model, settings)


def run(checkpoint: Path, objective: Any, mesh: str | None = None, accumulation: int = 1) -> list[dict[str, float]]:
    one, given = runner(checkpoint, objective, mesh, accumulation), batch(objective)
    values = [one.step(given).values() for _ in range(STEPS)]
    return [{"loss": one.loss, "grad_norm": one.grad_norm, "tokens": one.tokens, **one.metrics} for one in values]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> dict[str, list[dict[str, float]]]:
    return {one.method: run(checkpoint, one) for one in METHODS}


def of_trl(objective: Any, logits: Any, given: Batch) -> Any:
    """The loss of TRL's own trainer for the logits of a model, with the batch as its collator would give it."""
    import torch
    from torch.nn import functional
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer

    turned = np.r_[0 : ROWS - 2 : 2, 1 : ROWS - 2 : 2]  # chosen first, then rejected, without what fills the batch
    tokens = torch.tensor(given.tokens[turned]).long()
    mask, attended = torch.tensor(given.weights[turned]).long(), torch.tensor(given.positions[turned] >= 0).long()
    reference = torch.tensor(given.extra["ref_logps"][turned]).float()
    logits, half = logits[turned], len(turned) // 2

    def outputs(which: slice) -> Any:
        logprobs = functional.log_softmax(logits[which, :-1], -1).gather(-1, tokens[which, 1:, None])[..., 0]
        zeros = torch.zeros_like(logprobs)
        kept = logprobs * mask[which, 1:]
        return SimpleNamespace(log_probs=kept, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    class Model(SimpleNamespace):
        def __call__(self, *args: Any, **more: Any) -> Any:
            if isinstance(objective, ORPO):
                return SimpleNamespace(logits=logits)
            return outputs(self.rows(more["input_ids"]))

        def rows(self, ids: Any) -> slice:
            if isinstance(objective, DPO):
                return slice(None)
            return slice(half) if torch.equal(ids, tokens[:half]) else slice(half, None)

    same = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, device="cpu")
    mine = {"accelerator": same, "aux_loss_enabled": False, "beta": objective.beta, "_total_train_tokens": 0}
    from collections import defaultdict

    model = Model(training=True)
    mine |= {"model": model, "_metrics": {"train": defaultdict(list)}, "_tp_size": 1, "precompute_ref_logps": True}
    if isinstance(objective, ORPO):
        trainer: Any = SimpleNamespace(**mine, is_encoder_decoder=False)
        ids = {"input_ids": tokens, "attention_mask": attended, "labels": tokens.masked_fill(mask == 0, -100)}
        concatenated = {f"concatenated_{name}": value for name, value in ids.items()}
        trainer.padding_value, trainer.concatenated_inputs = 0, lambda *args, **more: concatenated
        trainer.get_batch_logps = ORPOTrainer.get_batch_logps
        trainer.odds_ratio_loss = partial(ORPOTrainer.odds_ratio_loss, trainer)
        trainer.concatenated_forward = partial(ORPOTrainer.concatenated_forward, trainer)
        return ORPOTrainer.get_batch_loss_metrics(trainer, model, {"chosen_labels": tokens[:half]})
    if isinstance(objective, DPO):
        more = {"ld_alpha": None, "f_divergence_type": "reverse_kl", "loss_types": [objective.loss_type]}
        more |= {"loss_weights": [1.0], "label_smoothing": objective.label_smoothing, "use_weighting": False}
        inputs = {"input_ids": tokens, "attention_mask": attended, "completion_mask": mask}
        inputs |= {"ref_chosen_logps": reference[:half], "ref_rejected_logps": reference[half:]}
        trainer = SimpleNamespace(**mine, **more)
        loss = DPOTrainer._compute_loss(trainer, model, inputs, False)
    else:
        more = {"calculate_KL": objective.loss_type == "kto", "loss_type": objective.loss_type}
        more |= {name: getattr(objective, name) for name in ("desirable_weight", "undesirable_weight")}
        trainer = SimpleNamespace(**mine, **more)
        trainer._compute_kl_logps = partial(KTOTrainer._compute_kl_logps, trainer)
        labels = torch.tensor(given.extra["labels"][turned][:half] == 1)
        inputs = {"label": labels, "ref_logps": reference[:half], "ref_KL_logps": reference[half:]}
        for name, rows in {"": slice(half), "KL_": slice(half, None)}.items():
            inputs |= {f"{name}input_ids": tokens[rows], f"{name}attention_mask": attended[rows]}
            inputs[f"{name}completion_mask"] = mask[rows]
        loss = KTOTrainer._compute_loss(trainer, model, inputs, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


@pytest.mark.torch
@pytest.mark.parametrize(
    "objective", [DPO(loss_type="robust", label_smoothing=0.1), *METHODS[1:]], ids=lambda one: one.method
)
def test_updates_are_those_of_trl(objective: Any, checkpoint: Path, plain: Any) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    optimizer, given = torch.optim.SGD(model.parameters(), 0.5), batch(objective)
    ours = run(checkpoint, objective) if isinstance(objective, DPO) else plain[objective.method]
    for figures in ours:
        attended = torch.tensor(given.positions >= 0).long()
        logits = model(torch.tensor(given.tokens).long(), attention_mask=attended).logits
        loss, metrics = of_trl(objective, logits, given)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((value.grad**2).sum() for value in model.parameters()))
        optimizer.step()
        np.testing.assert_allclose(figures["loss"], loss.item(), rtol=1e-4)
        np.testing.assert_allclose(figures["grad_norm"], norm.item(), rtol=1e-4)
        for name in set(figures) & set(metrics):
            np.testing.assert_allclose(figures[name], metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert {"rewards/chosen", "rewards/rejected", "logps/chosen"} <= set(figures) & set(metrics)


@pytest.mark.torch
@pytest.mark.parametrize("loss_type", get_args(DPOLoss))
def test_losses_of_pairs_are_those_of_trl(loss_type: Any) -> None:
    import torch

    smoothing = 0.1 if loss_type in ("robust", "exo_pair") else 0.0
    objective, given = DPO(0.3, loss_type, smoothing), batch(DPO())
    random = np.random.default_rng(3)
    logits = random.normal(size=(ROWS, SEQ, 256)).astype(np.float32)
    loss, _ = of_trl(objective, torch.tensor(logits), given)
    logprobs = np.take_along_axis(np.array(jax.nn.log_softmax(logits[:, :-1])), given.tokens[:, 1:, None], 2)[..., 0]
    ratios = ((logprobs * given.weights[:, 1:]).sum(1) - given.extra["ref_logps"])[:-2]
    means = ratios / given.weights[:-2].sum(1)
    losses = dpo_losses(objective, ratios[0::2], ratios[1::2], means[0::2] - means[1::2])
    np.testing.assert_allclose(losses.mean(), loss.item(), rtol=1e-4)


@pytest.mark.parametrize("objective", METHODS, ids=lambda one: one.method)
def test_updates_do_not_depend_on_mesh_and_accumulation(objective: Any, checkpoint: Path, plain: Any) -> None:
    for figures, expected in zip(
        run(checkpoint, objective, "fsdp=2,tensor=2", 2), plain[objective.method], strict=True
    ):
        assert set(figures) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(figures[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_pairs_are_never_divided(checkpoint: Path) -> None:
    with pytest.raises(RequestError, match=r"16 rows was given.*3 parts, 2 rows together.*multiple of 6"):
        runner(checkpoint, DPO(), accumulation=3).step(batch(DPO()))


def test_a_trainer_compares_with_the_model_before_training_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    folder = Path(__file__).parents[3] / "examples" / "checkpoints" / "pydoc-llama"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    checkpoint = llama_checkpoint(tmp_path / "llama", vocab_size=len(tokenizer))

    def ended(folder: str, **arguments: Any) -> tuple[Trainer, dict[str, np.ndarray]]:
        trainer = Trainer(
            str(checkpoint),
            method="dpo",
            beta=0.5,
            train_dataset=[{"prompt": "a", "chosen": "b" * (1 + number), "rejected": "c d"} for number in range(6)],
            eval_dataset={"held": [{"prompt": "a", "chosen": "b", "rejected": "c d"}]},
            tokenizer=tokenizer,
            output_dir=tmp_path / folder,
            cache_dir=tmp_path,
            max_length=16,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=1,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            disable_tqdm=True,
            **arguments,
        )
        trainer.train()
        return trainer, {path: np.asarray(value) for path, value in trainer.runner.params.items()}

    whole, expected = ended("whole", max_steps=4, save_strategy="no")
    lines = [line for line in whole.state.log_history if "loss" in line]
    np.testing.assert_allclose(lines[0]["loss"], np.log(2), rtol=1e-5)  # the model is its own reference
    assert abs(lines[0]["rewards/margins"]) < 1e-5 < lines[-1]["rewards/margins"]
    metrics = whole.evaluate()
    assert metrics["eval_rewards/accuracies"] == 1 and metrics["eval_loss"] < np.log(2)
    assert "eval_perplexity" not in metrics and metrics["eval_held_loss"] == metrics["eval_loss"]
    ended("parts", max_steps=2)
    _, resumed = ended("parts", max_steps=4, resume_from_checkpoint=True)
    for path, value in expected.items():
        np.testing.assert_array_equal(resumed[path], value)


def test_figures_that_no_example_has_are_left_out() -> None:
    one, none = jax.numpy.float32(1), jax.numpy.float32(0)
    sums = LossSums(one, one, one, one, {"rewards/rejected": (none, none), "rewards/chosen": (one, one + one)})
    found = updated(names_of(sums), *of_update(Figures(sums, one, one, jax.numpy.asarray(False))).tolist())
    assert found.metrics == {"rewards/chosen": 0.5}


@pytest.mark.torch
def test_the_balance_of_experts_joins_every_objective(tmp_path: Path) -> None:
    """TRL's trainers add router_aux_loss_coef times the model's aux_loss to the mean of their losses."""
    import torch
    import transformers

    torch.manual_seed(0)
    theirs = transformers.MixtralForCausalLM(transformers.MixtralConfig(**EXPERTS))
    for parameter in theirs.parameters():  # so that experts are chosen unevenly
        parameter.data.normal_(std=0.3)
    theirs.save_pretrained(tmp_path)
    one = runner(tmp_path, METHODS[0])
    model, params, given = one._step.model, one._step.computed(one.params), batch(KTO())
    count = jax.numpy.float32(5)
    extra = {**given.extra, **{name: np.ones(ROWS, np.float32) for name in ("advantages", "scales", "shares")}}
    shared = dict.fromkeys(("pairs", "chosen_tokens", "divergence", "divergence_rows"), count)
    placed = TokenBatch(given.tokens, given.weights, given.positions, None, extra, shared)

    def total(params: Any, coefficient: float, objective: Any) -> tuple[jax.Array, LossSums]:
        loss = LossSettings(router_aux_loss=coefficient)
        sums = OBJECTIVES[objective.method](model, params, placed, objective, loss)
        return sums.total / sums.divisor, sums

    @jax.jit
    def every(params: Any) -> Any:
        found = {each.method: [total(params, one, each) for one in (0.0, 0.3)] for each in (*METHODS, GRPO())}
        return found, jax.grad(lambda params: total(params, 0.3, ORPO())[0] - total(params, 0.0, ORPO())[0])(params)

    found, slopes = every(params)
    assert abs(next(slope for path, slope in slopes.items() if path.endswith("router.kernel"))).max() > 1e-4
    for method, ((without, plain), (with_balance, sums)) in found.items():
        rows = slice(None, None, 2 if method == "kto" else 1)  # of KTO's, those that its divergence is not measured on
        mask = torch.tensor(given.positions[rows] >= 0).long()
        with torch.no_grad():
            balance = 0.3 * theirs(torch.tensor(given.tokens[rows]).long(), attention_mask=mask).aux_loss.item()
        np.testing.assert_allclose(with_balance - without, balance, rtol=1e-4, err_msg=method)
        np.testing.assert_allclose(sums.metrics["aux_loss"][0] / sums.metrics["aux_loss"][1], balance, rtol=1e-4)
        assert "aux_loss" not in plain.metrics
    np.testing.assert_allclose(one.step(given).values().loss, found["dpo"][1][0], rtol=1e-5)
    values = one.evaluate(given).values()  # traced after the update, whose figures keep their names
    after = one.step(given).values()
    assert after.loss == pytest.approx(values.total / values.divisor, rel=1e-5)
    expected = {name: value / weight for name, (value, weight) in values.metrics.items()}
    assert after.metrics == pytest.approx(expected, rel=1e-4, abs=1e-5) and "aux_loss" in expected
    with pytest.raises(RequestError, match="router_aux_loss_coef was given with method='reward'"):
        Trainer(str(tmp_path), method="reward", train_dataset=[], router_aux_loss_coef=0.1)
    Trainer(str(tmp_path), method="orpo", train_dataset=[], router_aux_loss_coef=0.1)
