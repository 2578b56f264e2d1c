"""Describes the work of a program as far as its memory and time depend on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from ttpu_core.checkpoint import DTYPES
from ttpu_core.errors import RequestError
from ttpu_core.quantization.config import QuantizationConfig
from ttpu_core.services import Quantization
from ttpu_core.sharding.serving import StepSize
from ttpu_core.sharding.training_state import UpdateSettings
from ttpu_core.spec.arithmetic import BITS, CACHE_DTYPES

Task = Literal["decode", "prefill", "mixed", "train"]
Layers = Literal["unrolled", "scan"]


@dataclass(frozen=True, slots=True)
class Workload:
    """One program: a decode step of `batch` rows over caches of `context` slots, a prefill of `batch` rows of
    `context` tokens, a training step on as many, or a step of an engine with pages for `batch` sequences of `context`
    tokens.

    Args:
        task: decode, prefill, mixed or train; mixed, and decode with `step`, are an engine's steps.
        batch: number of rows; of a training step those of all parts of its accumulation.
        context: tokens, or cache slots, per row.
        dtype: dtype of weights, activations, and a cache that is not quantized; a training step also keeps float32
            weights and moments.
        layers: "unrolled" compiles each layer; otherwise a loop over stacked parameters compiles one.
        quantization: a shorthand of how the layers' kernels are quantized, for decode and prefill.
        step: sizes of an engine's step; None for contiguous caches and for training.
        kv_cache: how an engine's keys and values are quantized, int8 or fp8; None if they are not.
        update: settings of a training step; None is AdamW on whole batches, and for the others nothing.

    Raises:
        RequestError: a size below 1, or an unknown task, dtype or quantization.
    """

    task: Task
    batch: int
    context: int
    dtype: str = "bfloat16"
    layers: Layers = "unrolled"
    quantization: Quantization | None = None
    step: StepSize | None = None
    kv_cache: str | None = None
    update: UpdateSettings | None = None

    def __post_init__(self) -> None:
        for name, word, allowed in (
            ("task", self.task, get_args(Task)),
            ("dtype", self.dtype, DTYPES),
            ("layers", self.layers, get_args(Layers)),
            ("kv_cache", self.kv_cache or "int8", tuple(CACHE_DTYPES)),
        ):
            if word not in allowed:
                raise RequestError(
                    f"{name} {word!r} was asked for, but only {', '.join(map(str, allowed))} are known: write one of "
                    "them."
                )
        if self.quantization is not None:
            QuantizationConfig.parse(self.quantization)
        for name, size in (("batch", self.batch), ("context", self.context)):
            if size < 1:
                raise RequestError(f"{name} {size} was asked for, but it must be at least 1: raise it.")
        if (self.task == "mixed") > (self.step is not None) or (self.step and self.task not in ("decode", "mixed")):
            raise RequestError(
                f"a {self.task} program {'with' if self.step else 'without'} the sizes of an engine's step was asked "
                "for, but mixed steps have them, decode steps may, and others have none: correct the step."
            )
        if self.kv_cache is not None and self.step is None:
            raise RequestError(
                f"{self.kv_cache} keys and values of a {self.task} program were asked for, but only a serving engine "
                "quantizes them: leave kv_cache out, or plan to serve."
            )
        if self.update is not None and self.task != "train":
            raise RequestError(
                f"settings of training were asked for with a {self.task} program, but only a training step has an "
                "optimizer, parts, and stages of ZeRO: plan to train (--task training), or leave them out."
            )
        if self.batch % self.settings.gradient_accumulation_steps:
            raise RequestError(
                f"an update on {self.batch} rows was asked for in {self.settings.gradient_accumulation_steps} parts, "
                "but these have equally many: make the batch a multiple of gradient_accumulation_steps."
            )
        if self.task == "train" and self.quantization is not None:
            raise RequestError(
                f"training in {self.quantization} was asked for, but the weights that a training step updates are "
                "float32: leave the quantization out."
            )

    @property
    def settings(self) -> UpdateSettings:
        """The settings of a training step."""
        return UpdateSettings() if self.update is None else self.update

    @property
    def rows_at_once(self) -> int:
        """Rows that all devices compute at once: those of one part of a training step."""
        return self.batch // self.settings.gradient_accumulation_steps

    @property
    def tokens(self) -> int:
        """Tokens per row that the program processes; an engine's step is one row of all its tokens."""
        if self.step is not None:
            return self.step.tokens
        return 1 if self.task == "decode" else self.context

    @property
    def bytes_per_element(self) -> int:
        """Bytes per element of activations, and of a cache that is not quantized."""
        return BITS[self.dtype] // 8

    @property
    def cache_dtype(self) -> str:
        """The dtype of cached keys and values."""
        return self.dtype if self.kv_cache is None else CACHE_DTYPES[self.kv_cache]

    def with_batch(self, batch: int) -> Workload:
        """Return the same workload with another number of rows."""
        return replace(self, batch=batch)
