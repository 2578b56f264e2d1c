"""Mixers with a state in the core's vocabulary: what is stored, what is kept, their tensors' names, and padding."""

from __future__ import annotations

from ttpu_core.mapping.layout import standard_mapping
from ttpu_core.sharding.padding import pad_architecture
from ttpu_core.spec import ArchitectureSpec, EmbeddingSpec, HeadSpec, LayerSpec, MixerSpec, NormSpec, StateSpec
from ttpu_core.spec.short_convolution import short_convolution


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
