"""A search for a text in an order reads no more of the run than it has time for."""

from datetime import UTC, datetime
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
)

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Split
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.viewer.record_search import search_in_order


class Batches(CommandListener):
    """How many Records came with each reply."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def started(self, event: CommandStartedEvent) -> None:
        pass

    def succeeded(self, event: CommandSucceededEvent) -> None:
        cursor = event.reply.get("cursor", {})
        if cursor.get("ns", "").endswith(".records"):
            self.sizes.append(len(cursor.get("firstBatch", cursor.get("nextBatch"))))

    def failed(self, event: CommandFailedEvent) -> None:
        pass


async def test_a_search_in_an_order_goes_beyond_its_first_stretch_in_batches_of_that_size(
    database: RunDatabase, mongod: EmbeddedMongod, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, count = datetime(2026, 1, 1, tzinfo=UTC), 3000
    await database.records.insert_many(
        {"_id": f"r{at:04}", "split": "train", "score": 0.5, "tokens": {"generated": at},
         "finished_at": ended}
        for at in range(count)
    )  # fmt: skip
    batches = Batches()
    client: AsyncMongoClient[dict[str, Any]]
    async with AsyncMongoClient(mongod.url, tz_aware=True, event_listeners=[batches]) as client:
        listened = RunDatabase(client, client[database.name])
        monkeypatch.setattr("agentrl.viewer.record_search._SECONDS_OF_TEXT", 60.0)
        found = await search_in_order(listened, "best", {}, Split.TRAIN, "nowhere")
        assert found.looked_at == count and found.after is None
        assert sum(batches.sizes) == count and max(batches.sizes) == 250
        batches.sizes.clear()
        monkeypatch.setattr("agentrl.viewer.record_search._SECONDS_OF_TEXT", 0.0)
        found = await search_in_order(listened, "best", {}, Split.TRAIN, "nowhere")
        assert found.looked_at == sum(batches.sizes) == 250
        assert found.after == [0.5, 249, "r0249"]
