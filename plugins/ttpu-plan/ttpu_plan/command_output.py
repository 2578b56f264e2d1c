"""What `ttpu plan` prints: plans as tables, or as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ttpu_core.cli.console import counted, in_bytes, in_milliseconds, stdout_console
from ttpu_core.sharding.hardware import GIB
from ttpu_plan.compiled_plans import Verified

if TYPE_CHECKING:
    from rich.table import Table

    from ttpu_core.architecture import Architecture
    from ttpu_core.sharding.verification import Verification
    from ttpu_plan.plan import Plan
    from ttpu_plan.planner import NoFit, Request

MOST_CHIPS = 256  # of the slices that are tried where none is named
NOTE = (
    "Sizes are of one device at the peak. Memory is predicted from the arrays that the programs hold; times are "
    "rooflines, good for comparing meshes. Nothing ran on a TPU."
)
LEFT = ("slice", "mesh", "bound by")  # columns of words
VERIFIED_NOTE = "Compiled figures are the TPU compiler's own; its times are a walk through its schedule."


def plans_title(model: str, request: Request) -> str:
    """What the plans are for, as their table and picture say it."""
    rows = "" if request.batch is None else f"{counted(request.batch, 'row')}, "
    return f"{model}: {request.purpose}, {rows}{request.tokens:,} tokens of context"


def plans_json(
    checkpoint: str,
    architecture: Architecture,
    topology: str | None,
    request: Request,
    shown: Sequence[Plan],
    without: Sequence[str],
    verified: Verified,
) -> dict[str, Any]:
    """The JSON object, but for what a command adds to it.

    Args:
        checkpoint: as it was given.
        architecture: of the model.
        topology: the slices, or None.
        request: what is planned.
        shown: the plans, the first to be taken first.
        without: generations of which no slice serves.
        verified: what the compiler says, of plans that it compiled.
    """
    from ttpu_core.quantization.report import stored_formats
    from ttpu_core.sharding.hardware import parse_topology
    from ttpu_plan.plan_file import plan_json

    if topology is not None:
        batch: int | None = request.rows(parse_topology(topology).num_devices)
    else:  # where nothing is said, training takes as many rows as each slice has devices
        batch = request.batch if request.purpose == "training" else request.rows(1)
    rows = []
    for one in shown:
        compiled = {"compiled": [asdict(each) for each in verified[one]]} if one in verified else {}
        rows.append({**plan_json(one), "parallelism": str(one.parallelism), "layout": one.layout, **compiled})
    return {
        "checkpoint": checkpoint,
        "model_type": architecture.spec.model_type,
        "num_parameters": architecture.spec.num_parameters,
        "kernel_formats": dict(stored_formats(architecture.spec)),
        **request_json(request, topology, batch),
        "note": NOTE,
        "patch_packs": list(architecture.patch_packs),
        "kernels": _kernels(architecture, shown),
        "plans": rows,
        "without": list(without),
    }


def request_json(request: Request, topology: str | None, batch: int | None) -> dict[str, Any]:
    """What was asked for."""
    return {
        "purpose": request.purpose,
        "request": {
            "task": request.purpose,
            "topology": topology,
            "batch": batch,
            "context": request.tokens,
            "dtype": request.dtype,
            "quantization": request.quantization,
            "kv_cache": request.kv_cache,
            "new_tokens": request.new_tokens,
            "update": None if request.update is None else asdict(request.update),
        },
    }


def nothing_fits(reason: str | None, nothing: NoFit | None) -> dict[str, Any] | None:
    """What is known of it: only the reason where a compiler refused what was predicted to fit."""
    from ttpu_plan.plan_file import plan_json

    if reason is None:
        return None
    remedies = nothing.remedies if nothing else ()
    changes = [{"change": one.change, "plan": plan_json(one.plan)} for one in remedies]
    return nothing_json(reason, nothing.missing_bytes if nothing else None, changes)


def nothing_json(reason: str, missing_bytes: int | None, remedies: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """`nothing_fits` of the JSON, which is null where a plan fits."""
    return {"reason": reason, "missing_bytes": missing_bytes, "remedies": list(remedies)}


def print_plans(
    checkpoint: str,
    architecture: Architecture,
    request: Request,
    shown: Sequence[Plan],
    without: Sequence[str],
    verified: Verified,
) -> None:
    """Print the tables.

    Args:
        checkpoint: as it was given.
        architecture: of the model.
        request: what is planned.
        shown: the plans, the first to be taken first.
        without: generations of which no slice serves.
        verified: what the compiler says, of plans that it compiled.
    """
    from rich import box
    from rich.table import Table

    from ttpu_core.quantization.report import stored_formats

    console = stdout_console()
    if shown:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=plans_title(checkpoint, request), title_justify="left")
        rows = [_cells(one) for one in shown]
        labels = list(dict.fromkeys(label for row in rows for label in row))
        for label in labels:
            table.add_column(label, justify="left" if label in LEFT else "right", no_wrap=True)
        for one, row in zip(shown, rows, strict=True):
            table.add_row(*(row.get(label, "") for label in labels), style="" if one.fits else "dim")
        console.print(table)
    lines = [f"{chip}: not on {MOST_CHIPS} chips" for chip in without]
    lines += dict.fromkeys(one.note for one in shown if one.note)
    if lines:
        console.print("\n".join(lines), end="\n\n")
    if verified:
        console.print(_compiled_table(verified))
    spec = architecture.spec
    kernels = [f"{operation}: {words}" for operation, words in _kernels(architecture, shown).items()]
    if architecture.patch_packs:
        kernels.append(f"patch packs: {', '.join(architecture.patch_packs)}")
    if kernels:
        console.print("\n".join(kernels), end="\n\n")
    stored = "; ".join(stored_formats(spec)) or request.dtype
    cache = f", keys and values in {request.kv_cache}" if request.kv_cache else ""
    words = f"{spec.model_type}, {spec.num_parameters:,} parameters in {request.quantization or stored}{cache}. {NOTE}"
    console.print(f"{words} {VERIFIED_NOTE}" if verified else words)


def _cells(one: Plan) -> dict[str, str]:
    """Column → text of one plan's row, sizes in GiB."""
    memory, programs = asdict(one.memory), {program.workload.task: program for program in one.programs}
    others = ("gradients", "optimizer", "activations", "logits") if "train" in programs else ("cache", "activations")
    if one.is_served:
        others = (*others, "sampling")
    cells = {
        "slice": one.topology,
        "chips": f"{one.slices.num_chips:,}",
        "mesh": one.layout,
        "GiB": f"{one.memory.total / GIB:.1f} of {one.hbm_bytes / GIB:.1f}",
        **{name: f"{memory[name] / GIB:.2f}" for name in ("weights", *others, "temporaries")},
    }
    for task, label in (("decode", "decode step"), ("mixed", "mixed step"), ("prefill", "prefill"), ("train", "step")):
        if task in programs:
            cells[label] = in_milliseconds(programs[task].time.seconds)
    cells["tokens/s"] = f"{one.tokens_per_second:,.0f}"
    cells["bound by"] = one.programs[0].time.bound
    return cells


def _compiled_table(verified: Verified) -> Table:
    """Prediction and compiler side by side, a program a line."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="compiled", title_justify="left")
    for label in ("slice", "mesh", "program"):
        table.add_column(label, no_wrap=True)
    for label in ("predicted GiB", "GiB", "error", "predicted", "time"):
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("exchanged on each device, and who says so", overflow="fold")
    for its, compiled in verified.items():
        for one in compiled:
            program = its.program(one.task)
            assert program is not None
            found = ("", "does not fit", "", "", "", one.refused)
            if one.peak_bytes is not None:
                error = program.memory.of_program / one.peak_bytes - 1
                sizes = f"{program.memory.of_program / GIB:.2f}", f"{one.peak_bytes / GIB:.2f}", f"{error:+.1%}"
                times = in_milliseconds(program.time.seconds), in_milliseconds(one.seconds)
                found = (*sizes, *times, _compiled_words(one))
            table.add_row(its.topology, its.layout, one.task, *found)
    return table


def _compiled_words(one: Verification) -> str:
    exchanged = ", ".join(f"{counted(count, op)} ({in_bytes(size)})" for op, count, size in one.collectives)
    when = "compiled before" if one.cached else f"compiled in {one.compile_seconds:.0f} s"
    return f"{exchanged or 'nothing'}; {when} by {one.compiler}"


def _kernels(architecture: Architecture, shown: Sequence[Plan]) -> dict[str, str]:
    """Operation → what the first plan runs it by on a TPU, and why; {} where no backend that knows is installed."""
    from dataclasses import replace

    from ttpu_core.backend import Plans
    from ttpu_core.quantization.quantize import planned_spec
    from ttpu_core.registry import default_registry
    from ttpu_plan.served import capable_backend

    backend = capable_backend(default_registry(), Plans)
    if not isinstance(backend, Plans):
        return {}
    if not shown:
        return dict(backend.planned_kernels(architecture))
    plan, workloads = shown[0], [program.workload for program in shown[0].programs]
    spec = planned_spec(architecture.spec, workloads[0].quantization)
    return dict(
        backend.planned_kernels(
            replace(architecture, spec=spec),
            served=plan.is_served,
            shards_sequence=dict(plan.mesh).get("sequence", 1) > 1,
            parallelism=plan.replica,
            rows=tuple(dict.fromkeys(one.tokens * (1 if one.step else one.batch) for one in workloads)),
        )
    )
