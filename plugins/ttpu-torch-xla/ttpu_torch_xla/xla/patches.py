"""The patches of torch_xla itself that training loops of others need: transformers' Trainer and accelerate load batches
and write checkpoints through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from queue import Queue
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ttpu_core.errors import UnsupportedError
from ttpu_torch_xla.patches.patch import Patch
from ttpu_torch_xla.runtime import current, is_device

PATCHES: tuple[Patch, ...] = (
    Patch(
        "errors of loaders reach the training loop",
        "torch_xla.distributed.parallel_loader:ParallelLoader._loader_worker",
        "ttpu_torch_xla.xla.patches:loader_worker",
        "what fails in the thread that reads batches ends it without a word, so that a training loop has no batches "
        "and reports success.",
        "batches that accelerate or MpDeviceLoader loads",
        needed=True,
    ),
    Patch(
        "copies to the host without a program for each",
        "torch_xla.core.xla_model:_maybe_convert_to_cpu",
        "ttpu_torch_xla.xla.patches:convert_to_cpu",
        "on several devices torch_xla compiles a program for each shape and sharding that it copies.",
        "checkpoints of transformers' Trainer, and xm.save",
    ),
    Patch(
        "FSDPv2 around what is sharded already",
        "torch_xla.experimental.spmd_fully_sharded_data_parallel:SpmdFullyShardedDataParallel.__init__",
        "ttpu_torch_xla.xla.patches:wrapping",
        "transformers' Trainer wraps models in FSDPv2 and then makes no optimizer for them, and layers that are "
        "wrapped already fail.",
        "fsdp_config={'xla_fsdp_v2': True} of transformers' Trainer",
    ),
)


class _Reported:
    """The batches of a loader, whose first error goes to a queue and ends them."""

    def __init__(self, batches: Any, errors: Queue[Exception]) -> None:
        self._batches, self._errors = batches, errors

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._batches
        except Exception as error:
            self._errors.put(error)

    def __len__(self) -> int:
        return len(self._batches)


def loader_worker(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """The thread's function, after which the consumer of the batches raises what failed in it."""

    def work(self: Any) -> None:
        self._cpu_loader = _Reported(self._cpu_loader, self._exception_queue)
        original(self)

    return work


loader_worker.wraps_original = True  # type: ignore[attr-defined]


def convert_to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function for programs on all devices: the same, with tensors of any shape copied by the runtime."""

    def converted(data: Any, convert: bool = True) -> Any:
        runtime = current()
        if not convert or not runtime.is_spmd():
            return original(data, convert)
        leaves, structure = tree_flatten(data)
        there = [one for one in leaves if isinstance(one, torch.Tensor) and is_device(one)]
        fetched = iter(runtime.fetch(there))
        return tree_unflatten(
            [next(fetched) if isinstance(one, torch.Tensor) and is_device(one) else one for one in leaves], structure
        )

    return converted


convert_to_cpu.wraps_original = True  # type: ignore[attr-defined]


def wrapping(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor of FSDPv2, which refuses whole models of this backend."""

    @wraps(original)
    def init(self: Any, module: Any, *args: Any, **options: Any) -> None:
        if hasattr(module, "ttpu") and hasattr(module, "generate"):
            raise UnsupportedError(
                f"FSDPv2 was to be wrapped around {type(module).__name__}, as transformers' Trainer does for "
                "fsdp_config={'xla_fsdp_v2': True}, but a model is sharded when it is loaded: leave fsdp out of the "
                "Trainer's arguments, and pass parallelism_strategy='fsdp' to AutoModelForTPU.from_pretrained, with "
                "use_fsdp_wrap=True for FSDPv2."
            )
        original(self, module, *args, **options)

    return init


wrapping.wraps_original = True  # type: ignore[attr-defined]
