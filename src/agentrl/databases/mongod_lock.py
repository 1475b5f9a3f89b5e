"""Who holds the data folder of a mongod: one holds it at a time, by a lock on a file in it."""

import fcntl
import os
from itertools import pairwise
from pathlib import Path

_FILE = "mongod.lock"  # mongod keeps a `flock` on it, and its process id in it


def mongod_holds(data_dir: Path) -> bool:
    """Whether a mongod runs on this data folder."""
    try:
        file = os.open(data_dir / _FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # one that others may have too
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(file)


def opened_by(data_dir: Path, own: int | None = None) -> str | None:
    """Who started the mongod that runs on this data folder, as a subject; None if none runs.

    `own`: process id of one that runs, and does not count.
    """
    if not mongod_holds(data_dir):
        return None
    try:
        mongod = (data_dir / _FILE).read_text(encoding="utf-8").strip()
        if not mongod:
            # It starts: it writes its process id a while after it locks the file. Ours would have
            # ended if another had the lock.
            return "another mongod" if own is None else None
        if mongod == str(own):
            return None
        stat = Path(f"/proc/{mongod}/stat").read_text(encoding="utf-8")
        parent = stat.rpartition(")")[2].split()[1]  # the name before it may hold anything
        words = Path(f"/proc/{parent}/cmdline").read_text(encoding="utf-8").split("\0")
    except OSError:
        return "another mongod"  # it ends just now, or is not of this machine
    for word, verb in pairwise(words):
        if word in ("agentrl.cli", "agentrl") or word.endswith("/agentrl"):
            return f"`agentrl {verb}` (process {parent})"
    return f"mongod (process {mongod})"
