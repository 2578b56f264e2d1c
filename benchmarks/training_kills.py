"""Kills a training run with SIGKILL at random moments, again and again, while it writes checkpoints in the background;
after each kill this process restores every numbered checkpoint folder, and the run is resumed. Ends with an error if a
checkpoint does not restore, if a resumed run says that one is damaged or goes on from another than the newest, or if an
update that is computed twice has another loss, in any bit. Reports what was seen.

    python benchmarks/training_kills.py --kills 50 --output benchmarks/results/training_kills.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttpu import Trainer

UNFINISHED = ".unfinished-"  # how the folder of a checkpoint that is being written begins
CHECKPOINT = Path(__file__).parent.parent / "examples" / "checkpoints" / "pydoc-llama"
STEPS = 1_000_000


def main() -> None:
    """Start, kill, resume, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        train(options.run)
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        report = kill_again_and_again(Path(folder) / "run", options.kills, random.Random(options.seed))
    versions = {name: metadata.version(name) for name in ("jax", "orbax-checkpoint")}
    report = {"python": platform.python_version(), "versions": versions, **report}
    print(json.dumps(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def train(folder: Path) -> None:
    """One process: it trains from the newest checkpoint on, saving after every second update, until it is killed."""
    trainer(folder).train()


def trainer(folder: Path) -> Trainer:
    """A trainer whose run has this folder."""
    from ttpu import Trainer

    return Trainer(
        str(CHECKPOINT),
        train_dataset=[{"input_ids": [1, 5 + number % 90, *range(9, 30)]} for number in range(200)],
        output_dir=folder,
        cache_dir=folder.parent / "tokens",
        max_steps=STEPS,
        max_length=24,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=2,
        save_total_limit=3,
        disable_tqdm=True,
        resume_from_checkpoint=True,
        trainable=["layers.*.mlp.*"],
    )


class Restorer:
    """Restores checkpoints in this process, as a run does.

    Args:
        folder: where copies of checkpoints may stand, in the file system of the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runner = trainer(folder / "run").runner

    def restore_all(self, checkpoints: Path) -> int:
        """Restore every folder with a number, and return how many there are. A copy by hard links is read, so that the
        resumed run finds the folder as the kill left it.

        Raises:
            SystemExit: one does not restore, or is of another step than its name says.
        """
        from ttpu_core.errors import CheckpointError
        from ttpu_train.checkpoints import Checkpoints
        from ttpu_train.runner import CheckpointPolicy

        copy = self._folder / "copy"
        for one in checkpoints.glob("*"):
            if one.name.isdigit():
                shutil.copytree(one, copy / one.name, copy_function=os.link)
        if not copy.exists():
            return 0
        store = Checkpoints(self._runner, copy, CheckpointPolicy(keep=None))
        steps = store.steps()
        for step in steps:
            try:
                found = store.restore(step)["state"]["global_step"]
            except CheckpointError as error:
                raise SystemExit(f"a checkpoint is torn: {error}") from error
            if found != step or self._runner.step_count != step:
                raise SystemExit(f"the checkpoint of step {step} holds step {found}")
        numbered = sum(one.name.isdigit() for one in copy.iterdir())
        if numbered != len(steps):
            raise SystemExit(f"of {numbered} folders with numbers the store sees {list(steps)}")
        store.close()
        shutil.rmtree(copy)
        return numbered


def kill_again_and_again(folder: Path, kills: int, chance: random.Random) -> dict[str, Any]:
    """Figures of all kills.

    Raises:
        SystemExit: a checkpoint is torn, or a resumed run failed, found a damaged checkpoint, did not go on from the
            newest or computed another loss.
    """
    losses: dict[int, float] = {}
    unfinished = restored = computed_twice = 0
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "jax")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    restorer = Restorer(folder.parent / "restored")
    for number in range(kills + 1):
        newest = newest_checkpoint(folder)
        before = newest or 0  # lines of the log: resuming cuts off those of updates that the checkpoint lacks
        wanted = before + chance.randint(2, 8) + max(0, len(log(folder)) - before)
        said = folder.parent / "stderr"
        with said.open("wb") as errors:
            command = [sys.executable, __file__, "--run", str(folder)]
            process = subprocess.Popen(command, env=environment, stdout=errors, stderr=errors)
        last = number == kills
        while len(log(folder)) < wanted and process.poll() is None:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.3)
        ended = process.poll()
        process.send_signal(signal.SIGTERM if last else signal.SIGKILL)
        process.wait()
        text = said.read_text(errors="replace")
        if ended is not None:
            raise SystemExit(f"{text}\nthe run after kill {number} ended by itself with status {ended}")
        if "damaged" in text:
            raise SystemExit(f"{text}\nthe run after kill {number} found a damaged checkpoint")
        lines = log(folder)[before:]
        if newest and (not lines or lines[0]["step"] != newest + 1):
            raise SystemExit(f"the run after kill {number} did not go on from the checkpoint of {newest}")
        for line in lines:
            computed_twice += line["step"] in losses
            loss = losses.setdefault(line["step"], line["loss"])
            if loss != line["loss"]:
                raise SystemExit(f"after kill {number} update {line['step']} has the loss {line['loss']}, not {loss}")
        unfinished += not last and any(one.name.startswith(UNFINISHED) for one in (folder / "checkpoints").iterdir())
        restored += restorer.restore_all(folder / "checkpoints")
        print(f"kill {number}: {restored} checkpoints restored, newest {newest_checkpoint(folder)}", file=sys.stderr)
    return {
        "kills": kills,
        "during_a_save": unfinished,
        "updates": len(losses),
        "updates_computed_twice": computed_twice,
        "checkpoints_restored": restored,
    }


def newest_checkpoint(folder: Path) -> int | None:
    """The step of the newest folder with a number, which must restore."""
    steps = [int(one.name) for one in folder.glob("checkpoints/*") if one.name.isdigit()]
    return max(steps, default=None)


def log(folder: Path) -> list[dict[str, Any]]:
    """The lines of the log that are updates; a line that a kill cut short is left out."""
    file = folder / "log.jsonl"
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            content = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "loss" in content:
            found.append(content)
    return found


if __name__ == "__main__":
    main()
