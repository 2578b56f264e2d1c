"""A quantization is asked for in one vocabulary, becomes formats of kernels in the architecture, and rounds to the
nearest numbers of a format."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ttpu_core import ModelConfig, default_registry
from ttpu_core.checkpoint import TensorInfo
from ttpu_core.errors import ConfigError, RequestError, UnsupportedError
from ttpu_core.quantization import QuantizationConfig, choices, quantize_spec
from ttpu_core.quantization.grouping import fit_formats
from ttpu_core.quantization.quantize import described
from ttpu_core.quantization.report import QuantizationReport, report_of
from ttpu_core.quantization.rounding import dequantize, round_kernel
from ttpu_core.quantization.schemes import SCHEMES, quantization_of
from ttpu_core.quantization.schemes.config_groups import config_groups
from ttpu_core.quantization.stored import stored_architecture
from ttpu_core.sharding.padding import pad_architecture
from ttpu_core.spec import ArchitectureSpec
from ttpu_core.spec.kernel_format import LARGEST, ActivationFormat, KernelFormat, stored_parameters
from ttpu_core.spec.parameters import stacked_parameters

LLAMA = {
    "model_type": "llama",
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def architecture(config: dict[str, Any]) -> Any:
    return default_registry().architecture(ModelConfig.from_dict(config))


def spec_of(config: dict[str, Any]) -> ArchitectureSpec:
    return architecture(config).spec


# the configuration


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("w8a16", KernelFormat("int8")),
        ("int4", KernelFormat("int4")),
        ("w4a16-g128", KernelFormat("int4", 128)),
        ("w8a8", KernelFormat("int8", activation=ActivationFormat("int8"))),
        ("w4a8-g32-asym", KernelFormat("int4", 32, symmetric=False, activation=ActivationFormat("int8"))),
        ("fp8", KernelFormat("float8_e4m3fn")),
        ("fp8-block128", KernelFormat("float8_e4m3fn", 128)),
        ("w8a8-fp8", KernelFormat("float8_e4m3fn", activation=ActivationFormat("float8_e4m3fn"))),
        ("MXFP4", KernelFormat("float4_e2m1fn", 32, scale_dtype="float8_e8m0fnu")),
    ],
)
def test_a_shorthand_names_a_format(text: str, form: KernelFormat) -> None:
    config = QuantizationConfig.read(text)
    assert config.kernel_format == form
    assert QuantizationConfig.parse(str(config)) == config
    assert QuantizationConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_autoxlas_names_are_taken() -> None:
    config = QuantizationConfig(n_bits=4, block_size=128, exclude_layers=["lm_head"], quantize_lm_head=True)
    assert config == QuantizationConfig(4, 128, skip=("lm_head",), lm_head=True)
    assert QuantizationConfig(bits=8, block_size=-1) == QuantizationConfig()
    assert dataclasses.replace(config, n_bits=8) == QuantizationConfig(8, 128, skip=("lm_head",), lm_head=True)
    assert dataclasses.replace(config, dtype="fp8").kernel_format == KernelFormat("float8_e4m3fn", 128)
    with pytest.warns(UserWarning, match="use_xla_kernel=True changes nothing here"):
        QuantizationConfig(use_xla_kernel=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bits": 3}, "held in 4 or 8"),
        ({"bits": 8, "n_bits": 4}, "two names of one number"),
        ({"bits": 8, "dtype": "int4"}, "int4 has 4 bits"),
        ({"dtype": "int2"}, "quantized to int8, int4, fp8, mxfp4"),
        ({"group_size": 1}, "from 2 on"),
        ({"bits": 4, "group_size": 7}, "an even number"),
        ({"dtype": "mxfp4", "group_size": 64}, "for 32 weights each"),
        ({"dtype": "fp8", "symmetric": False}, "only integers have zero points"),
        ({"symmetric": "no"}, "True or False"),
        ({"use_pallas": "yes"}, "True, False or 'auto'"),
        ({"kv_cache": "int4"}, "quantized to int8 or fp8"),
        ({"per_channel": False}, "too coarse"),
        ({"pack_4bit": False}, "always share a byte"),
        ({"skip": [1]}, "pass strings"),
        ({"groups": 128}, "groups, but it takes"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        QuantizationConfig.from_dict(arguments)


@pytest.mark.parametrize("text", ["w3a16", "", "w4a16-128", "w4a16-g128-g64", "int8-int4", "gguf"])
def test_what_is_no_shorthand_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="write one of them, such as 'w4a16-g128'"):
        QuantizationConfig.parse(text)


# the architecture


def test_projections_of_layers_are_quantized_and_the_rest_has_a_reason() -> None:
    spec, config = spec_of(MIXTRAL), QuantizationConfig.parse("w4a16-g32")
    quantized = quantize_spec(spec, config)
    paths = {path.partition(".")[2].partition(".")[2] for path, _ in quantized.kernel_formats}
    experts = {"moe.experts.gate_up.kernel", "moe.experts.down.kernel"}
    assert paths == {"attention.qkv.kernel", "attention.output.kernel", *experts}
    assert list(described(choices(spec, config))) == [
        "the embedding table, read by row (in Python embeddings=True quantizes it): embed.embedding",
        "a router: rounding it sends tokens to other experts: layers.*.moe.router.kernel",
        "the output head (lm_head quantizes it): head.kernel",
    ]
    whole = quantize_spec(spec, dataclasses.replace(config, lm_head=True, embeddings=True))
    assert {"head.kernel", "embed.embedding"} <= dict(whole.kernel_formats).keys()
    stored = stored_parameters(stacked_parameters(quantized))
    assert stored["groups.0.0.moe.experts.down.kernel.scale"].shape == (2, 4, 64, 3)


def test_kernels_are_skipped_by_our_names_and_by_the_checkpoints() -> None:
    mine = architecture(LLAMA)
    for skip in ("layers.0.mlp.down", "model.layers.0.mlp.down_proj", "*.0.mlp.down_proj"):
        quantized = quantize_spec(mine.spec, QuantizationConfig(skip=skip), mine.mapping)
        assert "layers.0.mlp.down.kernel" not in dict(quantized.kernel_formats)
        assert len(quantized.kernel_formats) == 7
    with pytest.raises(RequestError, match="skip names 'q_prj', but no matrix"):
        quantize_spec(mine.spec, QuantizationConfig(skip="q_prj"), mine.mapping)
    with pytest.raises(RequestError, match="every kernel is skipped"):
        quantize_spec(mine.spec, QuantizationConfig(skip="*"), mine.mapping)
    with pytest.raises(RequestError, match="leave lm_head out, or in Python pass embeddings=True"):
        quantize_spec(spec_of(LLAMA | {"tie_word_embeddings": True}), QuantizationConfig(lm_head=True))


def test_a_group_size_that_does_not_divide_becomes_finer_and_says_so() -> None:
    spec, config = spec_of(LLAMA), QuantizationConfig(4, 64, skip="attention")
    sizes = {path: form.group_size for path, form in quantize_spec(spec, config).kernel_formats}
    kernels = {"gate_up": 64, "down": 32}
    assert sizes == {f"layers.{layer}.mlp.{name}.kernel": size for layer in (0, 1) for name, size in kernels.items()}
    report = report_of(quantize_spec(spec, config), "while loading", "bfloat16", choices(spec, config))
    line = "groups of 32, because 64 does not divide 96 inputs: layers.*.mlp.down.kernel"
    assert line in str(report).splitlines()
    assert QuantizationReport(**report.to_dict()).finer_lines == [line]


def test_a_group_size_without_a_part_that_divides_is_refused_with_the_kernels_name() -> None:
    spec = spec_of(LLAMA | {"intermediate_size": 100})
    words = r"layers.0.mlp.down has 100 inputs, and .* that divides them is 4, .* skip 'layers.0.mlp.down'"
    with pytest.raises(RequestError, match=words):
        quantize_spec(spec, QuantizationConfig(4, 32, skip="attention"))
    with pytest.raises(RequestError, match=r"groups have 32 inputs, but layers\.0\.mlp\.down has 100"):
        quantize_spec(spec, QuantizationConfig(dtype="mxfp4"))


# groups on a mesh


def test_groups_are_split_where_padding_or_a_device_begins() -> None:
    spec = quantize_spec(spec_of(LLAMA), QuantizationConfig(4, 32))
    mesh = {"tensor": 8, "fsdp": 4}
    padded, paddings = pad_architecture(spec, mesh)
    fitted, groupings = fit_formats(padded, spec, paddings, mesh)
    sizes = {path.rpartition("layers.1.")[2]: form.group_size for path, form in fitted.kernel_formats[4:]}
    # 6 heads of 16 become 8, on 8 devices; 64 features lie on 4 devices, 96 inner ones on 8.
    assert sizes == {
        "attention.qkv.kernel": 16,
        "attention.output.kernel": 16,
        "mlp.gate_up.kernel": 16,
        "mlp.down.kernel": 4,
    }
    output = groupings["layers.0.attention.output.kernel"]
    heads = [source for source in output.sources if source >= 0]
    assert sorted(heads) == list(range(6)) and len(output.sources) == 8
    assert all(group == source // 2 for group, source in zip(output.original_groups, output.sources, strict=True))


def test_groups_that_no_device_can_hold_whole_are_refused() -> None:
    sizes = {"hidden_size": 16, "head_dim": 8}
    spec = quantize_spec(spec_of(LLAMA | sizes), QuantizationConfig(8, 16, skip="mlp.down"))
    with pytest.raises(UnsupportedError, match="less than 2 inputs: use fewer devices"):
        fit_formats(spec, spec, {}, {"fsdp": 16})


# rounding


FORMATS = [
    KernelFormat("int8"),
    KernelFormat("int8", 16, symmetric=False),
    KernelFormat("int4", 16),
    KernelFormat("int4", symmetric=False),
    KernelFormat("int4", 16, scale_dtype="bfloat16"),
    KernelFormat("float8_e4m3fn", 16),
    KernelFormat("float4_e2m1fn", 32, scale_dtype="float8_e8m0fnu"),
]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.dtype}-{form.group_size}-{form.symmetric}")
def test_weights_are_off_by_half_a_step_at_most(form: KernelFormat) -> None:
    weights = np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32)
    weights[0, 0] = 0
    weights[1, 2, 7] = 40  # an outlier
    weights[2] = np.abs(weights[2])
    parts = round_kernel(weights, form)
    error = np.abs(dequantize(parts, form) - weights)
    scale = np.repeat(parts["scale"].reshape(3, 5, -1), 64 // form.groups(64), axis=-1)
    if form.dtype.startswith("int"):
        # A scale that was rounded down to its dtype leaves the largest weight beyond the last step.
        clipped = scale * LARGEST[form.dtype] * 2.0**-8 if form.scale_dtype == "bfloat16" else 0
        bound = scale * 0.5 + clipped
    else:
        bits = 3 if form.dtype == "float8_e4m3fn" else 1
        bound = np.maximum(np.abs(weights) * 2.0 ** -(bits + 1), scale * 2.0 ** -(bits + 1))
    assert (error <= bound * 1.0001).all()
    assert not error[0, 0].any()


def test_dequantized_columns_are_in_the_order_of_the_inputs() -> None:
    form = KernelFormat("int8", 4, input_order=True)
    weights = np.random.default_rng(1).standard_normal((2, 3, 8)).astype(np.float32)
    order = np.stack([np.random.default_rng(lead).permutation(8) for lead in range(2)])
    stored = np.take_along_axis(weights, np.broadcast_to(order[:, None], weights.shape), axis=-1)
    parts = round_kernel(stored, form) | {"input_order": order.astype(np.int32)}
    assert np.abs(dequantize(parts, form) - weights).max() < 0.03


# a malformed `quantization_config`


def grouped(**changes: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with changes to its group."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16} | changes.pop("weights", {})
    group = {"targets": ["Linear"], "weights": weights} | changes
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": group}}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16}
GROUP = "config_groups.a"


@pytest.mark.parametrize("files", [True, False], ids=["files", "config alone"])
@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        (FP8 | {"weight_block_size": [1]}, "weight_block_size", "the list [1], but a list of two positive integers"),
        (FP8 | {"weight_block_size": "x"}, "weight_block_size", 'the string "x"'),
        (FP8 | {"weight_block_size": ["a", "b"]}, "weight_block_size", "a list of two positive integers"),
        (FP8 | {"weight_block_size": True}, "weight_block_size", "to true"),
        (FP8 | {"weight_block_size": [0, 0]}, "weight_block_size", "the list [0, 0]"),
        (FP8 | {"weight_block_size": [128, -1]}, "weight_block_size", "the list [128, -1]"),
        (grouped() | {"config_groups": "x"}, "config_groups", "an object"),
        (grouped() | {"config_groups": {"a": ["Linear"]}}, GROUP, "an object"),
        (grouped() | {"sparsity_config": "x"}, "sparsity_config", "an object"),
        (grouped() | {"ignore": 5}, "ignore", "the number 5, but a list of names"),
        (grouped() | {"ignore": ["re:("]}, "ignore", "valid regular expressions"),
        (grouped(targets=5), f"{GROUP}.targets", "the number 5"),
        (grouped(targets=["re:("]), f"{GROUP}.targets", "valid regular expressions"),
        (grouped() | {"config_groups": {"a": {"weights": [1]}}}, f"{GROUP}.weights", "the list [1], but an object"),
        (grouped(input_activations=5), f"{GROUP}.input_activations", "the number 5, but an object"),
        (grouped(input_activations={"type": "foo"}), f"{GROUP}.input_activations.type", "one of int, float"),
        (grouped(weights={"num_bits": "4"}), f"{GROUP}.weights.num_bits", 'the string "4", but a positive integer'),
        (grouped(weights={"strategy": "foo"}), f"{GROUP}.weights.strategy", "one of tensor, channel, group"),
        (grouped(weights={"type": "foo"}), f"{GROUP}.weights.type", "one of int, float"),
        (grouped(weights={"group_size": "x"}), f"{GROUP}.weights.group_size", "a positive integer or -1"),
        (grouped(weights={"block_structure": "9"}), f"{GROUP}.weights.block_structure", "two positive integers"),
        (grouped(weights={"symmetric": 0}), f"{GROUP}.weights.symmetric", "true or false"),
        (GPTQ | {"bits": "4"}, "bits", 'the string "4", but a positive integer'),
        (GPTQ | {"group_size": 0}, "group_size", "a positive integer or -1"),
        (AWQ | {"bits": "4"}, "bits", 'the string "4", but a positive integer'),
        (AWQ | {"group_size": [16]}, "group_size", "a positive integer or -1"),
    ],
)
def test_a_malformed_quantization_config_is_refused_by_the_name_of_its_key(
    section: dict[str, Any], key: str, words: str, files: bool
) -> None:
    config = ModelConfig.from_dict(LLAMA | {"quantization_config": section})
    with pytest.raises(ConfigError) as caught:
        if files:
            written = quantization_of(config)
            assert written is not None
            dtypes = {"qweight": ("I32", (2, 16)), "qzeros": ("I32", (1, 2)), "scales": ("F16", (1, 16))}
            if section["quant_method"] == "awq":
                dtypes |= {"qweight": ("I32", (16, 2))}
            tensors = {
                f"a.{part}": TensorInfo(f"a.{part}", dtype, shape, Path("model.safetensors"), 0, 0)
                for part, (dtype, shape) in dtypes.items()
            }
            SCHEMES[section["quant_method"]]("here", written, tensors)
        else:
            stored_architecture(architecture(LLAMA), config)
    message = str(caught.value)
    assert f"'quantization_config.{key}'" in message and words in message
    assert message.endswith(".") and "\n" not in message


def test_config_groups_may_be_written_as_old_files_do() -> None:
    block = {"num_bits": 8, "type": "FLOAT", "strategy": "Block", "block_structure": "128x64", "group_size": None}
    section = grouped(weights=block, input_activations={"num_bits": 8, "type": "float", "dynamic": "local"})
    (group,) = config_groups("here", ModelConfig.from_dict(section))
    assert (group.weights.block, group.weights.group_size, group.weights.floating) == ((128, 64), None, True)
    assert group.inputs is not None and group.inputs.dynamic and group.inputs.floating
    (group,) = config_groups("here", ModelConfig.from_dict(grouped(weights={"group_size": -1}, input_activations=None)))
    assert group.weights.group_size is None and group.weights.symmetric and group.inputs is None
