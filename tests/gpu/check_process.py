"""The process of one check: calls its function and writes what came of it.

    python tests/gpu/check_process.py MODULE:FUNCTION DEVICE GPUS OUT

OUT/outcome.json has the figures as soon as there are some, so that a check that is killed leaves
those that it had, and at the end whether it passed. Exit status 1 if it failed.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path

from machine import Figures, Machine, NotHere

TESTS = Path(__file__).parents[1]
# `dtensor_bench`, `tiny`, `conformance` and others
sys.path += [str(TESTS), str(TESTS / "training"), str(TESTS / "inference")]


def main(function: str, device: str, gpus: str, out: str) -> int:
    """Run the check; returns the exit status."""
    folder = Path(out)
    figures = Figures(folder / "outcome.json")
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(Machine(device, int(gpus), folder), figures)
    except NotHere as lacking:
        figures.end("skipped", str(lacking))
        return 0
    except Exception as error:  # a check may fail in any way; each is its outcome
        traceback.print_exc()
        figures.end("failed", f"{type(error).__name__}: {error}")
        return 1
    figures.end("ok")
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo that release tensors while Python finalises would abort the process.
    os._exit(status)
