"""The entry point `jax` of the group `ttpu.models_under_test`. JAX reads its environment when it is imported, so this
module imports it only when it is needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import Checkpoint
from ttpu_core.sharding.hardware import chip_named
from ttpu_core.sharding.padding import pad_architecture
from ttpu_core.sharding.parallelism import parse_mesh
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY
from ttpu_core.spec import ArchitectureSpec
from ttpu_jax.platform import prepare

if TYPE_CHECKING:
    from ttpu_jax.aot.report import ProgramReport
    from ttpu_jax.aot.slices import Place
    from ttpu_jax.under_test.model import JaxModel

FLAG = "--xla_force_host_platform_device_count"
REFERENCE = "eager"
"""The implementation of attention that the others are held against."""


class JaxUnderTest:
    """Starts JAX and loads models."""

    name = "jax"
    distributions: tuple[str, ...] = ("ttpu-jax", "jax", "libtpu")

    def prepare(self, device: Literal["cpu", "tpu"], virtual_devices: int) -> None:
        """Set XLA_FLAGS and JAX_PLATFORMS. This has no effect once JAX has looked for devices."""
        if FLAG not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}={virtual_devices}".strip()
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of each resharding that tiny shapes force on it
        if device == "cpu":
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        prepare()

    def missing_device(self, device: Literal["cpu", "tpu"]) -> str | None:
        """Return why checks cannot run on a device here, or None. On a TPU, products have full precision from then on.
        """
        import jax

        if device == "cpu":
            return None
        found = jax.devices()[0]
        if found.platform == "tpu":
            # float32 is compared with float32: a TPU multiplies in bfloat16 unless it is told not to.
            jax.config.update("jax_default_matmul_precision", "highest")
            return None
        return f"there is no TPU here: JAX found {found.device_kind!r} ({found.platform})"

    def missing_devices(self, count: int) -> str | None:
        """Return why models cannot be sharded over so many devices in this process, or None."""
        import jax

        if jax.device_count() >= count:
            return None
        return (
            f"JAX started with {jax.device_count()} devices here, and sharded checks need {count}: set "
            f"XLA_FLAGS={FLAG}={count} before JAX is imported"
        )

    def device_kinds(self) -> tuple[str, ...]:
        """Return JAX's names of the device kinds."""
        import jax

        return tuple(sorted({device.device_kind for device in jax.devices()}))

    def load(
        self,
        architecture: Architecture,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        mesh: str | None,
        attn_implementation: str,
    ) -> JaxModel:
        """Load a model.

        Args:
            architecture: what the plugin says of the checkpoint's config.
            checkpoint: as transformers saved it.
            dtype: "float32" or "bfloat16".
            mesh: such as "fsdp=2,tensor=4"; None for one device.
            attn_implementation: as `from_pretrained` takes it.
        """
        from ttpu_jax.under_test.model import JaxModel

        return JaxModel(architecture, checkpoint, dtype=dtype, mesh=mesh, attn_implementation=attn_implementation)

    def refuse_mesh(self, spec: ArchitectureSpec, mesh: str) -> None:
        """A mesh must divide every parameter, padded where it can be.

        Raises:
            UnsupportedError: it does not.
        """
        sizes = parse_mesh(mesh)
        padded, _ = pad_architecture(spec, sizes)
        for path, parameter in padded.parameters.items():
            DEFAULT_STRATEGY.mesh_axes(parameter.axes, parameter.shape, sizes, path)

    def forget_programs(self) -> None:
        """Clear JAX's caches of functions that will not be called again."""
        import jax

        jax.clear_caches()

    def attention_implementations(self) -> Sequence[str]:
        """Names of the kernels, the reference first."""
        from ttpu_jax.ops.attention import IMPLEMENTATIONS

        return (REFERENCE, *(name for name in IMPLEMENTATIONS if name != REFERENCE))

    def compiled(
        self,
        architecture: Architecture,
        chip: str,
        task: Literal["decode", "prefill", "train"],
        *,
        rows: int,
        context: int,
        slice_name: str | None,
        mesh: str | None,
    ) -> ProgramReport | None:
        """Compile a program for the smallest slice that holds it, or for the one that is named, and return the
        compiler's figures.

        Args:
            rows: sequences of decode.
            context: cache slots of a row, and tokens of a prefill and of a training step.
            slice_name: the slice; None for the smallest.
            mesh: its mesh; None for the usual one.

        Raises:
            MissingDependencyError: libtpu is not installed.
            UnsupportedError: it does not fit, or cannot be compiled.
        """
        from ttpu_jax.aot.slices import fitting_report

        return fitting_report(
            architecture,
            _places(architecture.spec, chip, task == "train", rows * context, slice_name, mesh),
            task=task,
            batch={"decode": rows, "prefill": 1, "train": None}[task],
            context=context,
            layers="unrolled" if task == "decode" else "scan",
        )


def _places(
    spec: ArchitectureSpec, chip: str, train: bool, cached_tokens: int, slice_name: str | None, mesh: str | None
) -> Iterator[Place]:
    """Slices and meshes to try: the named one alone, or the smallest that may hold the model and larger ones."""
    from ttpu_jax.aot.slices import inference_slices, training_slices

    known = chip_named(chip)
    found = (
        training_slices(spec, known)
        if train
        else inference_slices(spec, known, spec.kv_bytes_per_token(2) * cached_tokens)
    )
    if slice_name is None:
        yield from found
    elif mesh is not None:
        yield slice_name, parse_mesh(mesh)
    else:
        yield next(((name, usual) for name, usual in found if name == slice_name), (slice_name, {}))
