"""Which processes run, for tests of what ends with what."""

from collections.abc import Iterable

import psutil


def still_running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended. A zombie has: only its parent has yet to ask for its status, which
    never happens where process 1 does not."""
    return [process for process in processes if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        # `is_running` knows whether another process has the number by now.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
