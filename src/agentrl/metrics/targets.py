"""The file that names the ports of a run's processes, as Prometheus' `file_sd_configs` read it.

It stands beside the run's folder, `output/RUN.metrics_targets.json`: a pattern of Prometheus' may
have a `*` in the last part of a path only, so `output/*.metrics_targets.json` finds all runs.

Several processes write it, one after the other. Each looks at times whether its entry is there, and
writes it again if somebody removed it. At its end it removes its own entry, and the entries of
processes of this machine that were killed. The file goes with its last entry. The labels of a
target are `run` and `process`; those that begin with `__meta_` are for Prometheus' relabelling and
for this module.
"""

import asyncio
import fcntl
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from agentrl.configs import Config, ConfigError
from agentrl.whole_file import write_whole

log = logging.getLogger(__name__)

_HOST, _PID = "__meta_agentrl_host", "__meta_agentrl_pid"
_LOOK_S = 10.0
_Entry = dict[str, Any]


def targets_file(config: Config) -> Path:
    """The file of a run."""
    return config.output.with_name(f"{config.output.name}.metrics_targets.json")


@asynccontextmanager
async def announced(config: Config, addresses: Mapping[str, str]) -> AsyncIterator[None]:
    """Have targets in a run's file during the block.

    `addresses`: HOST:PORT by the name of the process. Raises `ConfigError` if the file cannot be
    written.
    """
    path, run = targets_file(config), config.run.run_name
    ours = [_entry(run, process, address) for process, address in addresses.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _change(path, ours)
    except OSError as error:
        raise ConfigError(
            f"--metrics_port {config.run.metrics_port}: the list of targets cannot be written: "
            f"{error}"
        ) from None
    over = asyncio.Event()
    keeping = asyncio.create_task(_keep(path, ours, over))
    try:
        yield
    finally:
        over.set()
        try:
            await keeping
        finally:
            _leave(path, ours)


def _leave(path: Path, ours: Sequence[_Entry]) -> None:
    try:
        _change(path, [], without=ours)
    except OSError as error:  # the folder is gone, or its disk is full: no reason to fail
        log.warning("%s keeps an entry of this process: %s", path, error)


async def _keep(path: Path, ours: Sequence[_Entry], over: asyncio.Event) -> None:
    """Write the entries again whenever they are gone, until it is over."""
    told = False
    while True:
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), _LOOK_S)
            return
        try:
            # In a thread: others may hold the lock, and the disk may be slow.
            await asyncio.to_thread(_restore, path, ours)
            told = False
        except OSError as error:
            if not told:
                log.warning("%s lacks an entry of this process: %s", path, error)
            told = True


def _restore(path: Path, ours: Sequence[_Entry]) -> None:
    known = _read(path)
    if any(each not in known for each in ours):
        path.parent.mkdir(parents=True, exist_ok=True)
        _change(path, ours, without=ours)


def _entry(run: str, process: str, address: str) -> _Entry:
    labels = {
        "run": run, "process": process, _HOST: socket.gethostname(), _PID: str(os.getpid()),
    }  # fmt: skip
    return {"targets": [address], "labels": labels}


def _change(path: Path, more: Iterable[_Entry], without: Iterable[_Entry] = ()) -> None:
    """Add entries, and leave out some, and those of processes that are gone."""
    with _locked(path.parent):
        gone = list(without)
        known = [each for each in _read(path) if each not in gone and not _is_dead(each)]
        entries = known + list(more)
        if not entries:
            path.unlink(missing_ok=True)
            return
        with write_whole(path) as partial:
            partial.write_text(json.dumps(entries, indent=2) + "\n", "utf-8")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which goes with its process."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _read(path: Path) -> list[_Entry]:
    """The entries of a file; none if it is not there, or if somebody else has written to it."""
    try:
        entries: list[_Entry] = json.loads(path.read_text("utf-8"))
        for each in entries:
            int(each["labels"][_PID]), each["labels"][_HOST], each["targets"]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        # No reason to stop a process that samples or trains.
        log.warning("%s is written anew: it is no list of targets: %r", path, error)
        return []
    return entries


def _is_dead(entry: _Entry) -> bool:
    labels = entry["labels"]
    if labels[_HOST] != socket.gethostname():
        return False
    try:
        os.kill(int(labels[_PID]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # it lives, and is another user's
    return False
