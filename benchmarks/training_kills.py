"""Kills a training run with SIGKILL at random moments, again and again, while it writes checkpoints in the background;
after each kill the run is resumed, which restores the newest checkpoint. Reports how many kills there were, how many
hit a save, and that no checkpoint was torn: every folder with a number restores, and the losses of updates that were
computed twice are equal to the last bit.

    python benchmarks/training_kills.py --kills 50 --output benchmarks/results/training_kills.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

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
    with tempfile.TemporaryDirectory() as folder:
        report = kill_again_and_again(Path(folder) / "run", options.kills, random.Random(options.seed))
    versions = {name: metadata.version(name) for name in ("jax", "orbax-checkpoint")}
    report = {"python": platform.python_version(), "versions": versions, **report}
    print(json.dumps(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def train(folder: Path) -> None:
    """One process: it trains from the newest checkpoint on, saving after every second update, until it is killed."""
    from ttpu import Trainer

    Trainer(
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
    ).train()


def kill_again_and_again(folder: Path, kills: int, chance: random.Random) -> dict[str, Any]:
    """Figures of all kills.

    Raises:
        SystemExit: a resumed run failed, or did not go on from the newest whole checkpoint, or computed another loss.
    """
    losses: dict[int, float] = {}
    unfinished = 0
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "jax")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for number in range(kills + 1):
        newest = newest_checkpoint(folder)
        before = newest or 0  # lines of the log: resuming cuts off those of updates that the checkpoint lacks
        process = subprocess.Popen([sys.executable, __file__, "--run", str(folder)], env=environment, stdout=2)
        last = number == kills
        wanted = before + chance.randint(2, 8) + max(0, len(log(folder)) - before)
        while len(log(folder)) < wanted and process.poll() is None:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.3)
        if process.poll() is not None:
            raise SystemExit(f"the run after kill {number} ended by itself with status {process.returncode}")
        process.send_signal(signal.SIGTERM if last else signal.SIGKILL)
        process.wait()
        lines = log(folder)[before:]
        if newest and lines[0]["step"] != newest + 1:
            raise SystemExit(f"the run after kill {number} began at {lines[0]['step']}, with a checkpoint of {newest}")
        for line in lines:
            loss = losses.setdefault(line["step"], line["loss"])
            if loss != line["loss"]:
                raise SystemExit(f"after kill {number} update {line['step']} has the loss {line['loss']}, not {loss}")
        unfinished += not last and any(not one.name.isdigit() for one in (folder / "checkpoints").iterdir())
    return {"kills": kills, "during_a_save": unfinished, "updates": len(losses), "torn_checkpoints": 0}


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
