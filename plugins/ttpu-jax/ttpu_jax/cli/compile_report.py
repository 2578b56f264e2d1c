"""`ttpu compile-report` compiles a model's decode step and prefill for TPU slices and prints the compiler's figures as
a table or as JSON. It takes a checkpoint or only its config.json, and needs neither a TPU nor weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli.console import counted, in_bytes, print_json, stderr_console, stdout_console, warnings_as_lines
from ttpu_core.sharding.verification import MEASURED_NOTE

if TYPE_CHECKING:
    from ttpu_core.loading import Purpose
    from ttpu_core.services import Planner
    from ttpu_core.spec import ArchitectureSpec
    from ttpu_jax.aot.report import ProgramReport, UnmodelledTotal

NOTE = (
    "Figures of the TPU compiler (libtpu) for a slice that was not there: nothing ran on a TPU. Memory is what the "
    "compiled program will take; times are a walk through the compiler's own schedule, good for comparing programs. "
    f"{MEASURED_NOTE}"
)


WITHOUT_PLUGIN = (
    "No plugin describes this model type: what was compiled is transformers' own code. Which masks it wants is known "
    "after its weights are read, and may change the programs."
)

USUAL: Mapping[str, Any] = {
    "layers": "unrolled",
    "attn_implementation": "auto",
    "experts": "auto",
    "quantization": None,
    "sharding_rules": None,
    "plan": None,
    "residual_stream": "auto",
    "remat": "full",
    "without": "",
}
"""Options that need an architecture, and what they are without being asked for."""


class TaskChoice(StrEnum):
    """Which programs are compiled."""

    decode = "decode"
    prefill = "prefill"
    train = "train"
    both = "both"


class ExpertsChoice(StrEnum):
    """How experts are computed."""

    auto = "auto"
    grouped = "grouped"
    few = "few"
    exchanged = "exchanged"


class LayersChoice(StrEnum):
    """How layers are compiled."""

    unrolled = "unrolled"
    scan = "scan"


class StreamChoice(StrEnum):
    """Where the residual stream of inference is cut."""

    auto = "auto"
    whole = "whole"


class RematChoice(StrEnum):
    """What the backward pass computes again."""

    full = "full"
    attention = "attention"
    gate = "gate"
    dots = "dots"
    mlp = "mlp"
    none = "none"


def compile_report(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint's directory, a config.json, or a Hub id org/name."),
    ],
    topology: Annotated[
        list[str], typer.Option("--topology", metavar="NAME", help="A TPU slice, as in v5e:2x4; repeat for more.")
    ],
    task: Annotated[
        TaskChoice, typer.Option(help="One token a row, a whole prompt, both, or a training step.")
    ] = TaskChoice.both,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the decode or training step.")] = 32,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cache slots of each row of the decode step, or tokens of each row to train on.",
            show_default="2048, or the model's",
        ),
    ] = None,
    prefill: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of the prompt that prefill reads, in one row.", show_default="2048, or the model's"
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and cache: bfloat16, float16, float32.")] = "bfloat16",
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="As in data=2,tensor=4. Without it, tensor takes all devices of the slice."),
    ] = None,
    sharding_rules: Annotated[
        str | None,
        typer.Option(metavar="RULES", help="Logical axes and the mesh axes that shard them: expert=data+tensor."),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The mesh and rules of a plan that ttpu plan --save wrote, and nothing else of it."
        ),
    ] = None,
    layers: Annotated[
        LayersChoice, typer.Option(help="Compile every layer, or one in a loop: compiles sooner, runs slower.")
    ] = LayersChoice.unrolled,
    attn_implementation: Annotated[
        str, typer.Option(metavar="NAME", help="auto, eager, xla_flash_attention, splash_attention, or module:name.")
    ] = "auto",
    experts: Annotated[
        ExpertsChoice,
        typer.Option(
            help="How experts are computed: on tokens sorted by expert, in the form for few tokens, on tokens that "
            "devices send each other, or auto."
        ),
    ] = ExpertsChoice.auto,
    quantization: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Of the weights: w8a16, w8a8, w4a16-g128, w4a16-g128-asym, fp8, mxfp4."),
    ] = None,
    residual_stream: Annotated[
        StreamChoice,
        typer.Option(help="auto cuts the rows of long inputs over the tensor axis; whole keeps them on every device."),
    ] = StreamChoice.auto,
    remat: Annotated[
        RematChoice | None,
        typer.Option(
            show_default="full",
            help="To train, what the backward pass computes again: full (all of a layer but its input), none, or a "
            "part: each of attention, gate, dots and mlp keeps more than the one before.",
        ),
    ] = None,
    without: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Optimizations to leave out, for comparison, with commas between them: rope_product and mesh_order; "
            "of decode and prefill window_cache and fused_norms; of decode cache_write; of prefill layer_loop; of "
            "training trained_products, gradient_rings, sums_in_hbm, vocabulary_loss, unset_gradients.",
        ),
    ] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="Also say where the time goes, by part of the model.")
    ] = False,
    picture: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw that as .png or .svg; needs matplotlib.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with the parts.")] = False,
) -> None:
    """Compile a model for TPUs that are not there: memory, collectives and predicted time of a step.

    Nothing runs on a TPU. Needs a config.json only. A model that does not fit is refused, with its size.

    Examples:

    \b
      ttpu compile-report ./llama/config.json --topology v5e:2x4
      ttpu compile-report ./llama --topology v5e:2x4 --topology v6e:2x4 --task decode --batch 64
      ttpu compile-report ./llama --topology v5e:2x4 --task decode --explain --picture decode.png
      ttpu compile-report ./llama --topology v5e:4x4 --mesh data=2,tensor=8 --json
      ttpu compile-report ./qwen3-moe --topology v6e:2x4 --task decode --plan plan.json
      ttpu compile-report ./llama --topology v5e:2x4 --task decode --without cache_write

    \f
    Raises:
        RequestError: a plan and a mesh or rules, an option of another task, or a picture that cannot be drawn.
    """
    from ttpu_core.errors import RequestError
    from ttpu_core.pictures import check_picture
    from ttpu_core.sharding.parallelism import parse_mesh, parse_slices
    from ttpu_core.spec.context import check_context
    from ttpu_jax.optimizations import left_out_by

    if picture is not None:
        check_picture(picture)
    if plan is not None and (mesh or sharding_rules):
        raise RequestError(
            f"--plan {plan} and --{'mesh' if mesh else 'sharding-rules'} were given, but a plan has a mesh and rules "
            "of its own: leave one of them out."
        )
    if remat is not None and task is not TaskChoice.train:
        raise RequestError(f"--remat was given, but it has no effect with --task {task.value}: add --task train.")
    if prefill is not None and task not in (TaskChoice.prefill, TaskChoice.both):
        raise RequestError(
            f"--prefill was given, but it has no effect with --task {task.value}: add --task prefill, or leave it out."
        )
    axes, slices = (parse_mesh(mesh), parse_slices(mesh)) if mesh else (None, {})
    options = {
        "layers": layers.value,
        "attn_implementation": attn_implementation,
        "experts": experts.value,
        "quantization": quantization,
        "sharding_rules": sharding_rules,
        "plan": plan,
        "residual_stream": residual_stream.value,
        "remat": (remat or RematChoice.full).value,
        "without": without,
    }
    report, spec, usual = _reporter(checkpoint, options, dtype, "train" if task is TaskChoice.train else "generate")
    described = spec is not None
    if spec is not None:
        for option, tokens in (("--context", context), ("--prefill", prefill)):
            if tokens is not None and task is not TaskChoice.train:  # of which the report itself warns
                check_context(spec, tokens, trains=False, name=option)
    wanted: list[tuple[Any, int, int]] = []
    if task in (TaskChoice.decode, TaskChoice.both):
        wanted.append(("decode", batch, context or usual))
    if task in (TaskChoice.prefill, TaskChoice.both):
        wanted.append(("prefill", 1, prefill or usual))
    if task is TaskChoice.train:
        wanted.append(("train", batch, context or usual))
    left_out = left_out_by([program for program, *_ in wanted], without)
    if slices and not described:
        raise RequestError(
            f"--mesh {mesh} was given, but no plugin describes this model type, and transformers' own code is compiled "
            "without a choice of how slices lie along axes: leave out what begins with dcn."
        )
    layout: dict[str, Any] = {} if plan else {"mesh": axes}
    if slices:
        layout["slices"] = slices
    reports = []
    for name in topology:
        for program, rows, slots in wanted:
            with warnings_as_lines(), stderr_console().status(f"compiling {program} of {checkpoint} for {name}"):
                given = {"without": ",".join(sorted(left_out[program]))} if without else {}
                reports.append(report(name, task=program, batch=rows, context=slots, dtype=dtype, **layout, **given))
    if as_json:
        programs = [_as_json(one) for one in reports]
        print_json({"checkpoint": checkpoint, "described": described, "note": NOTE, "programs": programs})
    else:
        _print(checkpoint, reports, "" if described else f" {WITHOUT_PLUGIN}", explain=explain)
    if picture is not None:
        _draw(reports, picture)


def _draw(reports: list[ProgramReport], picture: str) -> None:
    """Write the picture.

    Raises:
        RequestError: the file cannot be written.
    """
    from ttpu_core.pictures import unwritable
    from ttpu_jax.cli.parts import save_picture

    try:
        save_picture(reports, picture)
    except OSError as error:
        raise unwritable(picture, error) from error
    stderr_console().print(f"drew {counted(len(reports), 'program')} in {picture}")


def _reporter(
    checkpoint: str, options: Mapping[str, Any], dtype: str, purpose: Purpose
) -> tuple[Callable[..., ProgramReport], ArchitectureSpec | None, int]:
    """What compiles programs of a checkpoint by the name of a slice, the architecture as its plugin describes it, and
    the tokens of a program where no number is named. Where there is no plugin it is the fallback's.

    Args:
        checkpoint: its directory, config.json or Hub id.
        options: that need an architecture.
        dtype: of the weights.
        purpose: of the programs.

    Raises:
        RequestError: an option that needs a plugin.
        PlanError: the plan is damaged, or was made for another model or for other weights.
        UnsupportedError: sharding rules that are none.
    """
    from functools import partial

    from ttpu_core.errors import RequestError
    from ttpu_core.loading import planned_architecture, undescribed_config
    from ttpu_core.registry import default_registry
    from ttpu_core.sharding.parallelism import parse_rules, strategy_with
    from ttpu_core.sharding.strategy import usual_strategy
    from ttpu_core.spec.context import USUAL_CONTEXT, usual_context
    from ttpu_jax.aot.report import ReportsWithoutPlugin
    from ttpu_jax.aot.report import compile_report as of_architecture

    config = undescribed_config(checkpoint)
    fallback = None if config is None else default_registry().fallback("jax")
    if config is None or not isinstance(fallback, ReportsWithoutPlugin):
        architecture, rules, plan = planned_architecture(checkpoint), options["sharding_rules"], options["plan"]
        usual = usual_strategy(trains=purpose == "train")
        layout: dict[str, Any] = {"strategy": strategy_with(parse_rules(rules) if rules else None, usual)}
        if plan is not None:
            planner: Planner = default_registry().service("planner")
            asked = options["quantization"]
            followed = planner.plan_for(
                plan, architecture.spec, dtype=dtype, quantization=asked, purpose=purpose, backend="JAX"
            )
            layout = {"strategy": followed.strategy, "mesh": dict(followed.mesh), "slices": dict(followed.dcn)}
        given = {name: value for name, value in options.items() if name not in ("sharding_rules", "plan")}
        report = partial(of_architecture, architecture, **layout, **given)
        return report, architecture.spec, usual_context(architecture.spec)
    for name, value in options.items():
        if value != USUAL[name]:
            raise RequestError(
                f"--{name.replace('_', '-')} {value} was asked for, but no plugin describes model type "
                f"{config.model_type!r}, and transformers' own code is compiled as it is: leave it out, or begin a "
                "plugin with `ttpu new-plugin --from CONFIG`."
            )
    return partial(fallback.program_report, config), None, min(USUAL_CONTEXT, int(fallback.describe(config)["context"]))


def _as_json(report: ProgramReport) -> dict[str, Any]:
    return {
        **asdict(report),
        "mesh": dict(report.mesh),
        "kernel_formats": dict(report.kernel_formats),
        "cache_in_place": report.cache_in_place,
        "kernel_seconds": report.kernel_seconds,
        "tokens_per_second": report.tokens_per_second,
    }


def _print(checkpoint: str, reports: list[ProgramReport], remark: str = "", *, explain: bool = False) -> None:
    from rich import box
    from rich.table import Table

    from ttpu_jax.cli.parts import table_of

    first = reports[0]
    console = stdout_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False, title=checkpoint, title_justify="left")
    table.add_column(style="bold")
    columns = [dict(_rows(report)) for report in reports]
    for _ in columns:
        table.add_column(justify="right")
    for label in columns[0]:
        if any(column[label] for column in columns):
            table.add_row(label, *(column[label] or "none" for column in columns))
    console.print(table)
    for report in reports if explain else ():
        console.print(table_of(report))
    held = "; ".join(f"{words} ({count} kernels)" for words, count in first.kernel_formats) or first.dtype
    console.print(
        f"{first.model_type}, {first.num_parameters:,} parameters in {held}; jax "
        f"{first.jax_version}, libtpu {first.libtpu_version}. Sizes are of one device. {NOTE}{remark}"
    )


_LAYERS = {"unrolled": "unrolled", "scan": "in a scan", "loop": "in a loop that fetches their kernels"}


def _rows(report: ProgramReport) -> list[tuple[str, str]]:
    """Label and value of each line of one program's column. A value that is empty is none."""
    parts = report.breakdown
    held = "weights, optimizer" if report.task == "train" else "KV cache"
    waits = parts.copy_wait + parts.host_wait + parts.collective_wait + parts.dcn_wait
    return [
        ("program", f"{report.task} {report.batch} × {report.context if report.task == 'decode' else report.tokens}"),
        ("slice", report.topology),
        ("mesh", ", ".join(f"{axis}={size}" for axis, size in report.mesh)),
        ("layers", _LAYERS[report.layers]),
        ("peak memory", f"{in_bytes(report.peak_bytes)} of {in_bytes(report.hbm_bytes)}"),
        ("  arguments", in_bytes(report.argument_bytes)),
        ("  temporaries", in_bytes(report.temp_bytes)),
        (f"  {held}", in_bytes(report.cache_bytes)),
        (f"{held} updated in place", "yes" if report.cache_in_place else f"no: {in_bytes(report.aliased_bytes)} of it"),
        ("predicted time", _milliseconds(report.predicted_seconds)),
        ("  compute", _milliseconds(parts.compute)),
        ("  collectives", _milliseconds(parts.collective)),
        ("  waiting", _milliseconds(waits)),
        ("  in the background", _milliseconds(parts.collective_in_background)),
        ("  between slices", _hidden(parts.dcn_in_background, parts.dcn_wait)),
        ("  to and from the host", _hidden(parts.host_in_background, parts.host_wait)),
        ("  HBM, at least", _milliseconds(report.hbm_seconds)),
        ("  roofline", _milliseconds(report.roofline_seconds)),
        ("kernels, at least", _milliseconds(report.kernel_seconds)),
        ("predicted with them", _milliseconds(report.seconds_with_kernels)),
        ("predicted, HBM shared", _milliseconds(report.total_seconds)),
        ("tokens per second", f"{report.tokens_per_second:,.0f}"),
        ("collectives", "\n".join(_collectives(report)) or "none"),
        ("without an estimate", "\n".join(_uncounted(report)) or "nothing"),
        ("optimizations left out", "\n".join(report.without) or "none"),
        ("compiled in", f"{report.compile_seconds:.1f} s ({report.compile_cpu_seconds:.0f} CPU seconds)"),
    ]


def _collectives(report: ProgramReport) -> list[str]:
    return [f"{counted(one.count, one.op)}, {in_bytes(one.result_bytes)}" for one in report.collectives]


def _hidden(seconds: float, waited: float) -> str:
    """What goes on in the background, and how long the core waits for it."""
    return f"{_milliseconds(seconds)}, {_milliseconds(waited)} waited for" if seconds else ""


def _uncounted(report: ProgramReport) -> list[str]:
    lines = [f"{one.count:,} × {one.name}{_least(one)}" for one in report.unmodelled]
    if report.loops_without_trip_count:
        lines.append(f"all but one turn of {counted(report.loops_without_trip_count, 'loop')}")
    return lines


def _least(one: UnmodelledTotal) -> str:
    return "" if one.roofline_seconds is None else f", at least {_milliseconds(one.roofline_seconds)}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
