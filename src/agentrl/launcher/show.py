"""`agentrl show`: one trajectory, two side by side, a list of Records, or what failed."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from agentrl.configs import ConfigError
from agentrl.configs.verbs import SHOWN_RECORDS, show_parser
from agentrl.databases import outages
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Split
from agentrl.databases.failed_tasks import count_failed_tasks
from agentrl.databases.notes import read_note
from agentrl.foreign_text import visible_json
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.database import place_config, run_database
from agentrl.launcher.record_filter import read_conditions
from agentrl.launcher.show_diff import Side, diff, print_diff
from agentrl.launcher.show_failed import (
    counted,
    print_failed_tasks,
    print_quarantined,
    read_failures,
)
from agentrl.launcher.show_list import list_records, print_list
from agentrl.launcher.show_record import print_record
from agentrl.launcher.show_tokens import token_lines
from agentrl.launcher.trajectory import (
    find_record,
    read_turns,
    record_json,
    right_answer,
    trajectory_json,
)
from agentrl.launcher.trajectory_tokens import model_folder, read_row, turn_tokens


def main(argv: Sequence[str]) -> int:
    """Run `agentrl show RUN [RECORD | --diff A B | --list | --failed]`; returns the exit status.

    Raises `ConfigError` if the run or a record does not exist.
    """
    given = show_parser().parse(argv)
    arguments = given.own
    conditions = read_conditions(arguments.where)
    listing = arguments.order or arguments.where or (arguments.count and not arguments.failed)
    if listing and (arguments.record or arguments.failed or arguments.diff):
        raise ConfigError(
            "--where and --count choose among records: leave out the id, --diff or --failed"
        )
    if arguments.tokens and (listing or arguments.failed or arguments.diff):
        raise ConfigError(
            "--tokens prints those of one record: give its id, or none for the newest"
        )
    config = place_config(given)
    console, split = TerminalConsole(), Split(arguments.split)

    async def show() -> None:
        async with run_database(config, run_lives=True) as opened:
            database = opened.database
            if arguments.failed:
                count = arguments.count or SHOWN_RECORDS
                if arguments.json:
                    _print_json(asdict(await read_failures(database, count)))
                    return
                failures = await read_failures(database)
                print_failed_tasks(console, failures.tasks, failures.n_tasks, count)
                print_quarantined(
                    console, arguments.run, failures.quarantined, failures.n_quarantined, count
                )
            elif listing:
                records = await list_records(
                    database, arguments.order or "newest", conditions, split,
                    arguments.count or SHOWN_RECORDS,
                )  # fmt: skip
                if arguments.json:
                    _print_json([record_json(record) for record in records])
                    return
                print_list(console, records, config.run.run_name)
            elif arguments.diff:
                found = diff(*[await _side(database, name) for name in arguments.diff])
                if arguments.json:
                    _print_json(found.json())
                    return
                print_diff(console, found)
            else:
                await show_one(database)

    async def show_one(database: RunDatabase) -> None:
        if not (arguments.tokens or arguments.json):
            for outage in await outages.current(database):
                console.print(Text(outage.sentence(datetime.now(UTC)), "red"), soft_wrap=True)
        n_failed = await count_failed_tasks(database)
        failed = f"{counted(n_failed)} tasks have failures: `agentrl show {arguments.run} --failed`"
        try:
            record = await find_record(database, arguments.record, split)
        except ConfigError as error:
            raise ConfigError(f"{error}; {failed}" if n_failed else f"{error}") from None
        turns = await read_turns(database, record.id)
        answer = await right_answer(database, record)
        note = await read_note(database, record.id)
        tokens = None
        if arguments.tokens:
            row = await read_row(database, record.id)
            tokens = turn_tokens(turns, row, await model_folder(database))
        if arguments.json:
            shown = trajectory_json(record, turns, answer)
            shown["note"] = None if note is None else note.model_dump(mode="json", exclude={"id"})
            if tokens is not None:
                shown["tokens"] = [asdict(turn) for turn in tokens]
            _print_json(shown)
            return
        if tokens is not None:
            for line in token_lines(tokens):
                print(line)
            return
        print_record(console, record, turns, answer)
        if note is not None:
            labels = "".join(f" [{label}]" for label in note.labels)
            console.print(Text(f"note{labels}: {note.text}", "cyan"), soft_wrap=True)
        if n_failed:
            console.print(Text(failed, "yellow"))

    asyncio.run(show())
    return 0


async def _side(database: RunDatabase, record_id: str) -> Side:
    """What `diff` compares of a Record."""
    record = await find_record(database, record_id, Split.TRAIN)
    turns = await read_turns(database, record.id)
    row = await read_row(database, record.id)
    return record, turns, turn_tokens(turns, row, await model_folder(database))


def _print_json(value: Any) -> None:
    print(visible_json(json.dumps(value, ensure_ascii=False, indent=1)))
