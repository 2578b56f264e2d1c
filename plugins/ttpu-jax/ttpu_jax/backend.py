"""The JAX backend, which implements the core's backend protocols. It turns an architecture and a checkpoint into a
model on this process's devices."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.mapping import FlaxMapping, pad_mapping
from ttpu_core.quantization import QuantizationConfig, choices, quantize_architecture
from ttpu_core.quantization.grouping import fit_formats
from ttpu_core.quantization.mapping import StoredMapping, formats_of, mixed_kernels, stored_mapping
from ttpu_core.quantization.quantize import EMBEDDING
from ttpu_core.quantization.report import DEQUANTIZED, format_words, report_of
from ttpu_core.quantization.schemes import open_quantized, refuse_again
from ttpu_core.registry import default_registry
from ttpu_core.sharding.padding import pad_architecture
from ttpu_core.sharding.parallelism import Parallelism, Rules
from ttpu_core.sharding.serving import ServedShapes, ServingLimits
from ttpu_core.sharding.strategy import Strategy
from ttpu_core.sharding.verification import Verification
from ttpu_core.spec import ArchitectureSpec, axes
from ttpu_core.token_scores import TokenScores
from ttpu_jax.causal_lm import JaxCausalLM
from ttpu_jax.distributed import initialize
from ttpu_jax.generation import scoring
from ttpu_jax.generation.programs import Programs
from ttpu_jax.load_options import JaxLoadOptions
from ttpu_jax.model.causal_model import cache_dtype, causal_model
from ttpu_jax.model.layer_run import LayerRun, check_layer_run
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.model.support import check_supported
from ttpu_jax.ops.attention import attention_choice
from ttpu_jax.ops.matmul.choice import ROWS, product_choices
from ttpu_jax.ops.matmul.rings import stream_form
from ttpu_jax.optimizations import Optimization, read_without
from ttpu_jax.parallel import placement_for
from ttpu_jax.params.dtypes import model_dtype
from ttpu_jax.params.initialize import random_parameters
from ttpu_jax.params.load import load_parameters
from ttpu_jax.params.padding import pad_for
from ttpu_jax.params.quantized import groupings_for
from ttpu_jax.text_tokenizer import text_tokenizer
from ttpu_jax.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from ttpu_core.loading import ProgressCallback
    from ttpu_jax.aot.training import CompiledUpdate
    from ttpu_jax.reward_model import JaxRewardModel
    from ttpu_jax.runner.ahead import Ahead
    from ttpu_jax.runner.compilation_cache import CacheCounts
    from ttpu_jax.runner.runner import Runner
    from ttpu_jax.train.rollouts import RolloutModel
    from ttpu_jax.train.rows import Rows
    from ttpu_jax.train.runner import JaxTrainRunner
    from ttpu_plan.plan import Plan
    from ttpu_serve.api.engine_config import EngineConfig
    from ttpu_serve.runner import AdapterWeights
    from ttpu_train.runner import StepSettings


logger = logging.getLogger(__name__)
AUTO_PALLAS: bool | Literal["auto"] = "auto"


class JaxBackend:
    """Runs models with JAX on TPU, CPU or GPU."""

    name = "jax"
    options = JaxLoadOptions
    spans_processes = False

    def open(self, architecture: Architecture, checkpoint: Checkpoint, options: JaxLoadOptions) -> JaxCausalLM:
        """Load a model: read its weights onto the devices.

        Raises:
            CheckpointError: the checkpoint's files cannot be read.
            MappingError: the checkpoint's tensors are not those that the architecture needs.
            UnsupportedError: this backend cannot run the model, or the mesh does not divide it.
            RequestError: options that contradict each other or the devices.
        """
        began = time.perf_counter()
        initialize()
        if options.purpose == "generate":
            self.keep_compiled()
        check_supported(architecture.spec)
        if options.random_seed is not None and options.quantization is not None:
            raise RequestError(
                f"random_seed={options.random_seed} and quantization={str(options.quantization)!r} were given, but "
                "random weights are for training, which needs dense ones: leave one of them out."
            )
        held = model_dtype(options.dtype, checkpoint, jax.default_backend())
        quantized = None
        if options.random_seed is None:
            quantized = open_quantized(checkpoint)
            names = checkpoint.tensors if quantized is None else quantized.shapes
            architecture = replace(architecture, mapping=architecture.mapping.suited_to(names))
        report, use_pallas = None, AUTO_PALLAS
        if quantized is not None:
            if options.quantization is not None:
                raise refuse_again(checkpoint.source, quantized.scheme, options.quantization)
            spec = formats_of(architecture.spec, architecture.mapping, quantized)
            architecture = replace(architecture, spec=spec)
            mixed = dict.fromkeys(mixed_kernels(spec, architecture.mapping, quantized), DEQUANTIZED)
            report = report_of(spec, quantized.scheme, held.name, mixed=mixed)
        elif options.quantization is not None:
            asked = QuantizationConfig.read(options.quantization)
            use_pallas = asked.use_pallas
            if asked.kv_cache is not None and not options.enable_paged_attention and options.purpose != "serve":
                raise RequestError(
                    f"kv_cache={asked.kv_cache!r} was asked for, but only a serving engine quantizes keys and values: "
                    "use LLM or `ttpu serve`, or leave it out."
                )
            found = choices(architecture.spec, asked, architecture.mapping)
            architecture = quantize_architecture(architecture, asked)
            report = report_of(architecture.spec, "while loading", held.name, found)
        _refuse_embedding(architecture.spec)
        without = read_without(options.without)
        placement = placement_for(
            architecture.spec,
            parallelism_strategy=options.parallelism_strategy,
            sharding_strategy=options.sharding_strategy,
            mesh=options.mesh,
            plan=options.plan,
            sharding_rules=options.sharding_rules,
            dtype=held.name,
            quantization=None if options.quantization is None else str(QuantizationConfig.read(options.quantization)),
            purpose="serve" if options.enable_paged_attention else options.purpose,
            by_links=Optimization.MESH_ORDER not in without,
        )
        spec, paddings = pad_for(architecture.spec, placement)
        attention = attention_choice(
            spec,
            options.attn_implementation or "auto",
            placement.platform,
            options.attention_config,
            placement.axes_of(axes.SEQUENCE),
        )
        runtime = Runtime(
            placement,
            attention.name,
            different_ropes(spec.layers),
            attention.options,
            use_pallas=use_pallas,
            dtype=held,
            experts=options.experts,
            stream="whole" if options.purpose == "train" else options.residual_stream,
            without=without,
        )
        progress = options.progress
        on_load = None if progress is None else (lambda done, total: progress("load", done, total))
        groupings = groupings_for(architecture.spec, placement)
        mapping: FlaxMapping | StoredMapping = pad_mapping(architecture.mapping, paddings)
        if quantized is not None:
            fitted = {path: one for path, (one,) in groupings.items()}
            mapping = stored_mapping(architecture.spec, spec, architecture.mapping, paddings, fitted, quantized)
        if options.random_seed is not None:
            deviation = checkpoint.config.get("initializer_range", 0.02)
            params = random_parameters(
                spec.parameters, placement, held, options.random_seed, deviation, paddings=paddings
            )
        else:
            params = load_parameters(
                checkpoint, mapping, spec.parameters, placement, held, on_load, groupings=groupings
            )
        on_compile = None if progress is None else (lambda _, seconds: progress("compile", float(seconds > 0), 1.0))
        kept = cache_dtype(spec, runtime, held)
        programs = Programs(causal_model(spec, runtime), params, kept, on_compile=on_compile)
        tokenizer = text_tokenizer(checkpoint)
        seconds = time.perf_counter() - began
        model = JaxCausalLM(architecture, checkpoint, programs, params, held, tokenizer, seconds, paddings)
        model.quantization = report
        if report is not None:
            logger.info("%s", report)
            if report.finer:
                logger.warning("the weights are quantized in %s", "; ".join(report.finer_lines))
        if options.enable_paged_attention:
            engines = default_registry().service("engine")
            model.engine = engines.build(model, options.engine_config or engines.config({}), progress)
        return model

    def model_runner(
        self,
        model: JaxCausalLM | RolloutModel,
        config: EngineConfig,
        adapters: Mapping[str, AdapterWeights] | None = None,
    ) -> Runner:
        """A runner for a loaded model, or for one in training, without pages and programs; see `ttpu_jax.runner.build`
        and `ttpu_jax.runner.rollouts`.

        Raises:
            UnsupportedError: a model, or a mesh, that the engine cannot serve.
            RequestError: settings that contradict the model or each other.
        """
        from ttpu_jax.train.rollouts import RolloutModel

        if isinstance(model, RolloutModel):
            from ttpu_jax.runner.rollouts import rollout_runner

            return rollout_runner(model.source.programs.spec, model.runtime, model.weights, model.dtype, config)
        return model.engine_runner(config, adapters)

    def open_reward_model(self, source: str | Path, options: JaxLoadOptions) -> JaxRewardModel:
        """Open a checkpoint as a reward model; see `ttpu_jax.reward_model`.

        Args:
            source: a checkpoint's folder or Hub id, of a language model or of a reward model.
            options: how it is loaded.

        Raises:
            UnsupportedError: transformers has no classifier of this type, or the weights are quantized.
        """
        from ttpu_jax.reward_model import open_reward_model

        return open_reward_model(self, source, options)

    def row_layout(self, model: JaxCausalLM) -> Rows:
        """Which rows of a batch a loaded model's mesh gives this process.

        Raises:
            UnsupportedError: processes share rows.
        """
        from ttpu_jax.train.rows import row_layout

        return row_layout(model.programs.runtime.placement)

    def train_runner(self, model: JaxCausalLM, settings: StepSettings) -> JaxTrainRunner:
        """A runner that takes over a loaded model's weights; see `ttpu_jax.train.runner`.

        Raises:
            RequestError: settings that contradict the model or each other.
            UnsupportedError: the model cannot be trained so.
        """
        from ttpu_jax.train.runner import JaxTrainRunner

        return JaxTrainRunner(model, settings)

    def compile_training(
        self,
        architecture: Architecture,
        topology: str,
        settings: StepSettings,
        *,
        rows: int,
        length: int,
        packed: bool = False,
        parallelism_strategy: str | None = None,
    ) -> CompiledUpdate:
        """Compile the update of a run for a slice that need not be there; see `ttpu_jax.aot.training`.

        Args:
            architecture: the model.
            topology: the slice, as in v5e:4x4.
            settings: of the run.
            rows: that a device computes at once.
            length: tokens of a row.
            packed: rows hold several sequences.
            parallelism_strategy: how the model is sharded; None is fsdp over all devices.

        Raises:
            UnsupportedError: no such slice or mesh, or the update does not fit.
            RequestError: settings that contradict the model or each other.
            MissingDependencyError: libtpu is not installed.
        """
        from ttpu_jax.aot.training import compile_update

        return compile_update(
            architecture,
            topology,
            settings,
            rows=rows,
            length=length,
            packed=packed,
            parallelism_strategy=parallelism_strategy,
        )

    def export_checkpoint(
        self, place: Path, out: Path, *, identity: Mapping[str, Any], dtype: str, merge: bool = False
    ) -> None:
        """Write a run's checkpoint as a Hugging Face checkpoint, or its adapters; see `ttpu_jax.train.export`.

        Args:
            place: the checkpoint's folder.
            out: the folder to write.
            identity: whose checkpoint it is.
            dtype: of the written weights.
            merge: write the base model with the trained adapter merged, instead of the adapter.

        Raises:
            CheckpointError: its files are damaged.
        """
        from ttpu_jax.train.export import export_checkpoint

        export_checkpoint(place, out, identity=identity, dtype=dtype, merge=merge)

    def text_logits(self, model: JaxCausalLM, tokens: np.ndarray, lengths: np.ndarray) -> jax.Array:
        """Compute the logits [batch, seq, vocab] of texts, tokens [batch, seq] of the given lengths [batch]; see
        `ttpu_jax.generation.scoring`."""
        return scoring.text_logits(model.programs, tokens, lengths)

    def token_scores(
        self, logits: jax.Array, targets: np.ndarray, reference: jax.Array | None = None
    ) -> TokenScores:
        """Score the targets [batch, seq] by logits [batch, seq, vocab], and compare these with a reference of the same
        shape [batch, seq, vocab]; see `ttpu_jax.generation.scoring`."""
        return scoring.token_scores(logits, targets, reference)

    def weight_bytes(self, model: JaxCausalLM) -> int:
        """Sum the bytes of a model's parameters; 4-bit values count half a byte."""
        return scoring.weight_bytes(model.params)

    def tokenizer(self, checkpoint: Checkpoint) -> Any:
        """The checkpoint's tokenizer, or None if it has no tokenizer files.

        Raises:
            CheckpointError: transformers cannot read the files.
        """
        return load_tokenizer(checkpoint)

    def layer_run(
        self,
        architecture: Architecture,
        params: Mapping[str, np.ndarray],
        tokens: np.ndarray,
        options: JaxLoadOptions,
        dtype: str,
    ) -> LayerRun:
        """The layers of a model over some texts, one at a time: see `ttpu_core.backend.Calibrates` and
        `ttpu_jax.model.layer_run`."""
        initialize()
        spec = architecture.spec
        check_supported(spec)
        placement = placement_for(
            spec,
            parallelism_strategy=options.parallelism_strategy,
            sharding_strategy=options.sharding_strategy,
            mesh=options.mesh,
            plan=options.plan,
            sharding_rules=options.sharding_rules,
            dtype=dtype,
        )
        check_layer_run(spec, pad_for(spec, placement)[0], placement)
        platform, sequence = placement.platform, placement.axes_of(axes.SEQUENCE)
        attention = attention_choice(spec, options.attn_implementation or "auto", platform, None, sequence)
        runtime = Runtime(
            placement,
            attention.name,
            different_ropes(spec.layers),
            attention.options,
            without=frozenset({Optimization.FUSED_NORMS}),  # layers are differentiated
        )
        return LayerRun(spec, runtime, params, tokens, np.dtype(dtype))

    def options_beside(self, model: JaxCausalLM) -> JaxLoadOptions:
        """Loading options for a second model on the devices of a loaded one, held in the same dtype."""
        runtime = model.programs.runtime
        return JaxLoadOptions(dtype=model.dtype.name, mesh=runtime.placement.mesh, without=runtime.without)

    def keep_compiled(self) -> Path | None:
        """Enable JAX's persistent compilation cache, unless the user has set its folder or disabled it."""
        from ttpu_jax.runner.compilation_cache import keep_compiled

        return keep_compiled()

    def compiled_folder(self, *, ahead: bool) -> Path:
        """Return the folder of compiled programs: JAX's cache, or with `ahead` the folder of programs for other
        machines' devices.

        Raises:
            RequestError: there is no folder that only this user may write to, or JAX's cache is disabled.
        """
        from ttpu_jax.runner.compilation_cache import compiled_folder

        return compiled_folder(ahead=ahead)

    def cache_counts(self) -> CacheCounts:
        """Return a context manager that counts the hits and the writes of JAX's compilation cache."""
        from ttpu_jax.runner.compilation_cache import CacheCounts

        return CacheCounts()

    def compile_ahead(
        self,
        architecture: Architecture,
        topology: str,
        config: EngineConfig,
        *,
        dtype: str,
        parallelism_strategy: str | None = None,
        sharding_rules: Rules | None = None,
        plan: Any = None,
        attn_implementation: str = "auto",
        quantization: Any = None,
        residual_stream: str = "auto",
        progress: ProgressCallback | None = None,
    ) -> Ahead:
        """Compile an engine's programs for a slice that need not be there: see `ttpu_core.backend.CompilesAhead` and
        `ttpu_jax.runner.slices`."""
        from ttpu_jax.runner.slices import compile_slice

        return compile_slice(
            architecture,
            topology,
            config,
            dtype=dtype,
            parallelism_strategy=parallelism_strategy,
            sharding_rules=sharding_rules,
            plan=plan,
            attn_implementation=attn_implementation,
            quantization=quantization,
            residual_stream=stream_form(residual_stream),
            progress=progress,
        )

    def verify_plan(
        self, architecture: Architecture, plan: Plan, *, progress: Callable[[str], None] | None = None
    ) -> tuple[Verification, ...]:
        """Compile each program of a plan for TPUs and return the compiler's figures; see `ttpu_jax.runner.verify`."""
        from ttpu_jax.runner.verify import verify_plan

        return verify_plan(architecture, plan, progress=progress)

    def planned_kernels(
        self,
        architecture: Architecture,
        *,
        served: bool = False,
        shards_sequence: bool = False,
        parallelism: Parallelism | None = None,
        rows: tuple[int, ...] = (),
    ) -> Mapping[str, str]:
        """Return the attention implementation of each kind of layer on a TPU and that of the products with quantized
        kernels, and why; see `ttpu_core.backend.Plans`.

        Args:
            architecture: the model.
            served: in an engine's steps, else in those of `generate` and of training.
            shards_sequence: the sequence is sharded.
            parallelism: the mesh, and what its axes shard; None for one device.
            rows: tokens of the programs; () for those of a usual decode step and prompt.
        """
        if served:
            from ttpu_jax.runner.planned import served_kernels

            kinds = served_kernels(architecture.spec)
        else:
            kinds = _attention_by_kind(architecture, "tpu", (axes.SEQUENCE,) if shards_sequence else ())
        spec = architecture.spec
        if parallelism is not None:
            padded, paddings = pad_architecture(spec, dict(parallelism.mesh), parallelism.strategy)
            spec, _ = fit_formats(padded, spec, paddings, dict(parallelism.mesh), parallelism.strategy)
        products = product_choices(spec, "tpu", parallelism=parallelism, rows=rows or ROWS)
        return {**{f"attention ({kind})": words for kind, words in kinds.items()}, **products}

    def served_shapes(
        self, spec: ArchitectureSpec, mesh: Mapping[str, int], strategy: Strategy, limits: ServingLimits, dtype: str
    ) -> ServedShapes:
        """Return the sizes of the steps that an engine compiles on TPUs, and the bytes of its cache and state.

        Args:
            spec: the architecture, padded for the mesh.
            mesh: mesh axis → devices along it, of one replica.
            strategy: the mesh axes that shard each logical axis.
            limits: of the engine.
            dtype: of weights, activations and cache.

        Raises:
            UnsupportedError: an engine cannot serve the model.
        """
        from ttpu_jax.runner.planned import served_shapes

        return served_shapes(spec, mesh, strategy, limits, dtype)

    def kernels(self, architecture: Architecture) -> Mapping[str, str]:
        """Return the implementation of each operation on this machine, and why; on a machine without TPUs, also the one
        on a TPU."""
        initialize()
        here, on_tpu = (
            {f"attention ({kind})": words for kind, words in _attention_by_kind(architecture, platform).items()}
            | product_choices(architecture.spec, platform)
            for platform in (jax.default_backend(), "tpu")
        )
        table = {
            operation: words if words == on_tpu[operation] else f"{words}. On a TPU: {on_tpu[operation]}"
            for operation, words in here.items()
        }
        return {**table, "norm, rope, MLP": "XLA: fused by the compiler"}

    def doctor(self) -> Mapping[str, Any]:
        """Report the devices, the versions of libraries, and whether this machine can compile TPU programs."""
        initialize()
        names = ("jax", "jaxlib", "flax", "transformers", "safetensors", "libtpu")
        versions = {name: _version(name) for name in names}
        return {
            "platform": jax.default_backend(),
            "devices": [f"{device.id}: {device.device_kind}" for device in jax.devices()],
            "versions": versions,
            "compiles_for_tpu": util.find_spec("libtpu") is not None,
            "missing": {} if versions["libtpu"] else {"libtpu": 'pip install "ttpu-jax[tpu]"'},
        }


if TYPE_CHECKING:
    from ttpu_serve.runner import ServingBackend

    _SERVES: type[ServingBackend] = JaxBackend


def _refuse_embedding(spec: ArchitectureSpec) -> None:
    form = dict(spec.kernel_formats).get(EMBEDDING)
    if form is not None and (form.dtype not in ("int8", "float8_e4m3fn") or form.input_order):
        raise UnsupportedError(
            f"the checkpoint has an embedding table in {format_words(form)}, but the JAX backend looks rows up in "
            "tables of 8-bit numbers: take a checkpoint whose table is not quantized."
        )


def _attention_by_kind(
    architecture: Architecture, platform: str, sequence_axes: tuple[str, ...] = ()
) -> dict[str, str]:
    """Kind of layer → what serves it and why; layers of one kind may differ in that."""
    table: dict[str, str] = {}
    for choice in attention_choice(architecture.spec, "auto", platform, sequence_axes=sequence_axes).kinds:
        table[choice.kind] = f"{table[choice.kind]}, or {choice}" if choice.kind in table else str(choice)
    return table


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
