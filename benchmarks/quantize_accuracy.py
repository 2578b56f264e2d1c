"""What `ttpu quantize` costs the shipped checkpoint in accuracy: relative errors of its matrices' products, and the
perplexity, divergence and top-1 agreement that `ttpu eval` measures, for each scheme and method. The text is the one
that the checkpoint was trained on, as its training script cleans it. Twenty minutes on two cores.

    python benchmarks/quantize_accuracy.py --output benchmarks/results/quantize_accuracy.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from training_vs_torch import machine

ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / "examples" / "checkpoints" / "pydoc-llama"
MADE = (
    ("w8a16", "rtn"), ("w8a8", "smoothquant"), ("w4a16-g32", "rtn"), ("w4a16-g32", "awq"), ("w4a16-g32", "gptq"),
    ("w4a16-g32-asym", "rtn"), ("w4a16-g32-asym", "gptq"),
)  # fmt: skip


def main() -> None:
    """Quantize in every way, measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=190, help="of 512 tokens, to calibrate on")
    parser.add_argument("--tokens", type=int, default=3072, help="the first of the text, to measure perplexity on")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(training_text())
        report = measured(Path(folder), text, arguments.passages, arguments.tokens)
    print(json.dumps(report, indent=2))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


def training_text() -> str:
    """The documentation inside this Python, cleaned."""
    sys.path.insert(0, str(ROOT / "examples" / "train"))
    from pydoc_corpus import read_topics

    return "\n\n".join("\n\n".join(paragraphs) for _, paragraphs in read_topics())


def measured(folder: Path, text: Path, passages: int, tokens: int) -> dict[str, Any]:
    """The figures of every scheme and method."""
    errors: dict[str, Any] = {}
    folders = [str(CHECKPOINT)]
    for scheme, method in MADE:
        out = folder / f"{scheme}-{method}"
        calibration = [] if method == "rtn" else ["--calibrate", str(text), "--num-samples", str(passages)]
        options = ["--scheme", scheme, "--method", method, "--out", str(out), *calibration]
        made = ttpu("quantize", str(CHECKPOINT), *options)
        folders.append(str(out))
        if scheme == "w4a16-g32":
            errors |= {f"{kind} by {method}": value for kind, value in made["errors"].items()}
    windows = ["--window", "512", "--stride", "256", "--limit", str(tokens)]
    perplexity = ttpu("eval", *folders, "--text", str(text), *windows)
    perplexity["text"] = text.name
    for model in perplexity["models"]:
        model["name"] = Path(model["name"]).name
    return {"machine": machine(), "passages": passages, "relative errors": errors, "perplexity": perplexity}


def ttpu(*command: str) -> Any:
    """Run a command, and read the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "ttpu_core.cli.main", *command, "--json", "--quiet"], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"ttpu {' '.join(command)} failed: {done.stderr}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
