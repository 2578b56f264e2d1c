"""Replaces the linear layers and the stacked experts of a stock transformers model by quantized ones, in place, and
reports which were replaced."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.quantization.config import is_named
from ttpu_core.quantization.quantize import why_finer
from ttpu_torch_xla.quantization.config import QuantizationConfig
from ttpu_torch_xla.quantization.experts import QuantizedStack, hold, stacks_in, why_dense
from ttpu_torch_xla.quantization.linear import QuantizedLinear, format_for

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Last parts of the names of layers that pick experts: rounding them sends tokens elsewhere, and they are small."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """The result of `quantize`.

    Attributes:
        config: what was asked for.
        quantized: names of the layers that were swapped, and of the tensors of stacked experts.
        kept: layers and matrices that were not, and why.
        bytes_before: of all parameters and buffers, shared ones once.
        bytes_after: the same.
        finer: layers whose blocks are finer than those asked for, and why.
        stacks: how many of `quantized` are tensors of stacked experts.
    """

    config: QuantizationConfig
    quantized: tuple[str, ...]
    kept: Mapping[str, str]
    bytes_before: int
    bytes_after: int
    finer: Mapping[str, str] = field(default_factory=dict)
    stacks: int = 0

    def __str__(self) -> str:
        layers = f"{len(self.quantized) - self.stacks} linear layers"
        what = f"{layers} and {self.stacks} tensors of experts" if self.stacks else layers
        lines = [
            f"{what} held as {self.config.name}: {self.bytes_before / 1e6:.1f} MB before, "
            f"{self.bytes_after / 1e6:.1f} MB now"
        ]
        return "\n".join([*lines, *self.finer_lines, *(f"not quantized, {line}" for line in _lines(self.kept))])

    @property
    def finer_lines(self) -> list[str]:
        """A line per reason why blocks are finer than those asked for."""
        return list(_lines(self.finer))


def quantize(
    model: Any,
    config: QuantizationConfig | Mapping[str, Any] | None = None,
    keep: Mapping[str, str] = MappingProxyType({}),
    devices: Mapping[str, int] = MappingProxyType({}),
) -> Report:
    """Swap the linear layers of a model, and the experts that transformers 5 holds as one tensor, in place. Routers,
    the head and what `exclude_layers` names stay; so do experts that no `QuantizedStack` holds (`why_dense`).

    A model on the meta device, or one with any weights, becomes what a quantized model's `state_dict` loads into. Its
    `save_pretrained` refuses from then on: transformers would read such a checkpoint with weights at random.

    Args:
        model: the stock model.
        config: how to quantize, or its arguments.
        keep: more layers that stay as they are, and why.
        devices: layer or tensor of experts → number of devices that will share its inputs; blocks are split so that
            each has whole ones.

    Raises:
        RequestError: there is nothing to quantize, no blocks suit a layer, or an excluded name matches no layer.
    """
    config = QuantizationConfig() if config is None else QuantizationConfig.read(config)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    stacks = {name: (module, projection) for name, module, projection in stacks_in(model)}
    if any(isinstance(module, QuantizedLinear | QuantizedStack) for module in model.modules()):
        raise RequestError("a model was to be quantized, but it has quantized layers already: quantize it once.")
    for pattern in config.exclude_layers:
        if not any(is_named(name, pattern) for name in (*linears, *stacks)):
            raise RequestError(
                f"exclude_layers names {pattern!r}, but no linear layer of this model is called that: take names such "
                f"as {', '.join(list(linears)[:3])}, or a run of their parts."
            )
    head = _head(model)
    kept = {name: reason for name, module in linears.items() if (reason := _reason(name, module, head, config))}
    kept |= {name: reason for name, reason in keep.items() if name in linears and name not in kept}
    for name, (experts, _) in stacks.items():
        excluded = any(is_named(name, pattern) for pattern in config.exclude_layers)
        reason = "in exclude_layers" if excluded else why_dense(experts, config.kernel_format.activation)
        if reason is not None:
            kept[name] = reason
    chosen = [name for name in (*linears, *stacks) if name not in kept]
    if not chosen:
        raise RequestError(
            f"{type(model).__name__} was to be quantized, but none of its {len(linears)} linear layers may be: exclude "
            "fewer, or pass quantize_lm_head=True."
        )
    finer = {}
    for name in chosen:
        inputs = linears[name].in_features if name in linears else model.get_parameter(name).shape[-1]
        if reason := why_finer(format_for(inputs, config, name), config.kernel_format, inputs):
            finer[name] = reason
    before, held_stacks = nbytes(model), sum(name in stacks for name in chosen)
    untied = _tied(model) and any(linears.get(name) is head for name in chosen)
    sharing = _sharing(linears)
    swapped: dict[str, QuantizedLinear] = {}
    for name in chosen:
        if name in stacks:
            experts, projection = stacks.pop(name)
            weight = getattr(experts, projection).detach()
            hold(experts, projection, QuantizedStack.from_weight(weight, config, name, devices.get(name, 1)))
            continue
        parent, _, last = name.rpartition(".")
        linear, first = linears.pop(name), sharing[name]
        if first not in swapped:
            swapped[first] = QuantizedLinear.from_linear(linear, config, devices.get(name, 1))
        setattr(model.get_submodule(parent), last, swapped[first])
    if untied:
        model.config.tie_word_embeddings = False
    if hasattr(model, "save_pretrained"):  # before the class's, which a patch may have replaced
        model.save_pretrained = refuse_to_save
    kept |= {name: reason for name, reason in _other_matrices(model) if name not in kept}
    report = Report(config, tuple(chosen), kept, before, nbytes(model), finer, held_stacks)
    logger.info("%s", report)
    for line in report.finer_lines:
        logger.warning("the weights are quantized in %s", line)
    return report


def nbytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers; shared ones count once."""
    tensors = {id(one): one for one in (*model.parameters(), *model.buffers())}
    return sum(one.numel() * one.element_size() for one in tensors.values())


def refuse_to_save(*args: Any, **options: Any) -> None:
    """`save_pretrained` of a quantized model.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "save_pretrained was called on a model with quantized layers, whose numbers transformers cannot load: write a "
        "quantized checkpoint with `ttpu quantize`, or save model.state_dict() with torch.save."
    )


def _reason(name: str, module: nn.Linear, head: nn.Module | None, config: QuantizationConfig) -> str | None:
    """Why a linear layer stays as it is."""
    last = name.rpartition(".")[2]
    if any(is_named(name, pattern) for pattern in config.exclude_layers):
        return "in exclude_layers"
    if (module is head or last == "lm_head") and not config.quantize_lm_head:
        return "the head (quantize_lm_head)"
    if last in ROUTERS:
        return "a router"
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__}, which may do more than a linear layer"
    return None


def _sharing(linears: Mapping[str, nn.Linear]) -> dict[str, str]:
    """Each layer's name → that of the first layer with the same weight and bias, itself unless they are shared."""
    first: dict[tuple[int, int], str] = {}
    return {name: first.setdefault((id(one.weight), id(one.bias)), name) for name, one in linears.items()}


def _lines(reasons: Mapping[str, str]) -> Iterator[str]:
    """One line per reason, with the names of the first layers that have it."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"{reason}: {', '.join(names[:3])}{more}"


def _head(model: nn.Module) -> nn.Module | None:
    """What gives the logits."""
    find = getattr(model, "get_output_embeddings", None)
    found = find() if callable(find) else None
    return found if isinstance(found, nn.Module) else None


def _tied(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return bool(getattr(config, "tie_word_embeddings", False))


def _other_matrices(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Matrices that no linear layer holds, and why they stay."""
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Linear | QuantizedLinear):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2:
                continue
            kind = type(module).__name__
            reason = (
                "a table of embeddings" if isinstance(module, nn.Embedding) else f"a tensor of {kind}, no nn.Linear"
            )
            yield f"{prefix}.{name}" if prefix else name, reason
