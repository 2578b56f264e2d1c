"""`TorchXlaTrainRunner`: trains the stock model where it was loaded. An update is one program: loss, gradients,
clipping, the optimizer and its state. It implements `ttpu_train.runner.TrainRunner`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from ttpu_core.architecture import refuse_undescribed
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.sharding.hardware import chip_named
from ttpu_core.spec import AttentionSpec, axes
from ttpu_torch_xla.checkpointing import checkpoint_layers
from ttpu_torch_xla.handle import Handle
from ttpu_torch_xla.load import TORCH_DTYPES
from ttpu_torch_xla.runtime import device_type
from ttpu_torch_xla.saving import on_host
from ttpu_torch_xla.sharding.apply import Sharding
from ttpu_torch_xla.train.loss import Rows, Sums, balance_coefficient, rows_of, summed_loss, sums_and_logits
from ttpu_torch_xla.train.optimizers import optimizer_for
from ttpu_torch_xla.train.parameters import batch_axes, matches, named, paths_of, placements, trained_names
from ttpu_torch_xla.train.schedule import share_of

if TYPE_CHECKING:
    from ttpu_torch_xla.train.checkpoints import SafetensorsFiles
    from ttpu_train.runner import Batch, StepSettings

Values = TypeVar("Values")
CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
KNOWN = (
    "optimizer", "loss", "accumulation", "zero_stage", "compute_dtype", "remat", "trainable", "skip_nonfinite", "seed",
)  # fmt: skip
KNOWN_OF_OPTIMIZERS = (
    "name", "learning_rate", "schedule", "weight_decay", "beta1", "beta2", "epsilon", "momentum", "max_grad_norm",
    "no_decay",
)  # fmt: skip
KNOWN_OF_LOSSES = ("label_smoothing", "z_loss", "router_aux_loss")
"""The settings that this runner follows; others are refused by name."""
COUNT = "count"
"""The optimizer state's name of the number of updates that were not skipped."""


@dataclass(frozen=True)
class Layout:
    """Which rows of a batch are this process's; see `ttpu_train.runner.RowLayout`."""

    shards: int = 1
    process_index: int = 0
    process_count: int = 1
    device_count: int = 1
    share_index: int = 0
    share_count: int = 1


@dataclass(frozen=True)
class Updated:
    """The figures of an update; see `ttpu_train.runner.StepValues`."""

    loss: float
    cross_entropy: float
    tokens: float
    grad_norm: float
    learning_rate: float
    skipped: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluated:
    """The sums of a batch; see `ttpu_train.runner.EvalValues`."""

    cross_entropy: float
    tokens: float
    correct: float
    total: float
    divisor: float
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Pending(Generic[Values]):
    """Figures that devices may still be computing: a tensor, and what makes values of it."""

    tensor: torch.Tensor
    read: Callable[..., Values]

    def ready(self) -> bool:
        """False: torch_xla does not say whether a value is there without waiting for it."""
        return False

    def values(self) -> Values:
        """The figures, when they are there."""
        return self.read(*self.tensor.cpu().tolist())


def row_layout(model: Any) -> Layout:
    """Which rows of a batch a loaded model's mesh gives this process.

    Raises:
        RequestError: this backend did not load the model.
        UnsupportedError: this is one of several processes.
    """
    handle = getattr(model, "ttpu", None)
    if not isinstance(handle, Handle):
        raise RequestError(
            f"a {type(model).__name__} was to be trained, but it was not loaded by this backend: pass what "
            "AutoModelForTPU.from_pretrained(..., backend='torch_xla') returns."
        )
    _, processes = handle.runtime.process()
    if processes > 1:
        raise UnsupportedError(
            f"{processes} processes were to train together, but the torch_xla backend's runner drives the devices of "
            "one process: train on one host, or use backend='jax'."
        )
    if handle.parallelism is None:
        return Layout()
    sizes = dict(handle.parallelism.mesh)
    return Layout(prod(sizes[axis] for axis in batch_axes(handle.parallelism)), device_count=prod(sizes.values()))


class TorchXlaTrainRunner:
    """Trains a loaded model's own parameters, which are its float32 master weights.

    Args:
        model: as the backend loaded it.
        settings: of the run.

    Attributes:
        step_count: updates so far.
        trained: name → trained parameter, with the names of the stock model.
        state: for each name of the optimizer's state, a tensor for each trained parameter.
        count: float32 [], updates that were not skipped.

    Raises:
        RequestError: settings that contradict the model or each other.
        UnsupportedError: the model or the settings cannot be trained with so.
    """

    def __init__(self, model: Any, settings: StepSettings) -> None:
        self.layout = row_layout(model)
        self.settings, self.source = settings, model
        self.step_count = 0
        self._handle: Handle = model.ttpu
        self._runtime = self._handle.runtime
        _refuse(model, settings)
        self._optimizer = optimizer_for(settings.optimizer)
        share_of(settings.optimizer.schedule, 0)
        self._balance = balance_coefficient(settings.loss, model.config)
        usual = "float32" if self._runtime.platform() == "cpu" else "bfloat16"
        self._dtype = TORCH_DTYPES[usual if settings.compute_dtype == "auto" else settings.compute_dtype]
        architecture, parallelism = self._handle.architecture, self._handle.parallelism
        paths = paths_of(model, architecture)
        names = set(trained_names(settings.trainable, paths, architecture.spec.model_type))
        parameters = named(model)
        self._placements = placements(model, architecture, parallelism, settings.zero_stage)
        self._sharding = None
        if parallelism is not None:
            self._sharding = Sharding(parallelism, self._handle.mesh, self._runtime)
        self.trained = {name: one for name, one in parameters.items() if name in names}
        decay, spared = settings.optimizer.weight_decay, settings.optimizer.no_decay
        self._decays = [0.0 if all(matches(path, spared) for path in paths[name]) else decay for name in self.trained]
        for name, one in parameters.items():
            one.requires_grad_(name in names)
        self.parameter_count = sum(one.numel() for name, one in parameters.items() if name in paths)
        self.trained_count = sum(one.numel() for one in self.trained.values())
        chip = self._runtime.chip()
        self.peak_flops = chip_named(chip).bf16_flops if chip and self._dtype is torch.bfloat16 else None
        if settings.remat != "none":
            checkpoint_layers(model)
        elif getattr(model, "supports_gradient_checkpointing", False):
            model._set_gradient_checkpointing(enable=False)
        self.state = {
            name: [self._zeros(path, one, self._placements.state) for path, one in self.trained.items()]
            for name in self._optimizer.per_parameter
        }
        self.count = self._whole(torch.zeros(()))
        self._sums = self._whole(torch.zeros(3))
        if settings.accumulation > 1:
            for name, one in self.trained.items():
                one.grad = self._zeros(name, one, self._placements.gradients)
        self._runtime.sync(wait=True)

    def step(self, batch: Batch) -> Pending[Updated]:
        """Update the weights. The first batch of a shape compiles its program; with an accumulation two, of a part and
        of the update.

        Raises:
            RequestError: rows that the layout's shards and the accumulation do not divide.
            UnsupportedError: packed rows for a model with layers that are not attention.
        """
        parts = self.settings.accumulation
        self._check(batch, parts)
        self.source.train()
        for number in range(parts):
            rows = self._placed(batch, slice(number, None, parts))
            with self._runtime.use_random_state(self._seed(number)), self._autocast():
                sums = summed_loss(self.source, rows, self.settings.loss, self._balance)
                sums.total.backward()
            self._hold_gradients()
            self._sums += torch.stack([sums.total.detach(), sums.cross_entropy.detach(), sums.weight])
            if parts > 1:
                self._runtime.sync()
        figures = self._update()
        self._runtime.sync()
        self.step_count += 1
        return Pending(figures, _updated)

    def evaluate(self, batch: Batch) -> Pending[Evaluated]:
        """The loss of a batch with the weights as they are.

        Raises:
            RequestError: rows that the layout's shards do not divide.
            UnsupportedError: packed rows for a model with layers that are not attention.
        """
        self._check(batch)
        sums: Sums = self._forward(
            lambda rows: summed_loss(self.source, rows, self.settings.loss, self._balance), batch
        )
        figures = _evaluation(sums)
        self._runtime.sync()
        return Pending(figures, Evaluated)

    def predict(self, batch: Batch) -> tuple[Pending[Evaluated], np.ndarray]:
        """What `evaluate` gives, and the logits, float32 [rows, seq, vocab].

        Raises:
            RequestError: rows that the layout's shards do not divide.
            UnsupportedError: packed rows for a model with layers that are not attention.
        """
        self._check(batch)
        sums, logits = self._forward(
            lambda rows: sums_and_logits(self.source, rows, self.settings.loss, self._balance), batch
        )
        figures = _evaluation(sums)
        (whole,) = self._runtime.fetch([logits])
        return Pending(figures, Evaluated), whole.numpy()

    def any_process(self, flag: bool) -> bool:
        """`flag`, as there is one process."""
        return flag

    def compiled_bytes(self) -> int | None:
        """None: torch_xla does not say what a compiled program holds."""
        return None

    def checkpoint_files(self) -> SafetensorsFiles:
        """What writes and reads the tensors of this run's checkpoints."""
        from ttpu_torch_xla.train.checkpoints import SafetensorsFiles

        return SafetensorsFiles(self)

    def save_pretrained(self, folder: Path, dtype: str) -> Path:
        """Write the weights as a Hugging Face checkpoint, in `dtype`."""
        from ttpu_torch_xla.train.export import write

        state = on_host(self.source.state_dict(keep_vars=True))
        write(self.source, folder, state, dtype)
        if self._handle.tokenizer is not None:
            self._handle.tokenizer.save_pretrained(str(folder))
        return folder

    def model(self) -> Any:
        """The loaded model, whose parameters are the weights as they are, to generate with."""
        return self.source.eval()

    # -- for checkpoints --

    def stored_tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """All parameters by name and the optimizer's state by name, on devices."""
        state = {
            f"{name}.{path}": one
            for name, held in self.state.items()
            for path, one in zip(self.trained, held, strict=True)
        }
        return dict(named(self.source)), {COUNT: self.count, **state}

    def put(self, stored: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], step: int) -> None:
        """Take over tensors of the host as `stored_tensors` names them."""
        parameters, held = self.stored_tensors()
        with torch.no_grad():
            for tensors, given, specs in (
                (parameters, stored, self._placements.weights),
                (held, state, self._placements.state),
            ):
                for name, one in tensors.items():
                    path = name if given is stored else name.partition(".")[2]
                    there = self._placed_tensor(given[name], specs.get(path, ((),) * one.ndim))
                    one.copy_(there)
        self._runtime.sync(wait=True)
        self.step_count = step

    # -- the program --

    def _update(self) -> torch.Tensor:
        """Record the update of all trained parameters from their gradients; returns the figures in the order of
        `Updated`."""
        settings, parts = self.settings, self.settings.accumulation
        rate_now = settings.optimizer.learning_rate * share_of(settings.optimizer.schedule, self.step_count)
        rate = self._whole(torch.tensor([rate_now])).reshape(())  # a scalar 0 would be a constant of the program
        with torch.no_grad():
            total, cross_entropy, weight = self._sums.unbind()
            count = torch.where(weight > 0, weight, 1.0)
            gradients = [
                torch.zeros_like(one) if one.grad is None else one.grad / count for one in self.trained.values()
            ]
            norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
            if settings.optimizer.max_grad_norm is not None:
                scale = torch.clamp(settings.optimizer.max_grad_norm / (norm + CLIP_EPSILON), max=1.0)
                gradients = [gradient * scale for gradient in gradients]
            skipped = torch.zeros_like(norm, dtype=torch.bool)
            if settings.skip_nonfinite:
                skipped = ~(torch.isfinite(norm) & torch.isfinite(total))
            after = [[one.clone() for one in held] for held in self.state.values()]
            directions = self._optimizer.directions(gradients, after, self.count)
            for one, direction, decay in zip(self.trained.values(), directions, self._decays, strict=True):
                updated = one + rate * (direction - decay * one if decay else direction)
                one.copy_(torch.where(skipped, one, updated))
            for held, new in zip(self.state.values(), after, strict=True):
                for moment, value in zip(held, new, strict=True):
                    moment.copy_(torch.where(skipped, moment, value))
            self.count += torch.where(skipped, 0.0, 1.0)
            figures = torch.stack([total / count, cross_entropy / count, weight, norm, rate, skipped.float()])
            self._sums.zero_()
            for one in self.trained.values():
                if parts > 1 and one.grad is not None:
                    one.grad.zero_()
                else:
                    one.grad = None
        return figures

    def _hold_gradients(self) -> None:
        """Shard gradients as the optimizer is given them."""
        if self._sharding is None:
            return
        for name, one in self.trained.items():
            if one.grad is not None:
                self._runtime.shard(one.grad, self._sharding.mesh, self._placements.gradients[name])

    def _forward(self, compute: Callable[[Rows], Any], batch: Batch) -> Any:
        self.source.eval()
        with torch.no_grad(), self._autocast():
            return compute(self._placed(batch))

    def _autocast(self) -> Any:
        return torch.autocast(device_type(), dtype=torch.bfloat16, enabled=self._dtype is torch.bfloat16)

    def _seed(self, part: int) -> int:
        """Of what is random in a part of an update, so that a resumed run draws what it would have drawn."""
        return (self.settings.seed * 1_000_003 + self.step_count * self.settings.accumulation + part) % 2**31

    # -- placement --

    def _check(self, batch: Batch, parts: int = 1) -> None:
        rows, shards = batch.tokens.shape[0], self.layout.shards
        if rows % (shards * parts) or not rows:
            raise RequestError(
                f"a batch of {rows} rows was given, but {shards} devices take equal shares of it"
                f"{f' in {parts} parts' if parts > 1 else ''}: give a multiple of {shards * parts} rows."
            )
        spec = self._handle.architecture.spec
        others = {type(layer.mixer).__name__ for layer in spec.layers if not isinstance(layer.mixer, AttentionSpec)}
        if batch.segments is not None and others:
            raise UnsupportedError(
                f"packed rows were given to a {spec.model_type} model, but transformers does not divide the sequences "
                f"of a row in its layers without attention ({', '.join(sorted(others))}): use packing=False."
            )

    def _placed(self, batch: Batch, part: slice = slice(None)) -> Rows:
        """Rows on the devices, each of which receives its own."""
        host = rows_of(batch, part)

        def put(array: np.ndarray) -> torch.Tensor:
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            spec = () if self._sharding is None else self._sharding.partition_spec(
                (axes.BATCH, axes.SEQUENCE), tuple(tensor.shape)
            )  # fmt: skip
            return self._placed_tensor(tensor, spec)

        return Rows(
            put(host.tokens),
            put(host.targets),
            put(host.weights),
            put(host.positions),
            None if host.mask is None else put(host.mask),
        )

    def _placed_tensor(self, tensor: torch.Tensor, spec: Any) -> torch.Tensor:
        there = self._runtime.put(tensor)
        if self._sharding is not None:  # also what is whole, or the first update would be of another program
            self._runtime.shard(there, self._sharding.mesh, spec)
        return there

    def _zeros(self, name: str, like: torch.Tensor, specs: Mapping[str, Any]) -> torch.Tensor:
        return self._placed_tensor(torch.zeros(like.shape), specs.get(name, ((),) * like.ndim))

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._placed_tensor(tensor, ((),) * tensor.ndim)


def _evaluation(sums: Sums) -> torch.Tensor:
    """The figures in the order of `Evaluated`, in one tensor [figures]."""
    return torch.stack([sums.cross_entropy, sums.weight, sums.correct, sums.total, sums.weight])


def _updated(
    loss: float, cross_entropy: float, tokens: float, grad_norm: float, learning_rate: float, skipped: float
) -> Updated:
    return Updated(loss, cross_entropy, tokens, grad_norm, learning_rate, bool(skipped))


def _refuse_unknown(settings: Any, known: tuple[str, ...]) -> None:
    for one in fields(settings):
        value = getattr(settings, one.name)
        usual = one.default_factory() if one.default_factory is not MISSING else one.default
        if one.name == "adapters" and value is not None:
            raise UnsupportedError(
                "adapters were asked for (peft_config or adapter_name_or_path), but the torch_xla backend trains whole "
                "weights only: leave them out, or use backend='jax'."
            )
        if one.name == "objective" and value is not None:
            raise UnsupportedError(
                f"method={type(value).__name__.lower()!r} was asked for, but the torch_xla backend minimizes the "
                "cross-entropy of the next token alone: leave method out, or use backend='jax'."
            )
        if one.name not in known and value != usual:
            raise UnsupportedError(
                f"{one.name}={value!r} was asked for, but training on the torch_xla backend knows nothing of it: leave "
                "it out, or use backend='jax'."
            )


def _refuse(model: Any, settings: StepSettings) -> None:
    refuse_undescribed(model.ttpu.architecture, "trained")
    _refuse_unknown(settings, KNOWN)
    _refuse_unknown(settings.optimizer, KNOWN_OF_OPTIMIZERS)
    _refuse_unknown(settings.loss, KNOWN_OF_LOSSES)
    if model.ttpu.quantization is not None:
        raise UnsupportedError(
            "a quantized model was to be trained, but updates are smaller than the steps between its numbers: load the "
            "model without quantization."
        )
    others: Iterable[torch.dtype] = {one.dtype for one in model.parameters()} - {torch.float32}
    if others:
        raise RequestError(
            f"a model with weights in {', '.join(str(one).removeprefix('torch.') for one in others)} was to be "
            "trained, but master weights are float32: load it with dtype='float32'; bf16=True computes in bfloat16 all "
            "the same."
        )
    if settings.compute_dtype not in ("auto", "float32", "bfloat16"):
        raise UnsupportedError(
            f"compute_dtype={settings.compute_dtype!r} was asked for, but the torch_xla backend trains in float32 and "
            "bfloat16: use one of these."
        )
    if settings.remat not in ("auto", "full", "none"):
        raise UnsupportedError(
            f"remat={settings.remat!r} was asked for, but the torch_xla backend computes whole layers again, or "
            "nothing, and keeps no activations by name: use 'full', 'none', or 'auto', which is 'full'."
        )
    if settings.remat != "none" and not getattr(model, "supports_gradient_checkpointing", False):
        raise UnsupportedError(
            f"remat={settings.remat!r} was asked for, but transformers cannot compute the layers of "
            f"{type(model).__name__} again: use remat='none'."
        )
    if settings.accumulation < 1:
        raise RequestError(
            f"an accumulation of {settings.accumulation} parts was asked for, but a batch has at least 1: raise it."
        )
