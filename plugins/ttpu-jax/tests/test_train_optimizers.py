"""Learning rates are transformers', and each optimizer updates what it should."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ttpu_core.config import ModelConfig
from ttpu_core.errors import RequestError
from ttpu_core.registry import default_registry
from ttpu_core.sharding.training_state import UpdateSettings
from ttpu_core.spec import Parameter, axes
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.train.from_settings import trained_paths
from ttpu_jax.train.optimizers import EMBEDDING_SHARE, optimizer_for, schedule_of
from ttpu_train.runner import OptimizerSettings, ScheduleSettings

TOTAL, WARMUP, DECAY = 40, 5, 10
TABLE = {
    "groups.0.0.mlp.down.kernel": Parameter((2, 6, 8), (axes.LAYERS, axes.EMBED, axes.MLP)),
    "groups.0.0.mlp.up.kernel": Parameter((2, 2, 8, 6), (axes.LAYERS, None, axes.MLP, axes.EMBED)),
    "embed.embedding": Parameter((9, 6), (axes.VOCAB, axes.EMBED)),
    "final_norm.scale": Parameter((6,), (axes.NORM,)),
}
RANDOM = np.random.default_rng(0)
PARAMS = {path: jnp.asarray(RANDOM.standard_normal(one.shape), jnp.float32) for path, one in TABLE.items()}
GRADIENTS = {path: jnp.asarray(RANDOM.standard_normal(one.shape), jnp.float32) for path, one in TABLE.items()}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "ours", "theirs", "options"),
    [
        ("constant", {}, "constant_with_warmup", {}),
        ("linear", {}, "linear", {}),
        ("cosine", {}, "cosine", {}),
        ("cosine", {"min_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("inverse_sqrt", {}, "inverse_sqrt", {}),
        (
            "warmup_stable_decay",
            {"decay_steps": DECAY, "min_ratio": 0.1},
            "warmup_stable_decay",
            {"num_decay_steps": DECAY, "min_lr_ratio": 0.1},
        ),
    ],
)
def test_learning_rates_are_those_of_transformers(
    name: Any, ours: dict[str, Any], theirs: str, options: dict[str, Any]
) -> None:
    import torch
    import transformers

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = transformers.get_scheduler(theirs, optimizer, WARMUP, TOTAL, scheduler_specific_kwargs=options)
    wanted = []
    for _ in range(TOTAL + 3):
        wanted.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    share = schedule_of(ScheduleSettings(name, warmup_steps=WARMUP, total_steps=TOTAL, **ours))
    np.testing.assert_allclose(share(jnp.arange(TOTAL + 3)), wanted, rtol=1e-5, atol=1e-6)


def direction(name: str, **settings: Any) -> dict[str, np.ndarray]:
    optimizer = optimizer_for(OptimizerSettings(name, **settings), TABLE)
    updates, _ = optimizer.update(GRADIENTS, optimizer.init(PARAMS), PARAMS)
    return {path: np.asarray(value) for path, value in updates.items()}


def test_directions_of_the_optimizers() -> None:
    plain, lion, muon = direction("sgd"), direction("lion"), direction("muon")
    adam, factored = direction("adamw"), direction("adafactor")
    for path, gradient in GRADIENTS.items():
        np.testing.assert_array_equal(plain[path], gradient)
        np.testing.assert_array_equal(lion[path], np.sign(gradient))
        np.testing.assert_allclose(adam[path], np.sign(gradient), atol=1e-4)
        assert np.isfinite(factored[path]).all() and np.sqrt(np.square(factored[path]).mean()) <= 1.001
    for kernel in muon["groups.0.0.mlp.down.kernel"]:  # each layer's is nearly orthogonal
        values = np.linalg.svd(kernel, compute_uv=False)
        assert values.max() < 2 * values.min()
    for kernel in muon["groups.0.0.mlp.up.kernel"]:  # a taller matrix [out, in] takes larger steps
        matrix = kernel.reshape(-1, kernel.shape[-1])
        values = np.linalg.svd(matrix, compute_uv=False) / (matrix.shape[0] / matrix.shape[1]) ** 0.5
        assert 0.5 < values.min() <= values.max() < 1.3
    np.testing.assert_allclose(muon["embed.embedding"], 0.15 * adam["embed.embedding"], rtol=1e-6)


def test_weight_decay_leaves_out_what_its_patterns_name() -> None:
    bare = direction("sgd")
    for path, value in direction("sgd", weight_decay=0.5).items():
        decay = 0.0 if path.endswith(".scale") else 0.5
        np.testing.assert_allclose(value, bare[path] + decay * PARAMS[path], rtol=1e-6)


def test_buffers_are_not_trained() -> None:
    table = {**TABLE, "groups.0.0.layer_scalar": Parameter((2, 1), (axes.LAYERS, None), "ones", trained=False)}
    for patterns in (None, ("*",)):
        assert trained_paths(patterns, table, {}, "gemma4_text") == set(TABLE)


def test_muon_leaves_depthwise_convolutions_to_adamw() -> None:
    path = "groups.0.0.mixer.conv.kernel"
    table = {**TABLE, path: Parameter((2, 4, 3, 5), (axes.LAYERS, None, axes.KV_HEADS, axes.QKV))}
    gradient = {**GRADIENTS, path: jnp.ones((2, 4, 3, 5))}
    optimizer = optimizer_for(OptimizerSettings("muon"), table)
    updates, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    np.testing.assert_allclose(updates[path], EMBEDDING_SHARE, rtol=1e-5)


def test_momentum_adds_up_earlier_gradients() -> None:
    optimizer = optimizer_for(OptimizerSettings("sgd", momentum=0.5), TABLE)
    _, state = optimizer.update(GRADIENTS, optimizer.init(PARAMS), PARAMS)
    updates, _ = optimizer.update(GRADIENTS, state, PARAMS)
    np.testing.assert_allclose(optax.tree.norm(updates), 1.5 * optax.tree.norm(GRADIENTS), rtol=1e-6)


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(RequestError, match=r"'adam_4bit' was asked for, but this backend has adamw, adamw_8bit, lion"):
        optimizer_for(OptimizerSettings("adam_4bit"), TABLE)
    with pytest.raises(RequestError, match=r"'step' was asked for, but learning rates follow constant, linear"):
        schedule_of(ScheduleSettings("step"))  # type: ignore[arg-type]


@pytest.mark.torch
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor"])
def test_several_updates_are_those_of_torch_or_of_the_paper(name: str) -> None:
    import torch
    import transformers

    table = {"embed.embedding": Parameter((130, 128), (axes.VOCAB, axes.EMBED))}  # large enough to be factored
    random = np.random.default_rng(3)
    weight, *gradients = random.standard_normal((4, 130, 128)).astype(np.float32)
    settings = OptimizerSettings(name, beta1=0.8, beta2=0.95, momentum=0.9, weight_decay=0.1)
    ours, rate = optimizer_for(settings, table), 0.01
    params = {"embed.embedding": jnp.asarray(weight)}
    state = ours.init(params)
    for gradient in gradients:
        updates, state = ours.update({"embed.embedding": jnp.asarray(gradient)}, state, params)
        params = optax.apply_updates(params, {path: -rate * update for path, update in updates.items()})
    theirs = torch.nn.Parameter(torch.tensor(weight))
    decay = 1 - rate * 0.1  # decoupled, of the weight before the update
    optimizer: Any = {
        "adamw": lambda: torch.optim.AdamW([theirs], rate, (0.8, 0.95), 1e-8, 0.1),
        "sgd": lambda: torch.optim.SGD([theirs], rate, 0.9),
        "adafactor": lambda: transformers.Adafactor([theirs], rate, scale_parameter=False, relative_step=False),
        "lion": lambda: None,
    }[name]()
    moment = np.zeros_like(weight)
    for gradient in gradients:
        with torch.no_grad():
            if name != "adamw":
                theirs.mul_(decay)
            if name == "lion":  # arXiv 2302.06675, algorithm 2
                theirs.sub_(rate * torch.tensor(np.sign(0.8 * moment + np.float32(0.2) * gradient)))
                moment = 0.95 * moment + np.float32(0.05) * gradient
        if optimizer is not None:
            theirs.grad = torch.tensor(gradient)
            optimizer.step()
    np.testing.assert_allclose(params["embed.embedding"], theirs.detach().numpy(), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "lion", "muon", "sgd"])
def test_the_planner_counts_the_state_of_every_optimizer(name: str) -> None:
    """Of Llama-3.1-8B on one device, whose sizes fill tiles, without the count of updates."""
    from ttpu_plan.memory import estimate_memory
    from ttpu_plan.workload import Workload

    found = find_spec("ttpu_llama")
    assert found is not None and found.origin is not None
    config = ModelConfig.from_file(Path(found.origin).parent / "configs" / "llama-3.1-8b.json")
    spec = default_registry().architecture(config).spec
    table = stacked_parameters(spec)
    params = {path: jax.ShapeDtypeStruct(one.shape, jnp.float32) for path, one in table.items()}
    momentum = 0.9 if name == "sgd" else 0.0
    state = jax.eval_shape(optimizer_for(OptimizerSettings(name, momentum=momentum), table).init, params)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    step = Workload("train", 1, 2048, layers="scan", update=UpdateSettings(name, momentum))
    assert estimate_memory(spec, {}, step).optimizer == pytest.approx(held, rel=1e-5)
