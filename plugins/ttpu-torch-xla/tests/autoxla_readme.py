"""The examples of AutoXLA's README, unchanged but for the import lines and the checkpoint, which is this script's first
argument; test_xla_autoxla.py runs it on eight simulated devices."""

from __future__ import annotations

import json
import sys

import torch

from ttpu import AutoXLAModelForCausalLM
from ttpu_torch_xla.quantization import QuantizationConfig

CHECKPOINT = sys.argv[1]
IDS = torch.tensor(json.loads(sys.argv[2]))


def quick_start() -> torch.nn.Module:
    return AutoXLAModelForCausalLM.from_pretrained(
        CHECKPOINT,
        attn_implementation="splash_attention",
        sharding_strategy="fsdp",
    )


def splash_attention() -> torch.nn.Module:
    return AutoXLAModelForCausalLM.from_pretrained(
        CHECKPOINT,
        attn_implementation="splash_attention",
        attention_config={"sa_block_q": 1024},
    )


def sharding_3d() -> torch.nn.Module:
    return AutoXLAModelForCausalLM.from_pretrained(
        CHECKPOINT,
        sharding_strategy="3d",
    )


def quantized_loading() -> torch.nn.Module:
    quant_cfg = QuantizationConfig(bits=8, use_pallas=True, quantize_activation=True)
    return AutoXLAModelForCausalLM.from_pretrained(
        CHECKPOINT,
        do_quant=True,
        quantization_config=quant_cfg,
    )


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    """Logits on the host, of every example's batch."""
    from ttpu_torch_xla.runtime import current

    with torch.no_grad():
        output = model(input_ids=IDS.to(current().device()))
    return output.logits.float().cpu()


if __name__ == "__main__":
    results = {}
    for example in (quick_start, splash_attention, sharding_3d, quantized_loading):
        model = example()
        logits = logits_of(model)
        results[example.__name__] = {"logits": logits.tolist(), "sharding": str(model.ttpu.parallelism)}
        model.ttpu.close()
        del model
    json.dump(results, sys.stdout)
