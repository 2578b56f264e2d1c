"""Attention by name for stock models: functions for transformers' AttentionInterface over the kernels of ttpu_jax."""

from __future__ import annotations

from ttpu_torch_xla.patches.patch import Patch

KERNELS = ("splash_attention", "xla_flash_attention")

# transformers takes every name with "flash" in it for a CUDA kernel, and tries to download that.
_REGISTERED = {"xla_flash_attention": "xla_fused_attention"}


def transformers_name(attention: str) -> str:
    """Return the name under which transformers knows an attention, for its `attn_implementation`."""
    return _REGISTERED.get(attention, attention)


def patches(attention: str) -> tuple[Patch, ...]:
    """Return the patches of transformers that this attention needs; none for transformers' own implementations."""
    if attention not in KERNELS:
        return ()
    return (
        Patch(
            name=attention,
            target=f"transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS._global_mapping[{transformers_name(attention)}]",
            replacement=f"ttpu_torch_xla.attention.interface:{attention}",
            reason="transformers' own attention holds all scores in memory and knows no TPU kernel",
            when=f"attn_implementation={attention}",
            kind="interface",
        ),
        Patch(
            name=f"{attention}_mask",
            target=f"transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[{transformers_name(attention)}]",
            replacement="ttpu_torch_xla.attention.mask:kernel_mask",
            reason="an attention without a mask function of its own gets no mask at all",
            when=f"attn_implementation={attention}",
            kind="interface",
        ),
    )
