"""`ttpu plan` finds the TPU slices that serve or train a model, and how to shard it there. It takes a checkpoint or
only its config.json, and writes a table, JSON, a plan file or a picture. It needs no TPU; `--verify` needs libtpu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli import options
from ttpu_core.cli.console import counted, in_bytes, in_milliseconds, note, print_json, stderr_console, stdout_console
from ttpu_core.sharding.hardware import GIB

if TYPE_CHECKING:
    from rich.table import Table

    from ttpu_core.architecture import Architecture
    from ttpu_core.sharding.verification import Verification
    from ttpu_plan.plan import Plan
    from ttpu_plan.planner import NoFit, Request
    from ttpu_plan.proposal import Proposal

Verified = dict["Plan", "tuple[Verification, ...]"]

CONFIG = "config.json"
NOTHING_FITS = 1
CANDIDATES = 3
MOST_CHIPS = 256  # of the slices that are tried where none is named
NOTE = (
    "Sizes are of one device at the peak. Memory is predicted from the arrays that the programs hold; times are "
    "rooflines, good for comparing meshes. Nothing ran on a TPU."
)
LEFT = ("slice", "mesh", "bound by")  # columns of words
VERIFIED_NOTE = "Compiled figures are the TPU compiler's own; its times are a walk through its schedule."


class PurposeChoice(StrEnum):
    """The purpose of a plan."""

    inference = "inference"
    generation = "generation"
    training = "training"


def plan(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint's directory, a config.json, or a Hub id org/name."),
    ],
    topology: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="TPU slices, as in v5e:2x4 or 2*v5e:4x4. Without it, each generation's."),
    ] = None,
    task: Annotated[
        PurposeChoice,
        typer.Option(help="The steps of ttpu serve, the programs of generate(), or training steps."),
    ] = PurposeChoice.inference,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Rows of a step, over all replicas. Without it 32; to train, one a device, and with --topology the "
            "best batch is proposed.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Cache slots of each row, or tokens to train on. Without it 2,048, or the model's context if that is "
            "shorter.",
        ),
    ] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="To generate: tokens of each answer, by which plans are ranked. Where answers are short, meshes that "
            "shard the tokens of prompts are the fastest. Without it as many as a prompt has.",
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Of the layers' weights, to serve: w8a16, w4a16-g128, fp8, mxfp4."),
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Of keys and values, to serve: auto (the model's), int8, fp8.")
    ] = "auto",
    zero_stage: Annotated[
        int | None,
        typer.Option(min=0, max=3, metavar="N", help="To train: of ZeRO. Without it 3 on meshes with fsdp, else 0."),
    ] = None,
    optim: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="To train: adamw (the default), adamw_8bit, adafactor, lion, muon or sgd."),
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(metavar="X", help="To train with muon, or sgd, which keeps no state without it.")
    ] = None,
    gradient_accumulation_steps: Annotated[
        int | None, typer.Option(metavar="N", help="To train: parts that an update is computed in. Without it 1.")
    ] = None,
    remat: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="To train, what the backward pass computes again: full (the default), attention, gate, dots, mlp or "
            "none, each less than the one before, or auto, the least that fits.",
        ),
    ] = None,
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="To train: hold the optimizer's state in the host's memory.")
    ] = False,
    best: Annotated[int, typer.Option(min=1, metavar="N", help="How many plans are shown for a topology.")] = 5,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compile the first plans of a topology, or the first of each generation."),
    ] = False,
    candidates: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="How many plans for a topology --verify compiles, of which the fastest comes first, and to train "
            "without --batch how many of the best batches. Without it 3. Each takes 30 to 40 s for an 8B model on two "
            "cores, and 1 to 3 minutes to train, the first time.",
        ),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="PLAN.json", help="Write the first plan.")] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw where the memory goes: .html, or .png by matplotlib.")
    ] = None,
    patch_pack: options.PatchPacks = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say on which TPU slices a model fits, how to shard it there, and how fast it is going to be.

    A plan to serve is for the steps that ttpu serve compiles. Where it has replicas,
    each is a server of its own, with the devices of one host or a part of them.
    Needs a config.json only. If nothing fits, it says by how much, what would, and ends with status 1.

    Examples:

    \b
      ttpu plan ./llama/config.json
      ttpu plan ./llama --topology v5e:2x4 --batch 64 --save plan.json
      ttpu plan ./llama --topology v5e:2x4 --task generation --batch 1 --new-tokens 1    # prompts alone
      ttpu plan ./llama --topology v5p:4x4x4 --task training --verify --picture memory.html
      ttpu plan ./llama --topology v5e:4x4 --task training --zero-stage 2 --optim lion --save plan.json

    \f
    Raises:
        RequestError: --verify was given with settings of training, --candidates without what it is for, or a context
            longer than the model's.
    """
    from dataclasses import replace

    from ttpu_core.errors import RequestError
    from ttpu_core.loading import planned_architecture
    from ttpu_core.pictures import check_picture
    from ttpu_core.quantization import quantize_architecture
    from ttpu_core.sharding.training_state import UpdateSettings
    from ttpu_core.spec.context import usual_context
    from ttpu_plan.picture import ENDINGS, save_picture
    from ttpu_plan.plan_file import check_plan_file, save_plan
    from ttpu_plan.planner import Request
    from ttpu_plan.proposal import in_words, proposals

    if picture is not None:
        check_picture(picture, ENDINGS)
    if save is not None:
        check_plan_file(save)
    kept = None if kv_cache_dtype == "auto" else kv_cache_dtype
    asked = {
        "optim": optim,
        "momentum": momentum,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "remat": remat,
        "zero_stage": zero_stage,
        "offload_optimizer": offload_optimizer or None,
    }
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    update = UpdateSettings(**given) if given else None
    request = Request(
        task.value,
        batch,
        context,
        quantization=quantization,
        kv_cache=kept,
        update=update,
        new_tokens=new_tokens,
    )
    for name, is_there in (("--verify", verify), ("--topology", topology is not None)):
        if candidates is not None and not is_there:
            raise RequestError(
                f"--candidates was given, but it has no effect without {name}: add that, or leave --candidates out."
            )
    others = [name for name in given if name != "remat"]
    if verify and others:
        raise RequestError(
            f"--verify was given with --{', --'.join(others).replace('_', '-')}, but it compiles a step of AdamW on "
            "whole batches, whose mesh decides the stage of ZeRO: compile the update of a run with `ttpu train "
            "run.yaml --dry-run --topology NAME`, or leave one of them out."
        )
    without_plugin = {
        "--verify": verify, "--save": save, "--picture": picture, "--quantization": quantization,
        "--kv-cache-dtype": kept, "--patch-pack": patch_pack, "--task": task is PurposeChoice.training,
        "--new-tokens": new_tokens,
    }  # fmt: skip
    if _planned_without_plugin(checkpoint, topology, request, best, without_plugin, as_json):
        return
    architecture = planned_architecture(checkpoint, patch_pack or None)
    quantize_architecture(architecture, quantization)  # says what is wrong before all else
    if context is None:
        request = replace(request, context=usual_context(architecture.spec))  # which is printed
    else:
        _check_context(architecture, context, trains=task is PurposeChoice.training)
    candidates = candidates or CANDIDATES
    shown, nothing, without = _plans(architecture, topology, request, max(best, candidates) if verify else best)
    fitting = [one for one in shown if one.fits]
    verified = _verified(architecture, fitting if topology is None else fitting[:candidates]) if verify else {}
    if topology is not None:
        shown = sorted(shown, key=lambda one: _order(one, verified))  # stable: what is not verified stays in order
    if verify:
        fitting = [one for one in shown if one in verified and not _refused(one, verified)]
    reason = None if fitting else str(nothing) if nothing else _all_refused(shown, verified)
    if save is not None and fitting:
        save_plan(fitting[0], save)  # before what is printed, whose reader may stop reading
    if not as_json:
        _print(checkpoint, architecture, request, shown, without, verified)
    proposed: list[Proposal] = []
    if task is PurposeChoice.training and batch is None and topology is not None and fitting:
        compiled = (lambda one: _verified(architecture, [one])[one]) if verify else None
        proposed = proposals(architecture.spec, topology, request, remat, candidates, compiled)
    if as_json:
        content = _as_json(checkpoint, architecture, topology, request, shown, without, verified)
        if proposed:
            content["best_batch"] = proposed[0].as_json(architecture.spec) if proposed[0].fits else None
        if proposed and verify:
            content["compiled_batches"] = [one.as_json(architecture.spec) for one in proposed]
        print_json({**content, "nothing_fits": _nothing_fits(reason, nothing)})
    elif proposed:
        stdout_console().print(in_words(proposed, architecture.spec))
    if picture is not None and shown:
        save_picture([(_name(one), one) for one in shown], picture, _title(architecture.spec.model_type, request))
        note(f"drew {counted(len(shown), 'plan')} in {picture}")
    if save is not None and fitting:
        command = _used_with(checkpoint, fitting[0], save, patch_pack or ())
        note(f"saved the plan for {_name(fitting[0])} as {save}{command}")
    if reason is not None:
        note(f"nothing fits: {reason}")
        raise typer.Exit(NOTHING_FITS)


def _planned_without_plugin(
    checkpoint: str,
    topology: str | None,
    request: Request,
    best: int,
    options: Mapping[str, Any],
    as_json: bool,
) -> bool:
    """Whether no plugin describes the model, and the fallback plans it; if so, its plans are printed.

    Args:
        checkpoint: its directory, config.json or Hub id.
        topology: the slices, or None.
        request: what is planned.
        best: how many plans are shown.
        options: that need an architecture: name → what was given, if anything.
        as_json: print one JSON object.

    Raises:
        RequestError: an option that needs a plugin was given.
        UnsupportedError: the model cannot be traced, or has fewer positions than are planned for.
    """
    from dataclasses import replace

    from ttpu_core.backend import PlansWithoutPlugin
    from ttpu_core.errors import RequestError
    from ttpu_core.loading import undescribed_config
    from ttpu_core.registry import default_registry
    from ttpu_plan import undescribed

    config = undescribed_config(checkpoint)
    fallback = None if config is None else default_registry().fallback("jax")
    if config is None or not isinstance(fallback, PlansWithoutPlugin):
        return False
    for name, given in options.items():
        if given:
            asked = f"{name} training" if name == "--task" else name
            raise RequestError(
                f"{asked} was given, but no plugin describes model type {config.model_type!r}, and of transformers' "
                "own code only weights, cache and the least time of a decode step are known: leave it out, or begin a "
                "plugin with `ttpu new-plugin --from CONFIG`."
            )
    if request.context is None:
        request = replace(request, context=min(request.tokens, fallback.describe(config)["context"]))
    rows = request.rows(1)
    with stderr_console().status(f"tracing {checkpoint}"):
        plans = undescribed.undescribed_plans(
            fallback, config, topology, batch=rows, context=request.tokens, dtype=request.dtype
        )
    fitting, shown = any(one.fits for one in plans), plans[:best]
    reason = "take more chips, fewer rows (--batch) or a shorter context (--context)."
    if as_json:
        values = {"checkpoint": checkpoint, "model_type": config.model_type, "described": False, "batch": rows}
        values |= {"context": request.tokens, **_request_json(request, topology, rows), "note": undescribed.NOTE}
        nothing = None if fitting else _nothing_json(reason, min((one.missing_bytes for one in plans), default=None))
        print_json({**values, "plans": undescribed.as_json(shown), "nothing_fits": nothing})
    else:
        title = f"{checkpoint}: {counted(rows, 'row')}, {request.tokens:,} tokens of context"
        stdout_console().print(undescribed.table_of(shown, title))
        stdout_console().print(undescribed.NOTE)
    if not fitting:
        note(f"nothing fits: {reason}")
        raise typer.Exit(NOTHING_FITS)
    return True


def _check_context(architecture: Architecture, context: int, *, trains: bool) -> None:
    """As `check_context`, with its warning as a line for people."""
    import warnings

    from ttpu_core.spec.context import check_context

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check_context(architecture.spec, context, trains=trains)
    for one in said:
        note(f"warning: {one.message}")


def _plans(
    architecture: Architecture, topology: str | None, request: Request, best: int
) -> tuple[list[Plan], NoFit | None, list[str]]:
    """What is shown, the first to be taken first; why nothing fits if so; and the generations that do not serve."""
    from ttpu_core.sharding.hardware import parse_topology
    from ttpu_plan.planner import plans, smallest_slices, why_nothing_fits, why_nothing_serves

    spec = architecture.spec
    if topology is None:
        smallest = smallest_slices(spec, request)
        found = [one for one in smallest.values() if one is not None]
        without = [chip for chip, one in smallest.items() if one is None]
        if not found:
            nothing = why_nothing_serves(spec, request)
            return [nothing.closest], nothing, without
        # Fewest chips first, then the most tokens of each.
        return sorted(found, key=lambda one: (one.slices.num_chips, -one.tokens_per_second)), None, without
    slices = parse_topology(topology)
    every = plans(spec, slices, request)
    fitting = [one for one in every if one.fits]
    if fitting:
        return fitting[:best], None, []
    return every[:best], why_nothing_fits(spec, slices, request, every), []


def _verified(architecture: Architecture, wanted: Sequence[Plan]) -> Verified:
    """Plan → what the compiler says of its programs."""
    from ttpu_core.backend import Verifies
    from ttpu_core.errors import UnsupportedError
    from ttpu_core.registry import default_registry
    from ttpu_plan.served import capable_backend

    backend = capable_backend(default_registry(), Verifies)
    if not isinstance(backend, Verifies):
        raise UnsupportedError(
            "--verify was asked for, but no installed backend can compile a plan: "
            '`pip install -U "ttpu-core[jax]"`.'
        )
    result: Verified = {}
    with stderr_console().status("") as status:
        for one in wanted:

            def progress(task: str, one: Plan = one) -> None:
                status.update(f"compiling {task} of {one.model_type} for {_name(one)}")

            result[one] = backend.verify_plan(architecture, one, progress=progress)
    return result


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


def _refused(one: Plan, verified: Verified) -> bool:
    return any(program.peak_bytes is None for program in verified.get(one, ()))


def _all_refused(shown: Sequence[Plan], verified: Verified) -> str:
    left = any(one.fits and one not in verified for one in shown)
    return (
        "the compiler refuses what was predicted to fit: take "
        f"{'more of --candidates, or more chips' if left else 'more chips, fewer rows or a shorter context'}."
    )


def _order(one: Plan, verified: Verified) -> tuple[int, float]:
    """Verified plans by the compiler's times, then the others, then those that it refused."""
    if one not in verified:
        return 1, 0.0
    if _refused(one, verified):
        return 2, 0.0
    return 0, one.rank_seconds({program.task: program.seconds for program in verified[one]})


def _name(one: Plan) -> str:
    return f"{one.topology} {one.layout}"


def _used_with(checkpoint: str, one: Plan, saved: Path, patch_packs: Sequence[str]) -> str:
    """The command that runs what a plan was made for."""
    import shlex

    if Path(checkpoint).name == CONFIG and Path(checkpoint).expanduser().is_file():
        checkpoint = str(Path(checkpoint).parent)  # weights are loaded by the name of their folder
    if one.program("train") is not None:
        words = ["ttpu", "train", "run.yaml", f"model={checkpoint}", f"plan={saved}"]
        words += [f"load_options.patch_packs={','.join(patch_packs)}"] if patch_packs else []
        return f"; train with `{shlex.join(words)}`"
    workload = one.programs[0].workload
    words = [checkpoint, "--plan", str(saved)]
    words += ["--quantization", str(workload.quantization)] if workload.quantization else []
    words += [word for name in patch_packs for word in ("--patch-pack", name)]
    if not one.is_served:
        return f"; generate with `{shlex.join(['ttpu', 'generate', *words])}`"
    words += ["--max-num-seqs", str(workload.batch), "--max-model-len", str(workload.context)]
    words += ["--kv-cache-dtype", workload.kv_cache] if workload.kv_cache else []
    each = "" if one.replicas == 1 else f", once for each of the {one.replicas} replicas"
    return f"; serve it with `{shlex.join(['ttpu', 'serve', *words])}`{each}"


def _title(model: str, request: Request) -> str:
    rows = "" if request.batch is None else f"{counted(request.batch, 'row')}, "
    return f"{model}: {request.purpose}, {rows}{request.tokens:,} tokens of context"


def _as_json(
    checkpoint: str,
    architecture: Architecture,
    topology: str | None,
    request: Request,
    shown: Sequence[Plan],
    without: Sequence[str],
    verified: Verified,
) -> dict[str, Any]:
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
        **_request_json(request, topology, batch),
        "note": NOTE,
        "patch_packs": list(architecture.patch_packs),
        "kernels": _kernels(architecture, shown),
        "plans": rows,
        "without": list(without),
    }


def _request_json(request: Request, topology: str | None, batch: int | None) -> dict[str, Any]:
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


def _nothing_fits(reason: str | None, nothing: NoFit | None) -> dict[str, Any] | None:
    """What is known of it: only the reason where a compiler refused what was predicted to fit."""
    from ttpu_plan.plan_file import plan_json

    if reason is None:
        return None
    remedies = nothing.remedies if nothing else ()
    changes = [{"change": one.change, "plan": plan_json(one.plan)} for one in remedies]
    return _nothing_json(reason, nothing.missing_bytes if nothing else None, changes)


def _nothing_json(reason: str, missing_bytes: int | None, remedies: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """`nothing_fits` of the JSON, which is null where a plan fits."""
    return {"reason": reason, "missing_bytes": missing_bytes, "remedies": list(remedies)}


def _print(
    checkpoint: str,
    architecture: Architecture,
    request: Request,
    shown: Sequence[Plan],
    without: Sequence[str],
    verified: Verified,
) -> None:
    from rich import box
    from rich.table import Table

    from ttpu_core.quantization.report import stored_formats

    console = stdout_console()
    if shown:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=_title(checkpoint, request), title_justify="left")
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
