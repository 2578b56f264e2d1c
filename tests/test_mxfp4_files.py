"""gpt-oss' experts in microscaled 4-bit floats: what is read stands for the weights that transformers makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

from ttpu_core.checkpoint.decoded import DecodedTensor  # noqa: E402
from ttpu_core.checkpoint.header import TensorReader, read_header  # noqa: E402
from ttpu_core.errors import CheckpointError  # noqa: E402
from ttpu_core.quantization.reading import read_parts  # noqa: E402
from ttpu_core.quantization.rounding import dequantize  # noqa: E402
from ttpu_core.quantization.schemes import QuantizedCheckpoint  # noqa: E402
from ttpu_core.quantization.schemes.mxfp4 import read_mxfp4  # noqa: E402

pytestmark = pytest.mark.torch

NAME = "model.layers.0.mlp.experts.gate_up_proj"
EXPERTS, OUT, GROUPS = 3, 5, 4


def packed(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes with two numbers each, which take every value, and exponents from 2^-20 to 2^19."""
    random = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (EXPERTS, OUT, GROUPS, 16), generator=random, dtype=torch.uint8)
    return blocks, torch.randint(107, 147, (EXPERTS, OUT, GROUPS), generator=random, dtype=torch.uint8)


def read(folder: Path, tensors: dict[str, torch.Tensor]) -> QuantizedCheckpoint:
    save_file(tensors, folder / "model.safetensors")
    return read_mxfp4("gpt-oss", {"quant_method": "mxfp4"}, read_header(folder / "model.safetensors").tensors)


def test_experts_stand_for_the_weights_that_transformers_dequantizes(tmp_path: Path) -> None:
    blocks, scales = packed()
    bias = torch.zeros(EXPERTS, OUT)
    held = read(tmp_path, {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales, f"{NAME}_bias": bias})
    assert set(held.dense) == {f"{NAME}_bias"}
    weight = held.weights[NAME]
    assert held.shapes == {NAME: (EXPERTS, 32 * GROUPS, OUT), f"{NAME}_bias": (EXPERTS, OUT)}  # as transformers has it
    assert (weight.shape, weight.group_size, weight.dtype) == ((EXPERTS, OUT, 32 * GROUPS), 32, "float4_e2m1fn")
    with TensorReader() as reader:
        parts = read_parts(weight, reader)
        values = weight.parts["values"]
        assert isinstance(values, DecodedTensor)
        middle = values.rows(reader, 4, 11)  # across experts
    assert np.array_equal(middle, parts["values"].reshape(-1, 32 * GROUPS)[4:11])
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, in, out]
    assert np.array_equal(dequantize(parts, weight.format), expected.transpose(1, 2).numpy())


def test_exponents_that_stand_for_no_number_and_missing_ones_are_refused(tmp_path: Path) -> None:
    blocks, scales = packed()
    scales[1, 2, 3] = 255
    held = read(tmp_path, {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales})
    with TensorReader() as reader, pytest.raises(CheckpointError, match="NaN or infinite: take"):
        read_parts(held.weights[NAME], reader)
    with pytest.raises(CheckpointError, match=r"has no .*gate_up_proj_scales' beside it"):
        read(tmp_path, {f"{NAME}_blocks": blocks})
    with pytest.raises(CheckpointError, match="scales of 32 numbers each"):
        read(tmp_path, {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales[:, :, :3].contiguous()})
