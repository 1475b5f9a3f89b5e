"""`agentrl delete`: removes a run's files from its folder, its database and its logs.

The user is asked twice. Other files in the folder are kept, links are not followed, and a live run
is refused.
"""

import asyncio
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.configs import ConfigError
from agentrl.configs.parsing import config_of
from agentrl.configs.verbs import delete_parser
from agentrl.databases.run_list import StoredRun, drop_run, server, stored_runs
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.database import mongod_holds
from agentrl.launcher.deployment import read_deployment
from agentrl.launcher.report import print_lines
from agentrl.launcher.run_folder import RunLock, lock_holder, read_launch, refuse_withheld
from agentrl.launcher.run_parts import disk_bytes, logs_of, parts_of, shown_bytes
from agentrl.launcher.run_state import launched_at
from agentrl.redaction import without_passwords

_SHOWN = 8


@dataclass(frozen=True)
class _Doomed:
    """What is to be deleted.

    `url`: the MongoDB that has the run's database; None if none was found. `stored_bytes`: size of
    that database.
    """

    run: str
    folder: Path
    parts: Sequence[Path]
    logs: Sequence[Path]
    url: str | None
    stored_bytes: int

    @property
    def bytes(self) -> int:
        return self.stored_bytes + sum(map(disk_bytes, [*self.parts, *self.logs]))

    @property
    def lines(self) -> list[str]:
        """One line for each item, with its size."""
        found = [f"{part}  {shown_bytes(disk_bytes(part))}" for part in self.parts]
        if self.url is not None:
            size = shown_bytes(self.stored_bytes)
            found.append(f"database {self.run} at {without_passwords(self.url)}  {size}")
        if self.logs:
            size = shown_bytes(sum(map(disk_bytes, self.logs)))
            found.append(f"{len(self.logs)} logs, {self.logs[0].parent}/{self.run}_*.log  {size}")
        return found


def main(argv: Sequence[str]) -> int:
    """Run `agentrl delete RUN [--yes]`; returns the exit status, 1 if the user declines.

    Raises `ConfigError` if the run is live or does not exist.
    """
    given = delete_parser().parse(argv)
    arguments = given.own
    config = config_of({**given.values, "run_name": arguments.run})
    folder = config.output
    url = None if arguments.keep_database else _url_of(folder, config.run.db_connection_string)
    doomed = asyncio.run(_find(arguments.run, folder, url))
    if not doomed.parts and doomed.url is None:
        where = f" and no database at {without_passwords(url)}" if url else ""
        raise ConfigError(
            f"run {arguments.run!r} has nothing in {folder}{where}: is the name right? "
            "`agentrl runs` lists the runs of this folder"
        )
    if not (arguments.keep_database or url or folder.joinpath("mongo").exists()
            or folder.joinpath("launch.json").exists()):  # fmt: skip
        raise ConfigError(
            f"run {arguments.run!r} has its database elsewhere: set DB_URL to its MongoDB, or "
            "give --keep_database to delete only the folder"
        )
    _refuse_live(doomed)
    console = TerminalConsole()
    print_lines(console, [f"run {doomed.run}:", *(f"  {line}" for line in doomed.lines)])
    if not arguments.yes and not _confirmed(doomed.run):
        print_lines(console, ["nothing is deleted"])
        return 1
    size = shown_bytes(doomed.bytes)
    left = asyncio.run(_delete(doomed))
    print_lines(console, [f"deleted run {doomed.run}: {size}", *left])
    return 0


def _url_of(folder: Path, given: str | None) -> str | None:
    """The URL of the run's MongoDB: of the flag, else of the run's launch, else `DB_URL`.

    A run whose folder holds its database has only that of the flag, or None. Raises `ConfigError`
    if the launch had a secret URL, which is not stored.
    """
    if given is not None or (folder / "mongo").exists():
        return given
    try:
        launch = read_launch(folder)
    except ConfigError:  # a damaged file is deleted like any other
        launch = None
    url = launched_at(launch) or read_deployment(os.environ).db_url
    if url is None and launch is not None:
        refuse_withheld(launch, (), ["db_connection_string"])
    return url


async def _find(run: str, folder: Path, url: str | None) -> _Doomed:
    stored: list[StoredRun] = []
    if url is not None:
        async with server(url) as client:
            stored = await stored_runs(client, only=run)
    for found in stored:
        if found.live:
            raise ConfigError(
                f"run {run!r} is live (trainer {found.run.trainer} on {found.run.trainer_host}): "
                "stop it first"
            )
    return _Doomed(
        run=run,
        folder=folder,
        parts=parts_of(folder),
        logs=logs_of(run),
        url=url if stored else None,
        stored_bytes=sum(found.bytes for found in stored),
    )


def _refuse_live(doomed: _Doomed) -> None:
    holder = lock_holder(doomed.folder)
    if holder is not None:
        raise ConfigError(f"run {doomed.run!r} is live (process {holder}): stop it first")
    if mongod_holds(doomed.folder / "mongo"):
        raise ConfigError(
            f"the database of run {doomed.run!r} is open: end the process that opened it first, "
            "as `agentrl db` or `agentrl show`"
        )


def _confirmed(run: str) -> bool:
    """Ask the user twice. The end of the input counts as a no."""
    try:
        if input("Delete all of that for good? [y/N] ").strip().lower() not in ("y", "yes"):
            return False
        return input("Type the run's name: ").strip() == run
    except EOFError:
        print()
        return False


async def _delete(doomed: _Doomed) -> list[str]:
    """Delete the run. Returns a line for each thing that was kept, because it is not the run's."""
    lock = RunLock(doomed.folder) if doomed.folder.is_dir() else None
    if lock is not None:
        lock.acquire(patience_s=0.0)  # the run cannot be launched meanwhile
    try:
        left = await _drop(doomed)
        for part in [*parts_of(doomed.folder), *doomed.logs]:
            _remove(part)
    finally:
        if lock is not None:
            lock.release()
    if not doomed.folder.is_dir():
        return left
    others = sorted(entry.name for entry in doomed.folder.iterdir())
    if others:
        more = ", ..." if len(others) > _SHOWN else ""
        named = ", ".join(others[:_SHOWN])
        left.append(f"left in {doomed.folder}, not the run's: {named}{more}")
    elif doomed.folder.is_symlink():
        left.append(f"left: the empty folder {doomed.folder.resolve()}, which was linked to")
        doomed.folder.unlink()
    else:
        doomed.folder.rmdir()
    return left


async def _drop(doomed: _Doomed) -> list[str]:
    if doomed.url is None:
        return []
    async with server(doomed.url) as client:
        others = [
            name
            for stored in await stored_runs(client, only=doomed.run)
            for name in await drop_run(stored)
        ]
    if not others:
        return []
    return [f"left in database {doomed.run}, not the run's: {', '.join(others)}"]


def _remove(path: Path) -> None:
    """Remove a file, link or folder. The target of a link is kept. Raises `ConfigError`."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: cannot be deleted ({error.strerror}); remove the cause, and run "
            "`agentrl delete` again"
        ) from None
