"""The clock of the database's server, by which leases end and Records have their times."""

from datetime import datetime

from agentrl.databases.connection import RunDatabase


async def server_time(database: RunDatabase) -> datetime:
    """The time there; ours may differ."""
    # Commands decode times without a zone unless told otherwise, unlike queries.
    options = database.database.codec_options
    answer = await database.database.command("hello", codec_options=options)
    now: datetime = answer["localTime"]
    return now
