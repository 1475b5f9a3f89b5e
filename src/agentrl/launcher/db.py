"""`agentrl db`: a run's database, open for MongoDB Compass, `mongosh` or any other client.

The database of a live run is open already. For a finished run its mongod is started on loopback,
until Ctrl-C.
"""

import asyncio
from collections.abc import Sequence

from agentrl.configs.verbs import db_parser
from agentrl.databases.mongod import EmbeddedMongod, MongodError
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.database import ended, place_config, run_database
from agentrl.launcher.report import print_lines
from agentrl.redaction import without_passwords
from agentrl.stop_signals import stop_signals

_LOOK_S = 0.25


def main(argv: Sequence[str]) -> int:
    """`agentrl db RUN`; returns the exit status. Raises for a name that is not there."""
    config = place_config(db_parser().parse(argv))
    console = TerminalConsole()

    async def hold() -> None:
        async with run_database(config, run_lives=True) as opened:
            name = config.run.run_name
            if config.run.db_connection_string is not None:
                print_lines(console, [f"database {name} at {without_passwords(opened.url)}"])
                return
            print_lines(console, [f"for MongoDB Compass: {compass_url(opened.url, name)}"])
            if opened.mongod is None:
                print_lines(console, ["it is open as long as the process that opened it runs"])
                return
            print_lines(console, ["open until Ctrl-C"])
            await _until_signal(opened.mongod)
        print_lines(console, ["closed"])

    asyncio.run(hold())
    return 0


def compass_url(url: str, name: str) -> str:
    """The address of an embedded mongod as clients with windows take it: one server, not a set."""
    host = url.removeprefix("mongodb://").partition("/")[0]
    return f"mongodb://{host}/{name}?directConnection=true"


async def _until_signal(mongod: EmbeddedMongod) -> None:
    """Wait for Ctrl-C or its like. Raises `MongodError` if mongod ends before."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, asked.set)
    while not asked.is_set():
        if ended(mongod):
            raise MongodError(f"mongod ended: see the end of {mongod.log_file}")
        try:
            await asyncio.wait_for(asked.wait(), _LOOK_S)
        except TimeoutError:
            continue
