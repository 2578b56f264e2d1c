"""Preferences and GRPO with adapters, beside dense and quantized weights: the reference is the model without them, and
the engine samples with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny import llama_checkpoint

from ttpu import AutoModelForTPU
from ttpu_jax.backend import JaxBackend
from ttpu_jax.ops.kernels import AdaptedKernel, QuantizedKernel
from ttpu_jax.train.runner import JaxTrainRunner
from ttpu_train.adapters import AdapterSettings
from ttpu_train.grpo.arguments import GRPOArguments
from ttpu_train.grpo.worker import RolloutWorker
from ttpu_train.objectives import DPO, GRPO, KTO
from ttpu_train.runner import Batch, OptimizerSettings, ScheduleSettings, StepSettings

ENGINE = {"sequence_buckets": (8,), "token_buckets": (32,), "max_num_batched_tokens": 32, "page_size": 8}
OPTIMIZER = OptimizerSettings(learning_rate=3e-2, schedule=ScheduleSettings("constant"))
ADAPTERS = AdapterSettings("all-linear", r=3, lora_alpha=6, init_lora_weights=False)
ROWS, SEQ = 8, 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("methods") / "llama")


def opened(checkpoint: Path, **load: Any) -> Any:
    return AutoModelForTPU.from_pretrained(str(checkpoint), **{"dtype": "float32", **load})


def runner(
    checkpoint: Path, objective: Any, adapters: AdapterSettings | None = ADAPTERS, **load: Any
) -> JaxTrainRunner:
    settings = StepSettings(OPTIMIZER, objective=objective, adapters=adapters)
    return JaxBackend().train_runner(opened(checkpoint, **load), settings)


def batch(objective: Any = None) -> Batch:
    random = np.random.default_rng(5)
    tokens = random.integers(1, 255, (ROWS, SEQ)).astype(np.int32)
    places = np.broadcast_to(np.arange(SEQ, dtype=np.int32), tokens.shape)
    extra: dict[str, np.ndarray] = {}
    if isinstance(objective, KTO):
        extra["labels"] = np.where(np.arange(ROWS) % 2, -1, np.arange(ROWS) // 2 % 2).astype(np.float32)
    return Batch(tokens, (places >= 3).astype(np.float32), places, None, extra)


def base_logprobs(checkpoint: Path, given: Batch, **load: Any) -> np.ndarray:
    """Of each row by a model without adapters."""
    logits = jax.nn.log_softmax(opened(checkpoint, **load)(given.tokens).logits, axis=-1)
    found = np.take_along_axis(np.asarray(logits)[:, :-1], given.tokens[:, 1:, None], -1)[..., 0]
    return (found * given.weights[:, 1:]).sum(1)


def test_preferences_are_learned_by_adapters_beside_weights_of_4_bits(checkpoint: Path) -> None:
    learned(checkpoint, DPO(), quantization="w4a16-g16")


@pytest.mark.torch
def test_preferences_are_learned_by_adapters_of_a_quantized_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    from quantized_files import awq

    learned(awq(checkpoint, tmp_path)[0], KTO())


def learned(checkpoint: Path, objective: Any, **load: Any) -> None:
    """New adapters count nothing for the reference, even where they are not zero."""
    one, given = runner(checkpoint, objective, **load), batch(objective)
    reference = one.row_logprobs(given)
    expected = base_logprobs(checkpoint, given, **load)
    np.testing.assert_allclose(reference, expected, rtol=1e-4)
    given = Batch(given.tokens, given.weights, given.positions, None, {**given.extra, "ref_logps": reference})
    base = one.params["groups.0.0.attention.qkv.kernel"]
    assert isinstance(base, QuantizedKernel) and base.format.dtype in ("int4", "uint4")
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(base)]
    values = [one.step(given).values() for _ in range(6)]
    assert values[-1].loss < 0.9 * values[0].loss
    assert values[-1].metrics["rewards/chosen"] > values[-1].metrics["rewards/rejected"]
    for old, new in zip(before, jax.tree.leaves(one.params["groups.0.0.attention.qkv.kernel"]), strict=True):
        np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(one.row_logprobs(given), reference)  # nor do trained ones


def test_a_given_adapter_is_part_of_the_reference(checkpoint: Path, tmp_path: Path) -> None:
    first = runner(checkpoint, None)
    folder = first.save_pretrained(tmp_path / "adapter", "float32")
    given = batch()
    begun = AdapterSettings("all-linear", r=3, lora_alpha=6, start=str(folder))
    one = runner(checkpoint, GRPO(beta=0.1), begun)
    expected = base_logprobs(checkpoint, given)
    found = one.row_logprobs(given)
    assert np.abs(found - expected).max() > 1e-2
    np.testing.assert_allclose(one.token_logprobs(given, 1.0, initial=True).sum(1), found, rtol=1e-4)
    one.params = {path: value if path not in one.adapters.names else 2 * value for path, value in one.params.items()}
    np.testing.assert_allclose(one.token_logprobs(given, 1.0, initial=True).sum(1), found, rtol=1e-4)
    assert np.abs(one.token_logprobs(given, 1.0).sum(1) - found).max() > 1e-2
    new = runner(checkpoint, GRPO(beta=0.1))
    np.testing.assert_allclose(new.token_logprobs(given, 1.0, initial=True).sum(1), expected, rtol=1e-4)


def sampled(trained: JaxTrainRunner, prompts: list[list[int]], worker: RolloutWorker) -> list[list[int]]:
    return [one.tokens for one in worker.generate(prompts, range(len(prompts)))]


@pytest.mark.parametrize(
    ("adapters", "load"),
    [(ADAPTERS, {"quantization": "w8a16"}), (ADAPTERS, {"mesh": "data=2,tensor=2"})],
    ids=["quantized", "data"],
)
def test_the_engine_samples_with_what_is_trained(adapters: Any, load: dict[str, Any], checkpoint: Path) -> None:
    one = runner(checkpoint, None, adapters, **load)
    args = GRPOArguments(
        reward_funcs=lambda **_: [], max_completion_length=6, temperature=1e-6, engine_options=ENGINE
    )
    worker = RolloutWorker(one, args, 16, 8)
    prompts = [np.random.default_rng(seed).integers(0, 255, 5).tolist() for seed in range(4)]
    before = sampled(one, prompts, worker)
    for _ in range(2):
        one.step(batch()).values()
    weights = one.rollout_weights()
    held = {id(array) for array in jax.tree.leaves(one.params)}
    assert not held & {id(array) for array in weights.own}
    kernel = weights.params["groups.0.0.mlp.down.kernel"]
    assert isinstance(kernel, AdaptedKernel)
    if "mesh" in load:
        assert kernel.base.addressable_shards[0].data.size * 4 == kernel.base.size  # each device holds a part
    else:
        assert kernel.base is one.params["groups.0.0.mlp.down.kernel"] and isinstance(kernel.base, QuantizedKernel)
    after = sampled(one, prompts, worker)
    worker.close()
    for array in jax.tree.leaves(one.params):
        assert not array.is_deleted()
    model: Any = one.model()
    expected = [
        model.generate(np.array([prompt]), max_new_tokens=6, do_sample=False)[0, 5 : 5 + len(own)].tolist()
        for prompt, own in zip(prompts, after, strict=True)
    ]
    assert after == expected and after != before
