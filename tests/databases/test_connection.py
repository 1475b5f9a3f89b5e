"""The connection to MongoDB when the network is at fault."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from agentrl.databases import connection
from agentrl.databases.connection import connect, retry_through_outages
from agentrl.databases.mongod import EmbeddedMongod


class Cable:
    """Carries connections to a port of this machine. What is open when it is cut stays open, and
    carries nothing any more, as where the other machine has lost its power. New ones work."""

    def __init__(self, target: int) -> None:
        self.loses: bytes | None = None  # the next message with this word, and nothing else
        self._target = target
        self._copies: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def lead(self) -> AsyncIterator[int]:
        """The port of its end."""
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            self.cut()
            server.close()

    def cut(self) -> None:
        for copy in self._copies:
            copy.cancel()

    async def _carry(self, near: asyncio.StreamReader, near_end: asyncio.StreamWriter) -> None:
        far, far_end = await asyncio.open_connection("127.0.0.1", self._target)
        for source, target in ((near, far_end), (far, near_end)):
            copy = asyncio.create_task(self._copy(source, target))
            self._copies.add(copy)
            copy.add_done_callback(self._copies.discard)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                if self.loses is not None and self.loses in data:
                    self.loses = None
                    continue
                target.write(data)
                await target.drain()
            target.close()


async def test_an_operation_is_not_left_waiting_for_a_member_whose_network_is_gone(
    mongod: EmbeddedMongod,
) -> None:
    address = urlsplit(mongod.url)
    assert address.port is not None
    cable = Cable(address.port)
    async with cable.lead() as port:
        url = mongod.url.replace(f":{address.port}", f":{port}")
        database = await connect(url, "test-cable")
        collection = database.database["things"]
        await collection.insert_one({"_id": 1})
        cable.cut()
        began = time.monotonic()
        found = await retry_through_outages(lambda: collection.find_one({}), "a thing")
        assert found == {"_id": 1}
        assert time.monotonic() - began < 12, "by itself the driver takes half a minute"
        await database.client.drop_database("test-cable")
        await database.close()


async def test_an_operation_whose_answer_never_comes_is_repeated_while_the_server_looks_well(
    mongod: EmbeddedMongod, database_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_ANSWER_S", 1.5)
    url = urlsplit(mongod.url)
    assert url.port is not None
    cable = Cable(url.port)
    async with cable.lead() as port:
        there = f"mongodb://127.0.0.1:{port}/?directConnection=true"
        database = await connect(there, database_name)
        found = database.records.find_one({"_id": "nothing"})
        assert await found is None
        cable.loses = b"of-the-lost"
        read = retry_through_outages(
            lambda: database.records.find_one({"_id": "of-the-lost"}), "a read"
        )
        async with asyncio.timeout(20):
            assert await read is None
        assert cable.loses is None, "the read was lost once"
        await database.close()
