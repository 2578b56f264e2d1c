"""What is written is what `compressed_tensors` reads: its own decompression gives the weights that the parts stand
for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ttpu_core.config import ModelConfig
from ttpu_core.quantization.config import QuantizationConfig
from ttpu_core.quantization.rounding import dequantize, round_kernel
from ttpu_core.quantization.schemes.compressed_tensors import group_of
from ttpu_core.quantization.schemes.config_groups import config_groups
from ttpu_quantize import compressed_tensors as layout
from ttpu_quantize.gptq import GPTQ
from ttpu_quantize.linears import Linear

SHAPE = (24, 48)  # 24 rows of zero points do not fill words of 8 at every group size


def linear(scheme: str, **changes: object) -> Linear:
    form = replace(QuantizationConfig.parse(scheme).kernel_format, **changes)  # type: ignore[arg-type]
    return Linear("m.weight", "m.weight", SHAPE, form, ())


@pytest.mark.parametrize(("bits", "axis"), [(4, 0), (4, 1), (8, 0), (8, 1)])
def test_packing_is_undone_by_unpacking_and_is_that_of_the_library(bits: int, axis: int) -> None:
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers", exc_type=ImportError)
    low = 1 << (bits - 1)
    values = np.random.default_rng(0).integers(-low, low, (7, 13)).astype(np.int8)
    packed = layout.pack(values, bits, axis)
    np.testing.assert_array_equal(layout.unpack(packed, bits, values.shape[axis], axis), values)
    theirs = helpers.pack_to_int32(torch.tensor(values), bits, packed_dim=axis)
    np.testing.assert_array_equal(packed, theirs.numpy())


@pytest.mark.parametrize(
    "scheme",
    ["w4a16-g16", "w4a16-g16-asym", "w4a16-asym", "w8a16", "w8a16-g16-asym", "w8a8", "w4a8-g16", "fp8", "w8a8-fp8"],
)
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_the_library_decompresses_what_the_parts_stand_for(scheme: str, scale_dtype: str) -> None:
    held = linear(scheme, scale_dtype=scale_dtype)
    parts = round_kernel(np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32), held.form)
    tensors = layout.stored_tensors(held, parts)
    np.testing.assert_array_equal(decompressed(held, tensors), dequantize(parts, held.form))
    again = layout.read_parts(held, tensors)
    np.testing.assert_array_equal(dequantize(again, held.form), dequantize(parts, held.form))


def test_the_library_decompresses_an_input_order() -> None:
    held = linear("w4a16-g16-asym", input_order=True)
    random = np.random.default_rng(2)
    inputs = random.standard_normal((200, SHAPE[1])) * random.uniform(0.1, 3, SHAPE[1])
    weights = random.standard_normal(SHAPE).astype(np.float32)
    parts = GPTQ(order="group").round(weights, (inputs.T @ inputs).astype(np.float32), held.form)
    tensors = layout.stored_tensors(held, parts)
    np.testing.assert_array_equal(decompressed(held, tensors), dequantize(parts, held.form))
    again = layout.read_parts(held, tensors)
    np.testing.assert_array_equal(dequantize(again, held.form), dequantize(parts, held.form))


def test_a_config_group_has_modules_of_its_own_form_alone() -> None:
    sizes = {"layers.0.up": 16, "layers.1.up": 16, "layers.2.up": 8, "layers.0.down": 8, "layers.1.down": 16}
    linears = [
        replace(linear("w4a16-g16", group_size=size), name=f"{name}.weight", stored=f"{name}.weight")
        for name, size in sizes.items()
    ]
    entry = layout.quantization_config(linears, ["layers.3.down", "layers.0.gate", "layers.1.gate"])
    assert entry["config_groups"]["group_0"]["targets"] == ["layers.2.up", "layers.0.down"]
    assert entry["ignore"] == ["layers.3.down", r"re:layers\.\d+\.gate$"]
    config = ModelConfig.from_dict({"model_type": "llama", **entry})
    groups = config_groups("here", config)
    for one in linears:
        found = group_of(one.module, groups, tuple(entry["ignore"]))
        assert found is not None
        assert found.weights.group_size == one.form.group_size


def decompressed(held: Linear, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The weights by the library, from our tensors and our entry of config.json."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors", exc_type=ImportError)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig as Theirs

    entry = layout.quantization_config([held], [])
    scheme = Theirs.model_validate(entry).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(entry["format"])

    def tensor(array: np.ndarray) -> object:
        if array.dtype.name in ("bfloat16", "float8_e4m3fn"):
            same_size = torch.tensor(array.view(f"int{8 * array.dtype.itemsize}"))
            return same_size.view(getattr(torch, array.dtype.name))
        return torch.tensor(array)

    state = {name.removeprefix("m."): tensor(array) for name, array in tensors.items()}
    state["weight_scale"] = state["weight_scale"].float()  # type: ignore[attr-defined]
    found: np.ndarray = compressor.decompress(state, scheme)["weight"].float().numpy()
    return found
