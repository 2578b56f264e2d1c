"""`AutoXLAModelForCausalLM`, which has the name, arguments and defaults of AutoXLA's class and uses this backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ttpu_core.auto import AutoModelForTPU


class AutoXLAModelForCausalLM:
    """Opens a checkpoint with AutoXLA's arguments; there are no instances of this class itself."""

    def __init__(self) -> None:
        """Refuse to make an instance.

        Raises:
            TypeError: always; call `from_pretrained`.
        """
        raise TypeError("AutoXLAModelForCausalLM has no instances: call its from_pretrained(path_or_id).")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        auto_shard: bool = True,
        sharding_strategy: str | None = None,
        gradient_checkpointing: bool = True,
        use_fsdp_wrap: bool | Literal["auto"] = "auto",
        verbose: bool = True,
        mesh: Any = None,
        do_quant: bool = False,
        quantization_config: Any = None,
        attn_implementation: str = "eager",
        attention_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Load the stock transformers model onto the XLA device; `TorchXlaLoadOptions` documents the arguments.

        On one device nothing is sharded or wrapped, whatever the strategy.

        Args:
            sharding_strategy: "fsdp" where no `mesh`, `plan` or `parallelism_strategy` says how the model is sharded. A
                mesh takes precedence over it.
            verbose: print how the model is sharded.
            options: what `AutoModelForTPU.from_pretrained` takes besides, such as dtype.
        """
        from ttpu_torch_xla.runtime import current

        if sharding_strategy is None and all(options.get(name) is None for name in ("plan", "parallelism_strategy")):
            sharding_strategy = "fsdp"
        runtime = current()
        several = auto_shard and runtime.num_devices() > 1
        # AutoXLA's own default is True; it wraps where there is something to wrap along.
        model = AutoModelForTPU.from_pretrained(
            pretrained_model_name_or_path,
            backend="torch_xla",
            auto_shard=several,
            mesh=mesh,
            sharding_strategy=None if mesh is not None else sharding_strategy,
            use_fsdp_wrap=use_fsdp_wrap if several else False,
            gradient_checkpointing=gradient_checkpointing,
            do_quant=do_quant,
            quantization_config=quantization_config,
            attn_implementation=attn_implementation,
            attention_config=attention_config,
            **options,
        )
        if verbose:
            handle = model.ttpu
            print(
                f"{type(model).__name__} on {runtime.platform()}, {handle.parallelism or 'one device'}: "
                f"{handle.attention} attention"
            )
        return model
