"""`agentrl import`: makes a run of the trajectories in a file.

The run then has Tasks, Records and rows like any other: it is shown, exported, trained with
`--enable_sampling false`, and `agentrl sft --from_run` reads it.
"""

import asyncio
import os
from collections.abc import Sequence

from pymongo import ReplaceOne

from agentrl.configs import Config, ConfigError
from agentrl.configs.parsing import config_of
from agentrl.configs.verbs import import_parser
from agentrl.databases import policies
from agentrl.databases.connection import Documents, RunDatabase
from agentrl.databases.documents import Document
from agentrl.databases.records import RecordLedger
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.data_file import read_data
from agentrl.launcher.data_import import OWNER, Imported, documents
from agentrl.launcher.database import run_database
from agentrl.launcher.deployment import read_deployment
from agentrl.launcher.report import print_lines, run_arguments
from agentrl.launcher.run_folder import RunLock

_AT_ONCE = 500  # documents of one write
_LEASE_S = 60.0  # unused: nothing is leased


def main(argv: Sequence[str]) -> int:
    """Read the file and store it; returns the exit status. Raises `ConfigError` for bad input."""
    given = import_parser().parse(argv)
    url = read_deployment(os.environ).db_url
    values = {"db_connection_string": url, **given.values} if url else given.values
    if "run_name" not in values:
        raise ConfigError("--run_name is needed: the name of the run that the file becomes")
    config, file = config_of(values), given.own.file
    if not file.is_file():
        raise ConfigError(f"{file}: there is no such file")
    try:
        imported = documents(read_data(file))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not imported.records:
        raise ConfigError(f"{file}: has no row")
    with RunLock(config.output):
        asyncio.run(_store(config, imported))
    told = (
        f"run {config.run.run_name}: {len(imported.records):,} trajectories of "
        f"{len(imported.tasks):,} tasks, {len(imported.rows):,} of them with a row for a trainer"
    )
    look = f"look at them: agentrl show {run_arguments(config)} --list"
    print_lines(TerminalConsole(), [told, *_not_kept(imported), look])
    return 0


def _not_kept(imported: Imported) -> list[str]:
    """Sentences on what the run does not keep of the file."""
    lines = []
    for whose, counted in (("rows", imported.not_kept), ("messages", imported.unread)):
        named = ", ".join(sorted(f"{name} ({n:,} rows)" for name, n in counted.items()))
        lines += [f"fields of {whose} that are not kept: {named}"] if named else []
    lines += [f"{said} ({n:,} rows)" for said, n in sorted(imported.remarks.items())]
    return lines


async def _store(config: Config, imported: Imported) -> None:
    """Store the documents. An import that was interrupted is repeated; another one is refused."""
    async with run_database(config, run_lives=False, may_begin=True) as opened:
        database = opened.database
        await _refuse_other(database, imported)
        await _write(database.tool_lists, list(imported.tool_lists.values()))
        await _write(database.tasks, list(imported.tasks.values()))
        await _write(database.turns, imported.turns)
        await RecordLedger(database, _LEASE_S).add_rows(imported.rows)
        # Of whatever step: as far as this run knows, its start weights sampled them.
        for version in imported.versions:
            await policies.publish(database, version, 0, OWNER)
        await _write(database.records, list(imported.records.values()))


async def _refuse_other(database: RunDatabase, imported: Imported) -> None:
    other = {"$or": [{"owner": {"$ne": OWNER}}, {"_id": {"$nin": list(imported.records)}}]}
    if await database.records.find_one(other, {"_id": 1}) is not None:
        raise ConfigError(
            f"run {database.name!r} has other trajectories: give --run_name a name of its own"
        )


async def _write(collection: Documents, made: Sequence[Document]) -> None:
    for start in range(0, len(made), _AT_ONCE):
        some = [document.to_mongo() for document in made[start : start + _AT_ONCE]]
        await collection.bulk_write(
            [ReplaceOne({"_id": each["_id"]}, each, upsert=True) for each in some]
        )
