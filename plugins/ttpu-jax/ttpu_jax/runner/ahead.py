"""Compiles an engine's programs for a TPU slice ahead of time. It takes an architecture, a slice and engine settings,
and returns the compiler's figures for each program, and the number of pages that fit beside the weights and the largest
step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from ttpu_core.architecture import Architecture
from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, Strategy
from ttpu_core.spec import axes
from ttpu_jax.aot.compile import CompiledProgram, compile_lowered, lower_for, without_persistent_cache
from ttpu_jax.aot.topology import GIB, TpuTopology, make_mesh, tpu_topology
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.model.paged import GroupSpec, group_page_bytes
from ttpu_jax.model.support import check_supported
from ttpu_jax.ops.attention import attention_choice
from ttpu_jax.ops.matmul.devices import UsePallas
from ttpu_jax.ops.matmul.rings import StreamForm
from ttpu_jax.params.dtypes import model_dtype
from ttpu_jax.params.initialize import abstract_parameters
from ttpu_jax.params.padding import pad_for
from ttpu_jax.params.placement import Placement, device_bytes
from ttpu_jax.runner.build import filled, refuse_idle_devices, runner_for
from ttpu_jax.runner.compilation import Program, name_of, without_folders
from ttpu_jax.runner.executable_cache import ExecutableCache
from ttpu_jax.runner.memory import MARGIN, pages_per_group
from ttpu_jax.runner.programs import EnginePrograms
from ttpu_jax.runner.reserve import reserved_bytes

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig

USABLE = 0.97
"""Of the memory that the compiler's figures leave, what pages are counted for: a device that is there may have less."""
KERNEL = 'custom_call_target="tpu_custom_call"'


@dataclass(frozen=True)
class ProgramFigures:
    """The compiler's figures for a program. Bytes are of one device; collectives are (name, number, bytes of one
    device's results). `seconds` are predicted; they leave out the `kernels` (calls of Pallas kernels), and count one
    iteration of each of the `open_loops`, whose trip counts depend on the requests. `kernel_seconds` is the least time
    of the kernels that state their FLOPs and bytes; those of attention state what sequences as long as they may be
    take. `total_seconds` are predicted with kernels, and with HBM shared (`ScheduleEstimate`)."""

    peak_bytes: int
    argument_bytes: int
    alias_bytes: int
    temp_bytes: int
    seconds: float
    compile_seconds: float
    collectives: tuple[tuple[str, int, int], ...]
    kernels: int
    open_loops: int
    kernel_seconds: float
    total_seconds: float

    @property
    def counts_all(self) -> bool:
        """Whether `seconds` include everything."""
        return not self.kernels and not self.open_loops

    @classmethod
    def of(cls, program: CompiledProgram) -> ProgramFigures:
        """Return the figures of a compiled program."""
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for one in program.collectives:
            counts[one.op] += one.count
            sizes[one.op] += one.count * one.result_bytes
        return cls(
            peak_bytes=program.peak_bytes,
            argument_bytes=program.argument_bytes,
            alias_bytes=program.alias_bytes,
            temp_bytes=program.temp_bytes,
            seconds=program.estimate.seconds,
            compile_seconds=program.compile_seconds,
            collectives=tuple((op, counts[op], sizes[op]) for op in sorted(counts)),
            kernels=program.hlo_text.count(KERNEL),
            open_loops=len(program.estimate.loops_without_trip_count),
            kernel_seconds=program.estimate.kernel_seconds,
            total_seconds=program.estimate.total_seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> ProgramFigures:
        """Read the figures from the values of `to_dict`, also after a round trip through JSON."""
        collectives = tuple((str(op), int(count), int(size)) for op, count, size in facts["collectives"])
        return cls(**{**facts, "collectives": collectives})


@dataclass(frozen=True)
class AheadProgram:
    """One program. `cache_bytes` are the bytes of its pages and states on each device; `compiled` is None where the
    program was stored before."""

    name: str
    figures: ProgramFigures
    compiled: CompiledProgram | None
    cache_bytes: int

    @property
    def compiled_before(self) -> bool:
        """Whether the program was stored before."""
        return self.compiled is None

    @property
    def cache_in_place(self) -> bool:
        """Whether the program updates all caches in place, so that only one copy exists."""
        return self.figures.alias_bytes >= self.cache_bytes


@dataclass(frozen=True)
class Ahead:
    """An engine's programs for a slice. `num_pages` of each group fit; `programs` are compiled with them.

    weight_bytes: on each device. page_bytes: of a page in each group, in all of its layers, on each device.
    """

    topology: TpuTopology
    config: EngineConfig
    mesh: Mapping[str, int]
    num_pages: tuple[int, ...]
    page_bytes: tuple[int, ...]
    weight_bytes: int
    programs: tuple[AheadProgram, ...]
    runner: EnginePrograms

    @property
    def topology_name(self) -> str:
        """The slice, as in v5e:2x4."""
        return self.topology.name

    @property
    def hbm_bytes(self) -> int:
        """Memory of each device."""
        return self.topology.chip.hbm_bytes

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.config.page_size or 1

    @property
    def page_groups(self) -> Sequence[GroupSpec]:
        """The groups of `num_pages`."""
        return self.runner.layout.groups


def compile_ahead(
    architecture: Architecture,
    topology_name: str,
    config: EngineConfig,
    *,
    dtype: Any = "bfloat16",
    mesh: Mapping[str, int] | None = None,
    strategy: Strategy = DEFAULT_STRATEGY,
    attn_implementation: str = "auto",
    use_pallas: UsePallas = "auto",
    residual_stream: StreamForm = "auto",
    only: Callable[[Program], bool] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    store: bool = False,
    workers: int = 1,
) -> Ahead:
    """Compile an engine's programs for a slice.

    Args:
        mesh: mesh axis → devices along it; None shards every layer over all devices (`tensor`).
        use_pallas: of the products with quantized kernels, see `ttpu_core.quantization.QuantizationConfig`.
        residual_stream: as for loading.
        only: which programs; None is all.
        progress: called with the name of what was compiled, how many are done, and how many there are.
        store: keep executables for a machine that has such a slice, and do not compile what was kept before.
        workers: programs that are compiled at once, while the next ones are traced. libtpu 0.0.42 takes one after
            another (8 layers of Llama-3.1-8B: 26 s by one, 27 s by two, on two processors).

    Raises:
        UnsupportedError: no such slice or mesh, or a program does not fit.
        RequestError: settings that contradict the model or each other.
        MissingDependencyError: libtpu is not installed.
    """
    topology = tpu_topology(topology_name)
    runner = abstract_runner(
        architecture, topology, config, dtype, mesh, strategy, attn_implementation, use_pallas, residual_stream
    )
    placement = runner.runtime.placement
    kept = ExecutableCache(placement.devices) if store else None
    if progress is not None:
        progress("", 0, 1)
    size = runner.config.page_size or 1
    page_bytes = group_page_bytes(runner.spec, runner.layout, size, placement, runner.cache_dtype)
    runner.num_pages = _num_pages(runner, topology, page_bytes, kept)
    programs = [program for program in runner.programs() if only is None or only(program)]
    caches = device_bytes(runner._empty_caches(abstract=True))
    return Ahead(
        topology=topology,
        config=runner.config,
        mesh={} if placement.mesh is None else dict(placement.mesh.shape),
        num_pages=runner.num_pages,
        page_bytes=page_bytes,
        weight_bytes=device_bytes(runner.params),
        programs=_compile_all(topology, programs, caches, kept, progress, workers),
        runner=runner,
    )


def _compile_all(
    topology: TpuTopology,
    programs: Sequence[Program],
    caches: int,
    store: ExecutableCache | None,
    progress: Callable[[str, int, int], None] | None,
    workers: int,
) -> tuple[AheadProgram, ...]:
    """Traced here, one after another; compiled in threads meanwhile. `caches`: bytes of pages and states."""

    def compile_one(program: Program, lowered: jax.stages.Lowered) -> AheadProgram:
        held = caches if program.key[0] == "step" else 0  # type: ignore[index]
        return AheadProgram(name_of(program.key), *_compiled(topology, program, lowered, store), held)

    done: dict[int, AheadProgram] = {}
    # Once for all of them: each program for itself would keep the others waiting.
    with without_persistent_cache(), ThreadPoolExecutor(workers, thread_name_prefix="ttpu-compile") as pool:
        try:
            futures = {
                pool.submit(compile_one, program, lower(topology, program)): index
                for index, program in enumerate(programs)
            }
            for future in as_completed(futures):
                done[futures[future]] = future.result()
                if progress is not None:
                    progress(done[futures[future]].name, len(done), len(programs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tuple(done[index] for index in range(len(programs)))


def abstract_runner(
    architecture: Architecture,
    topology: TpuTopology,
    config: EngineConfig,
    dtype: Any,
    mesh: Mapping[str, int] | None,
    strategy: Strategy = DEFAULT_STRATEGY,
    attn_implementation: str = "auto",
    use_pallas: UsePallas = "auto",
    residual_stream: StreamForm = "auto",
) -> EnginePrograms:
    """Make a runner for the devices of a slice, whose weights are only shapes.

    Args:
        architecture: the model.
        topology: the slice.
        config: the engine's settings.
        dtype: of weights, activations and cache.
        mesh: mesh axis → devices along it; None shards every layer over all devices (`tensor`).
        strategy: the mesh axes that shard each logical axis.
        attn_implementation: as for loading.
        use_pallas: of the products with quantized kernels.
        residual_stream: as for loading.

    Raises:
        UnsupportedError: the engine cannot serve the model or the mesh, or the settings ask for adapters or a draft
            model.
        RequestError: settings that contradict the model or each other.
    """
    check_supported(architecture.spec)
    if config.adapters or config.max_adapters:
        raise UnsupportedError(
            f"programs with LoRA adapters were asked for {topology.name!r}, but adapters are read beside weights on "
            "devices that are there: leave them out, or compile on that machine."
        )
    kind = model_dtype(dtype, platform="tpu")
    placement = Placement(make_mesh(topology, mesh or {"tensor": len(topology.devices)}), strategy)
    refuse_idle_devices(placement)
    spec, _ = pad_for(architecture.spec, placement)
    sequence_axes = placement.axes_of(axes.SEQUENCE)
    attention = attention_choice(spec, attn_implementation, placement.platform, None, sequence_axes)
    ropes = different_ropes(spec.layers)
    runtime = Runtime(
        placement, attention.name, ropes, attention.options, use_pallas=use_pallas, dtype=kind, stream=residual_stream
    )
    settings = filled(config, spec, placement.platform)
    params = abstract_parameters(spec.parameters, placement, kind)
    runner = runner_for(spec, runtime, params, settings, kind)
    if config.speculation is not None and config.speculation.model is not None:
        raise UnsupportedError(
            f"programs with the draft model {config.speculative!r} were asked for {topology.name!r}, but a draft model "
            "shares memory that is measured on devices that are there: use ngram, or compile on that machine."
        )
    runner.num_pages = pages_per_group(
        replace(settings, num_pages=settings.num_pages or (settings.max_num_seqs or 1) + 2), runner.layout, (), None
    )
    return runner


def _compiled(
    topology: TpuTopology, program: Program, lowered: jax.stages.Lowered | None, store: ExecutableCache | None
) -> tuple[ProgramFigures, CompiledProgram | None]:
    """What the compiler says of a program, now or when it was stored; it is stored now if it was not."""
    lowered = lowered or lower(topology, program)
    key = "" if store is None else store.key(lowered)
    facts = None if store is None else store.facts(key)
    if facts is not None:
        return ProgramFigures.from_dict(facts), None
    compiled = compile_lowered(topology, lowered, name_of(program.key))
    figures = ProgramFigures.of(compiled)
    if store is not None:
        store.save(key, compiled.executable, figures.to_dict())
    return figures, compiled


def lower(topology: TpuTopology, program: Program) -> jax.stages.Lowered:
    """Trace one program for a slice."""
    with without_folders():
        return lower_for(topology, program.jitted, *program.arguments)


def _num_pages(
    runner: EnginePrograms, topology: TpuTopology, page_bytes: tuple[int, ...], store: ExecutableCache | None
) -> tuple[int, ...]:
    """What was asked for, or as many as the memory holds beside the weights and what `reserved_bytes` counts."""
    config = runner.config
    if config.num_pages is not None or not page_bytes:
        return pages_per_group(config, runner.layout, page_bytes, None)
    if config.kv_cache_memory is not None:
        return pages_per_group(config, runner.layout, page_bytes, config.kv_cache_memory)
    weights = device_bytes(runner.params)
    free = topology.chip.hbm_bytes - MARGIN - weights
    if free > 0:
        free -= reserved_bytes(runner, lambda program: _compiled(topology, program, None, store)[0].temp_bytes)
    if free <= 0:
        raise UnsupportedError(
            f"an engine for {topology.name!r} was asked for, but weights, states and the largest step take "
            f"{-free / GIB:.2f} GiB more than each device's {topology.chip.hbm_bytes / GIB:.2f} GiB: use more devices, "
            "or lower max_num_seqs and max_num_batched_tokens."
        )
    return pages_per_group(config, runner.layout, page_bytes, int(free * USABLE * (config.memory_utilization or 1)))
