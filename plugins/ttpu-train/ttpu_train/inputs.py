"""Checks what a `Trainer` is given before it trains: the model, the options, the folder of the run, the data, the
backend."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.spec import ArchitectureSpec
from ttpu_core.spec.context import check_context
from ttpu_train.arguments import TrainingArguments


def check_kinds(model: Any, args: Any, load_options: Any, tokenizers: tuple[Any, Any]) -> None:
    """Refuse what is no model, arguments and options that are no mapping, two tokenizers, and the name of one.

    Raises:
        RequestError: it is so.
    """
    if not isinstance(model, str | Path) and getattr(described(model), "backend", None) is None:
        plain = model is None or isinstance(model, bool | int | float | list | tuple | Mapping)
        given = repr(model) if plain else f"a {type(model).__name__}"
        raise RequestError(
            f"model={given} was given, but it is a checkpoint's folder or Hub id, or a model that "
            "AutoModelForTPU.from_pretrained opened: pass one of these."
        )
    if args is not None and not isinstance(args, TrainingArguments | Mapping):
        kind = f"{type(args).__module__.partition('.')[0]}.{type(args).__name__}"
        raise RequestError(
            f"args was given as a {kind}, but it is ttpu.TrainingArguments, whose names are those of transformers, or "
            "a mapping: pass one of these, or the fields by name."
        )
    first, second = tokenizers
    if first is not None and second is not None and first is not second:
        raise RequestError(
            "processing_class and tokenizer were given, but both are the tokenizer of the data: pass one of them."
        )
    given = second if first is None else first
    if isinstance(given, str | Path):
        raise RequestError(
            f"processing_class={str(given)!r} was given, but it is a tokenizer of transformers: pass "
            f"AutoTokenizer.from_pretrained({str(given)!r})."
        )
    if load_options is not None and not isinstance(load_options, Mapping):
        raise RequestError(
            f"load_options={load_options!r} was given, but it is a mapping, such as {{dtype: float32}}: correct it."
        )


def check_opened(model: Any, strategy: Any, load_options: Mapping[str, Any] | None) -> None:
    """Refuse what is said of opening a model that is open already.

    Raises:
        RequestError: there is something.
    """
    given = [
        name for name, value in (("parallelism_strategy", strategy), ("load_options", load_options or None))
        if value is not None
    ]  # fmt: skip
    if given and not isinstance(model, str | Path):
        raise RequestError(
            f"{' and '.join(given)} was given with a loaded {type(described(model)).__name__}, which is on its devices "
            "already: give it to AutoModelForTPU.from_pretrained, or pass the checkpoint's folder as model."
        )


def plain_metrics(found: Any) -> dict[str, Any]:
    """What compute_metrics returned, with numbers of numpy, torch and jax as Python's, because logs and checkpoints
    are JSON.

    Raises:
        RequestError: it is no mapping.
    """
    if not isinstance(found, Mapping):
        raise RequestError(
            f"compute_metrics returned {type(found).__name__} {str(found)[:60]!r}, but metrics by name are needed: "
            'return a mapping, such as {"accuracy": 0.5}.'
        )
    return {str(name): value.tolist() if hasattr(value, "tolist") else value for name, value in found.items()}


def callbacks_in(given: Any) -> tuple[Any, ...]:
    """The callbacks that a trainer was given; None is none.

    Raises:
        RequestError: it is no list.
    """
    if given is not None and not isinstance(given, Iterable):
        raise RequestError(
            f"callbacks was given as a {type(given).__name__}, but it is a list: write callbacks=[...] around it."
        )
    return tuple(given or ())


def make_folder(folder: Path) -> None:
    """Make the folder of a run.

    Raises:
        RequestError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RequestError(
            f"output_dir={str(folder)!r} was given for the files of the run, but it cannot be written to "
            f"({error.strerror}): name a folder that can be."
        ) from error


def kept(dataset: Any) -> Any:
    """A dataset that can be read more than once."""
    if isinstance(dataset, Mapping):
        return {name: kept(one) for name, one in dataset.items()}
    return list(dataset) if isinstance(dataset, Iterator) else dataset


def parts_of(eval_dataset: Any) -> list[Any]:
    """The datasets that are evaluated one after another: those of a mapping, or the only one."""
    return list(eval_dataset.values()) if isinstance(eval_dataset, Mapping) else [eval_dataset]


def described(model: Any) -> Any:
    """What a loaded model says of itself: a stock model of transformers does so in its attribute `ttpu`."""
    return getattr(model, "ttpu", model)


def training_backend(name: str | None) -> Any:
    """An installed backend that trains.

    Raises:
        MissingDependencyError: it is not installed.
        UnsupportedError: it trains no models.
    """
    from ttpu_core.backend import Trains
    from ttpu_core.registry import default_registry

    runs = default_registry().backend(name)
    if not isinstance(runs, Trains):
        raise UnsupportedError(
            f"a model was to be trained by the backend {runs.name!r}, which trains none: use backend='jax' or "
            "'torch_xla'."
        )
    return runs


def warn_of_long_rows(max_length: int, spec: Any) -> None:
    """Say that rows are longer than the model's positions. Training so is how contexts are extended, so that it is
    not refused, unless positions are learned.

    Raises:
        RequestError: they are.
    """
    if isinstance(spec, ArchitectureSpec):
        check_context(spec, max_length, trains=True, name="max_length")
