"""The torch_xla backend as the core sees it: from an architecture and a checkpoint to the stock PyTorch model, patched,
quantized, cut over the devices, with a `generate` that compiles once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import metadata, util
from typing import Any, Literal

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.errors import RequestError
from ttpu_core.sharding.parallelism import Rules
from ttpu_torch_xla.handle import Handle, run_on_all_devices
from ttpu_torch_xla.load import model_dtype, stock_model, tokenizer_of
from ttpu_torch_xla.moving import move
from ttpu_torch_xla.patches.choice import patches_for
from ttpu_torch_xla.patches.patch import Patch, applied
from ttpu_torch_xla.runtime import current
from ttpu_torch_xla.streaming import StreamingModel

ProgressCallback = Callable[[str, float, float], None]


class TorchXlaBackend:
    """Runs the stock transformers model with torch_xla on TPU or CPU."""

    name = "torch_xla"

    def load(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        *,
        dtype: Any = "auto",
        parallelism_strategy: Any = None,
        sharding_strategy: Any = None,
        sharding_rules: Rules | None = None,
        mesh: Any = None,
        plan: Any = None,
        auto_shard: bool = True,
        use_fsdp_wrap: bool | Literal["auto"] = False,
        attn_implementation: str | None = "auto",
        attention_config: Mapping[str, Any] | None = None,
        do_quant: bool = False,
        quantization_config: Any = None,
        gradient_checkpointing: bool = False,
        scan_layers: bool = False,
        patches: bool = True,
        progress: ProgressCallback | None = None,
        **unknown: Any,
    ) -> Any:
        """The stock transformers model on the XLA device.

        Args:
            dtype: "auto" (as stored), "float32", "bfloat16", "float16", or a torch dtype.
            parallelism_strategy: how the model is cut over devices: "fsdp", "dp", "mp", "2d", "3d", "auto" (the planner
                chooses), or a mesh such as "data=2,tensor=4". None is one device.
            sharding_strategy: the same.
            mesh: the same.
            plan: a plan, or the file that `ttpu plan --save` wrote, instead of a strategy.
            sharding_rules: logical axis → the mesh axes that cut it, or None, in place of the usual ones.
            auto_shard: False leaves the model whole, whatever the strategy.
            use_fsdp_wrap: wrap the layers in torch_xla's FSDPv2 after they were cut; "auto" does so where the mesh has
                devices along "fsdp".
            attn_implementation: "auto", "eager", "sdpa", "xla_flash_attention" or "splash_attention".
            attention_config: settings of that implementation, such as {"sa_block_q": 1024} for splash_attention.
            do_quant: quantize the linear layers as `quantization_config` says (int8 per channel where it is None).
            quantization_config: a `ttpu_torch_xla.quantization.QuantizationConfig`.
            gradient_checkpointing: recompute each layer's activations in the backward pass.
            scan_layers: trace equal layers once; compiles faster, and takes more memory for temporaries.
            patches: False leaves out every patch that the model runs rightly without.
            progress: called as progress("load", 0, bytes) before and progress("load", bytes, bytes) after loading.

        Raises:
            CheckpointError, MappingError, UnsupportedError, RequestError, PluginError: what cannot be loaded, and why.
        """
        if unknown:
            raise RequestError(
                f"from_pretrained() was given {', '.join(sorted(unknown))}, but the torch_xla backend takes dtype, "
                "parallelism_strategy, sharding_strategy, sharding_rules, mesh, plan, auto_shard, use_fsdp_wrap, "
                "attn_implementation, attention_config, do_quant, quantization_config, gradient_checkpointing, "
                "scan_layers, patches and progress: leave it out."
            )
        from ttpu_torch_xla import generation
        from ttpu_torch_xla.attention import transformers_name
        from ttpu_torch_xla.attention.choice import attention_for
        from ttpu_torch_xla.checkpointing import checkpoint_layers
        from ttpu_torch_xla.quantization import QuantizationConfig, quantize
        from ttpu_torch_xla.scanning import refuse_scan
        from ttpu_torch_xla.scanning import scan_layers as scan
        from ttpu_torch_xla.sharding.fsdp import has_fsdp_axis, refuse_without_axis, wrap
        from ttpu_torch_xla.sharding.resolve import resolve

        for name, value in (("auto_shard", auto_shard), ("do_quant", do_quant), ("scan_layers", scan_layers),
                            ("gradient_checkpointing", gradient_checkpointing), ("patches", patches)):  # fmt: skip
            if not isinstance(value, bool):
                raise RequestError(f"{name} is {value!r}, but it is a switch: write True or False.")
        if use_fsdp_wrap not in (True, False, "auto"):
            raise RequestError(f"use_fsdp_wrap is {use_fsdp_wrap!r}, but it is True, False or 'auto': write one.")
        if quantization_config is not None and not do_quant:
            raise RequestError(
                "quantization_config was given without do_quant=True, so that nothing would be quantized: pass "
                "do_quant=True, or leave the configuration out."
            )
        if do_quant:
            quantization_config = QuantizationConfig.read(quantization_config or QuantizationConfig())
        began = time.perf_counter()
        size = float(checkpoint.total_bytes)
        tell = progress or (lambda *_: None)
        tell("load", 0.0, size)
        runtime = current()
        held = model_dtype(dtype, checkpoint)
        # transformers would fill what is missing with random numbers, and leave out what it does not know.
        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        architecture.mapping.suited_to(shapes).resolve(shapes, checkpoint.source)
        # Also where it is not followed: what is misspelt here would fail with auto_shard=True.
        asked_for = resolve(
            architecture.spec,
            runtime,
            parallelism_strategy=parallelism_strategy,
            sharding_strategy=sharding_strategy,
            mesh=mesh,
            plan=plan,
            sharding_rules=sharding_rules,
            dtype=str(held),
            quantization=None if quantization_config is None else quantization_config.planned_as,
        )
        parallelism = asked_for if auto_shard else None
        if use_fsdp_wrap == "auto":
            use_fsdp_wrap = has_fsdp_axis(parallelism)
        elif use_fsdp_wrap:
            refuse_without_axis(parallelism)
        if scan_layers:
            refuse_scan(parallelism)
        if parallelism is not None:
            run_on_all_devices(runtime)
        asked = attn_implementation or "auto"
        attention, options = attention_for(architecture, asked, runtime.platform(), attention_config)
        chosen = patches_for(architecture, attention, optional=patches)
        steps = ExitStack()
        steps.enter_context(applied(chosen))
        try:
            model = stock_model(checkpoint, held, transformers_name(attention), quiet=progress is not None).eval()
            handle = Handle(architecture, runtime, chosen, attention, options, parallelism)
            handle.tokenizer = tokenizer_of(checkpoint)
            if quantization_config is not None:
                handle.quantization = quantize(model, quantization_config)
            if parallelism is None:
                move(model, lambda _, tensor: runtime.put(tensor))
            else:
                from ttpu_torch_xla.sharding.apply import shard_model

                handle.mesh = shard_model(model, architecture, parallelism, runtime)
            runtime.sync(wait=True)
            if not runtime.differentiates():
                warnings.warn(
                    "this process ran a backward pass before the XLA device was there, and torch counts its devices at "
                    "the first one: the model generates, but cannot be trained here; load it before training on the "
                    "CPU, or in another process.",
                    stacklevel=2,
                )
            if gradient_checkpointing:
                checkpoint_layers(model)
            if scan_layers:
                scan(model, architecture)
            generation.install(model)
            if use_fsdp_wrap:
                model = wrap(model, handle.mesh, architecture)
            handle.attach(model, steps)
            handle.load_seconds = time.perf_counter() - began
            tell("load", size, size)
        except BaseException:
            steps.close()
            raise
        return model

    def streaming(self, model: Any) -> StreamingModel:
        """The model as the command line needs it."""
        return StreamingModel(model, model.ttpu.load_seconds)

    def kernels(self, architecture: Architecture) -> Mapping[str, str]:
        """Operation → implementation and why: on this machine, and on a TPU."""
        from ttpu_torch_xla.attention.choice import kernels

        return kernels(architecture)

    def patches(self, architecture: Architecture) -> tuple[Patch, ...]:
        """What is replaced in transformers for this architecture, for `ttpu info`."""
        return patches_for(architecture, "splash_attention")

    def doctor(self) -> Mapping[str, Any]:
        """Devices, versions, and what is missing."""
        runtime = current()
        versions = {name: _version(name) for name in ("torch", "torch_xla", "transformers", "ttpu-jax", "libtpu")}
        missing = {} if util.find_spec("ttpu_jax") else {"kernels": 'pip install "ttpu-torch-xla[kernels]"'}
        return {
            "platform": runtime.platform(),
            "devices": [f"{index}: {runtime.platform()}" for index in range(runtime.num_devices())],
            "versions": versions,
            "compiles_for_tpu": versions["libtpu"] is not None and not missing,
            "missing": missing,
        }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
