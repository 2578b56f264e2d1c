"""The patches that every model on this backend gets."""

from __future__ import annotations

from ttpu_torch_xla.patches.patch import Patch

LAZY = "ttpu_torch_xla.patches.tracing:is_tracing"

DEFAULTS: tuple[Patch, ...] = (
    Patch(
        "masks without reading them",
        "transformers.masking_utils:is_tracing",
        LAZY,
        "transformers reads a mask's values to find out whether it may be left out; for a lazy tensor that compiles "
        "and runs what was recorded so far, once more for every length.",
    ),
    Patch(
        "no search for padding in token ids",
        "transformers.modeling_utils:is_tracing",
        LAZY,
        "the warning about padding without a mask reads token ids from the device.",
        "where the config has a pad_token_id and no attention_mask is given",
    ),
    Patch(
        "experts of fixed shape",
        "transformers.integrations.moe:ALL_EXPERTS_FUNCTIONS[grouped_mm]",
        "ttpu_torch_xla.patches.experts:grouped_experts",
        "the grouped product of experts counts tokens with histc and multiplies groups of unknown size, which "
        "torch_xla has no operations for.",
        "mixtures of experts",
        kind="interface",
        needed=True,
    ),
    Patch(
        "triangular systems on the device",
        "torch.linalg:solve_triangular",
        "ttpu_torch_xla.patches.linalg:solve_triangular",
        "torch_xla hands linalg.solve_triangular to the host; it lowers triangular_solve, which solves the same.",
        "layers with a gated delta rule",
    ),
    Patch(
        "layers computed again behind a barrier",
        "transformers.modeling_utils:checkpoint",
        "ttpu_torch_xla.checkpointing:checkpoint_or_recompute",
        "torch's activation checkpointing asks for a module torch.xla, which there is not, and XLA would keep what was "
        "computed first instead of computing it again.",
        "models in training whose gradient_checkpointing_enable() was called",
    ),
    Patch(
        "packed sequences counted in whole numbers",
        "transformers.masking_utils:find_packed_sequence_indices",
        "ttpu_torch_xla.patches.packing:find_packed_sequence_indices",
        "torch_xla's cumsum of booleans is boolean, so that all sequences of a row after the first would be one.",
        "position_ids that restart",
        needed=True,
    ),
    Patch(
        "windows longer than the sequence",
        "transformers.cache_utils:DynamicSlidingWindowLayer.update",
        "ttpu_torch_xla.patches.windows:update",
        "its slice begins before the tensor does where a window is longer than the sequence, which torch_xla refuses.",
        "layers with windows or chunks, called with a cache",
        needed=True,
    ),
    Patch(
        "checkpoints from the device",
        "transformers.modeling_utils:PreTrainedModel.save_pretrained",
        "ttpu_torch_xla.saving:save_pretrained",
        "safetensors writes tensors of the host only.",
        needed=True,
    ),
    Patch(
        "adapters from the device",
        "safetensors.torch:_find_shared_tensors",
        "ttpu_torch_xla.saving:find_shared_tensors",
        "safetensors compares addresses of storage, which tensors of XLA devices do not have.",
        "save_pretrained of a peft model",
        needed=True,
    ),
    Patch(
        "Adam without a fused kernel",
        "torch.optim.adam:Adam.__init__",
        "ttpu_torch_xla.patches.optimizers:without_fused",
        "XLA devices have no fused kernel of Adam, and fuse the whole step.",
        "fused=True, the default of transformers' Trainer",
        needed=True,
    ),
    Patch(
        "batches that are not pinned",
        "torch.utils.data._utils.pin_memory:pin_memory",
        "ttpu_torch_xla.patches.pinning:pin_memory",
        "an XLA device cannot pin memory, and the loader's thread dies where it is asked to.",
        "pin_memory=True, the default of transformers' Trainer",
        needed=True,
    ),
)

ADAPTERS = Patch(
    "LoRA beside quantized layers",
    "peft.tuners.lora.model:dispatch_default",
    "ttpu_torch_xla.quantization.adapters:dispatch",
    "peft knows no quantized layers of this backend, and refuses them.",
    "quantized models, where peft is installed",
    needed=True,
)
