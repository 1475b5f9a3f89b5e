"""`agentrl release`: puts groups, records and rows in quarantine back to where they failed.

    agentrl release RUN            all of them
    agentrl release RUN ID ...     those with these ids

`agentrl show RUN --failed` lists them. The run's samplers and trainer then process them, at the
next resume if the run is not live.
"""

import asyncio
from collections.abc import Sequence

from agentrl.configs import ConfigError
from agentrl.configs.verbs import release_parser
from agentrl.databases.quarantine import Quarantined, list_quarantined, release
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.database import place_config, run_database
from agentrl.launcher.report import print_lines


def main(argv: Sequence[str]) -> int:
    """`agentrl release RUN [ID ...]`. Returns the exit status.

    Raises `ConfigError` for an unknown run, and for an id that is not in quarantine.
    """
    given = release_parser().parse(argv)
    ids = given.own.ids
    config = place_config(given)

    async def put_back() -> tuple[Quarantined, int]:
        async with run_database(config, run_lives=True) as opened:
            known = {item.id for item in await list_quarantined(opened.database)}
            unknown = [item for item in ids if item not in known]
            if unknown:
                raise ConfigError(
                    f"nothing in quarantine has the id {unknown[0]}: "
                    f"`agentrl show {config.run.run_name} --failed` lists what has"
                )
            released = await release(opened.database, ids or None)
            left = {item.id for item in await list_quarantined(opened.database)}
            return released, len(left.intersection(ids or known))

    run = config.run.run_name
    lines = _lines(run, *asyncio.run(put_back()))
    print_lines(TerminalConsole(), lines)
    return 0


def _lines(run: str, released: Quarantined, stay: int) -> list[str]:
    if released.total:
        said = (
            f"run {run}: {released.groups} groups, {released.records} records and "
            f"{released.rows} rows are released from quarantine; they are worked on as soon as the "
            "run goes on"
        )
    else:
        said = f"run {run}: nothing was released from quarantine"
    if not stay:
        return [said]
    return [
        said,
        f"{stay} stay in quarantine, because their groups are being scored or finalised: release "
        "them when that is done",
    ]
