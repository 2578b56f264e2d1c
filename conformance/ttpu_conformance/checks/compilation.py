"""Checks that compile published models for TPUs, without a TPU: decode, prefill and train step fit into the memory of a
slice, and communicate only what they should."""

from __future__ import annotations

from ttpu_conformance.case import Case, CompileCase
from ttpu_conformance.check import check
from ttpu_conformance.errors import NotProven, fail
from ttpu_conformance.measure import Measured
from ttpu_conformance.model_under_test import CompiledProgram, CompilesForChips, Task, able
from ttpu_core.errors import MissingDependencyError, UnsupportedError
from ttpu_core.spec import ArchitectureSpec, MoESpec
from ttpu_core.spec.context import usual_context

GIB = 2**30
ROWS, CONTEXT = 32, 2048  # of decode; a prefill reads one row of CONTEXT tokens, a train step one row a device
# Models with a shorter context have that.

# What programs that only multiply activations with weights that stay where they are may exchange, and why. Each is also
# bounded in size: on average no more than the step's activations, so that a gathered weight or expert is found.
INFERENCE = {
    "all-reduce": "partial sums over heads, MLP and vocabulary sharded along `tensor`",
    "reduce-scatter": "the same sums, left sharded",
    "all-gather": "activations, and the candidates of each device for the next token",
    "collective-permute": "activations handed on while a product runs",
    "collective-broadcast": "a token or a position",
}
LOOKED_UP = {"all-to-all": "parts of the rows of a table that is not the head's too, whose features are sharded"}
WITH_EXPERTS = {"all-to-all": "tokens on their way to experts on other devices", "ragged-all-to-all": "the same"}
TRAINING = INFERENCE | WITH_EXPERTS | {"all-gather": "weights sharded along `fsdp` and `expert`, layer by layer"}
WEIGHTS_GATHERED = 4
"""How many times a train step may gather all weights: forward, recomputation, backward, and one more in float32."""


@check("compile")
def check_compiled_decode(case: Case) -> Measured:
    """The decode step of the published size compiles for the chip, fits, updates its cache in place, and gathers no
    weight."""
    report = _compiled(case, "decode")
    if not report.cache_in_place:
        fail(
            f"the decode step on {report.topology} holds its cache twice: {report.aliased_bytes / GIB:.2f} of "
            f"{report.cache_bytes / GIB:.2f} GiB are written where they were; a mixer's state must keep its shape, "
            "dtype and sharding."
        )
    check_collectives(case.architecture.spec, report)
    return _measured(report)


@check("compile")
def check_compiled_prefill(case: Case) -> Measured:
    """The prefill of the published size compiles for the chip, fits, and gathers no weight."""
    report = _compiled(case, "prefill")
    check_collectives(case.architecture.spec, report)
    return _measured(report)


@check("compile")
def check_compiled_train(case: Case) -> Measured:
    """The train step of the published size compiles for the chip and fits, fully sharded."""
    report = _compiled(case, "train")
    check_collectives(case.architecture.spec, report)
    return _measured(report)


def _compiled(case: Case, task: Task) -> CompiledProgram:
    backend = able(case.backend, CompilesForChips, "compiles no published size here")
    assert isinstance(case, CompileCase)
    declared, train = case.slice, task == "train"
    try:
        report = backend.compiled(
            case.architecture,
            case.chip,
            task,
            rows=ROWS,
            context=usual_context(case.architecture.spec, CONTEXT),
            slice_name=declared.train_slice if train else declared.slice,
            mesh=declared.train_mesh if train else declared.mesh,
        )
    except MissingDependencyError as error:
        raise NotProven(str(error)) from error
    if report is None:
        raise UnsupportedError(
            f"no {case.chip} slice of up to 256 chips has a mesh that divides {case.variant.name} and holds it for "
            f"{task}: declare a slice and a mesh for it in conformance.toml."
        )
    return report


def check_collectives(spec: ArchitectureSpec, report: CompiledProgram) -> None:
    """Refuse collectives that a program should not need, and those that are too large to be activations."""
    mesh = dict(report.mesh)
    untied, experts = not spec.head.tied, mesh.get("expert", 1) > 1
    inference = INFERENCE | (LOOKED_UP if untied else {}) | (WITH_EXPERTS if experts else {})
    allowed = TRAINING if report.task == "train" else inference
    activations = report.batch * report.tokens * spec.hidden_size * 4 * _copies(spec)
    weights = 4 * report.num_parameters * WEIGHTS_GATHERED
    for one in report.collectives:
        if one.op not in allowed:
            fail(
                f"the {report.task} program on {report.topology} runs {one.count} × {one.op}, which nothing in it "
                f"should need; allowed are {', '.join(allowed)}: name the logical axes of the parameters in question "
                "in `ttpu_sharding_rules`, or constrain the mixer's activations."
            )
        mean = one.result_bytes / max(one.count, 1)
        if report.task != "train" and mean > activations:
            fail(
                f"the {report.task} program on {report.topology} moves {mean / 2**20:.1f} MiB in each of {one.count} × "
                f"{one.op}, where its activations are {activations / 2**20:.1f} MiB: a weight, an expert or the cache "
                "is gathered; name its logical axes in `ttpu_sharding_rules`, or keep the kernel inside shard_map.",
                error=mean,
                tolerance=activations,
            )
        if report.task == "train" and one.op == "all-gather" and one.result_bytes > weights:
            fail(
                f"the train step on {report.topology} gathers {one.result_bytes / GIB:.1f} GiB, more than "
                f"{WEIGHTS_GATHERED} times all weights in float32: something is gathered again and again."
            )


def _copies(spec: ArchitectureSpec) -> int:
    """How many times a token's features may be held: once, or once for each expert that it goes to."""
    return max([1, *(layer.mlp.experts_per_token for layer in spec.layers if isinstance(layer.mlp, MoESpec))])


def _measured(report: CompiledProgram) -> Measured:
    mesh = ", ".join(f"{axis}={size}" for axis, size in report.mesh)
    exchanged = ", ".join(f"{one.count} {one.op}" for one in report.collectives) or "no collectives"
    note = (
        f"{report.topology} ({mesh}): {report.peak_bytes / GIB:.2f} of {report.hbm_bytes / GIB:.2f} GiB, {exchanged}, "
        f"{report.total_seconds * 1e3:.1f} ms predicted, compiled in {report.compile_seconds:.0f} s"
    )
    details = {
        "slice": report.topology,
        "mesh": dict(report.mesh),
        "task": report.task,
        "batch": report.batch,
        "context": report.context,
        "layers": report.layers,
        "num_parameters": report.num_parameters,
        "peak_bytes": report.peak_bytes,
        "hbm_bytes": report.hbm_bytes,
        "collectives": {one.op: {"count": one.count, "bytes": one.result_bytes} for one in report.collectives},
        "predicted_seconds": report.total_seconds,
        "compile_seconds": report.compile_seconds,
    }
    return Measured(note=note, details=details)
