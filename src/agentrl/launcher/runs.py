"""`agentrl runs`: lists the runs of a folder and of a MongoDB, one line each.

It reads files of the runs' folders and starts no database.
"""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.configs import ConfigError
from agentrl.configs.parsing import config_of
from agentrl.configs.verbs import runs_parser
from agentrl.databases.run_list import StoredRun, server, stored_runs
from agentrl.databases.runs import FINISHED
from agentrl.databases.success import evaluations
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.deployment import read_deployment
from agentrl.launcher.run_parts import shown_bytes
from agentrl.launcher.run_state import RunRow, State, read_run
from agentrl.redaction import without_passwords

_STYLES = {State.LIVE: "green", State.FAILED: "red", State.BROKEN: "red"}
_AGES = ((86400, "d"), (3600, "h"), (60, "min"))


def main(argv: Sequence[str]) -> int:
    """Run `agentrl runs [flags]`; returns the exit status.

    Raises `ConfigError` if the folder does not exist, and `DatabaseUnreachable`.
    """
    given = runs_parser().parse(argv)
    arguments = given.own
    root = Path(arguments.output_root)
    url = config_of(given.values).run.db_connection_string or read_deployment(os.environ).db_url
    if arguments.output_root != "output" and not root.is_dir():
        raise ConfigError(f"--output_root {root}: there is no such folder")
    rows = asyncio.run(list_runs(root, url))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print_runs(TerminalConsole(), rows, time.time(), str(root))
    return 0


async def list_runs(root: Path, url: str | None) -> list[RunRow]:
    """The runs of a folder and of the MongoDB at `url`, newest first.

    Raises `DatabaseUnreachable`.
    """
    folders = sorted(root.iterdir()) if root.is_dir() else []
    rows = [row for row in map(read_run, folders) if row is not None]
    if url is not None:
        rows = merge_rows(rows, await _rows_of(url))
    return sorted(rows, key=lambda row: -(row.changed or 0.0))


async def _rows_of(url: str) -> list[RunRow]:
    async with server(url) as client:
        return [await _row_of(stored, url) for stored in await stored_runs(client)]


async def _row_of(stored: StoredRun, url: str) -> RunRow:
    run = stored.run
    held_out = await evaluations(stored.database)
    state, note = State.STOPPED, ""
    if stored.live:
        state, note = State.LIVE, f"trainer {run.trainer} on {run.trainer_host}"
    elif run.status == FINISHED:
        state = State.FINISHED
    return RunRow(
        name=stored.database.name,
        state=state,
        note=note,
        step=run.step,
        max_steps=run.max_steps or None,
        before=held_out[0].success if held_out else None,
        after=held_out[-1].success if held_out else None,
        bytes=stored.bytes,
        changed=run.heartbeat.timestamp() if run.heartbeat else None,
        folder=None,
        database=without_passwords(url),
    )


def merge_rows(on_disk: Sequence[RunRow], stored: Sequence[RunRow]) -> list[RunRow]:
    """Merge the row of a run's folder with that of its database.

    A folder with an embedded database is another run, even if the names are equal.
    """
    left = {row.name: row for row in stored}
    merged = []
    for row in on_disk:
        other = left.pop(row.name, None) if row.database != "embedded" else None
        if other is None:
            merged.append(row)
            continue
        better = other if other.state in (State.LIVE, State.FINISHED) else row
        merged.append(
            replace(
                other,
                state=better.state,
                note=better.note,
                step=max(row.step, other.step),
                max_steps=other.max_steps or row.max_steps,
                bytes=row.bytes + other.bytes,
                changed=max(row.changed or 0.0, other.changed or 0.0),
                folder=row.folder,
            )
        )
    return [*merged, *left.values()]


def print_runs(console: Console, rows: Sequence[RunRow], now: float, root: str) -> None:
    """Print the rows as a table in the given order, then the notes on runs.

    `now`: seconds since 1970.
    """
    if not rows:
        console.print(f"no run in {root}")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("run", "state", "steps", "success", "size", "when", "where"):
        right = title in ("steps", "size", "when")
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "where",
                         overflow="fold")  # fmt: skip
    for row in rows:
        place = row.folder or row.database or "?"
        if row.folder and row.database not in (None, "embedded"):
            place += f", {row.database}"
        table.add_row(
            row.name,
            Text(row.state, _STYLES.get(row.state, "")),
            f"{row.step}/{row.max_steps or '?'}" if row.step or row.max_steps else "-",
            " → ".join(f"{one:.2f}" for one in (row.before, row.after) if one is not None) or "-",
            shown_bytes(row.bytes),
            age(now - row.changed) if row.changed else "-",
            place,
        )
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"{row.name}: {row.note}", markup=False, highlight=False, style="dim")


def age(seconds: float) -> str:
    """Format an age for display, such as `3 h`."""
    for unit, name in _AGES:
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"
