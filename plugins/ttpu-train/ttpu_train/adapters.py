"""The settings of low-rank adapters, by the names of peft's `LoraConfig`, and how they are read from what a user gives:
a mapping, a `LoraConfig`, or the folder of an adapter that peft saved."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.loading import refuse_unknown

ALL_LINEAR = "all-linear"
ADAPTER_CONFIG = "adapter_config.json"
BIASES = ("none", "all", "lora_only")
STARTS = (True, False, "gaussian")
"""Values of `init_lora_weights` that leave the base model's weights alone and need no data."""
DRAWN_BY_PEFT = ("eva", "orthogonal")
"""Values that leave the base model's weights alone, with which peft alone begins."""
SILENT = (
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "megatron_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision",
)  # fmt: skip
"""Fields of peft's configs that need not be read. `fan_in_fan_out` follows from the model."""


@dataclass(frozen=True)
class AdapterSettings:
    """Which low-rank adapters are trained, beside base weights that are not (arXiv 2106.09685). The names and meanings
    are those of peft's `LoraConfig`.

    Attributes:
        target_modules: names of linear modules or the ends of their names, as in ("q_proj", "v_proj"); one text is a
            regular expression of whole names, or "all-linear" for all that adapters reach.
        r: the rank.
        lora_alpha: the adapter's output is multiplied by lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora`.
        lora_dropout: the share of an adapter's inputs that is 0 in an update, drawn from the run's seed, the number of
            the update and its part.
        use_rslora: see `lora_alpha` (arXiv 2312.03732).
        use_dora: train the magnitude of each output of a kernel apart from its direction (arXiv 2402.09353).
        bias: "none", "all" or "lora_only": which biases of the base model are trained too.
        modules_to_save: modules of the base model that are trained whole.
        exclude_modules: as `target_modules`, of modules that get none.
        layers_to_transform: the layers whose modules get adapters; None: all.
        init_lora_weights: True: A is uniform as peft's and B is 0; "gaussian": A is normal with deviation 1 / r; False:
            neither is 0.
        start: the folder of an adapter to begin with; None begins with `init_lora_weights`.
    """

    target_modules: str | tuple[str, ...]
    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    modules_to_save: tuple[str, ...] = ()
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] | None = None
    init_lora_weights: bool | str = True
    start: str | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RequestError: one is out of range.
            UnsupportedError: a combination that is not trained.
        """
        for name in ("use_rslora", "use_dora"):
            _need(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        for name in ("target_modules", "modules_to_save", "exclude_modules"):
            names = getattr(self, name)
            listed = isinstance(names, str) or all(isinstance(one, str) and one for one in names)
            _need(listed, name, names, "a list of names")
            if isinstance(names, str):
                _check_pattern(name, names)
        layers = self.layers_to_transform or ()
        _need(all(map(_is_layer, layers)), "layers_to_transform", layers, "a list of numbers from 0")
        whole = isinstance(self.r, int) and not isinstance(self.r, bool)
        _need(whole and self.r >= 1, "r", self.r, "a whole number from 1")
        _need(_is_number(self.lora_alpha) and self.lora_alpha > 0, "lora_alpha", self.lora_alpha, "a number above 0")
        holds = _is_number(self.lora_dropout) and 0 <= self.lora_dropout < 1
        _need(holds, "lora_dropout", self.lora_dropout, "a number from 0 to below 1")
        _need(self.bias in BIASES, "bias", self.bias, f"one of {', '.join(BIASES)}")
        if self.init_lora_weights not in STARTS:
            raise UnsupportedError(
                f"init_lora_weights={self.init_lora_weights!r} was given, but adapters begin with True, False or "
                "'gaussian': others change the base weights or need data; give one of these."
            )
        if self.use_dora and self.lora_dropout:
            raise UnsupportedError(
                f"lora_dropout={self.lora_dropout} was given with use_dora, but DoRA's magnitudes scale the base's "
                "output of inputs that are not dropped: set lora_dropout: 0."
            )

    @property
    def scaling(self) -> float:
        """What the output of an adapter is multiplied by."""
        return float(self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r))


def adapter_settings(peft_config: Any, start: str | Path | None = None) -> AdapterSettings:
    """The settings that a user gave.

    Args:
        peft_config: a mapping with the fields of peft's `LoraConfig`, such a config, or None.
        start: the folder of an adapter to begin with, whose config counts for what `peft_config` leaves out.

    Raises:
        RequestError: a field is unknown or out of range, there is no adapter, or `peft_config` contradicts it.
        UnsupportedError: a field asks for what is not trained.
    """
    asked = {} if peft_config is None else _read(_given(peft_config), "peft_config", _known_to_peft(peft_config))
    if start is not None:
        own = _of_file(start)
        held = _read(own, f"{ADAPTER_CONFIG} of {str(start)!r}", frozenset(own))
        _refuse_contradictions(asked, held, str(start))
        asked = {**held, **asked, "init_lora_weights": _beginning_of(held, str(start))}
    if not asked.get("target_modules"):
        raise RequestError(
            "peft_config names no target_modules, but adapters need modules: give names such as [q_proj, v_proj], or "
            f"{ALL_LINEAR!r}."
        )
    return AdapterSettings(**asked, start=None if start is None else str(start))


_FIELDS = tuple(one.name for one in fields(AdapterSettings) if one.name != "start")
_SEQUENCES = ("modules_to_save", "exclude_modules", "target_modules")


def _read(given: Mapping[str, Any], where: str, known: frozenset[str]) -> dict[str, Any]:
    """The fields of `AdapterSettings` that a config of peft sets.

    Args:
        given: the config.
        where: what it is, for errors.
        known: fields that peft has.
    """
    refused = {name: value for name, value in given.items() if name not in _FIELDS and value}
    for name in SILENT:
        refused.pop(name, None)
    kind, task = refused.pop("peft_type", "LORA"), refused.pop("task_type", None)
    kind, task = getattr(kind, "value", kind), getattr(task, "value", task)
    if kind != "LORA" or task not in (None, "CAUSAL_LM"):
        raise UnsupportedError(
            f"{where} has peft_type {kind!r} and task_type {task!r}, but LoRA adapters of causal language models "
            "are trained: give LORA and CAUSAL_LM, or leave them out."
        )
    beyond = [name for name in refused if name in known]
    if beyond:
        raise UnsupportedError(
            f"{where} sets {', '.join(beyond)}, but adapters are trained with {', '.join(_FIELDS)}: leave it out."
        )
    refuse_unknown(refused, _FIELDS, where, "it", " (see docs/training.md)")
    return {name: _frozen(name, given[name]) for name in _FIELDS if given.get(name) is not None}


def _beginning_of(held: Mapping[str, Any], start: str) -> bool | str:
    """The `init_lora_weights` to write again for an adapter that exists.

    Raises:
        UnsupportedError: it changed the base model's weights.
    """
    own = held.get("init_lora_weights", True)
    if own in DRAWN_BY_PEFT:
        return True
    if own not in STARTS:
        raise UnsupportedError(
            f"{ADAPTER_CONFIG} of {start!r} has init_lora_weights={own!r}, which changed the base model's weights, but "
            "adapters are trained beside the weights in its checkpoint: save the adapter with peft's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    result: bool | str = own
    return result


def _refuse_contradictions(asked: Mapping[str, Any], held: Mapping[str, Any], start: str) -> None:
    """Refuse settings with which the adapter to begin with would compute something else. Which modules it has is
    compared with its tensors, where the model is known."""
    usual = {one.name: one.default for one in fields(AdapterSettings)}
    for name in ("r", "lora_alpha", "use_rslora", "use_dora"):
        own = held.get(name, usual[name])
        if name in asked and asked[name] != own:
            raise RequestError(
                f"peft_config has {name}={asked[name]!r}, but the adapter {start!r} of adapter_name_or_path was "
                f"trained with {name}={own!r} and would compute something else: leave it out of peft_config, or leave "
                "adapter_name_or_path out to train a new adapter."
            )


def _given(peft_config: Any) -> Mapping[str, Any]:
    if isinstance(peft_config, Mapping):
        return peft_config
    if not hasattr(peft_config, "to_dict"):
        raise RequestError(
            f"peft_config is a {type(peft_config).__name__}, but a mapping or peft's LoraConfig is needed: give "
            "one such as {r: 16, target_modules: all-linear}."
        )
    return dict(peft_config.to_dict())


def _of_file(start: str | Path) -> dict[str, Any]:
    """The config of the adapter in a folder."""
    file = Path(start).expanduser() / ADAPTER_CONFIG
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RequestError(
            f"adapter_name_or_path={str(start)!r} was given, but {ADAPTER_CONFIG} there cannot be read ({error}): name "
            "a folder that peft's save_pretrained or `ttpu export` wrote."
        ) from error


def _known_to_peft(peft_config: Any) -> frozenset[str]:
    """Fields that peft has: of its own config all, of a mapping those that are often set."""
    usual = ("rank_pattern", "alpha_pattern", "layers_pattern", "layer_replication", "lora_bias", "target_parameters")
    more = ("trainable_token_indices", "loftq_config", "eva_config", "corda_config", "use_qalora")
    own = () if isinstance(peft_config, Mapping) else tuple(peft_config.to_dict())
    return frozenset((*usual, *more, *own))


def _frozen(name: str, value: Any) -> Any:
    if name == "layers_to_transform":  # an empty list means all layers, as in peft
        return (tuple(value) or None) if isinstance(value, list | tuple) else (value,)
    if name == "modules_to_save" and isinstance(value, str):
        return (value,)
    if name in _SEQUENCES and not isinstance(value, str):
        _need(isinstance(value, list | tuple | set), name, value, "a list of names")
        return tuple(sorted(value, key=str))
    return value


def _check_pattern(name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise RequestError(
            f"peft_config has {name}={pattern!r}, but that is no regular expression ({error}): correct it, or give a "
            "list of names."
        ) from None


def _is_layer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _need(holds: bool, name: str, value: Any, allowed: str) -> None:
    if not holds:
        raise RequestError(f"peft_config has {name}={value!r}, but it is {allowed}: correct it.")
