"""What the backend knows of a model that it prepared, hung on the stock model as `model.ttpu`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ttpu_core.architecture import Architecture
from ttpu_core.plan.parallelism import Parallelism
from ttpu_core.spec import AttentionSpec
from ttpu_torch_xla.adapter import Adapter
from ttpu_torch_xla.patches.patch import Patch

Options = tuple[tuple[str, object], ...]


@dataclass(eq=False)
class Handle:
    """A prepared model's description.

    Attributes:
        architecture: what the family plugin says of it.
        adapter: the runtime that it lives on.
        patches: what was replaced in transformers for it; in place until `close`, or until the model is gone.
        attention: the name of its attention.
        options: settings of that attention, as `ttpu_jax.ops.attention` takes them.
        parallelism, mesh: how it is cut, by the core's names and as the runtime's mesh; None on one device.
        tokenizer: the checkpoint's, or None.
        quantization: what `quantize` reports, or None.
        load_seconds: wall-clock time from the checkpoint's files to the device.
    """

    architecture: Architecture
    adapter: Adapter
    patches: tuple[Patch, ...] = ()
    attention: str = "eager"
    options: Options = ()
    parallelism: Parallelism | None = None
    mesh: Any = None
    tokenizer: Any = None
    quantization: Any = None
    load_seconds: float = 0.0
    _undo: Callable[[], None] | None = field(default=None, repr=False)

    def attention_spec(self, layer: int) -> AttentionSpec | None:
        """The softmax attention of a layer; None where the layer has another mixer, or is not of this model."""
        layers = self.architecture.spec.layers
        mixer = layers[layer].mixer if 0 <= layer < len(layers) else None
        return mixer if isinstance(mixer, AttentionSpec) else None

    def attach(self, model: Any, undo: Callable[[], None]) -> None:
        """Hang this on the model and on its attention modules; `undo` runs at `close`, or when the model is gone."""
        model.ttpu = self
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                # Beside the module's own parts, so that neither parameters() nor state_dict() sees it.
                object.__setattr__(module, "ttpu", self)
        self._undo = weakref.finalize(model, undo)

    def close(self) -> None:
        """Take the patches back; the model then runs as the stock one, apart from its device and its `generate`."""
        if self._undo is not None:
            self._undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        """A copied model shares its description."""
        return self
