"""The backend's record of a model that it prepared, attached to the stock model as `model.ttpu`."""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from ttpu_core.architecture import Architecture
from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.parallelism import Parallelism
from ttpu_core.spec import AttentionSpec
from ttpu_torch_xla.patches.patch import Patch, applied
from ttpu_torch_xla.runtime import TorchRuntime

Options = tuple[tuple[str, object], ...]

_on_one_device: weakref.WeakSet[Any] = weakref.WeakSet()
"""Prepared models whose tensors are on one device of a runtime that does not run on all of them."""


def run_on_all_devices(runtime: TorchRuntime) -> None:
    """Run programs on all devices from now on, if they do not yet.

    Raises:
        UnsupportedError: a model of this process is on one device, whose programs would crash the process then.
    """
    if runtime.is_spmd():
        return
    if len(_on_one_device):
        gc.collect()  # models that are gone may be waiting for it
    if len(_on_one_device):
        raise UnsupportedError(
            f"a model was to be sharded over {runtime.num_devices()} devices, but {len(_on_one_device)} loaded before "
            f"it {'is' if len(_on_one_device) == 1 else 'are'} on one device, and {runtime.name} cannot change over: "
            "load those with a strategy too, delete them first, or use another process."
        )
    runtime.use_spmd()


@dataclass(eq=False)
class Handle:
    """A prepared model's description.

    Attributes:
        architecture: what the family plugin says of it.
        runtime: the runtime that it lives on.
        patches: what was replaced in transformers for it; in place until `close`, or until the model is gone.
        attention: the name of its attention.
        options: settings of that attention, as `ttpu_jax.ops.attention` takes them.
        parallelism, mesh: how it is sharded, by the core's names and as the runtime's mesh; None on one device.
        tokenizer: the checkpoint's, or None.
        quantization: what `quantize` reports, or None.
        load_seconds: wall-clock time from the checkpoint's files to the device.
        backend: that trains and serves the model.
    """

    architecture: Architecture
    runtime: TorchRuntime
    patches: tuple[Patch, ...] = ()
    attention: str = "eager"
    options: Options = ()
    parallelism: Parallelism | None = None
    mesh: Any = None
    tokenizer: Any = None
    quantization: Any = None
    load_seconds: float = 0.0
    backend: str = "torch_xla"
    _model: weakref.ref[Any] | None = field(default=None, repr=False)
    _undo: Any = field(default=None, repr=False)

    def attention_spec(self, layer: int) -> AttentionSpec | None:
        """The softmax attention of a layer; None where the layer has another mixer, or is not of this model."""
        layers = self.architecture.spec.layers
        mixer = layers[layer].mixer if 0 <= layer < len(layers) else None
        return mixer if isinstance(mixer, AttentionSpec) else None

    def attach(self, model: Any, patches: ExitStack | None = None) -> None:
        """Attach this to the model and to its attention modules. `patches` ends at `close`, or when the model is
        collected."""
        model.ttpu = self
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                # Beside the module's own parts, so that neither parameters() nor state_dict() sees it.
                object.__setattr__(module, "ttpu", self)
        self._hold(model, patches or ExitStack())

    def close(self) -> None:
        """Undo the patches. The model then runs as the stock one with eager attention, except for its device and its
        `generate`."""
        model = self._model() if self._model is not None else None
        if model is not None and self.attention not in ("eager", "sdpa"):
            model.set_attn_implementation("eager")
            self.attention = "eager"
        if self._undo is not None:
            self._undo()

    def _hold(self, model: Any, patches: ExitStack) -> None:
        self._model = weakref.ref(model)
        self._undo = weakref.finalize(model, patches.close)
        if not self.runtime.is_spmd():
            _on_one_device.add(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        """A copied model has a handle of its own, which keeps the patches for it; a copied part of one shares this."""
        model = self._model() if self._model is not None else None
        copied = memo.get(id(model))
        if copied is None:
            return self
        own = replace(self, _model=None, _undo=None)
        memo[id(self)] = own
        patches = ExitStack()
        if self._undo is not None and self._undo.alive:
            patches.enter_context(applied(self.patches))
        own._hold(copied, patches)
        return own

    def __getstate__(self) -> dict[str, Any]:
        """What a file can hold: a model that is opened from one has no patches."""
        return vars(self) | {"_model": None, "_undo": None}
