"""The extension point of transformers by which the layers of a model are replaced before its weights are loaded. What a
checkpoint stores quantized is then never read, nor made room for, as dense weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "ttpu"


@register_quantization_config(METHOD)
class Swapped(QuantizationConfigMixin):
    """What `from_pretrained` takes as `quantization_config`.

    Args:
        swap: replaces layers of the model on the meta device. A function and no method: transformers copies it.
    """

    quant_method: Any

    def __init__(self, swap: Callable[[Any], None]) -> None:
        self.quant_method = METHOD
        self.swap = swap


@register_quantizer(METHOD)
class Swapper(HfQuantizer):
    """Replaces layers, and leaves no trace in the model: the buffers of the new layers are for the caller to fill."""

    quantization_config: Swapped

    def preprocess_model(self, model: Any, dtype: Any = None, **options: Any) -> None:
        """Replace the layers."""
        before = set(model.state_dict())
        self.quantization_config.swap(model)
        own = "|".join(sorted({name.rpartition(".")[2] for name in set(model.state_dict()) - before}))
        if own:
            model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), rf"\.({own})$"}
        # The core has compared the files with the architecture already.
        model._keys_to_ignore_on_load_unexpected = {""}

    def postprocess_model(self, model: Any, **options: Any) -> None:
        """Make the model a stock one again."""
        self.remove_quantization_config(model)
        for name in ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"):
            vars(model).pop(name, None)

    def is_serializable(self) -> bool:
        """Whether transformers saves such a model."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether its quantized weights are trained."""
        return False


def without_quantization(config: Any) -> Any:
    """The config of a model whose weights transformers is to take for dense ones."""
    for part in (config, config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config"):
            if hasattr(part, name):
                delattr(part, name)
    return config
