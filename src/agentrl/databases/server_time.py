"""The clock of the database's server, by which leases end and Records have their times."""

from datetime import datetime
from typing import Any

from pymongo import AsyncMongoClient


async def server_time(client: AsyncMongoClient[Any]) -> datetime:
    """The time there; ours may differ."""
    # Commands decode times without a zone unless told otherwise, unlike queries.
    answer = await client.admin.command("hello", codec_options=client.codec_options)
    now: datetime = answer["localTime"]
    return now
