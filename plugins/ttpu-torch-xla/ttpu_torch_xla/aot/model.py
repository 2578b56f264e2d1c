"""Makes a stock transformers model of any size without weights on a `TpuSlice`. The model is patched and sharded as
`from_pretrained` does, and its parameters are program arguments without values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ttpu_core.architecture import Architecture
from ttpu_core.sharding.parallelism import Parallelism
from ttpu_torch_xla.aot.slice import TpuSlice
from ttpu_torch_xla.attention import transformers_name
from ttpu_torch_xla.attention.choice import attention_for
from ttpu_torch_xla.handle import Handle
from ttpu_torch_xla.patches.choice import patches_for
from ttpu_torch_xla.patches.patch import applied
from ttpu_torch_xla.sharding.apply import shard_model


def abstract_model(
    architecture: Architecture,
    config: Mapping[str, Any],
    tpu: TpuSlice,
    parallelism: Parallelism,
    *,
    dtype: torch.dtype = torch.bfloat16,
    attention: str = "splash_attention",
    attention_config: Mapping[str, Any] | None = None,
) -> Any:
    """Make the model, with its `Handle` as `model.ttpu`; `model.ttpu.close()` undoes the patches.

    Args:
        config: config.json, with its model_type.
        parallelism: the mesh of all devices of the slice, and the axes that shard each dimension.
        attention, attention_config: as `from_pretrained` takes them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    name, options = attention_for(architecture, attention, tpu.platform(), attention_config)
    chosen = patches_for(architecture, name)
    steps = ExitStack()
    steps.enter_context(applied(chosen))
    try:
        stock = AutoConfig.for_model(**config)
        with no_init_weights(), _parameters_without_values():
            model = AutoModelForCausalLM.from_config(
                stock, dtype=dtype, attn_implementation=transformers_name(name)
            ).eval()
        model.tie_weights()  # part of what `no_init_weights` leaves out
        handle = Handle(architecture, tpu, chosen, name, options, parallelism)
        handle.mesh = shard_model(model, architecture, parallelism, tpu)
        handle.attach(model, steps)
    except BaseException:
        steps.close()
        raise
    return model


@contextmanager
def _parameters_without_values() -> Iterator[None]:
    """Parameters of modules that are made inside go to the meta device, one by one, before anything touches their
    memory. Buffers stay: nothing but their constructor knows what is in them."""
    register = torch.nn.Module.register_parameter

    def without_values(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    torch.nn.Module.register_parameter = without_values  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
