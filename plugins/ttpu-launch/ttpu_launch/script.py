"""Runs a Python script with its arguments as `python FILE` does, but ends at once if the script fails: `sys.exit(1)`
would run a framework's exit handlers, which wait for processes that may be waiting for this one."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from ttpu_core.processes import is_one_of_several, leave_at_once


def main() -> None:
    """Run the script that the first argument names. Ends by SystemExit, by the script's exception, or at once."""
    del sys.argv[0]
    file = sys.argv[0]
    sys.path[0] = str(Path(file).resolve().parent)
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as ending:
        if not ending.code or not is_one_of_several():
            raise
        if not isinstance(ending.code, int):
            print(ending.code, file=sys.stderr)  # as the interpreter does
        leave_at_once(ending.code if isinstance(ending.code, int) else 1)


if __name__ == "__main__":
    main()
