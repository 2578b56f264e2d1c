"""The engine's counters and gauges as plain numbers, for metrics and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine. Counters count from the engine's start.

    kv_usage: share of used pages in the fullest group. pages_in_use, pages: by group name.
    prefix_queries, prefix_hits: prompt tokens looked up and found in the prefix cache.
    drafted, accepted: tokens of speculative decoding; accepted_at: accepted tokens by position in the draft.
    recompiles: programs compiled while serving that nobody had asked for before. programs_pending: those that are
    compiled meanwhile and not there yet. programs_cached: those that a cache had.
    model_flops: floating point operations of the model's matrix products, by formula. hbm_bytes: bytes of weights and
    cached keys and values that steps read, by formula. device_seconds: time during which a step was running.
    """

    waiting: int = 0
    running: int = 0
    pages_in_use: dict[str, int] = field(default_factory=dict)
    pages: dict[str, int] = field(default_factory=dict)
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    recompiles: int = 0
    programs: int = 0
    programs_pending: int = 0
    programs_cached: int = 0
    compile_seconds: float = 0.0
    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    model_flops: float = 0.0
    hbm_bytes: float = 0.0
    device_seconds: float = 0.0
    peak_flops: float | None = None
    """Of all devices together, per second; None where the hardware is not known."""
    peak_bytes: float | None = None
    asleep: bool = False
