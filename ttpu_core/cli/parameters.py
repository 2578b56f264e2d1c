"""`ttpu parameters` takes a config.json and prints every parameter of the model: its shape, its logical axes and the
checkpoint tensors that make it. No weight is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli.console import counted, print_json, stdout_console

if TYPE_CHECKING:
    from ttpu_core.architecture import Architecture
    from ttpu_core.mapping import Expression

MOST_PARTS = 4
"""Parts of a rule that are shown; the rest is counted."""


def parameters(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint's directory, a config.json, or a Hub id org/name."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    every_layer: Annotated[bool, typer.Option("--all", help="Show every layer, not one of each kind.")] = False,
    patch_pack: Annotated[
        list[str] | None,
        typer.Option("--patch-pack", metavar="NAME", help="An installed patch pack to apply; repeat for more."),
    ] = None,
) -> None:
    """Print the parameter table: each parameter's path, shape, logical axes, and how checkpoint tensors make it.

    Needs a config.json only. Layers that are described alike are shown once, unless --all is given.

    Examples:

      ttpu parameters ./llama/config.json

      ttpu parameters ./llama --all

      ttpu parameters ./llama --json | jq '.parameters[] | select(.path | test("qkv"))'
    """
    from ttpu_core.checkpoint import open_checkpoint, open_config
    from ttpu_core.registry import default_registry

    here = Path(checkpoint).expanduser().exists()
    config = open_config(checkpoint) if here else open_checkpoint(checkpoint).config
    architecture = default_registry().architecture(config, patch_pack)
    if as_json:
        print_json(_facts(architecture))
    else:
        _print(architecture, every_layer)


def _facts(architecture: Architecture) -> dict[str, Any]:
    mapping, spec = architecture.mapping, architecture.spec
    return {
        "model_type": spec.model_type,
        "total": spec.num_parameters,
        "parameters": [
            {
                "path": path,
                "shape": list(parameter.shape),
                "axes": list(parameter.axes),
                "dtype": parameter.dtype,
                "trained": parameter.trained,
                "made_of": made_of(mapping[path]),
                "tensors": [{"name": leaf.name, "shape": list(leaf.shape)} for leaf in mapping[path].leaves()],
            }
            for path, parameter in spec.parameters.items()
        ],
        "tied": list(mapping.tied),
        "ignored": list(mapping.ignored),
        "prefixes": [list(pair) for pair in mapping.prefixes],
        "alternatives": len(mapping.alternatives),
    }


def made_of(rule: Expression) -> str:
    """How checkpoint tensors make a parameter: names with their views, `concat` and `stack` with their axis."""
    from ttpu_core.mapping import Concat, Stack, Tensor
    from ttpu_core.mapping.expressions import Padded

    if isinstance(rule, Tensor):
        return rule.name + "".join(_view(operation, argument) for operation, argument in rule.views)
    if isinstance(rule, Padded):
        return f"padded({made_of(rule.part)})"
    assert isinstance(rule, Concat | Stack)
    parts = [made_of(part) for part in rule.parts[:MOST_PARTS]]
    if len(rule.parts) > MOST_PARTS:
        parts = [parts[0], f"… {len(rule.parts) - 2:,} more …", made_of(rule.parts[-1])]
    axis = f", axis={rule.axis}" if rule.axis else ""
    return f"{type(rule).__name__.lower()}({', '.join(parts)}{axis})"


def _view(operation: str, argument: Any) -> str:
    if operation == "take":
        return f"[{', '.join(_index(part) for part in argument)}]"
    return f".{operation}({', '.join(map(str, argument))})"


def _index(part: Any) -> str:
    if isinstance(part, int):
        return str(part)
    start, stop, step = ("" if bound is None else str(bound) for bound in part)
    return f"{start}:{stop}" + (f":{step}" if step else "")


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    path: str
    shape: str
    axes: str
    rule: str


def rows_of(architecture: Architecture, every_layer: bool) -> Iterator[Row]:
    """The lines of the table. Of layers that are described alike the first one is shown, unless all are asked for."""
    spec, mapping = architecture.spec, architecture.mapping
    first = {index for index, layer in enumerate(spec.layers) if layer not in spec.layers[:index]}
    for path, parameter in spec.parameters.items():
        found = re.match(r"layers\.(\d+)\.", path)
        if found and not every_layer and int(found[1]) not in first:
            continue
        shape, axes = " × ".join(map(str, parameter.shape)), ", ".join(axis or "–" for axis in parameter.axes)
        kept = f" ({parameter.dtype})" if parameter.dtype else ""
        yield Row(path, shape + kept, axes, made_of(mapping[path]))


def _print(architecture: Architecture, every_layer: bool) -> None:
    from rich import box
    from rich.table import Table

    spec, mapping = architecture.spec, architecture.mapping
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("parameter", "shape", "logical axes", "made of"):
        table.add_column(column, overflow="fold")
    for row in rows_of(architecture, every_layer):
        table.add_row(row.path, row.shape, row.axes, row.rule)
    console = stdout_console()
    console.print(table)
    alike: dict[int, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        alike.setdefault(spec.layers.index(layer), []).append(index)
    for shown, same in alike.items():
        if len(same) > 1 and not every_layer:
            console.print(f"layer {shown} stands for layers {', '.join(map(str, same))}")
    for title, names in (("tied", mapping.tied), ("ignored", mapping.ignored)):
        if names:
            console.print(f"{title}: {', '.join(names)}", markup=False)
    for old, new in mapping.prefixes:
        console.print(f"also read: {old}… as {new}…", markup=False)
    console.print(f"{counted(len(spec.parameters), 'parameter')}, {counted(spec.num_parameters, 'element')}")
