"""The compiler flags of this process. It reads the flags in the environment that change compiled programs, before other
libraries add to them, and adds the options of an engine. This module is imported first, because torch_xla, where
transformers finds it, sets flags long after they are read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import MappingProxyType

from ttpu_core.sharding.hardware import Chip

VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
WITHOUT_EFFECT = (
    "--xla_dump_",
    "--xla_force_host_platform_device_count",
    "--xla_tpu_use_enhanced_launch_barrier",  # of the runtime; JAX adds it where it finds a TPU
)
BY_PLATFORM = {"cpu": ("--xla_cpu_",), "gpu": ("--xla_gpu_",), "tpu": ("--xla_tpu_", "--xla_jf_")}

_AT_IMPORT = {name: os.environ.get(name, "") for name in VARIABLES}

CompilerOption = str | bool | int | float

DISABLED_PASSES = "xla_disable_hlo_passes"

# Equal operations of layers are compiled once and called. A prefill of Llama-3.1-8B compiles in half the CPU seconds,
# with the same schedule.
# Devices compute while rows of experts are on their way (`ttpu_jax.ops.exchange`).
_EVERY_PROGRAM: Mapping[str, CompilerOption] = MappingProxyType({
    "xla_tpu_enable_deduplicated_calls": "ENABLED",
    "xla_tpu_enable_async_ragged_all_to_all": True,
})

# Chip → how libtpu prefetches weights into VMEM. It takes the factor as the share of HBM's bandwidth that a prefetch
# gets: kernels of attention read the cache meanwhile, so that about half is left. Where it expects all, it lets
# prefetches end with attention, and v5e's HBM is idle during the exchange that follows. Slices of 4 MiB begin as soon
# as there is room for one in VMEM. Of what was tried these were best: predicted decode steps of 32 rows of seven dense
# models on v5e are up to 11 % shorter (docs/compile-report.md, which names those that are longer). Most on v6e are
# longer, and so are an engine's on v5e, whose kernel of pages reads HBM longer than weights travel.
_PREFETCHES: Mapping[str, Mapping[str, CompilerOption]] = MappingProxyType({
    "v5e": MappingProxyType({
        "xla_tpu_async_copy_bandwidth_scaling_factor": 0.6,
        "xla_tpu_sliced_prefetch_preferred_slice_size": 4 << 20,
    }),
})

# Of a program whose kernels fetch arrays to VMEM (`ttpu_jax.ops.fetch`). Such an array stays there for as long as
# attention takes, and libtpu aborts where that is longer than it lets arrays stay by default. It prefetches no
# parameter of the last layer from the start of the program on, which would take room from those of all others.
_FETCHES: Mapping[str, CompilerOption] = MappingProxyType({
    "xla_msa_max_overlap_to_mem_size_async_copy_ratio": 1e6,
    "xla_msa_max_cross_program_prefetches": 0,
})

# XLA:CPU computes what is bfloat16 in float32: to write a token it would convert the whole cache and back (12 layers, 8
# rows of 2,176 tokens: 25 ms in place of 0.2). What else is bfloat16 in a decode step are products, which it multiplies
# as they are, and additions, which LLVM widens.
_WRITES_BFLOAT16: Mapping[str, CompilerOption] = MappingProxyType({
    DISABLED_PASSES: "float-normalization-bf16",
})

# Lets v6e and v5p compute while weights are gathered. libtpu 0.0.42 does not do so by default.
OVERLAP_COLLECTIVES: Mapping[str, CompilerOption] = MappingProxyType({
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_enable_async_all_gather": True,
})

# For fully sharded training: weights are gathered whole in the background, instead of piece by piece around each
# product. Llama-3.1-8B on v5e:4x4: no 9,633 collective permutes.
_TRAINING: Mapping[str, CompilerOption] = MappingProxyType({
    **OVERLAP_COLLECTIVES,
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
})

# SparseCores scatter the gradients of a layer while the core computes those of the layer before. Without these options
# libtpu 0.0.42 makes all-reduces of reduce-scatters over 4x4 chips, and the core waits for them.
_SPARSE_CORES: Mapping[str, CompilerOption] = MappingProxyType({
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True,
})

# Chips whose gathers go on within operations on the vector unit too, and not within products alone. Where nothing
# carries a gather's steps, the core waits for them. On v5p a step of 96 rows would take a twentieth longer.
_CARRIED_BY_VECTORS: Mapping[str, CompilerOption] = MappingProxyType({
    "xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions": True,
})
_CHIPS_CARRIED_BY_VECTORS = ("v5e", "v6e")

# Chip → KiB of VMEM for a product and what is fused with it, where more than the compiler's own limit makes training
# faster: gathers that go on within a product leave it less. With 48 MiB v5e would take as long, and compile for two
# fifths longer.
_TRAINING_VMEM_KIB: Mapping[str, int] = MappingProxyType({"v5e": 45_056, "v5p": 32_768, "v6e": 65_536, "tpu7x": 49_152})

# The same where a device computes no more than 4,096 tokens at once, and gathers take about as long as products.
_FEW_TOKENS = 4096
_VMEM_KIB_OF_FEW_TOKENS: Mapping[str, int] = MappingProxyType({"v5e": 28_672})


def compiler_flags(platform: str, environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the sorted flags that change programs for a platform (cpu, gpu, tpu), by default those of this process."""
    found = " ".join((_AT_IMPORT if environment is None else environment).get(name, "") for name in VARIABLES)
    others = tuple(prefix for name, prefixes in BY_PLATFORM.items() if name != platform for prefix in prefixes)
    return tuple(sorted({flag for flag in found.split() if not flag.startswith(WITHOUT_EFFECT + others)}))


def program_options(
    platform: str | None, chip: Chip | None = None, *, writes_bfloat16: bool = False
) -> dict[str, CompilerOption]:
    """The compiler options of prefill and decode steps, without those that XLA_FLAGS or LIBTPU_INIT_ARGS set.

    Args:
        platform: of the devices: cpu, gpu, tpu.
        chip: of the devices; None leaves out what only some chips want.
        writes_bfloat16: the program is a decode step that writes a bfloat16 cache.
    """
    if platform == "cpu" and writes_bfloat16:
        return _not_given(_WRITES_BFLOAT16, platform)  # nothing if the user disables passes: `cache_dtype` asks
    if platform != "tpu":
        return {}
    of_chip = {} if chip is None else _PREFETCHES.get(chip.name, {})
    return _not_given({**_EVERY_PROGRAM, **of_chip}, platform)


def fetch_options() -> dict[str, CompilerOption]:
    """The compiler options that a program takes whose kernels fetch arrays to VMEM, without those that the environment
    sets."""
    return _not_given(_FETCHES, "tpu")


def engine_options(platform: str | None) -> dict[str, CompilerOption]:
    """The compiler options of an engine's programs for a platform, without those that the environment sets."""
    if platform != "cpu":
        return program_options(platform)
    # Each kernel's float32 copy (`Runtime.widen_rows`) is made where it is used, into memory that is warm. By default
    # XLA:CPU begins with all that waits for nothing: the copies of every layer.
    return _not_given({"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}, platform)


def training_options(platform: str, chip: Chip | None, tokens: int) -> dict[str, CompilerOption]:
    """The compiler options of an update, without those that the environment sets.

    Args:
        platform: of the devices: cpu, gpu, tpu.
        chip: of the devices; None if it is not known.
        tokens: that a device computes at once.
    """
    if platform != "tpu":
        return {}
    options = {**_EVERY_PROGRAM, **_TRAINING}
    if chip is None:
        return _not_given(options, platform)
    if chip.sums_on_sparse_cores:
        options |= _SPARSE_CORES
    if chip.name in _CHIPS_CARRIED_BY_VECTORS:
        options |= _CARRIED_BY_VECTORS
    limits = {**_TRAINING_VMEM_KIB, **(_VMEM_KIB_OF_FEW_TOKENS if tokens <= _FEW_TOKENS else {})}
    if chip.name in limits:
        options["xla_tpu_scoped_vmem_limit_kib"] = limits[chip.name]
    return _not_given(options, platform)


def _not_given(options: Mapping[str, CompilerOption], platform: str) -> dict[str, CompilerOption]:
    """The options for a platform that the environment does not set."""
    given = {flag.removeprefix("--").partition("=")[0] for flag in compiler_flags(platform)}
    return {name: value for name, value in options.items() if name not in given}


def refused_option(message: str) -> str | None:
    """The name of the compiler option that a compiler says it does not know, as another release of it may not."""
    found = re.search(r"No such compile option: '(\w+)'", message)
    return found.group(1) if found else None
