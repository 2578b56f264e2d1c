"""Tiny models on a mesh of eight simulated devices, which is for a whole process (xla_spmd.py), and what each strategy
did to them."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from quantized_files import fine_grained_fp8, gptq
from tiny import llama_checkpoint
from transformers import (
    AutoModelForCausalLM,
    BioGptConfig,
    BioGptForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from xla_tiny import tiny

from ttpu import AutoModelForTPU
from ttpu_core import ModelConfig, default_registry
from ttpu_torch_xla.checkpointing import checkpoint_layers
from ttpu_torch_xla.handle import Handle
from ttpu_torch_xla.patches.choice import patches_for
from ttpu_torch_xla.patches.patch import applied
from ttpu_torch_xla.quantization import QuantizationConfig, quantize
from ttpu_torch_xla.runtime import current
from ttpu_torch_xla.sharding import ShardedLoader, resolve, shard_model, wrap

STEPS, ROWS, TOKENS = 3, 8, 12
# AdamW divides by the root of the squared gradient plus eps: below an eps of the gradients' own size, a rounding of one
# that is nearly zero is as large a step as any.
OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 4, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "attn_implementation": "eager",
}  # fmt: skip
LLAMA = ("fsdp", "dp", "3d")
LOADED = ("dp", "3d")  # nothing is sharded, and everything is
MIXTRAL = "data=2,fsdp=2,expert=2"
OTHERS = ("gemma3n_text", "qwen3_next", "mistral4")
"""Model types with more to their layers: several residual streams, a gated delta rule, latent attention and experts."""
QUERY = "model.layers.0.self_attn.q_proj.weight"


def llama() -> Any:
    """Tied, and with a vocabulary that eight devices do not divide."""
    return LlamaForCausalLM(LlamaConfig(vocab_size=93, tie_word_embeddings=True, **SIZES))


def mixtral() -> Any:
    """Four experts, of which a token takes two."""
    return MixtralForCausalLM(MixtralConfig(vocab_size=96, num_local_experts=4, **SIZES))


def architecture_of(model: Any) -> Any:
    """What the family plugin says of a model."""
    return default_registry().architecture(ModelConfig.from_dict(json.loads(model.config.to_json_string(False))))


def batches(model: Any) -> list[dict[str, torch.Tensor]]:
    """The same token ids for each step."""
    ids = torch.randint(0, model.config.vocab_size, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": ids, "labels": ids}] * STEPS


def trained(model: Any, data: Any) -> Iterator[torch.Tensor]:
    """The losses of AdamW's steps."""
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    for batch in data:
        optimizer.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        yield loss.detach()
    model.optimizer = optimizer


class Case:
    """A model and what the host computes with it."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.architecture = architecture_of(model)
        self.data = batches(model)
        with torch.no_grad():
            self.logits = model(self.data[0]["input_ids"]).logits
        reference = copy.deepcopy(model)
        self.losses = [float(loss) for loss in trained(reference, self.data)]
        self.parameters = dict(reference.named_parameters())

    def run(self, what: str, *, fsdp_wrap: bool = False) -> dict[str, Any]:
        """The model cut as a strategy says: how far its logits, losses and parameters are from the host's."""
        runtime = current()
        parallelism = resolve(self.architecture.spec, runtime, parallelism_strategy=what)
        assert parallelism is not None
        model = copy.deepcopy(self.model)
        handle = Handle(self.architecture, runtime, parallelism=parallelism)
        handle.mesh = shard_model(model, self.architecture, parallelism, runtime)
        names = set(model.state_dict())
        if fsdp_wrap:
            checkpoint_layers(model)
            model = wrap(model, handle.mesh, self.architecture)
        handle.attach(model)
        runtime.sync(wait=True)
        loader = ShardedLoader(self.data, model)
        with torch.no_grad():
            there = next(iter(loader))["input_ids"]
            output = model(there).logits
            runtime.sync(wait=True)
            logits_sharding = runtime.sharding_of(output)
            error = _error(output.cpu(), self.logits)
            few = _error(model(self.data[0]["input_ids"][:1].to(runtime.device())).logits.cpu(), self.logits[:1])
        runtime.sync(wait=True)
        model.train()
        runtime.reset_counters()
        losses = [float(loss) for loss in list(trained(model, loader))]
        compiles = runtime.counters().compiles
        state = model.state_dict(keep_vars=True)
        moments = model.optimizer.state.get(state.get(QUERY))
        result = {
            "mesh": str(parallelism),
            "logits": error,
            "logits_of_one_row": few,
            "losses": [abs(a - b) / b for a, b in zip(losses, self.losses, strict=True)],
            "parameters": max(_error(state[name].detach().cpu(), one) for name, one in self.parameters.items()),
            "compiles": compiles,
            "input_sharding": runtime.sharding_of(there),
            "logits_sharding": logits_sharding,
            "sharding": {name: runtime.sharding_of(one) for name, one in state.items()},
            "state_sharding": runtime.sharding_of(moments["exp_avg"]) if moments else None,
            "names_kept": set(state) == names,
            "tied": state["lm_head.weight"] is state["model.embed_tokens.weight"],
            "class": type(model).__name__,
        }
        if fsdp_wrap:
            result |= self._saved(model, state) | self._loaded(model, there)
        return result

    def _saved(self, model: Any, state: dict[str, torch.Tensor]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            back = type(self.model).from_pretrained(folder).state_dict()
        return {"saved": all(torch.equal(one, state[name].detach().cpu()) for name, one in back.items())}

    def _loaded(self, model: Any, ids: torch.Tensor) -> dict[str, Any]:
        """The untrained weights put back through `load_state_dict`, whose names must fit as well."""
        model.load_state_dict(self.model.state_dict())
        model.eval()
        with torch.no_grad():
            return {"loaded": _error(model(ids).logits.cpu(), self.logits)}


def loaded(model: Any) -> dict[str, Any]:
    """A checkpoint through the public call: how far its logits are from the host's, and if it generates the same."""
    ids = batches(model)[0]["input_ids"]
    asked = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    with torch.no_grad():
        logits = model(ids).logits
    tokens = model.generate(ids[:3], **asked)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for what in LOADED:
            there = AutoModelForTPU.from_pretrained(folder, backend="torch_xla", sharding_strategy=what)
            with torch.no_grad():
                found = there(ids.to(there.device)).logits.cpu()
            results[what] = {
                "mesh": str(there.ttpu.parallelism),
                "logits": _error(found, logits),
                "generates_the_same": torch.equal(there.generate(ids[:3], **asked), tokens),
            }
    return results


def quantized_checkpoints() -> dict[str, Any]:
    """Checkpoints of two schemes, and one that is quantized while it is loaded."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        dense = llama_checkpoint(folder / "dense", num_hidden_layers=1, num_key_value_heads=4)
        gptq(dense, folder / "gptq", symmetric=False, version="gptq", desc_act=True)
        fine_grained_fp8(dense, folder / "fp8")
        return {
            "quantized": {scheme: quantized(folder / scheme) for scheme in ("gptq", "fp8")},
            "while_loading": quantized_while_loading(folder / "gptq"),
            "experts": quantized_experts(folder),
        }


def quantized(folder: Path) -> dict[str, Any]:
    """A quantized checkpoint, and beside it the dense one of the same numbers: how far apart their logits are, and how
    each part of a kernel is cut."""
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder / "expected").eval()(ids).logits
        model = AutoModelForTPU.from_pretrained(folder / "quantized", backend="torch_xla", mesh="fsdp=2,tensor=4")
        found = model(ids.to(model.device), use_cache=False).logits.cpu()
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    return {
        "logits": _error(found, expected),
        "blocks": layer.block_size,
        "sharding": {name: current().sharding_of(one) for name, one in layer.named_buffers()},
    }


def quantized_experts(folder: Path) -> dict[str, Any]:
    """Experts of a quantized checkpoint, cut by experts and along their inner size, beside the dense ones."""
    sizes = SIZES | {"num_hidden_layers": 1}
    MixtralForCausalLM(MixtralConfig(vocab_size=96, num_local_experts=4, **sizes)).save_pretrained(folder / "mixtral")
    made, same = gptq(
        folder / "mixtral", folder / "experts", size=32, symmetric=False, version="gptq", desc_act=True
    )
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(same).eval()(ids).logits
        model = AutoModelForTPU.from_pretrained(made, backend="torch_xla", mesh="expert=2,tensor=4")
        found = model(ids.to(model.device), use_cache=False).logits.cpu()
    held = model.model.layers[0].mlp.experts.down_proj_quantized
    return {
        "logits": _error(found, expected),
        "blocks": held.format.group_size,
        "sharding": {name: current().sharding_of(one) for name, one in held.named_buffers()},
    }


def quantized_while_loading(folder: Path) -> dict[str, Any]:
    """The same numbers, rounded while they are loaded onto a mesh and on the host."""
    ids = torch.arange(24).reshape(2, 12)
    host = AutoModelForCausalLM.from_pretrained(folder / "expected").eval()
    quantize(host, QuantizationConfig.parse("w4a16-g16"))
    there = AutoModelForTPU.from_pretrained(
        folder / "expected", backend="torch_xla", mesh="fsdp=2,tensor=4", quantization="w4a16-g16"
    )
    with torch.no_grad():
        found = there(ids.to(there.device), use_cache=False).logits.cpu()
        expected = host(ids).logits
    blocks = there.get_submodule("model.layers.0.mlp.down_proj").block_size
    return {"logits": _error(found, expected), "blocks": blocks}


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected.detach()).abs().max() / expected.detach().abs().max())


def without_a_plugin() -> dict[str, Any]:
    """A model type that no plugin describes, spread over all devices by size."""
    config = BioGptConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    host = BioGptForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        host.save_pretrained(folder)
        model = AutoModelForTPU.from_pretrained(folder, backend="torch_xla", parallelism_strategy="fsdp")
    ids = torch.randint(3, 64, (ROWS, TOKENS))
    with torch.no_grad():
        logits = model(input_ids=ids.to(model.device)).logits.cpu()
        error = float((logits - host(ids).logits).abs().max())
    sharding = model.ttpu.runtime.sharding_of(model.biogpt.layers[0].fc1.weight)
    model.ttpu.close()
    return {"error": error, "sharding": sharding}


def cases() -> dict[str, Any]:
    """Every case."""
    runtime = current()
    torch.manual_seed(0)
    dense, sparse = llama(), mixtral()
    patches = {patch.target: patch for one in (dense, sparse) for patch in patches_for(architecture_of(one), "eager")}
    with applied(patches.values()):
        case = Case(dense)
        results = {what: case.run(what) for what in LLAMA}
        results["mixtral"] = Case(sparse).run(MIXTRAL, fsdp_wrap=True)
    for model_type in OTHERS:
        with tiny(model_type) as other:
            results[model_type] = Case(other.model).run("3d")
    results["loaded"] = loaded(dense)
    results |= quantized_checkpoints()
    results["without a plugin"] = without_a_plugin()
    results["slices"] = runtime.mesh({"data": 2, "fsdp": 4}, {"fsdp": 2}).get_logical_mesh().tolist()
    chips = [{"name": f"TPU:{number}", "coords": [number % 2, number // 2, 0]} for number in reversed(range(8))]
    with (
        mock.patch("torch_xla.runtime.global_runtime_device_attributes", lambda: chips),
        mock.patch("torch_xla._internal.tpu.get_tpu_env", lambda: {"ACCELERATOR_TYPE": "v5litepod-8"}),
        mock.patch.object(type(runtime), "platform", lambda _: "tpu"),
    ):
        results["chip"] = runtime.chip()
        results["ring"] = runtime.mesh({"tensor": 8}).get_logical_mesh().tolist()
    return results
