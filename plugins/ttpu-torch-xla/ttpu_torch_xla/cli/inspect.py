"""`ttpu inspect` finds the operations that slow a stock PyTorch model down on a lazy runtime, and the patches that
remove them. It takes a checkpoint or only its config.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ttpu_core.cli.console import counted, note, print_json, stderr_console, stdout_console
from ttpu_core.errors import CheckpointError, RequestError, UnsupportedError


def inspect(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint's directory, a config.json, or a Hub id org/name."),
    ],
    backend: Annotated[str, typer.Option(help="The backend; torch_xla runs stock models.")] = "torch_xla",
    as_it_is: Annotated[bool, typer.Option("--as-it-is", help="Do not make the model small first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Find what makes a stock PyTorch model slow on torch_xla, and which patch removes it.

    A small model with the checkpoint's config and random weights runs forward and
    generates, first as transformers has it, then with one patch more at a time.
    Reported are graph breaks (the host waits for a value), operations that fall
    back to the host, and recompilations. No weight is read.

    Examples:

      ttpu inspect ./gemma
      ttpu inspect ./gemma/config.json --backend torch_xla
      ttpu inspect ./gemma --json | jq '.left'

    \f
    Raises:
        RequestError: another backend than torch_xla was given.
    """
    if backend != "torch_xla":
        raise RequestError(
            f"backend {backend!r} was to be inspected, but only torch_xla runs transformers' own models, which is what "
            "is inspected: leave --backend out."
        )
    _compile_quickly()
    from rich.progress import BarColumn, Progress, TextColumn

    from ttpu_torch_xla.inspector.inspect import build, inspect_model, stages
    from ttpu_torch_xla.runtime import current

    config, architecture = _config(checkpoint, as_it_is)
    model = build(config, shrunk=not as_it_is)
    with Progress(
        TextColumn("inspecting"), BarColumn(), TextColumn("{task.description}"), console=stderr_console(),
        disable=quiet, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=len(stages(architecture)))
        found = inspect_model(
            model,
            architecture,
            current(),
            tell=lambda stage, settled: progress.update(task, completed=settled, description=stage),
        )
    facts = {
        "checkpoint": checkpoint,
        "model_type": architecture.spec.model_type,
        "layers": int(config.num_hidden_layers),
        "as_it_is": as_it_is,
        "found": [_facts(one) for one in found],
        "left": [_facts(one) for one in found if one.removed_by is None],
    }
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def _compile_quickly() -> None:
    """Tell XLA to optimise little, since what is compiled here runs once or twice; read when the runtime starts."""
    flags = os.environ.get("XLA_FLAGS", "")
    for flag in ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"):
        if flag.partition("=")[0] not in flags:
            flags = f"{flags} {flag}".strip()
    os.environ["XLA_FLAGS"] = flags


def _config(name: str, as_it_is: bool) -> tuple[Any, Any]:
    """The text model's transformers config, small unless `as_it_is`, and the architecture."""
    import transformers

    from ttpu_core.checkpoint import open_checkpoint, open_config
    from ttpu_core.registry import default_registry
    from ttpu_torch_xla.fallback import stock_architecture
    from ttpu_torch_xla.inspector.shrink import small_config, small_stock_config

    path = Path(name).expanduser()
    if path.is_file():
        described = open_config(name)
    else:
        opened = open_checkpoint(name)
        described, path = opened.config, opened.path
    has_plugin = default_registry().is_described(described.model_type)
    architecture = default_registry().architecture(described) if has_plugin else None
    try:
        config = transformers.AutoConfig.from_pretrained(str(path)).get_text_config()  # takes a file of any name too
    except Exception as error:  # config classes raise many kinds for values that they refuse
        asked = f"{name} was to be inspected, but transformers {transformers.__version__}"
        if described.model_type not in transformers.CONFIG_MAPPING:
            raise UnsupportedError(
                f"{asked} has no model of type {described.model_type!r}: update transformers, or use backend='jax' for "
                "it."
            ) from error
        raise CheckpointError(
            f"{asked} refuses its config ({type(error).__name__}: {' '.join(str(error).split())[:300]}): correct it."
        ) from error
    if architecture is None:
        return (config if as_it_is else small_stock_config(config)), stock_architecture(described, config)
    return (config if as_it_is else small_config(config, architecture)), architecture


def _facts(one: Any) -> dict[str, Any]:
    return {
        "during": one.during,
        "kind": one.finding.kind,
        "what": one.finding.what,
        "where": one.finding.where,
        "times": one.times,
        "removed_by": one.removed_by,
    }


def _print(facts: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    found, left = facts["found"], facts["left"]
    if found:
        table = Table("during", "found", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("times", justify="right")
        table.add_column("removed by", max_width=16)  # leaves room for places in 80 columns
        for one in sorted(found, key=lambda one: (one["during"], one["kind"], one["what"])):
            what = "\n".join(line for line in (f"{one['kind']}: {one['what']}", one["where"]) if line)
            cells = (one["during"], what, str(one["times"]), one["removed_by"] or "—")
            table.add_row(*(Text(cell, overflow="fold") for cell in cells))
        stdout_console().print(table)
    layers = counted(facts["layers"], "layer" if facts["as_it_is"] else "small layer")
    print(
        f"{facts['model_type']} ({layers}): {counted(len(found), 'finding')}, of which this backend's patches leave "
        f"{len(left)}."
    )
    for one in left:
        where = f" at {one['where']}" if one["where"] else ""
        note(
            f"still there during {one['during']}: {one['kind']}, {one['what']}{where}, {counted(one['times'], 'time')}"
        )
