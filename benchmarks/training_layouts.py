"""Trains a tiny llama and a tiny mixture of experts with `ttpu.Trainer` on every kind of mesh, and compares the losses
with those of one device: in every stage of ZeRO, with and without accumulation, over 8 virtual CPU devices of one
process; and in stages 0 and 3 with accumulation over those of two processes that `ttpu launch` starts. Then it resumes:
a run that is stopped in its middle and goes on in new processes is compared with one that is not: losses, weights and
optimizer state bit for bit, the samples of each update, the random state that each begins with (of adapters the keys
of what is dropped), and the position in the data. Runs go from mesh to mesh too. Takes half an hour; ends with status 1
if a bar is missed.

    python benchmarks/training_layouts.py --output benchmarks/results/training_layouts.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

OF_ROWS = ("data", "fsdp", "expert")
"""Mesh axes that divide the rows of a batch."""
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}  # which no number of devices above 2 divides
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "output_router_logits": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES, **HEADS},
    "mixtral": {"model_type": "mixtral", **SIZES, **HEADS, **EXPERTS},
}
DENSE = (
    "data=8",
    "fsdp=8",
    "tensor=8",
    "sequence=8",
    "data=2,fsdp=4",
    "fsdp=4,tensor=2",
    "data=2,fsdp=2,tensor=2",
    "data=4,sequence=2",
    "fsdp=2,sequence=2,tensor=2",
    "dcn.data=2,fsdp=4",
    "dcn.data=2,fsdp=2,tensor=2",
)
MESHES: dict[str, tuple[str, ...]] = {
    "llama": DENSE,
    "mixtral": (
        "data=8",
        "fsdp=8",
        "expert=8",
        "data=2,expert=4",
        "fsdp=2,expert=4",
        "fsdp=2,expert=2,tensor=2",
        "data=2,expert=2,sequence=2",
        "dcn.data=2,expert=4",
        "dcn.data=2,fsdp=2,expert=2",
    ),
}
STAGES = (0, 1, 2, 3)
ROWS, LENGTH, UPDATES = 16, 16, 3
BAR = 1e-5
CHAIN = ("fsdp=8", "fsdp=4,tensor=2", None)
"""The meshes that one run goes through; None is one device."""
WITH_ADAPTERS = ("fsdp=8", "data=2,fsdp=4", "dcn.data=2,fsdp=4")
"""Meshes on which adapters with dropout are resumed too, which draw from the random state."""
ADAPTERS = {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.2}
COUNTERS = ("global_step", "epoch", "num_input_tokens_seen")


@dataclass(frozen=True)
class Case:
    """One call of `Trainer.train`.

    Attributes:
        model: a key of `MODELS`.
        mesh: None is one device.
        stage: of ZeRO; None leaves it to the mesh.
        parts: of accumulation.
        updates: that the run is made for.
        folder: the run's; None writes no checkpoints.
        stop: the update after which the run is stopped; None goes to the end.
        resume: the newest checkpoint of the folder.
        adapters: train `ADAPTERS` in place of the weights.
    """

    model: str
    mesh: str | None
    stage: int | None = None
    parts: int = 1
    updates: int = UPDATES
    folder: str | None = None
    stop: int | None = None
    resume: bool = False
    adapters: bool = False


def main() -> None:
    """Train, compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--meshes", nargs="+", help="these alone")
    parser.add_argument("--only", nargs="+", default=["losses", "resume"], choices=["losses", "resume"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2], choices=[1, 2])
    parser.add_argument("--thin", action="store_true", help="accumulate in stages 1 and 3 alone, always")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    versions = {name: metadata.version(name) for name in ("jax", "orbax-checkpoint")}
    report: dict[str, Any] = {"python": platform.python_version(), "versions": versions, "bar": BAR}
    with tempfile.TemporaryDirectory() as place:
        for name in options.models:
            write_model(Path(place), name)
        root, counts = Path(place), options.processes
        walk = [
            (name, [one for one in MESHES[name] if one in (options.meshes or MESHES[name])]) for name in options.models
        ]
        if "losses" in options.only:
            thin = options.thin
            report["losses"] = [row for name, meshes in walk for row in losses(root, name, meshes, counts, thin)]
        if "resume" in options.only:
            report["resume"] = [row for name, meshes in walk for row in resumed(root, name, meshes, counts)]
            report["layouts"] = [from_mesh_to_mesh(root, name) for name, _ in walk]
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    missed = [row for rows in report.values() if isinstance(rows, list) for row in rows if not row["holds"]]
    for row in missed:
        print(f"missed: {json.dumps(row)}")
    sys.exit(1 if missed else 0)


# -- the walk ------------------------------------------------------------------------------------------------


def losses(
    place: Path, model: str, meshes: list[str], processes: Iterable[int], thin: bool
) -> Iterator[dict[str, Any]]:
    """The largest relative difference of the losses on each mesh, in each stage, from those of one device."""
    alone = run(place, [Case(model, None, parts=parts) for parts in (1, 2)])
    for count in processes:
        every = [(stage, parts) for stage in STAGES for parts in (1, 2) if not thin or parts == 1 + stage % 2]
        taken = every if count == 1 else [(0, 2), (3, 2)]
        cases = [Case(model, mesh, stage, parts) for mesh in meshes for stage, parts in taken]
        for case, found in zip(cases, run(place, cases, count), strict=True):
            row = {"model": model, "mesh": case.mesh, "zero_stage": case.stage, "accumulation": case.parts}
            row["processes"] = count
            if "refused" in found:
                yield said({**row, "refused": found["refused"], "holds": may_refuse(case)})
            else:
                # The balance of experts is the mean over the parts: it is compared with as many.
                wanted = alone[case.parts - 1 if "num_local_experts" in MODELS[model] else 0]["losses"]
                apart = max(abs(ours - theirs) / theirs for ours, theirs in zip(found["losses"], wanted, strict=True))
                yield said({**row, "largest_difference": apart, "holds": apart <= BAR and not may_refuse(case)})


def may_refuse(case: Case) -> bool:
    """Whether a stage has nothing to divide: no two devices have different rows."""
    assert case.mesh is not None
    return bool(case.stage) and not any(axis in case.mesh for axis in OF_ROWS)


def resumed(place: Path, model: str, meshes: list[str], processes: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Runs that go on in new processes after N of 2N updates, beside runs that were not stopped."""
    half, whole = UPDATES - 1, 2 * (UPDATES - 1)
    for count in processes:
        first, rest = [], []
        kinds = [(mesh, False) for mesh in meshes]
        kinds += [(mesh, True) for mesh in meshes if model == "llama" and mesh in WITH_ADAPTERS and count == 1]
        for mesh, adapters in kinds:
            names = (str(place / f"{name} {model} {mesh} {count} {adapters}") for name in ("whole", "parts"))
            each = [Case(model, mesh, updates=whole, folder=name, adapters=adapters) for name in names]
            first += [each[0], replace(each[1], stop=half)]
            rest.append(replace(each[1], resume=True))
        found = run(place, first, count)
        again = run(place, rest, count)
        for case, beside, wanted, begun, after in zip(rest, first[::2], found[::2], found[1::2], again, strict=True):
            row = {"model": model, "mesh": case.mesh, "processes": count, "adapters": case.adapters}
            refused = [one["refused"] for one in (wanted, begun, after) if "refused" in one]
            if refused:
                yield said({**row, "refused": refused[0], "holds": False})
                continue
            ours, theirs = Path(case.folder or ""), Path(beside.folder or "")
            equal = {
                "losses_equal": wanted["losses"] == after["losses"],
                "samples_equal": wanted["samples"] == begun["samples"] + after["samples"],
                "random_state_equal": wanted["random"] == begun["random"] + after["random"],
                "position_equal": position(theirs, whole) == position(ours, whole),
            }
            differ = unequal(theirs, ours, whole)
            seen = len({number for update in wanted["samples"] for number in update})
            holds = all(equal.values()) and not differ and len(wanted["samples"]) == whole
            yield said({**row, **equal, "samples": seen, "arrays_unequal": differ, "holds": holds})


def from_mesh_to_mesh(place: Path, model: str) -> dict[str, Any]:
    """A run of two processes, which goes on on other meshes of one process: what each restored, the losses, and the
    samples."""
    each, folder = UPDATES - 1, str(place / f"chain {model}")
    total = each * (len(CHAIN) + 1)
    alone = run(place, [Case(model, None, updates=total)])[0]
    wanted = alone["losses"]
    cases = [Case(model, CHAIN[0], updates=total, folder=folder, stop=each)]
    cases += [
        Case(model, mesh, updates=total, folder=folder, stop=each * (number + 2), resume=True)
        for number, mesh in enumerate(CHAIN)
    ]
    found = run(place, cases[:1], 2) + run(place, cases[1:])
    restored = [one.get("restored") for one in found[1:]]
    written = [digests(Path(folder) / "checkpoints" / str(each * (number + 1))) for number in range(len(CHAIN))]
    equal = [ours == theirs for ours, theirs in zip(restored, written, strict=True)]
    ours = found[-1].get("losses", [])
    apart = max((abs(a - b) / b for a, b in zip(ours, wanted, strict=True)), default=1.0) if ours else None
    refused = next((one["refused"] for one in found if "refused" in one), None)
    same = [update for one in found for update in one.get("samples", [])] == alone["samples"]
    return said(
        {
            "model": model,
            "meshes": ["fsdp=8 of two processes", *CHAIN],
            "restored_bits_equal": equal,
            "samples_equal": same,
            "largest_difference": apart,
            **({"refused": refused} if refused else {}),
            "holds": all(equal) and same and apart is not None and apart <= BAR,
        }
    )


def said(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row."""
    print(json.dumps(row), flush=True)
    return row


def unequal(ours: Path, theirs: Path, step: int) -> list[str]:
    """The arrays of two runs' checkpoints that differ in a bit."""
    one, other = (digests(folder / "checkpoints" / str(step)) for folder in (ours, theirs))
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def position(folder: Path, step: int) -> dict[str, Any]:
    """The position in the data of a run's checkpoint, and its counters."""
    saved = json.loads((folder / "checkpoints" / str(step) / "trainer.json").read_text())
    return {"data": saved["data"], **{name: saved["state"][name] for name in COUNTERS}}


def digests(place: Path) -> dict[str, str]:
    """A digest of each array in a checkpoint."""
    import logging

    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    found = {}
    logging.getLogger("absl").setLevel(logging.ERROR)  # which misses a file of the next format of orbax
    with ocp.PyTreeCheckpointer() as reader:
        for part in ("params", "optimizer"):
            tree = reader.metadata(place / part).item_metadata.tree
            plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            for name, value in reader.restore(place / part, restore_args=plain).items():
                found[f"{part} {name}"] = digest(value)
    return found


def digest(array: Any) -> str:
    """What tells an array from another."""
    from hashlib import sha256

    import numpy as np

    array = np.asarray(array)
    return f"{array.dtype} {list(array.shape)} {sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]}"


# -- processes that train -------------------------------------------------------------------------------------


def run(place: Path, cases: list[Case], processes: int = 1) -> list[dict[str, Any]]:
    """What each case gave, in new processes that have 8 devices together."""
    if not cases:
        return []
    asked, given = place / "cases.json", place / "found.jsonl"
    given.unlink(missing_ok=True)
    asked.write_text(json.dumps({"place": str(place), "cases": [asdict(case) for case in cases]}))
    counts = ["--nproc-per-node", str(processes), "--devices-per-process", str(8 // processes)]
    command = [sys.executable, "-m", "ttpu_core.cli.main", "launch", *counts, "--", __file__, "--worker", str(asked)]
    # Two collectives of a program that run at once take two threads of each of the 8 devices.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "32"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    return [json.loads(line) for line in given.read_text().splitlines()]


def work(asked: Path) -> None:
    """One process: compute the cases in their order; process 0 writes what they gave."""
    from ttpu_jax.distributed import initialize

    initialize()
    import jax

    content = json.loads(asked.read_text())
    place = Path(content["place"])
    for case in content["cases"]:
        found = trained(place, Case(**case))
        if jax.process_index() == 0:
            with (place / "found.jsonl").open("a") as file:
                file.write(json.dumps(found) + "\n")
        jax.clear_caches()


def trained(place: Path, case: Case) -> dict[str, Any]:
    """Losses of all updates of a run, the samples and the random state of those of this call, and what was restored."""
    from ttpu import Trainer, TrainerCallback
    from ttpu_core.errors import RequestError, UnsupportedError
    from ttpu_jax.params.export import on_host

    class Watches(TrainerCallback):
        restored: dict[str, str] | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if case.resume:
                params, state = kwargs["model"].stored_arrays()
                arrays = {f"{part} {name}": one for part, of in (("params", params), ("optimizer", state))
                          for name, one in of.items()}  # fmt: skip
                self.restored = {name: digest(on_host(one)) for name, one in arrays.items()}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == case.stop

    watches = Watches()
    samples: list[list[int]] = []
    random: list[list[Any]] = []
    try:
        trainer = Trainer(
            str(place / case.model),
            train_dataset=examples(),
            output_dir=case.folder or place / "run",
            cache_dir=place / "tokens",
            max_steps=case.updates,
            max_length=LENGTH,
            gradient_accumulation_steps=case.parts,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            weight_decay=0.1,
            max_grad_norm=0.5,
            remat="full",
            parallelism_strategy=case.mesh,
            zero_stage=case.stage,
            logging_steps=1,
            save_strategy="no" if case.folder is None else "steps",
            save_steps=case.updates,
            resume_from_checkpoint=case.resume,
            per_device_train_batch_size=ROWS // (case.parts * rows_divided_over(case.mesh)),
            report_to="none",
            disable_tqdm=True,
            callbacks=[watches],
            **({"peft_config": ADAPTERS} if case.adapters else {}),
        )
        runner: Any = trainer.runner
        update = runner.step

        def recorded(batch: Any) -> Any:
            samples.append(runner.gathered_rows(numbers(batch)).tolist())
            random.append([runner.settings.seed, runner.step_count, dropped_by(runner, case.parts)])
            return update(batch)

        runner.step = recorded
        trainer.train()
    except (RequestError, UnsupportedError) as error:
        return {"refused": str(error)}
    found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {"losses": found, "samples": samples, "random": random, "restored": watches.restored}


def numbers(batch: Any) -> Any:
    """The number of each row's sample [rows] among `examples`; -1 for a row that fills a batch."""
    import numpy as np

    known = {tuple(one["input_ids"]): number for number, one in enumerate(examples())}
    rows = [tuple(row[real].tolist()) for row, real in zip(batch.tokens, batch.positions >= 0, strict=True)]
    return np.array([known[row] if row else -1 for row in rows], np.int32)


def dropped_by(runner: Any, parts: int) -> list[str]:
    """What each part of the next update draws its dropped inputs from; nothing without adapters."""
    if runner.adapters is None:
        return []
    keys = [runner.adapters.noise(runner.settings.seed, runner.step_count, part) for part in range(parts)]
    return [digest(one) for key in keys for one in key.values()]


def rows_divided_over(mesh: str | None) -> int:
    """The devices that have different rows."""
    sizes = dict(axis.removeprefix("dcn.").split("=") for axis in mesh.split(",")) if mesh else {}
    return prod(int(sizes.get(axis, 1)) for axis in OF_ROWS)


def examples() -> list[dict[str, list[int]]]:
    """Sequences of different lengths."""
    import numpy as np

    random = np.random.default_rng(0)
    return [{"input_ids": random.integers(0, 97, 4 + number % (LENGTH - 3)).tolist()} for number in range(10 * ROWS)]


def write_model(place: Path, name: str) -> None:
    """A checkpoint with random weights."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    import numpy as np

    from ttpu_core import ModelConfig, default_registry
    from ttpu_jax.params.export import save_checkpoint
    from ttpu_jax.params.initialize import random_parameters
    from ttpu_jax.params.placement import local_placement

    architecture = default_registry().architecture(ModelConfig.from_dict(MODELS[name]))
    shutil.rmtree(place / name, ignore_errors=True)
    params = random_parameters(
        architecture.spec.parameters, local_placement(), np.dtype(np.float32), standard_deviation=0.2
    )
    save_checkpoint(place / name, architecture.mapping, params, MODELS[name])


if __name__ == "__main__":
    main()
