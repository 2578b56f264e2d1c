"""`ttpu plan` finds the TPU slices that serve or train a model, and how to shard it there. It takes a checkpoint or
only its config.json, and writes a table, JSON, a plan file or a picture. It needs no TPU; `--verify` needs libtpu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttpu_core.cli import options
from ttpu_core.cli.console import counted, note, print_json, stderr_console, stdout_console, warnings_as_lines

if TYPE_CHECKING:
    from ttpu_core.architecture import Architecture
    from ttpu_plan.plan import Plan
    from ttpu_plan.planner import NoFit, Request
    from ttpu_plan.proposal import Proposal

CONFIG = "config.json"
NOTHING_FITS = 1
CANDIDATES = 3


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
    from ttpu_core.spec.context import check_context, usual_context
    from ttpu_plan.command_output import nothing_fits, plans_json, plans_title, print_plans
    from ttpu_plan.compiled_plans import all_refused, compiled_order, compiled_plans, plan_name, refused
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
        with warnings_as_lines():
            check_context(architecture.spec, context, trains=task is PurposeChoice.training)
    candidates = candidates or CANDIDATES
    shown, nothing, without = _plans(architecture, topology, request, max(best, candidates) if verify else best)
    fitting = [one for one in shown if one.fits]
    verified = compiled_plans(architecture, fitting if topology is None else fitting[:candidates]) if verify else {}
    if topology is not None:
        # Stable: what is not verified stays in order.
        shown = sorted(shown, key=lambda one: compiled_order(one, verified))
    if verify:
        fitting = [one for one in shown if one in verified and not refused(one, verified)]
    reason = None if fitting else str(nothing) if nothing else all_refused(shown, verified)
    if save is not None and fitting:
        save_plan(fitting[0], save)  # before what is printed, whose reader may stop reading
    if not as_json:
        print_plans(checkpoint, architecture, request, shown, without, verified)
    proposed: list[Proposal] = []
    if task is PurposeChoice.training and batch is None and topology is not None and fitting:
        compiled = (lambda one: compiled_plans(architecture, [one])[one]) if verify else None
        proposed = proposals(architecture.spec, topology, request, remat, candidates, compiled)
    if as_json:
        content = plans_json(checkpoint, architecture, topology, request, shown, without, verified)
        if proposed:
            content["best_batch"] = proposed[0].as_json(architecture.spec) if proposed[0].fits else None
        if proposed and verify:
            content["compiled_batches"] = [one.as_json(architecture.spec) for one in proposed]
        print_json({**content, "nothing_fits": nothing_fits(reason, nothing)})
    elif proposed:
        stdout_console().print(in_words(proposed, architecture.spec))
    if picture is not None and shown:
        drawn = [(plan_name(one), one) for one in shown]
        save_picture(drawn, picture, plans_title(architecture.spec.model_type, request))
        note(f"drew {counted(len(shown), 'plan')} in {picture}")
    if save is not None and fitting:
        command = _used_with(checkpoint, fitting[0], save, patch_pack or ())
        note(f"saved the plan for {plan_name(fitting[0])} as {save}{command}")
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
    from ttpu_plan.command_output import nothing_json, request_json

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
        values |= {"context": request.tokens, **request_json(request, topology, rows), "note": undescribed.NOTE}
        nothing = None if fitting else nothing_json(reason, min((one.missing_bytes for one in plans), default=None))
        print_json({**values, "plans": undescribed.as_json(shown), "nothing_fits": nothing})
    else:
        title = f"{checkpoint}: {counted(rows, 'row')}, {request.tokens:,} tokens of context"
        stdout_console().print(undescribed.table_of(shown, title))
        stdout_console().print(undescribed.NOTE)
    if not fitting:
        note(f"nothing fits: {reason}")
        raise typer.Exit(NOTHING_FITS)
    return True


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
