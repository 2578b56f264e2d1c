"""The hooks of the patch pack `blockwise`, which choose the attention function for any model."""

from ttpu_core import hookimpl
from ttpu_core.spec import KernelChoice


@hookimpl
def ttpu_kernels() -> list[KernelChoice]:
    """One choice for all models. The backend asks the function which layers it serves."""
    return [
        KernelChoice(
            operation="attention",
            implementation="ttpu_pack_attention.blockwise:attend",
            backend="jax",
            source="ttpu-pack-attention",
            reason="online softmax over blocks of keys, so that memory grows with the sequence and not with its square",
        )
    ]
