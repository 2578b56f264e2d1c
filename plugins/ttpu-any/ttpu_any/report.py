"""Compiles the prefill and the decode step of a stock model, or what reads texts of an encoder, for a TPU slice that is
not there. It takes a config and returns the compiler's report, as `ttpu_jax.aot.report` does for a model that a plugin
describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ttpu_any.aten.table import jax_dtype
from ttpu_any.encoder_programs import EncoderPrograms
from ttpu_any.programs import StockPrograms, StockSpec, StockState
from ttpu_any.sharding import batch_sharding, cache_sharding, check_axes, tensor_sharding
from ttpu_any.steps import Manner, Prefill, Steps, manners_of, position_offset
from ttpu_any.stock import context_of, empty_model, is_encoder, stock_class
from ttpu_any.trace import Traced, tensors_of
from ttpu_core.config import ModelConfig
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.generation.token_choice import TokenChoice
from ttpu_jax.aot.compile import compile_for
from ttpu_jax.aot.report import ProgramReport, reported
from ttpu_jax.aot.steps import Task
from ttpu_jax.aot.topology import TpuTopology, make_mesh, tpu_topology
from ttpu_jax.ops.sampling import SamplingFeatures, sampling_inputs
from ttpu_jax.params.dtypes import model_dtype
from ttpu_jax.params.placement import Placement, device_bytes

FIRST_WIDTH = 16
"""Tokens of the prefill that makes the cache of a decode step."""


@dataclass(frozen=True)
class TracedSteps:
    """The two traced calls of a stock model that generation needs.

    Attributes:
        manner: the first in which the model can be traced; which one it is run in is known after its weights are read.
        rows: of the batch.
        prefill: of prompts.
        decode: of one token a row, if it was asked for.
    """

    manner: Manner
    rows: int
    prefill: Prefill
    decode: Traced | None


def program_report(
    config: ModelConfig,
    topology_name: str,
    *,
    task: Task,
    batch: int,
    context: int,
    dtype: Any,
    mesh: Mapping[str, int] | None,
) -> ProgramReport:
    """Compile a decode step or a prefill for a TPU slice; see `ttpu_jax.aot.report.compile_report`.

    Args:
        config: of the model.
        topology_name: a name such as "v5e:2x4".
        task: decode or prefill.
        batch: number of rows.
        context: cache slots per row, and for a prefill tokens per row.
        dtype: of weights and cache.
        mesh: mesh axis → devices along it; None takes all of them as "tensor".

    Raises:
        UnsupportedError: the model cannot be traced, there is no such slice or mesh, or it does not fit.
        RequestError: a task, batch, context or dtype that is not compiled.
        MissingDependencyError: libtpu is not installed.
    """
    if task == "train":
        raise RequestError(
            f"a training step of a model of type {config.model_type!r} was to be compiled, but no plugin describes "
            "this type, and transformers' own code only generates: install a plugin, or begin one with `ttpu "
            "new-plugin --from CONFIG`."
        )
    if batch < 1 or context < 2:
        raise RequestError(
            f"a {task} program for a batch of {batch} with {context} slots was asked for, but it needs at least 1 row "
            "and 2 slots: raise them."
        )
    kind = model_dtype(dtype)
    topology = tpu_topology(topology_name)
    placement = Placement(make_mesh(topology, mesh or {"tensor": len(topology.devices)}))
    check_axes(placement)
    encoder = is_encoder(stock_class(config)[1])
    if encoder and task == "decode":
        raise RequestError(
            f"a decode step of a model of type {config.model_type!r} was to be compiled, but it is a text encoder, "
            "which generates nothing: compile what reads a batch of texts, with --task prefill."
        )
    model = empty_model(config, getattr(torch, kind.name))
    params = abstract_tensors(model, placement)
    if encoder:
        function, *arguments, held = _encoding(model, placement, batch, context)
    else:
        steps = traced_steps(model, batch, context, decode=task == "decode")
        function, *arguments, held = _program(model, config, placement, steps, task, context)
    function.__name__ = f"{task} of {config.model_type}"
    program = compile_for(
        topology, function, params, *arguments, donate_argnums=(1,) if task == "decode" else ()
    )
    return reported(
        program,
        topology,
        placement,
        model_type=config.model_type,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        task=task,
        layers="unrolled",
        dtype=kind.name,
        kernel_formats=(),
        batch=batch,
        context=context,
        tokens=1 if task == "decode" else context,
        cache_bytes=device_bytes(held) if task == "decode" else 0,
        roofline_seconds=_roofline_seconds(model, params, held, topology, task, batch, context),
    )


def traced_steps(model: Any, batch: int, slots: int, *, decode: bool) -> TracedSteps:
    """Trace the prefill of prompts that fill a cache of `slots`, or the decoding after a short one, in the first manner
    that can be.

    Raises:
        UnsupportedError: there is none, or the model has fewer positions than `slots`.
    """
    _check_context(model, slots)
    first: UnsupportedError | None = None
    for manner in manners_of(model):
        rows, steps = max(batch, manner.rows), Steps(model, manner)
        try:
            prefill = steps.prefill(rows, min(FIRST_WIDTH, slots - 1) if decode else slots, slots)
            return TracedSteps(manner, rows, prefill, steps.decode(prefill, rows, slots) if decode else None)
        except UnsupportedError as error:
            first = first or error
    assert first is not None
    raise first


def abstract_tensors(model: Any, placement: Placement) -> dict[str, jax.ShapeDtypeStruct]:
    """The model's tensors by name: shapes, dtypes and shardings."""
    return {
        name: jax.ShapeDtypeStruct(
            tuple(tensor.shape),
            jax_dtype(tensor.dtype),
            sharding=tensor_sharding(model, placement, name, tensor.shape),
        )
        for name, tensor in tensors_of(model).items()
    }


def abstract_cache(steps: TracedSteps, placement: Placement) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The tensors of the cache: shapes, dtypes and shardings."""
    return tuple(
        jax.ShapeDtypeStruct(each.shape, jax_dtype(each.dtype), sharding=cache_sharding(placement, each.shape))
        for each in steps.prefill.cache
    )


def _program(
    model: Any, config: ModelConfig, placement: Placement, steps: TracedSteps, task: Task, slots: int
) -> tuple[Callable[..., Any], Any, Any]:
    """A function of the parameters and of more arguments, which follow it, and the cache as the last."""
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    programs = StockPrograms(model, {}, StockSpec(config.model_type, vocabulary, slots), placement, steps.manner)
    rows, features = steps.rows, SamplingFeatures()
    cache: Any = abstract_cache(steps, placement)

    def integers(*shape: int) -> Any:
        where = batch_sharding(placement, rows, len(shape)) if shape else placement.whole()
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)

    def first(params: Any, given: tuple[jax.Array, jax.Array]) -> Any:
        greedy = sampling_inputs([TokenChoice(seed=0)] * rows)
        return programs.first_token(
            steps.prefill.program, params, *given, greedy, None, slots=slots, features=features
        )

    def following(params: Any, state: StockState) -> Any:
        greedy = sampling_inputs([TokenChoice(seed=0)] * rows)
        assert steps.decode is not None
        return programs.next_token(steps.decode, params, state, greedy, features=features)

    if task == "prefill":
        return first, (integers(rows, slots), integers(rows)), cache
    state = StockState(cache, integers(rows), integers(), integers(rows), integers(rows), None, slots)
    return following, state, cache


def _encoding(model: Any, placement: Placement, rows: int, width: int) -> tuple[Callable[..., Any], Any, Any, Any]:
    """The function that reads texts of `width` tokens with an encoder, its tokens and mask, and a cache of nothing."""
    _check_context(model, width)
    traced = EncoderPrograms(model, {}, placement).traced(rows, width)
    given = jax.ShapeDtypeStruct((rows, width), jnp.int32, sharding=batch_sharding(placement, rows, 2))

    def encode(params: Any, tokens: jax.Array, mask: jax.Array) -> Any:
        return traced(params, tokens, mask)[0]

    return encode, given, given, ()


def _check_context(model: Any, slots: int) -> None:
    most = context_of(model.config.get_text_config()) - position_offset(model)
    if slots > most:
        raise UnsupportedError(
            f"a context of {slots:,} tokens was asked for, but {type(model).__name__} has {most:,} positions: make it "
            "shorter."
        )


def _roofline_seconds(
    model: Any, params: Mapping[str, Any], cache: Any, topology: TpuTopology, task: Task, batch: int, context: int
) -> float:
    """Lower bound from the chip's peak rates, as of `ttpu_jax.aot.report`: the matrices are read once and multiplied
    by every token. Tensors of several experts are left out, because the config alone does not say how many are used."""
    table, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = table if model.can_generate() else None
    head = tied if output is None else output.weight
    rows = batch * (1 if task == "decode" else context)
    read, multiplied = device_bytes(cache) if task == "decode" else 0, 0.0
    for name, tensor in tensors_of(model).items():
        if tensor.dim() == 2 and (tensor is head or tensor is not table):
            read += device_bytes(params[name])
            multiplied += 2.0 * prod(tensor.shape) * (batch if tensor is head else rows)
    return max(
        read / topology.chip.hbm_bytes_per_second, multiplied / len(topology.devices) / topology.chip.bf16_flops
    )
