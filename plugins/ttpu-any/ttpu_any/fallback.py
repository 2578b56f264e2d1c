"""The fallback of the JAX backend, which implements `ttpu_core.backend.Fallback`: a model type that no plugin describes
comes in, transformers' PyTorch code as JAX programs goes out."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ttpu_any.check import checked_programs
from ttpu_any.encoder import StockEncoder, open_encoder
from ttpu_any.held_bytes import held_bytes
from ttpu_any.model import StockArchitecture, StockCausalLM
from ttpu_any.programs import StockPrograms, StockSpec
from ttpu_any.report import program_report
from ttpu_any.sharding import check_axes, plan_of, tensor_sharding
from ttpu_any.steps import Manner, manners_of, position_offset
from ttpu_any.stock import context_of, empty_model, is_encoder, load_model, stock_class
from ttpu_core.backend import HeldBytes
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.config import ModelConfig
from ttpu_core.errors import RequestError
from ttpu_core.sharding.parallelism import AUTO, resolve_parallelism
from ttpu_core.sharding.request import the_one_given
from ttpu_jax.aot.report import ProgramReport
from ttpu_jax.distributed import initialize
from ttpu_jax.load_options import JaxLoadOptions
from ttpu_jax.params.dtypes import model_dtype
from ttpu_jax.params.placement import Placement, local_placement
from ttpu_jax.tokenizer import load_tokenizer

import jax  # isort: skip (after what sets it up)

logger = logging.getLogger(__name__)

RUNS_IN = (
    "from_pretrained, LLM, `ttpu generate`, `ttpu chat`, `ttpu eval`, `ttpu serve`, `ttpu plan`, `ttpu compile-report`"
)
"""Where a model without a plugin runs."""

ENCODERS_RUN_IN = "from_pretrained, LLM(...).embed, `ttpu serve` (/v1/embeddings)"
"""Where a text encoder runs."""

GAINS = (
    "serving with paged attention, prefix caching, drafts, adapters and embeddings: without one `ttpu serve` keeps a "
    "cache of full length for each request",
    "one program for all layers, which compiles faster, and attention kernels for TPUs",
    "plans with the memory and the time of whole programs, quantization and training",
)
"""What a plugin would add."""


class StockFallback:
    """Runs transformers' own code on JAX."""

    def open(self, checkpoint: Checkpoint, options: JaxLoadOptions) -> StockCausalLM | StockEncoder:
        """Load a model: read its weights onto the devices, and check it against itself.

        Raises:
            CheckpointError, MappingError: the checkpoint's files are incomplete or malformed.
            UnsupportedError: the model cannot be traced, or does not agree with itself.
            RequestError: an option that needs a plugin.
        """
        began = time.perf_counter()
        initialize()
        config = checkpoint.config
        _refuse_options(options, config.model_type)
        kind, stock = stock_class(config)
        placement = _placement(options)
        check_axes(placement)
        held = model_dtype(options.dtype, checkpoint)
        progress = options.progress

        def put(model: Any, name: str, array: np.ndarray) -> jax.Array:
            return jax.device_put(array, tensor_sharding(model, placement, name, array.shape))

        on_load = None if progress is None else (lambda done, total: progress("load", done, total))
        model, params = load_model(checkpoint, getattr(torch, held.name), put, on_load)
        if is_encoder(stock):
            return open_encoder(checkpoint, model, params, placement, held, load_tokenizer(checkpoint), began)
        text = stock.get_text_config(decoder=True)
        spec = StockSpec(config.model_type, int(text.vocab_size), context_of(text) - position_offset(model))
        on_compile = None if progress is None else (lambda _, seconds: progress("compile", float(seconds > 0), 1.0))

        def make(manner: Manner) -> StockPrograms:
            return StockPrograms(model, params, spec, placement, manner, on_compile=on_compile)

        programs = checked_programs(make, manners_of(model), held.name, f"{checkpoint.source} ({kind.__name__})")
        logger.warning(
            "no plugin describes model type %r: transformers' own code runs instead; `ttpu info` says what a plugin "
            "would add",
            config.model_type,
        )
        architecture = StockArchitecture(spec, config)
        tokenizer = load_tokenizer(checkpoint)
        return StockCausalLM(
            architecture, checkpoint, programs, params, held, tokenizer, time.perf_counter() - began
        )

    def describe(self, config: ModelConfig) -> Mapping[str, Any]:
        """What is known of a model without a plugin, for `ttpu info`: plain values only. Nothing is computed.

        Raises:
            UnsupportedError: transformers has no such model.
            CheckpointError: transformers refuses the config.
        """
        kind, stock = stock_class(config)
        model = empty_model(config, torch.bfloat16)
        encoder = is_encoder(stock)
        text = stock.get_text_config(decoder=not encoder)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return {
            "code": f"{kind.__module__}.{kind.__name__}",
            "parameters": parameters,
            "context": context_of(text) - position_offset(model),
            "sharded_by": "transformers' tensor-parallel plan" if plan_of(model) else "fsdp",
            "runs_in": ENCODERS_RUN_IN if encoder else RUNS_IN,
            "a_plugin_would_add": [] if encoder else list(GAINS),
        }

    def held_bytes(
        self, config: ModelConfig, meshes: Sequence[Mapping[str, int]], *, batch: int, context: int, dtype: str
    ) -> list[HeldBytes]:
        """What each device holds on each of some meshes; see `ttpu_any.held_bytes`.

        Args:
            config: of the model.
            meshes: mesh axis → devices along it.
            batch: rows of the cache.
            context: slots of each row.
            dtype: of the weights and the cache.

        Raises:
            UnsupportedError: the model cannot be traced, or has fewer positions than `context`.
        """
        return held_bytes(config, meshes, batch=batch, context=context, dtype=dtype)

    def program_report(self, config: ModelConfig, topology_name: str, **asked: Any) -> ProgramReport:
        """See `ttpu_any.report.program_report`."""
        return program_report(config, topology_name, **asked)


def _refuse_options(options: JaxLoadOptions, model_type: str) -> None:
    """Refuse what needs an architecture."""
    asked = {
        "quantization": options.quantization is not None,
        "random_seed": options.random_seed is not None,
        "plan": options.plan is not None,
        "sharding_rules": options.sharding_rules is not None,
        "patch_packs": bool(options.patch_packs),
        "enable_paged_attention": options.enable_paged_attention,
        "attention_config": options.attention_config is not None,
        "residual_stream": options.residual_stream == "rings",
        "experts": options.experts != "auto",
        "without": bool(options.without),
    }
    refused = [name for name, given in asked.items() if given]
    if (options.attn_implementation or "auto") not in ("auto", "eager"):
        refused.append("attn_implementation")
    if options.purpose == "train":
        raise RequestError(
            f"a model of type {model_type!r} was to be trained, but no plugin describes this type, and transformers' "
            "own code, which runs without one, only generates and serves: install a plugin, or begin one with `ttpu "
            "new-plugin --from CONFIG`."
        )
    if refused:
        raise RequestError(
            f"{refused[0]}={getattr(options, refused[0])!r} was asked for, but no plugin describes model type "
            f"{model_type!r}, and transformers' own code is run without it: leave it out, or install or write a plugin "
            "(`ttpu new-plugin`)."
        )


def _placement(options: JaxLoadOptions) -> Placement:
    given = the_one_given(
        None,
        parallelism_strategy=options.parallelism_strategy,
        sharding_strategy=options.sharding_strategy,
        mesh=options.mesh,
        plan=None,
    )
    argument, asked = given or ("parallelism_strategy", None)
    if isinstance(asked, str) and asked.strip().lower() == AUTO:
        asked = "fsdp" if len(jax.devices()) > 1 else None  # the planner knows no model without a plugin
    if isinstance(asked, str):
        asked = resolve_parallelism(asked, len(jax.devices()), None, argument=argument)
    return local_placement(asked)
