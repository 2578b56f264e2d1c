"""Training the stock model on one device: a step compiles at most twice; layers that are computed again, or run as one
loop, give the gradients that they would give otherwise; what is saved is a checkpoint of transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from ttpu_core import ModelConfig, default_registry
from ttpu_core.errors import UnsupportedError
from ttpu_torch_xla.checkpointing import checkpoint_layers, recomputed
from ttpu_torch_xla.handle import Handle
from ttpu_torch_xla.patches.choice import patches_for
from ttpu_torch_xla.patches.defaults import DEFAULTS
from ttpu_torch_xla.patches.patch import applied
from ttpu_torch_xla.runtime import current
from ttpu_torch_xla.scanning import scan_layers
from ttpu_torch_xla.sharding.loader import ShardedLoader

pytestmark = pytest.mark.torch

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
IDS = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).index_fill(1, torch.tensor([0, 1]), 0)
TOLERANCE = 1e-5

Gradients = dict[str, torch.Tensor]


def architecture_of(model: Any) -> Any:
    return default_registry().architecture(ModelConfig.from_dict(json.loads(model.config.to_json_string(False))))


def gradients(model: Any, device: Any = "cpu") -> Gradients:
    """Of the loss on left-padded rows."""
    model.train()
    ids, mask = IDS.to(device), MASK.to(device)
    model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    current().sync(wait=True)  # or each gradient that is read compiles a program of its own
    return {name: one.grad.cpu() for name, one in model.named_parameters() if one.grad is not None}


def error(found: Gradients, expected: Gradients) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - one).abs().max() / one.abs().max()) for name, one in expected.items())


def on_device(model: Any) -> Any:
    there = copy.deepcopy(model).to(current().device())
    there.tie_weights()
    return there


def device_tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, device=current().device(), requires_grad=True)


@pytest.fixture(scope="module", autouse=True)
def started() -> Iterator[None]:
    """The runtime starts before the host's first backward pass, which counts devices; llama's patches are in place."""
    torch.zeros(1, device=current().device()).cpu()
    torch.manual_seed(0)
    with applied(patches_for(architecture_of(LlamaForCausalLM(LlamaConfig(**SIZES))), "eager")):
        yield


@pytest.fixture(scope="module")
def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


@pytest.fixture(scope="module")
def expected(llama: Any) -> Gradients:
    return gradients(copy.deepcopy(llama))


# Steps


def test_a_training_step_compiles_at_most_twice_and_learns_as_on_the_host(llama: Any) -> None:
    runtime, losses = current(), {}
    for place, model in (("host", copy.deepcopy(llama)), ("device", on_device(llama))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches: Any = [{"input_ids": IDS, "attention_mask": MASK, "labels": IDS}] * 4
        if place == "device":
            Handle(architecture_of(llama), runtime).attach(model)
            batches = ShardedLoader(batches, model)
            assert len(batches) == 4
            runtime.sync(wait=True)
            runtime.reset_counters()
        found = []
        for batch in batches:
            optimizer.zero_grad()
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        if place == "device":
            done = runtime.counters()
            assert done.compiles <= 2
            assert not done.fallbacks
        losses[place] = torch.stack(found).cpu()
    assert torch.allclose(losses["device"], losses["host"], rtol=TOLERANCE)


# Computing layers again


def test_checkpointed_layers_give_the_same_gradients(llama: Any, expected: Gradients) -> None:
    model = on_device(llama)
    checkpoint_layers(model)
    assert error(gradients(model, current().device()), expected) < TOLERANCE


def program_of(model: Any) -> str:
    """The program of a backward pass, before the compiler has seen it."""
    model.train()
    ids = IDS.to(current().device())
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found: str = torch_xla._XLAC._get_xla_tensors_hlo([one.grad for one in model.parameters()])
    return found


def test_layers_are_computed_twice_behind_barriers(llama: Any) -> None:
    plain, twice = on_device(llama), on_device(llama)
    checkpoint_layers(twice)
    without, with_barriers = program_of(plain), program_of(twice)
    assert "opt-barrier" not in without
    assert with_barriers.count("opt-barrier(") == llama.config.num_hidden_layers
    products = with_barriers.count(" dot(") - without.count(" dot(")
    assert products >= 7 * llama.config.num_hidden_layers  # the projections of attention and MLP


def test_transformers_own_switch_does_the_same(llama: Any) -> None:
    model = on_device(llama)
    model.activation_checkpointing_enable()
    assert program_of(model).count("opt-barrier(") == llama.config.num_hidden_layers
    model.activation_checkpointing_disable()
    model.zero_grad()
    assert "opt-barrier" not in program_of(model)


def test_nothing_is_computed_twice_in_evaluation(llama: Any) -> None:
    model = on_device(llama).eval()
    checkpoint_layers(model)
    ids = IDS.to(current().device())
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    program = torch_xla._XLAC._get_xla_tensors_hlo([one.grad for one in model.parameters()])
    assert "opt-barrier" not in program


def test_gradients_reach_below_frozen_embeddings(llama: Any) -> None:
    model = on_device(llama)
    model.get_input_embeddings().weight.requires_grad_(False)
    checkpoint_layers(model)
    found = gradients(model, current().device())
    assert "model.layers.0.self_attn.q_proj.weight" in found


def test_what_layers_hand_each_other_by_the_side_keeps_its_gradient() -> None:
    """Shared keys and values travel in a dict that one layer writes and another reads."""
    first, second, x = device_tensor(2.0, 3.0), device_tensor(5.0, 7.0), device_tensor(1.0, 4.0)

    def loss(run: Callable[..., Any]) -> torch.Tensor:
        shared: dict[str, torch.Tensor] = {}

        def writer(state: torch.Tensor) -> torch.Tensor:
            shared["keys"] = (state * first).sin()
            return state + shared["keys"].exp()

        def reader(state: torch.Tensor) -> torch.Tensor:
            return (state * second * shared["keys"]).tanh()

        return run(reader, run(writer, x)).sum()

    found = torch.autograd.grad(loss(recomputed), (first, second, x))
    plain = torch.autograd.grad(loss(lambda function, *args: function(*args)), (first, second, x))
    for one, other in zip(found, plain, strict=True):
        assert torch.allclose(one.cpu(), other.cpu(), rtol=1e-6)


def test_dropout_drops_the_same_again() -> None:
    x = torch.ones(512, device=current().device(), requires_grad=True)
    dropped = recomputed(lambda one: torch.nn.functional.dropout(one * one.exp(), 0.5), x)
    dropped.sum().backward()
    assert x.grad is not None
    kept = dropped.detach().cpu() != 0
    assert 0.3 < kept.float().mean() < 0.7
    assert torch.equal(x.grad.cpu() != 0, kept)


def test_a_second_backward_pass_computes_once_more() -> None:
    x = device_tensor(1.0, 2.0)
    total = recomputed(lambda one: (one.exp() * one.sin()).tanh(), x).sum()
    (once,) = torch.autograd.grad(total, x, retain_graph=True)
    (again,) = torch.autograd.grad(total, x)
    assert torch.equal(once.cpu(), again.cpu())


def test_checkpointing_that_transformers_has_not_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="transformers does not support it for Linear"):
        checkpoint_layers(torch.nn.Linear(2, 2))


# One loop over layers


@pytest.mark.slow
def test_layers_in_one_loop_give_the_same_gradients(llama: Any, expected: Gradients) -> None:
    model = on_device(llama)
    names = set(model.state_dict())
    scan_layers(model, architecture_of(llama))
    assert set(model.state_dict()) == names
    assert error(gradients(model, current().device()), expected) < TOLERANCE


def test_a_loop_keeps_less_where_layers_are_computed_again(llama: Any) -> None:
    kept, twice = on_device(llama), on_device(llama)
    checkpoint_layers(twice)
    carried = []
    for model in (kept, twice):
        scan_layers(model, architecture_of(llama))
        _, backward = [line for line in program_of(model).splitlines() if " while(" in line]
        # What a turn keeps is stacked over the two layers, beside their parameters.
        carried.append(backward.partition(" while(")[0].count("f32[2,"))
    assert carried[1] < carried[0]


def test_layers_in_one_loop_are_single_layers_to_a_cache(llama: Any) -> None:
    model = on_device(llama).eval()
    scan_layers(model, architecture_of(llama))
    with torch.no_grad():
        found = model(IDS.to(current().device())).logits.cpu()
        assert torch.allclose(found, llama.eval()(IDS).logits, atol=1e-5)
    assert model.model.layers[1] is list(model.model.layers.children())[1]


def test_a_loop_over_layers_that_differ_is_refused() -> None:
    sizes = {**SIZES, "num_hidden_layers": 6, "sliding_window": 4}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes))
    with pytest.raises(UnsupportedError, match="has 2 kinds of layers, and a loop needs one"):
        scan_layers(model, architecture_of(model))


# Saving


def test_transformers_loads_what_is_saved_from_the_device(llama: Any, tmp_path: Path) -> None:
    model = on_device(llama)
    with applied([patch for patch in DEFAULTS if "save_pretrained" in patch.target]):
        model.save_pretrained(tmp_path)
    back = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, one in llama.state_dict().items():
        assert torch.equal(back[name], one)
    assert "lm_head.weight" not in _stored(tmp_path)  # tied: written once


def _stored(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())
