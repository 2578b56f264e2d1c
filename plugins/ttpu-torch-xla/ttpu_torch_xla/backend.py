"""The torch_xla backend, which implements the core's backend protocols. It turns an architecture and a checkpoint into
a stock PyTorch model that is patched, quantized and sharded over the devices, with a `generate` that compiles once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint, dtype_name
from ttpu_core.errors import RequestError
from ttpu_core.quantization.mapping import formats_of, mixed_kernels
from ttpu_core.quantization.report import BY_LAYER, report_of
from ttpu_core.quantization.schemes import open_quantized, refuse_again
from ttpu_torch_xla.handle import Handle, run_on_all_devices
from ttpu_torch_xla.load import stock_model, tokenizer_of
from ttpu_torch_xla.load_options import TorchXlaLoadOptions
from ttpu_torch_xla.moving import move
from ttpu_torch_xla.patches.choice import patches_for
from ttpu_torch_xla.patches.patch import Patch, applied
from ttpu_torch_xla.runtime import current
from ttpu_torch_xla.streaming import StreamingModel

if TYPE_CHECKING:
    from ttpu_torch_xla.train.runner import Layout, TorchXlaTrainRunner
    from ttpu_train.runner import StepSettings


class TorchXlaBackend:
    """Runs the stock transformers model with torch_xla on TPU or CPU."""

    name = "torch_xla"

    options = TorchXlaLoadOptions

    def open(self, architecture: Architecture, checkpoint: Checkpoint, options: TorchXlaLoadOptions) -> Any:
        """Load the stock transformers model onto the XLA device.

        Raises:
            CheckpointError, MappingError, UnsupportedError, RequestError, PluginError: what cannot be loaded, and why.
        """
        from ttpu_torch_xla import generation
        from ttpu_torch_xla.attention import transformers_name
        from ttpu_torch_xla.attention.choice import attention_for
        from ttpu_torch_xla.checkpointing import checkpoint_layers
        from ttpu_torch_xla.quantization import QuantizationConfig, quantize
        from ttpu_torch_xla.quantization.choice import kept_layers
        from ttpu_torch_xla.quantization.stored import StoredLayers
        from ttpu_torch_xla.scanning import refuse_scan, scan_layers
        from ttpu_torch_xla.sharding.apply import devices_along_inputs
        from ttpu_torch_xla.sharding.fsdp import has_fsdp_axis, refuse_without_axis, wrap
        from ttpu_torch_xla.sharding.resolve import resolve

        if options.random_seed is not None:
            raise RequestError(
                f"random_seed={options.random_seed} was given, but the torch_xla backend loads the checkpoint's "
                "weights: make them with transformers' AutoModelForCausalLM.from_config, or use backend='jax'."
            )
        quantization_config = None
        if options.do_quant or options.quantization is not None:
            asked = options.quantization or options.quantization_config or QuantizationConfig()
            quantization_config = QuantizationConfig.read(asked)
        began = time.perf_counter()
        size = float(checkpoint.total_bytes)
        tell = options.progress or (lambda *_: None)
        tell("load", 0.0, size)
        runtime = current()
        held = dtype_name(options.dtype, checkpoint, "; for int8 and int4 pass do_quant=True and a quantization_config")
        # transformers would fill what is missing with random numbers, and leave out what it does not know.
        quantized = open_quantized(checkpoint)
        if quantized is not None and quantization_config is not None:
            raise refuse_again(checkpoint.source, quantized.scheme, quantization_config)
        dense = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        shapes = dense if quantized is None else quantized.shapes
        mapping = architecture.mapping.suited_to(shapes)
        names = mapping.resolve(shapes, checkpoint.source)
        if quantized is not None:
            spec = formats_of(architecture.spec, mapping, quantized)
            architecture = replace(architecture, spec=spec, mapping=mapping)
        # Also where it is not followed: what is misspelt here would fail with auto_shard=True.
        asked_for = resolve(
            architecture.spec,
            runtime,
            parallelism_strategy=options.parallelism_strategy,
            sharding_strategy=options.sharding_strategy,
            mesh=options.mesh,
            plan=options.plan,
            sharding_rules=options.sharding_rules,
            dtype=str(held),
            quantization=None if quantization_config is None else quantization_config.planned_as,
            purpose=options.purpose,
        )
        parallelism = asked_for if options.auto_shard else None
        use_fsdp_wrap = options.use_fsdp_wrap
        if use_fsdp_wrap == "auto":
            use_fsdp_wrap = has_fsdp_axis(parallelism)
        elif use_fsdp_wrap:
            refuse_without_axis(parallelism)
        if options.scan_layers:
            refuse_scan(parallelism)
        if parallelism is not None:
            run_on_all_devices(runtime)
        asked = options.attn_implementation or "auto"
        attention, settings = attention_for(architecture, asked, runtime.platform(), options.attention_config)
        has_quantized = quantized is not None or quantization_config is not None
        chosen = patches_for(architecture, attention, optional=options.patches, quantized=has_quantized)
        steps = ExitStack()
        steps.enter_context(applied(chosen))
        try:
            quiet = options.progress is not None
            stored = None if quantized is None else StoredLayers(quantized, architecture, parallelism)
            swap = None if stored is None else (lambda model: stored.swap(model))
            model = stock_model(checkpoint, held, transformers_name(attention), quiet=quiet, swap=swap).eval()
            handle = Handle(architecture, runtime, chosen, attention, settings, parallelism)
            handle.tokenizer = tokenizer_of(checkpoint)
            if stored is not None:
                stored.fill(model)
                mixed = dict.fromkeys(mixed_kernels(architecture.spec, mapping, stored.held), BY_LAYER)
                handle.quantization = report_of(architecture.spec, stored.held.scheme, held, mixed=mixed)
            elif quantization_config is not None:
                keep = kept_layers(model, architecture.spec, mapping, names)
                devices = devices_along_inputs(model, architecture, parallelism)
                handle.quantization = quantize(model, quantization_config, keep, devices)
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
            if options.gradient_checkpointing:
                checkpoint_layers(model)
            if options.scan_layers:
                scan_layers(model, architecture)
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

    def row_layout(self, model: Any) -> Layout:
        """Which rows of a batch a loaded model's mesh gives this process.

        Raises:
            RequestError: this backend did not load the model.
            UnsupportedError: this is one of several processes.
        """
        from ttpu_torch_xla.train.runner import row_layout

        return row_layout(model)

    def train_runner(self, model: Any, settings: StepSettings) -> TorchXlaTrainRunner:
        """A runner that trains a loaded model's own parameters; see `ttpu_torch_xla.train.runner`.

        Raises:
            RequestError: settings that contradict the model or each other.
            UnsupportedError: the model or the settings cannot be trained with so.
        """
        from ttpu_torch_xla.train.runner import TorchXlaTrainRunner

        return TorchXlaTrainRunner(model, settings)

    def export_checkpoint(
        self, place: Path, out: Path, *, identity: Mapping[str, Any], dtype: str, merge: bool = False
    ) -> None:
        """Write a run's checkpoint as a Hugging Face checkpoint; see `ttpu_torch_xla.train.export`.

        Args:
            place: the checkpoint's folder.
            out: the folder to write.
            identity: whose checkpoint it is.
            dtype: of the written weights.
            merge: refused, as there are no adapters.

        Raises:
            CheckpointError: its files are damaged.
            RequestError: `merge`, which is for adapters.
        """
        from ttpu_torch_xla.train.export import export_checkpoint

        export_checkpoint(place, out, identity=identity, dtype=dtype, merge=merge)

    def streaming(self, model: Any) -> StreamingModel:
        """Return the model with the interface that the command line needs."""
        return StreamingModel(model, model.ttpu.load_seconds)

    def kernels(self, architecture: Architecture) -> Mapping[str, str]:
        """Return the implementation of each operation, and why, on this machine and on a TPU."""
        from ttpu_torch_xla.attention.choice import kernels

        return kernels(architecture)

    def patches(self, architecture: Architecture) -> tuple[Patch, ...]:
        """List the patches of transformers for this architecture, for `ttpu info`."""
        return patches_for(architecture, "splash_attention")

    def doctor(self) -> Mapping[str, Any]:
        """Report devices, versions, and missing packages."""
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
