"""Quantized linear layers: what they cost in accuracy, that every way to run them gives the same, what XLA is given,
and what becomes of a model."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import warnings
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_xla")
transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402

from ttpu_core.errors import RequestError, UnsupportedError  # noqa: E402
from ttpu_torch_xla import runtime, saving  # noqa: E402
from ttpu_torch_xla.bridge import lowering_for  # noqa: E402
from ttpu_torch_xla.patches.defaults import DEFAULTS  # noqa: E402
from ttpu_torch_xla.patches.patch import applied  # noqa: E402
from ttpu_torch_xla.quantization import QuantizationConfig, QuantizedLinear, quantize  # noqa: E402
from ttpu_torch_xla.quantization.pack import half_run, pack, quantize_weight, unpack  # noqa: E402

pytestmark = pytest.mark.torch

INPUTS, OUTPUTS, BLOCK = 192, 40, 32
MODES = [
    QuantizationConfig(bits=bits, block_size=block_size, symmetric=symmetric, quantize_activation=activation)
    for bits, block_size, symmetric, activation in product((8, 4), (-1, BLOCK), (True, False), (False, True))
]


def name_of(config: QuantizationConfig) -> str:
    blocks = "channel" if config.block_size == -1 else "blocks"
    return f"{config.name}-{blocks}-{'symmetric' if config.symmetric else 'asymmetric'}"


all_modes = pytest.mark.parametrize("config", MODES, ids=name_of)


@pytest.fixture(scope="module")
def device() -> Any:
    return runtime.current().device()


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS)


@pytest.fixture
def x() -> Any:
    torch.manual_seed(1)
    return torch.randn(2, 3, INPUTS)


def steps(weight: Any, config: QuantizationConfig) -> Any:
    """The distance of neighbouring numbers for each weight [out, in], from the definition."""
    size = config.block_size if config.block_size != -1 else weight.shape[1]
    blocks = weight.detach().unflatten(1, (-1, size))
    if config.symmetric:
        step = blocks.abs().amax(-1, keepdim=True) / (2 ** (config.bits - 1) - 1)
    else:
        step = blocks.amax(-1, keepdim=True).clamp(min=0) - blocks.amin(-1, keepdim=True).clamp(max=0)
        step = step / (2**config.bits - 1)
    return step.expand_as(blocks).flatten(1)


def hlo(*tensors: Any) -> str:
    import torch_xla

    text: str = torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))
    return text


def in_xla(config: QuantizationConfig, linear: nn.Linear, x: Any, device: Any) -> str:
    """The program of a quantized layer as XLA is given it."""
    layer = QuantizedLinear.from_linear(linear, config).to(device)
    given = x.to(device)
    runtime.current().sync()
    return hlo(layer(given))


# accuracy


@all_modes
def test_weights_are_off_by_half_a_step_at_most(config: QuantizationConfig, linear: nn.Linear) -> None:
    error = (QuantizedLinear.from_linear(linear, config).weight - linear.weight).abs()
    assert (error <= steps(linear.weight, config) / 2 + 1e-6).all()


@all_modes
def test_outputs_are_off_by_no_more_than_the_steps_allow(config: QuantizationConfig, linear: nn.Linear, x: Any) -> None:
    layer = QuantizedLinear.from_linear(linear, config)
    allowed = x.abs() @ (steps(linear.weight, config) / 2).T
    if config.quantize_activation:
        of_tokens = x.abs().amax(-1, keepdim=True) / 127 / 2
        allowed = allowed + of_tokens * layer.weight.abs().sum(1)
    error = (layer(x) - linear(x)).abs()
    assert (error <= allowed + 1e-5).all()
    assert error.max() > 0


@pytest.mark.parametrize("block_size", [-1, BLOCK])
def test_zero_points_serve_weights_that_do_not_lie_around_zero(block_size: int, linear: nn.Linear, x: Any) -> None:
    shifted = copy.deepcopy(linear)
    shifted.weight.data += 0.1
    errors = {
        symmetric: (
            QuantizedLinear.from_linear(shifted, QuantizationConfig(4, block_size, symmetric=symmetric))(x) - shifted(x)
        )
        .abs()
        .mean()
        for symmetric in (True, False)
    }
    assert errors[False] < 0.8 * errors[True]


def test_channels_of_zeros_stay_zero_and_tokens_of_zeros_give_the_bias(linear: nn.Linear) -> None:
    linear.weight.data[:4] = 0
    for config in MODES:
        layer = QuantizedLinear.from_linear(linear, config)
        assert (layer.weight[:4] == 0).all()
        assert torch.equal(layer(torch.zeros(1, INPUTS))[0], linear.bias)


def test_the_bias_is_kept(linear: nn.Linear, x: Any) -> None:
    config = QuantizationConfig(bits=8, quantize_activation=True)
    without = copy.deepcopy(linear)
    without.register_parameter("bias", None)
    difference = QuantizedLinear.from_linear(linear, config)(x) - QuantizedLinear.from_linear(without, config)(x)
    assert torch.allclose(difference, linear.bias.expand_as(difference), atol=1e-6)


# layout


@pytest.mark.parametrize(("inputs", "half"), [(512, 128), (192, 32), (4096, 128), (6, 1), (14336, 128)])
def test_packing_is_undone_and_pairs_inputs_of_one_run(inputs: int, half: int) -> None:
    q = torch.randint(-8, 8, (3, inputs), dtype=torch.int8)
    packed = pack(q, half_run(inputs))
    assert half_run(inputs) == half
    assert packed.shape == (3, inputs // 2)
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack(packed), q)
    assert torch.equal((packed[:, :half] & 15).to(torch.int8) - 8, q[:, :half])
    assert torch.equal((packed[:, :half] >> 4).to(torch.int8) - 8, q[:, half : 2 * half])


@pytest.mark.parametrize("block_size", [-1, 64])
def test_a_cut_of_packed_inputs_is_the_same_inputs_quantized(block_size: int) -> None:
    weight = torch.randn(8, 512)
    weight[:, ::256] = 4.0  # the same largest weight in each half, so that the scales agree
    whole = quantize_weight(weight, 4, block_size)
    part = quantize_weight(weight[:, 256:], 4, block_size)
    dim = 1 if block_size == -1 else 0
    assert torch.equal(whole.weight_q.chunk(2, dim)[1], part.weight_q)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_blocks_that_devices_would_share_are_split_with_the_same_scale(symmetric: bool, linear: nn.Linear) -> None:
    config = QuantizationConfig(4, BLOCK, symmetric=symmetric)
    whole, split = (QuantizedLinear.from_linear(linear, config, devices) for devices in (1, INPUTS // 8))
    assert (whole.block_size, split.block_size) == (BLOCK, 8)
    assert split.weight_q.shape == (INPUTS // 8, 8 // 2, OUTPUTS)
    assert torch.equal(split.weight, whole.weight)
    # No part of a block divides the 3 inputs of each of 64 devices.
    assert QuantizedLinear.from_linear(linear, config, 64).block_size == BLOCK


def test_four_bits_unpacked_are_the_same_numbers(linear: nn.Linear, x: Any) -> None:
    packed = QuantizedLinear.from_linear(linear, QuantizationConfig(bits=4))
    loose = QuantizedLinear.from_linear(linear, QuantizationConfig(bits=4, pack_4bit=False))
    assert (packed.weight_q.dtype, loose.weight_q.dtype) == (torch.uint8, torch.int8)
    assert torch.equal(packed.weight, loose.weight)
    assert torch.allclose(packed(x), loose(x), atol=1e-6)


# eager, lazy and compiled


@all_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_xla_device_gives_what_the_host_gives(
    config: QuantizationConfig, dtype: Any, linear: nn.Linear, x: Any, device: Any
) -> None:
    layer = QuantizedLinear.from_linear(linear.to(dtype), config)
    host_x = x.to(dtype).clone().requires_grad_()
    host = layer(host_x)
    host.square().sum().backward()
    there = copy.deepcopy(layer).to(device)
    lazy_x = x.to(dtype).to(device).requires_grad_()
    lazy = there(lazy_x)
    lazy.square().sum().backward()
    one_rounding = 1e-5 if dtype == torch.float32 else 2**-7
    assert lazy.dtype == lazy_x.grad.dtype == dtype
    assert torch.allclose(lazy.cpu(), host, rtol=one_rounding, atol=1e-5)
    scale = host_x.grad.abs().max()
    assert (lazy_x.grad.cpu() - host_x.grad).abs().max() <= one_rounding * scale


@pytest.mark.parametrize("config", [MODES[0], MODES[3], MODES[9], MODES[12]], ids=name_of)
def test_torch_compile_takes_the_layer_whole(
    config: QuantizationConfig, linear: nn.Linear, x: Any, device: Any
) -> None:
    layer = QuantizedLinear.from_linear(linear, config)
    there = copy.deepcopy(layer).to(device)
    runtime.current().reset_counters()
    with torch.no_grad():
        compiled = torch.compile(there, backend="openxla", fullgraph=True)(x.to(device))
    assert torch.allclose(compiled.cpu(), layer(x), rtol=1e-5, atol=1e-5)
    assert not runtime.current().counters().fallbacks


def test_a_compiled_layer_has_gradients(linear: nn.Linear, x: Any, device: Any) -> None:
    layer = QuantizedLinear.from_linear(linear, QuantizationConfig(bits=4)).to(device)
    given = x.to(device).requires_grad_()
    torch.compile(layer, backend="openxla", fullgraph=True)(given).sum().backward()
    assert torch.allclose(given.grad.cpu(), layer.weight.cpu().sum(0).expand_as(x), atol=1e-5)


@all_modes
def test_the_gradient_reaches_the_input_as_through_the_dequantized_weights(
    config: QuantizationConfig, linear: nn.Linear, x: Any
) -> None:
    layer = QuantizedLinear.from_linear(linear, config)
    x.requires_grad_()
    towards = torch.randn(2, 3, OUTPUTS)
    (layer(x) * towards).sum().backward()
    assert torch.allclose(x.grad, towards @ layer.weight, atol=1e-5)


def test_what_lies_beside_and_before_a_quantized_layer_trains(linear: nn.Linear, x: Any) -> None:
    layer = QuantizedLinear.from_linear(linear, QuantizationConfig(bits=4))
    before, down, up = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, 4, bias=False), nn.Linear(4, OUTPUTS, bias=False)
    hidden = before(x)
    (layer(hidden) + up(down(hidden))).square().sum().backward()
    assert not list(layer.parameters())
    assert all(one.weight.grad is not None and one.weight.grad.abs().max() > 0 for one in (before, down, up))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("activation", [False, True], ids=["A16", "A8"])
def test_what_lies_before_any_kind_of_quantized_layer_trains(bias: bool, symmetric: bool, activation: bool) -> None:
    config = QuantizationConfig(symmetric=symmetric, quantize_activation=activation)
    layer = QuantizedLinear.from_linear(nn.Linear(16, 8, bias=bias), config)
    x = torch.randn(2, 16, requires_grad=True)
    layer(x).sum().backward()
    assert torch.allclose(x.grad, layer.weight.sum(0).expand_as(x), atol=1e-5)


def test_the_op_gives_the_bias_its_gradient(linear: nn.Linear, x: Any) -> None:
    weight = quantize_weight(linear.weight)
    torch.ops.ttpu.quantized_linear(x, *weight, linear.bias, False).sum().backward()
    assert torch.allclose(linear.bias.grad, torch.full((OUTPUTS,), 6.0))


def test_the_op_keeps_torchs_rules_for_custom_operations(linear: nn.Linear, x: Any) -> None:
    weight = quantize_weight(linear.weight, 4, symmetric=False)
    torch.library.opcheck(torch.ops.ttpu.quantized_linear, (x.requires_grad_(), *weight, linear.bias.detach(), False))


# what XLA is given


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_int8_tokens_are_multiplied_by_int8_weights_and_summed_in_int32(
    bits: int, symmetric: bool, linear: nn.Linear, x: Any, device: Any
) -> None:
    text = in_xla(QuantizationConfig(bits, symmetric=symmetric, quantize_activation=True), linear, x, device)
    dots = re.findall(r"= (\w+)\[[^\n]* dot\((\w+)\[[^\n]*?%\S+, (\w+)\[", text)
    assert dots == [("s32", "s8", "s8")] * (1 if bits == 8 else 2)


def test_int8_weights_are_only_converted_and_scales_come_after_the_product(
    linear: nn.Linear, x: Any, device: Any
) -> None:
    with lowering_for("v5e:2x4"):  # a CPU multiplies float32
        text = in_xla(QuantizationConfig(), linear.bfloat16(), x.bfloat16(), device)
    assert re.search(rf"convert\(s8\[{OUTPUTS},{INPUTS}\]\S* %p\d", text)
    assert re.search(r"= f32\[2,3,40\]\S* dot\(bf16\[2,3,192\]\S* %\S+, bf16\[40,192\]", text)
    assert f"f32[{OUTPUTS},{INPUTS}]" not in text


@pytest.mark.parametrize("config", [c for c in MODES if c.bits == 4], ids=name_of)
def test_packed_weights_are_an_argument_of_the_program_and_not_in_it(
    config: QuantizationConfig, linear: nn.Linear, x: Any, device: Any
) -> None:
    text = in_xla(config, linear, x, device)
    shape = "40,96" if config.block_size == -1 else "6,16,40"
    assert re.search(rf"u8\[{shape}\]\S* parameter\(", text)
    assert not re.search(r"= \w+\[\d[\d,]*\]\S* constant\(", text), "a constant that is no scalar"
    other = copy.deepcopy(linear)
    other.weight.data.neg_()
    assert in_xla(config, other, x, device) == text


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_are_a_dimension_of_the_product(bits: int, linear: nn.Linear, x: Any, device: Any) -> None:
    text = in_xla(QuantizationConfig(bits, BLOCK), linear.bfloat16(), x.bfloat16(), device)
    dots = [line for line in text.splitlines() if " dot(" in line]
    assert len(dots) == (1 if bits == 8 else 2)
    assert all("lhs_contracting_dims={2,3}, rhs_contracting_dims={0,1}" in line for line in dots)


@all_modes
def test_nothing_is_gathered_and_no_index_is_carried_along(
    config: QuantizationConfig, linear: nn.Linear, x: Any, device: Any
) -> None:
    layer = QuantizedLinear.from_linear(linear, config).to(device)
    given = x.to(device).requires_grad_()
    runtime.current().sync()
    y = layer(given)
    y.sum().backward()
    text = hlo(y, given.grad)
    assert " gather(" not in text
    assert not re.search(r"s64\[\d", text)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("cut", ["out", "in"])
@pytest.mark.parametrize(
    "config",
    [QuantizationConfig(quantize_activation=True), QuantizationConfig(4), QuantizationConfig(4, 128)],
    ids=name_of,
)
def test_a_tpu_reads_each_devices_part_of_the_weights_as_it_is_stored(config: QuantizationConfig, cut: str) -> None:
    pytest.importorskip("ttpu_jax")
    from ttpu_torch_xla.aot.compile import compile_graph
    from ttpu_torch_xla.aot.slice import TpuSlice

    inputs, outputs = 2048, 4096
    tpu = TpuSlice("v5e:2x4")
    mesh = tpu.mesh({"data": 2, "tensor": 4})
    layer = QuantizedLinear(inputs, outputs, config=config, device="meta", dtype=torch.bfloat16)
    for name, dims in layer.dimensions.items():
        buffer = getattr(layer, name)
        axes = tuple("tensor" if along == cut else None for along in dims)
        setattr(layer, name, tpu.placeholder(tuple(buffer.shape), buffer.dtype, axes))
    of_inputs, of_outputs = ("tensor", None) if cut == "in" else (None, "tensor")
    x = tpu.placeholder((16, 1, inputs), torch.bfloat16, ("data", None, of_inputs))
    with tpu.recording():
        y = layer(x)
        tpu.shard(y, mesh, ("data", None, of_outputs))
        graph = compile_graph([y], tpu)
    program = graph.executable.hlo_modules()[0].to_string()
    assert "all-gather" not in program
    assert graph.temp_bytes < inputs * outputs // 8, "a quarter of the weights, at half a byte each"
    assert ("= s32[" in program) == config.quantize_activation


# the module


def test_casting_and_moving_leaves_scales_in_float32(linear: nn.Linear, x: Any, device: Any) -> None:
    layer = QuantizedLinear.from_linear(linear, QuantizationConfig(symmetric=False))
    scale = layer.scale.clone()
    layer = layer.to(torch.bfloat16).to(device)
    assert torch.equal(layer.scale.cpu(), scale)
    dtypes = {name: buffer.dtype for name, buffer in layer.named_buffers()}
    whole = {"weight_q": torch.int8, "zero_point": torch.int8}
    assert dtypes == {"bias": torch.bfloat16, "scale": torch.float32, **whole}
    assert layer.weight.dtype == torch.bfloat16
    assert layer(x.bfloat16().to(device)).dtype == torch.bfloat16


@all_modes
def test_state_is_loaded_into_an_empty_layer(config: QuantizationConfig, linear: nn.Linear, x: Any) -> None:
    layer = QuantizedLinear.from_linear(linear, config)
    fresh = QuantizedLinear(INPUTS, OUTPUTS, config=config)
    assert (fresh.weight == 0).all()
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), layer(x))
    with torch.device("meta"):
        on_meta = QuantizedLinear(INPUTS, OUTPUTS, config=config)
    on_meta.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(on_meta(x), layer(x))


def test_the_buffers_say_what_their_dimensions_run_along(linear: nn.Linear) -> None:
    for config in MODES:
        layer = QuantizedLinear.from_linear(linear, config)
        assert set(layer.dimensions) == set(layer.state_dict())
        assert all(len(dims) == layer.state_dict()[name].ndim for name, dims in layer.dimensions.items())
        assert all(
            size == OUTPUTS
            for name, dims in layer.dimensions.items()
            for size, along in zip(layer.state_dict()[name].shape, dims, strict=True)
            if along == "out"
        )


# a model


def llama(**changes: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "attention_bias": True,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    torch.manual_seed(2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | more | changes))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture(scope="module")
def tokens() -> Any:
    return torch.randint(1, 128, (2, 9), generator=torch.Generator().manual_seed(3))


def logits(model: Any, tokens: Any) -> Any:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("config", [c for c in MODES if not c.quantize_activation], ids=name_of)
def test_a_quantized_model_is_the_stock_model_with_rounded_weights(config: QuantizationConfig, tokens: Any) -> None:
    stock, quantized = llama(), llama()
    report = quantize(quantized, config)
    assert len(report.quantized) == 14
    assert not torch.allclose(logits(quantized, tokens), logits(stock, tokens), atol=1e-5)
    with torch.no_grad():
        for name in report.quantized:
            stock.get_submodule(name).weight.copy_(quantized.get_submodule(name).weight)
    assert torch.allclose(logits(quantized, tokens), logits(stock, tokens), atol=1e-5)
    arguments = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(quantized.generate(tokens, **arguments), stock.generate(tokens, **arguments))


@pytest.mark.parametrize("config", [QuantizationConfig(), QuantizationConfig(4, 16, symmetric=False)], ids=name_of)
def test_a_gradient_passes_through_all_quantized_layers_of_a_model(
    config: QuantizationConfig, tokens: Any, device: Any
) -> None:
    rounded, model = llama(attention_bias=False), llama(attention_bias=False)
    for name in quantize(model, config).quantized:
        rounded.get_submodule(name).weight.data = model.get_submodule(name).weight
    found = {}
    for which, one, ids in (("host", rounded, tokens), ("device", model.to(device), tokens.to(device))):
        one.train()(ids, labels=ids, use_cache=False).loss.backward()
        runtime.current().sync()
        found[which] = one.model.embed_tokens.weight.grad.cpu()
    assert (found["device"] - found["host"]).abs().max() < 1e-4 * found["host"].abs().max()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_model_gives_the_same_on_the_xla_device(bits: int, tokens: Any, device: Any) -> None:
    model = llama()
    quantize(model, QuantizationConfig(bits=bits, quantize_activation=True))
    expected = logits(model, tokens)
    step = expected.abs().max() / 127  # a feature near the middle of two int8 numbers may fall to either
    assert (logits(model.to(device), tokens.to(device)).cpu() - expected).abs().max() <= step


def test_eight_bits_err_less_than_four_and_blocks_less_than_channels(tokens: Any) -> None:
    expected = logits(llama(), tokens)

    def error(**arguments: Any) -> float:
        model = llama()
        quantize(model, QuantizationConfig(**arguments))
        return float((logits(model, tokens) - expected).abs().mean())

    assert error(bits=8) < error(bits=8, quantize_activation=True) < error(bits=4, block_size=16) < error(bits=4)


def test_a_quantized_models_state_loads_into_a_fresh_one(tokens: Any) -> None:
    config = QuantizationConfig(bits=4, block_size=16, symmetric=False)
    model = llama()
    quantize(model, config)
    with torch.device("meta"):
        fresh = transformers.LlamaForCausalLM(model.config).eval()
    quantize(fresh, json.loads(json.dumps(config.to_dict())))
    fresh.load_state_dict(model.state_dict(), strict=True, assign=True)
    fresh.model.rotary_emb = model.model.rotary_emb  # a buffer that is in no state_dict
    assert torch.equal(logits(fresh, tokens), logits(model, tokens))
    assert torch.equal(logits(copy.deepcopy(model), tokens), logits(model, tokens))


def test_the_report_says_what_was_quantized_and_what_it_saved() -> None:
    model = llama()
    report = quantize(model, QuantizationConfig(bits=4, exclude_layers=("layers.0.self_attn", "*.1.mlp.down_proj")))
    assert len(report.quantized) == 14 - 4 - 1
    assert report.kept["model.layers.0.self_attn.q_proj"] == "in exclude_layers"
    assert report.kept["model.layers.1.mlp.down_proj"] == "in exclude_layers"
    assert "the head" in report.kept["lm_head"]
    assert "embeddings" in report.kept["model.embed_tokens.weight"]
    saved = 0
    for name in report.quantized:
        layer = model.get_submodule(name)
        saved += (
            layer.in_features * layer.out_features * 7 // 2 - layer.out_features * 4
        )  # a nibble for 4 bytes; scales
    assert report.bytes_before - report.bytes_after == saved
    assert "9 linear layers held as W4A16" in str(report)
    assert "in exclude_layers: model.layers.0.self_attn.q_proj" in str(report)


def mixture() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Qwen2MoeConfig(
        **sizes, num_key_value_heads=2, vocab_size=128, num_experts=4, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, decoder_sparse_step=1,
    )  # fmt: skip
    torch.manual_seed(4)
    return transformers.Qwen2MoeForCausalLM(config).eval()


def test_experts_are_quantized_and_routers_stay_and_the_report_says_so(tokens: Any) -> None:
    model, stock = mixture(), mixture()
    report = quantize(model, QuantizationConfig(bits=4, block_size=8))
    mlp = "model.layers.0.mlp"
    assert set(report.quantized) == {
        *(f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"),
        *(f"{mlp}.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
        *(f"{mlp}.experts.{name}_proj" for name in ("gate_up", "down")),
    }
    assert "7 linear layers and 2 tensors of experts held as W4A16" in str(report)
    assert report.kept[f"{mlp}.shared_expert_gate"] == "a router"
    assert f"{mlp}.gate.weight" in report.kept
    assert report.bytes_before - report.bytes_after > 4 * 3 * 16 * 32 * 7 // 2 - 4 * 4 * 3 * 16 * 32 // 8
    with torch.no_grad():
        for name in report.quantized:
            path, _, last = name.rpartition(".")
            rounded = model.get_submodule(path).get_submodule(last).weight if "experts" not in name else None
            rounded = getattr(model.get_submodule(path), last) if rounded is None else rounded
            dense = stock.get_parameter(name if "experts" in name else f"{name}.weight")
            assert (dense - rounded).abs().max() <= dense.abs().max() / 14 + 1e-6
            dense.copy_(rounded)
    assert torch.allclose(logits(model, tokens), logits(stock, tokens), atol=1e-5)
    assert torch.equal(logits(copy.deepcopy(model), tokens), logits(model, tokens))
    assert experts_of(model.bfloat16()).down_proj.dtype == torch.bfloat16
    assert {one.dtype for one in experts_of(model).buffers()} == {torch.uint8, torch.float32}


def experts_of(model: Any) -> Any:
    return model.model.layers[0].mlp.experts


def test_experts_stay_where_they_are_excluded_or_no_stack_holds_them() -> None:
    model = mixture()
    report = quantize(model, QuantizationConfig(exclude_layers=("experts.down_proj",)))
    name = "model.layers.0.mlp.experts.down_proj"
    assert report.kept[name] == "in exclude_layers"
    assert isinstance(experts_of(model).down_proj, nn.Parameter)
    assert not isinstance(experts_of(model).gate_up_proj, nn.Parameter)
    other = mixture()
    experts_of(other).is_transposed = True
    assert quantize(other).kept[name] == "experts with their inputs before their outputs"


@pytest.mark.parametrize("config", [MODES[3], MODES[8], MODES[14]], ids=name_of)
def test_few_chosen_experts_are_dequantized_alone(config: QuantizationConfig, device: Any) -> None:
    """One expert of four for one token: the same numbers as of the whole tensors, which are never made."""
    experts = experts_of(mixture())
    holder = nn.Module()
    holder.add_module("experts", experts)
    holder.linear = nn.Linear(32, 32)
    quantize(holder, dataclasses.replace(config, group_size=8) if config.group_size else config)
    hidden, index, share = torch.randn(1, 32), torch.tensor([[2]]), torch.ones(1, 1)
    experts.config._experts_implementation = "grouped_mm"
    with torch.no_grad(), applied([patch for patch in DEFAULTS if "experts" in patch.replacement]):
        expected = experts(hidden, index, share)
        there = experts.to(device)
        given = [one.to(device) for one in (hidden, index, share)]
        runtime.current().sync()
        found = there(*given)
        assert "[4,32,32]" not in re.sub(r"(u8|s8)\[4,32,32\]", "", hlo(found))
    assert torch.allclose(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_a_tied_head_gets_a_quantized_copy(tokens: Any) -> None:
    model = llama(tie_word_embeddings=True)
    expected = logits(model, tokens)
    table = model.model.embed_tokens.weight.clone()
    report = quantize(model, QuantizationConfig(quantize_lm_head=True))
    assert "lm_head" in report.quantized
    assert torch.equal(model.model.embed_tokens.weight, table)
    assert not model.config.tie_word_embeddings
    assert (logits(model, tokens) - expected).abs().max() < 0.05 * expected.abs().max()


def test_models_inside_wrappers_are_quantized_and_their_state_keeps_its_names(tokens: Any) -> None:
    class Wrapped(nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self._orig_module = module

        def forward(self, *arguments: Any, **named: Any) -> Any:
            return self._orig_module(*arguments, **named)

    plain, model = llama(), llama()
    model.model.layers = nn.ModuleList(Wrapped(layer) for layer in model.model.layers)
    report, config = quantize(model, QuantizationConfig(exclude_layers=("q_proj",))), plain.config
    assert config.num_hidden_layers == 2
    assert "model.layers.0._orig_module.mlp.up_proj" in report.quantized
    quantize(plain, QuantizationConfig(exclude_layers=("q_proj",)))
    plain.load_state_dict({name.replace("_orig_module.", ""): one for name, one in model.state_dict().items()})
    assert torch.equal(logits(plain, tokens), logits(model, tokens))


# the configuration


def test_autoxlas_readme_configuration_is_taken(linear: nn.Linear, x: Any) -> None:
    with pytest.warns(UserWarning, match="use_pallas=True changes nothing here"):
        config = QuantizationConfig(bits=8, use_pallas=True, quantize_activation=True)
    assert config.name == "W8A8"
    plain = QuantizedLinear.from_linear(linear, QuantizationConfig(quantize_activation=True))
    assert torch.equal(QuantizedLinear.from_linear(linear, config)(x), plain(x))


def test_autoxlas_other_arguments_are_taken_and_say_that_they_do_nothing() -> None:
    with pytest.warns(UserWarning, match="auto_tune_block_sizes=True changes nothing"):
        QuantizationConfig(auto_tune_block_sizes=True)
    with pytest.warns(UserWarning, match="use_xla_kernel=False changes nothing"):
        QuantizationConfig(use_xla_kernel=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert QuantizationConfig(n_bits=4, block_size=128, per_channel=False, pack_4bit=True).name == "W4A16"


def test_a_configuration_survives_json() -> None:
    config = QuantizationConfig(4, 64, False, True, exclude_layers=("q_proj",), quantize_lm_head=True, pack_4bit=False)
    assert QuantizationConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_configuration_can_be_changed_in_a_copy() -> None:
    config = QuantizationConfig(symmetric=False)
    for changed in (dataclasses.replace(config, bits=4), dataclasses.replace(config, n_bits=4)):
        assert (changed.bits, changed.n_bits, changed.symmetric) == (4, 4, False)
        assert changed == QuantizationConfig(4, symmetric=False)
    assert dataclasses.replace(config, block_size=64) == QuantizationConfig(block_size=64, symmetric=False)
    with pytest.raises(RequestError, match="two names of one number"):
        dataclasses.replace(config, bits=4, n_bits=8)


def test_a_configuration_or_its_arguments_are_read() -> None:
    config = QuantizationConfig(4)
    assert QuantizationConfig.read(config) is config
    assert QuantizationConfig.read({"bits": 4}) == config
    assert QuantizationConfig.read("w4a16") == config
    for wrong in (8, [("bits", 4)]):
        with pytest.raises(RequestError, match="but a QuantizationConfig or a mapping of its arguments is needed"):
            QuantizationConfig.read(wrong)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bits": 3}, "held in 4 or 8"),
        ({"bits": True}, "held in 4 or 8"),
        ({"bits": 8, "n_bits": 4}, "two names of one number"),
        ({"block_size": 0}, "from 2 on"),
        ({"block_size": 64.0}, "from 2 on"),
        ({"bits": 4, "block_size": 7}, "an even number"),
        ({"per_channel": False}, "too coarse"),
        ({"symmetric": "no"}, "True or False"),
        ({"quantize_embeddings": True}, "only linear layers"),
        ({"exclude_layers": (1,)}, "pass strings"),
        ({"groups": 128}, "groups, but it takes"),
        ({"dtype": "mxfp4"}, "quantizes to int8, int4 and fp8"),
        ({"kv_cache": "int8"}, "keeps keys and values"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        QuantizationConfig.from_dict(arguments)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (QuantizationConfig(block_size=36), "q_proj has 64 inputs, .* divides them is 4, where 8 is the least"),
        (QuantizationConfig(exclude_layers=("q_prj",)), "no linear layer of this model is called that"),
        (QuantizationConfig(exclude_layers=("*",)), "exclude fewer"),
    ],
)
def test_what_a_model_does_not_allow_is_refused_before_it_is_touched(config: QuantizationConfig, words: str) -> None:
    model = llama()
    with pytest.raises(RequestError, match=words):
        quantize(model, config)
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())


@pytest.mark.parametrize("patched", [False, True])
def test_a_checkpoint_that_transformers_would_misread_is_not_written(
    patched: bool, tmp_path: Any, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    quantize(model, {"bits": 8})
    monkeypatch.setattr(saving, "on_host", lambda _: pytest.fail("fetched what is not written"))
    with applied([patch for patch in DEFAULTS if patched and "save_pretrained" in patch.target]):
        there = model.to(device)
        for one in (there, copy.deepcopy(there)):
            with pytest.raises(UnsupportedError, match="quantized layers"):
                one.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_is_not_quantized_twice() -> None:
    model = llama()
    quantize(model, {"bits": 4})
    with pytest.raises(RequestError, match="quantized layers already"):
        quantize(model, {"bits": 4})
