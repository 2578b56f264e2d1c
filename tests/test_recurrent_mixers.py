"""Mixers with a state in the core's vocabulary: what is stored, what is kept, their tensors' names, and padding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ttpu_core.cli.info import _cache_facts
from ttpu_core.cli.prose import layer_words
from ttpu_core.errors import ConfigError
from ttpu_core.mapping.layout import standard_mapping
from ttpu_core.quantization import QuantizationConfig
from ttpu_core.quantization.quantize import why_dense
from ttpu_core.sharding.padding import pad_architecture
from ttpu_core.spec import (
    NO_MIXER,
    ArchitectureSpec,
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    NormSpec,
    Placement,
    StateSpec,
)
from ttpu_core.spec.parameters import layer_parameters
from ttpu_core.spec.selective_scan import selective_scan
from ttpu_core.spec.short_convolution import short_convolution
from ttpu_core.spec.state_space import StateSpaceSpec, state_space


def model(mixer: MixerSpec, hidden: int) -> ArchitectureSpec:
    layer = LayerSpec(mixer, None, NormSpec())
    return ArchitectureSpec("test", EmbeddingSpec(16, hidden), (layer,), NormSpec(), HeadSpec(), 64)


def mixer_tensors(mixer: MixerSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    tensors = standard_mapping(model(mixer, hidden)).tensors
    return {name.removeprefix("model.layers.0."): shape for name, shape in tensors.items() if "layers.0" in name}


def test_a_short_convolution_has_the_names_of_lfm2_and_keeps_two_tokens() -> None:
    mixer = short_convolution(hidden_size=2048, kernel=3, bias=True)
    tensors = mixer_tensors(mixer, 2048)
    assert {name: shape for name, shape in tensors.items() if name.startswith("conv.")} == {
        "conv.in_proj.weight": (6144, 2048),
        "conv.in_proj.bias": (6144,),
        "conv.conv.weight": (2048, 1, 3),
        "conv.conv.bias": (2048,),
        "conv.out_proj.weight": (2048, 2048),
        "conv.out_proj.bias": (2048,),
    }
    assert mixer.state == (StateSpec("conv", (2, 2048), (None, "mlp")),)
    assert model(mixer, 2048).kv_bytes_per_token(2) == 0


def test_the_channels_of_a_short_convolution_are_padded() -> None:
    spec = model(short_convolution(hidden_size=10, kernel=3), 10)
    padded, paddings = pad_architecture(spec, {"tensor": 4})
    mixer = padded.layers[0].mixer
    assert isinstance(mixer, MixerSpec) and mixer.state[0].shape == (2, 12)
    shapes = {path: padding.shape for path, padding in paddings.items() if "mixer" in path}
    assert shapes == {
        "layers.0.mixer.input.kernel": (3, 12, 10),
        "layers.0.mixer.conv.kernel": (3, 12),
        "layers.0.mixer.output.kernel": (10, 12),
    }
    assert pad_architecture(padded, {"tensor": 4})[0] == padded


# Mamba-2 2.7B
MAMBA2 = {"hidden_size": 2560, "num_heads": 80, "head_dim": 64, "state_size": 128, "groups": 1, "conv_kernel": 4}


def test_a_state_space_has_the_names_and_parameters_of_mamba2() -> None:
    mixer = state_space(**MAMBA2)  # type: ignore[arg-type]
    tensors = {name: shape for name, shape in mixer_tensors(mixer, 2560).items() if name.startswith("mamba.")}
    assert tensors == {
        "mamba.in_proj.weight": (2 * 5120 + 2 * 128 + 80, 2560),
        "mamba.conv1d.weight": (5376, 1, 4),
        "mamba.conv1d.bias": (5376,),
        "mamba.A_log": (80,),
        "mamba.dt_bias": (80,),
        "mamba.D": (80,),
        "mamba.norm.weight": (5120,),
        "mamba.out_proj.weight": (2560, 5120),
    }
    assert sum(parameter.size for _, parameter in mixer.parameters) == 40_214_000
    assert {state.name: state.shape for state in mixer.state} == {
        "conv": (3, 5120), "conv_shared": (3, 2, 128), "state": (80, 64, 128),
    }  # fmt: skip


def test_scales_of_a_state_space_are_one_unless_given() -> None:
    mixer = state_space(**MAMBA2, scales=(("dt", 0.5), ("b", 1.0)))  # type: ignore[arg-type]
    assert isinstance(mixer, StateSpaceSpec)
    assert (mixer.scale("dt"), mixer.scale("b"), mixer.scale("output")) == (0.5, 1.0, 1.0)
    assert "b_scale" not in dict(mixer.options)


def test_groups_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="80 heads in 3 groups"):
        state_space(**MAMBA2 | {"groups": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(("placement", "norms"), [("pre", {"mlp_norm.scale"}), ("post", {"post_mlp_norm.scale"})])
def test_a_layer_that_is_an_mlp_alone_has_the_norms_of_its_mlp(placement: Placement, norms: set[str]) -> None:
    layer = LayerSpec(NO_MIXER, MLPSpec(8), NormSpec(), BlockSpec(placement))
    assert layer_parameters(layer, 4).keys() == norms | {"mlp.gate_up.kernel", "mlp.down.kernel"}
    assert layer_words(layer).startswith("no mixer, ")


def test_a_selective_scan_has_the_names_and_parameters_of_mamba() -> None:
    sizes = {"hidden_size": 2560, "channels": 5120, "state_size": 16, "dt_rank": 160, "conv_kernel": 4}  # Mamba 2.8B
    mixer = selective_scan(**sizes, norm="scaled")  # type: ignore[arg-type]
    tensors = {name: shape for name, shape in mixer_tensors(mixer, 2560).items() if name.startswith("mamba.")}
    assert tensors == {
        "mamba.in_proj.weight": (10_240, 2560),
        "mamba.conv1d.weight": (5120, 1, 4),
        "mamba.conv1d.bias": (5120,),
        "mamba.x_proj.weight": (192, 5120),
        "mamba.dt_proj.weight": (5120, 160),
        "mamba.dt_proj.bias": (5120,),
        "mamba.A_log": (5120, 16),
        "mamba.D": (5120,),
        "mamba.dt_layernorm.weight": (160,),
        "mamba.b_layernorm.weight": (16,),
        "mamba.c_layernorm.weight": (16,),
        "mamba.out_proj.weight": (2560, 5120),
    }
    assert {state.name: state.shape for state in mixer.state} == {"conv": (3, 5120), "state": (16, 5120)}


def test_a_mixer_beside_attention_has_its_own_parameters_names_and_state() -> None:
    mixer = state_space(**MAMBA2)  # type: ignore[arg-type]
    layer = LayerSpec(AttentionSpec(8, 2, 64), None, NormSpec(), BlockSpec(beside=mixer))
    parts = {path.partition(".")[0] for path in layer_parameters(layer, 2560)}
    assert parts == {"input_norm", "attention", "mixer"} and layer.mixers == (mixer,)
    spec = replace(model(mixer, 2560), layers=(layer,))
    tensors = standard_mapping(spec).tensors
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mamba.in_proj.weight"} <= tensors.keys()
    facts = _cache_facts(spec)
    assert facts["bytes_per_token"] == 2 * 2 * 2 * 64
    assert facts["state_bytes_per_sequence"] == 4 * 80 * 64 * 128 + 2 * 3 * (5120 + 256)


def test_the_projections_of_a_mixer_are_quantized_also_beside_attention() -> None:
    mixer = state_space(**MAMBA2)  # type: ignore[arg-type]
    layer = LayerSpec(AttentionSpec(8, 2, 64), None, NormSpec(), BlockSpec(beside=mixer))
    config = QuantizationConfig()
    for spec in (model(mixer, 2560), replace(model(mixer, 2560), layers=(layer,))):
        kernels = {path: why_dense(path, each, spec, config) for path, each in spec.parameters.items()}
        quantized = {path.rpartition("mixer.")[2] for path, why in kernels.items() if "mixer" in path and why is None}
        assert {"gate_x.kernel", "output.kernel"} <= quantized
        assert not {"conv.kernel", "conv_shared.kernel", "shared.kernel"} & quantized
