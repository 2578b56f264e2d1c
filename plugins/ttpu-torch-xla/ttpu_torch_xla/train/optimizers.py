"""Optimizers on the device. They give the direction of an update, which the runner multiplies by the learning rate: the
count of updates and the rate are values of the program, so that neither a new rate nor a skipped update compiles
another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch.optim.adam import adam

from ttpu_core.errors import RequestError

if TYPE_CHECKING:
    from ttpu_train.runner import OptimizerSettings

Tensors = list[torch.Tensor]


class Optimizer(Protocol):
    """Turns gradients into directions."""

    @property
    def per_parameter(self) -> tuple[str, ...]:
        """The names of the state that has a parameter's shape, float32 and 0 at first."""
        ...

    def directions(self, gradients: Sequence[torch.Tensor], state: Sequence[Tensors], count: torch.Tensor) -> Tensors:
        """What is added to each parameter times the learning rate; changes the state in place.

        Args:
            gradients: of each parameter, of its shape.
            state: for each name of `per_parameter`, the tensors of all parameters.
            count: float32 [], updates before this one.
        """
        ...


class AdamW:
    """torch's AdamW, without its decay of weights and at a rate of 1. Its class is no use here: with the count of
    updates on the device it divides by the rate, which is 0 where a warm-up begins."""

    per_parameter = ("exp_avg", "exp_avg_sq")

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = settings

    def directions(self, gradients: Sequence[torch.Tensor], state: Sequence[Tensors], count: torch.Tensor) -> Tensors:
        """The directions, of the gradients' shapes; `count` is a float32 [] of the device. See `Optimizer`."""
        found = [torch.zeros_like(gradient) for gradient in gradients]
        means, squares = state
        adam(
            found,
            list(gradients),
            means,
            squares,
            [],
            [count.clone() for _ in found],
            foreach=False,
            capturable=True,
            amsgrad=False,
            beta1=self._settings.beta1,
            beta2=self._settings.beta2,
            lr=1.0,
            weight_decay=0.0,
            eps=self._settings.epsilon,
            maximize=False,
        )
        return found


class Sgd:
    """Stochastic gradient descent, with momentum where the settings have some."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._momentum = settings.momentum
        self.per_parameter: tuple[str, ...] = ("momentum_buffer",) if settings.momentum else ()

    def directions(self, gradients: Sequence[torch.Tensor], state: Sequence[Tensors], count: torch.Tensor) -> Tensors:
        """The directions, of the gradients' shapes; `count` is a float32 [] of the device. See `Optimizer`."""
        if not self._momentum:
            return [-gradient for gradient in gradients]
        return [-held.mul_(self._momentum).add_(gradient) for held, gradient in zip(state[0], gradients, strict=True)]


def optimizer_for(settings: OptimizerSettings) -> Optimizer:
    """The optimizer that the settings name.

    Raises:
        RequestError: this backend has none of that name.
    """
    makers: dict[str, type[AdamW] | type[Sgd]] = {"adamw": AdamW, "sgd": Sgd}
    if settings.name not in makers:
        raise RequestError(
            f"the optimizer {settings.name!r} was asked for, but the torch_xla backend has {', '.join(makers)}: use "
            "one of these, or backend='jax'."
        )
    return makers[settings.name](settings)
