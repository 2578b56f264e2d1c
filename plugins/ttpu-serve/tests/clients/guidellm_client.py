"""guidellm: a benchmark of a few requests, as its command runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import harness


@harness.case
def benchmark() -> None:
    """a benchmark over synthetic prompts: every request completes with the tokens that were asked for"""
    report = Path(tempfile.mkdtemp()) / "report.json"
    command = [
        *(str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={harness.URL}"),
        *("--tokenizer", f"kind=hf_auto,model={harness.CHECKPOINT}"),
        *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=12"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"),
        *("--output", f"kind=json,path={report}"),
    ]
    few = {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}  # each imports torch
    subprocess.run(command, check=True, timeout=120, env={**os.environ, **few})
    (found,) = json.loads(report.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert totals["successful"] == 4 and not totals["errored"], totals
    assert found["metrics"]["output_token_count"]["successful"]["mean"] == 12


harness.main()
