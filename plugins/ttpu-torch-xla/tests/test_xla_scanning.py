"""Layers in one loop: a training step follows what is changed in them, what the loop cannot do is refused in one
sentence, and everybody but the model's own forward pass sees the single layers."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from ttpu_core import ModelConfig, default_registry
from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.parallelism import resolve_parallelism
from ttpu_torch_xla.moving import move
from ttpu_torch_xla.quantization import quantize
from ttpu_torch_xla.runtime import current
from ttpu_torch_xla.scanning import refuse_scan, scan_layers

pytestmark = pytest.mark.torch

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
IDS = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))


class LowRank(torch.nn.Module):
    """A linear layer and a product of two small matrices beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.base = base
        self.down = torch.nn.Parameter(torch.randn(2, base.in_features, generator=generator).to(base.weight.device))
        self.up = torch.nn.Parameter(torch.randn(base.out_features, 2, generator=generator).to(base.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    current().device()  # before torch's first backward pass, which counts the kinds of devices
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes)).train()


def scanned(model: Any) -> Any:
    """A copy on the device, its layers in a loop."""
    there = copy.deepcopy(model)
    move(there, lambda _, tensor: current().put(tensor))
    scan_layers(
        there, default_registry().architecture(ModelConfig.from_dict(json.loads(model.config.to_json_string(False))))
    )
    return there


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of the loss, by parameter; what has none is not in it."""
    model.zero_grad(set_to_none=True)
    ids = IDS.to(model.device)
    model(ids, labels=ids, use_cache=False).loss.backward()
    current().sync(wait=True)
    return {name: one.grad.cpu() for name, one in model.named_parameters() if one.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, one in expected.items():
        assert (found[name] - one).abs().max() <= 1e-4 * one.abs().max() + 1e-6, name


def test_the_next_step_has_what_was_put_into_the_layers_since_the_last() -> None:
    host = llama()
    device = scanned(host)
    assert_same(gradients(device), gradients(host))
    for model in (host, device):
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
    found = gradients(device)
    assert_same(found, gradients(host))
    assert len(found) == 4


def test_the_next_step_has_gradients_for_what_was_thawed_since_the_last() -> None:
    host = llama()
    device = scanned(host)
    for model in (host, device):
        model.model.layers.requires_grad_(False)
    assert_same(gradients(device), gradients(host))
    for model in (host, device):
        model.model.layers[1].mlp.requires_grad_(True)
    assert_same(gradients(device), gradients(host))


def test_a_copy_trains_its_own_layers() -> None:
    device = scanned(llama())
    before = gradients(device)
    copied = copy.deepcopy(device)
    with torch.no_grad():
        copied.model.layers[0].mlp.up_proj.weight.mul_(2)
    changed = gradients(copied)
    name = "model.layers.0.mlp.gate_proj.weight"
    assert not torch.allclose(changed[name], before[name])
    assert_same(gradients(device), before)


def test_quantized_layers_run_in_the_loop() -> None:
    host = llama()
    quantize(host)
    assert_same(gradients(scanned(host)), gradients(host))


def test_all_but_the_forward_pass_see_single_layers() -> None:
    device = scanned(llama())
    gradients(device)
    layers = device.model.layers
    assert [type(layer) for layer in layers] == [LlamaDecoderLayer] * len(layers) == [LlamaDecoderLayer] * 2
    assert list(layers[:2]) == list(layers) == [layers[0], layers[1]]
    with pytest.raises(ZeroDivisionError):
        layers[1].register_forward_pre_hook(lambda *_: 1 // 0)
        device.eval()(IDS.to(device.device))
    assert len(list(layers)) == 2


def test_layers_that_differ_since_they_were_changed_are_refused() -> None:
    device = scanned(llama())
    layer = device.model.layers[1]
    layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
    with pytest.raises(UnsupportedError, match=r"layer 1 .* but they differ in self_attn.q_proj.base.weight: change"):
        gradients(device)


def test_dropout_is_refused_when_the_model_is_prepared() -> None:
    with pytest.raises(UnsupportedError, match=r"layer 0 has attention_dropout=0.5 in self_attn, and torch_xla's loop"):
        scanned(llama(attention_dropout=0.5))


def test_dropout_that_comes_later_is_refused_in_training() -> None:
    device = scanned(llama())
    for layer in device.model.layers:
        layer.mlp.down_proj = torch.nn.Sequential(torch.nn.Dropout(0.1), layer.mlp.down_proj)
    with pytest.raises(UnsupportedError, match=r"layer 0 has p=0.1 in mlp.down_proj.0"):
        gradients(device)
    gradients(device.eval())


def test_a_mesh_is_refused_before_anything_is_loaded() -> None:
    refuse_scan(None)
    with pytest.raises(UnsupportedError, match="scan_layers=True was asked for on the mesh fsdp=2,tensor=4"):
        refuse_scan(resolve_parallelism("2d", 8))
