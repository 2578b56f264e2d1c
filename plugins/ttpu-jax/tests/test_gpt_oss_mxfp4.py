"""gpt-oss as OpenAI publishes it: experts in microscaled 4-bit floats. The reference is transformers, which
dequantizes them on a CPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402

from ttpu import AutoModelForTPU  # noqa: E402
from ttpu_core.config import ModelConfig  # noqa: E402
from ttpu_core.quantization.stored import stored_architecture  # noqa: E402
from ttpu_core.registry import default_registry  # noqa: E402

pytestmark = pytest.mark.torch

LAYERS, HIDDEN, INNER, EXPERTS = 2, 64, 96, 4
FORMAT = ("float4_e2m1fn", 32, "float8_e8m0fnu")
NOT_CONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@dataclass(frozen=True)
class Published:
    """A tiny checkpoint, and transformers' logits of some tokens."""

    folder: Path
    tokens: np.ndarray
    logits: np.ndarray


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder = tmp_path_factory.mktemp("gpt-oss")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=96, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=8,
        max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    config.save_pretrained(folder)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.Generator().manual_seed(1)
    for layer in range(LAYERS):
        for name, out, inputs in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            key, shape = f"model.layers.{layer}.mlp.experts.{name}", (EXPERTS, out, inputs // 32)
            del tensors[key]
            tensors[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
            tensors[f"{key}_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8, generator=random)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
    (folder / "config.json").write_text(json.dumps(written))
    reference = transformers.GptOssForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(1, 96, (2, 24), generator=random)
    with torch.no_grad():
        return Published(folder, tokens.numpy(), reference(tokens).logits.numpy())


def formats(model: Any) -> dict[str, tuple[str, int | None, str]]:
    return {path: (each.dtype, each.group_size, each.scale_dtype) for path, each in model.spec.kernel_formats}


@pytest.mark.parametrize("mesh", [None, "tensor=4", "expert=2,tensor=2"])
def test_logits_equal_those_of_the_dequantized_model(published: Published, mesh: str | None) -> None:
    model: Any = AutoModelForTPU.from_pretrained(str(published.folder), dtype="float32", mesh=mesh)
    held = formats(model)
    names = [f"layers.{layer}.moe.experts.{name}.kernel" for layer in range(LAYERS) for name in ("gate_up", "down")]
    assert sorted(held) == sorted(names)
    if mesh is None:
        assert set(held.values()) == {FORMAT}
    found = np.asarray(model(published.tokens).logits)
    assert np.abs(found - published.logits).max() < 2e-5 * np.abs(published.logits).max() + 1e-6


def test_the_config_alone_says_which_kernels_are_quantized(published: Published) -> None:
    config = ModelConfig.from_file(published.folder / "config.json")
    found = stored_architecture(default_registry().architecture(config), config)
    model: Any = AutoModelForTPU.from_pretrained(str(published.folder), dtype="float32")
    assert dict(found.spec.kernel_formats) == dict(model.spec.kernel_formats)
