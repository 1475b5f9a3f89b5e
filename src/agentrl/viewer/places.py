"""Where runs are: their folders and databases. A database is opened when somebody looks at it.

A finished run with a MongoDB of its own has its mongod started for that, and stopped when nobody
has looked for a while, so that the run can be resumed meanwhile.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pymongo
from pymongo import AsyncMongoClient

from agentrl.configs import ConfigError
from agentrl.databases.connection import RunDatabase
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.run_list import server
from agentrl.launcher.database import (
    embedded_port,
    ended,
    mongod_holds,
    mongod_of,
    run_place,
    running_mongod,
)
from agentrl.launcher.progress import MetricsTail, ProgressReader
from agentrl.launcher.run_state import RunRow
from agentrl.launcher.runs import list_runs
from agentrl.viewer.kept import Kept

_IDLE_S = 60.0  # after which a mongod that was started for a look is stopped
_LOOK_S = 5.0
ANSWER_S = 8.0  # a database that has not answered a page by then is silent


@dataclass
class Place:
    """A run: its database, and its folder, which may be on another machine."""

    name: str
    database: RunDatabase
    folder: Path
    url: str
    progress: ProgressReader
    metrics: MetricsTail  # all lines of the folder's file
    kept: Kept = field(default_factory=Kept)


@dataclass
class _Open:
    place: Place
    stack: AsyncExitStack
    mongod_port: int | None  # of a mongod of the run's own
    started: EmbeddedMongod | None  # the mongod, if it was started here
    users: int = 0
    used: float = 0.0


class Places:
    """The runs below a folder and in the MongoDB at `url`. `elsewhere`: folders of runs by name."""

    def __init__(
        self, root: Path, url: str | None, elsewhere: Mapping[str, Path] | None = None
    ) -> None:
        self._root = root
        self._elsewhere = dict(elsewhere or {})
        self._url = url
        self._open: dict[str, _Open] = {}
        self._lock = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._closing = asyncio.create_task(self._close_idle(), name="idle databases")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._closing is not None
        self._closing.cancel()
        await asyncio.gather(self._closing, return_exceptions=True)
        for opened in self._open.values():
            await opened.stack.aclose()

    async def runs(self) -> list[RunRow]:
        """All runs, newest first. Raises `DatabaseUnreachable`."""
        with pymongo.timeout(ANSWER_S):
            return await list_runs(self._root, self._url)

    @asynccontextmanager
    async def run(self, name: str) -> AsyncIterator[Place]:
        """The run of this name. Raises `ConfigError` if there is none, `DatabaseUnreachable`.

        What the block asks of the database has `ANSWER_S` seconds; then a `PyMongoError` says so.
        """
        async with self._lock:
            opened = self._open.get(name)
            if opened is not None and not self._stands(opened):
                await self._open.pop(name).stack.aclose()
                opened = None
            if opened is None:
                with pymongo.timeout(None):  # also within the block of another run
                    opened = self._open[name] = await self._enter(name)
            opened.users += 1
        try:
            with pymongo.timeout(ANSWER_S):
                yield opened.place
        finally:
            opened.users -= 1
            opened.used = time.monotonic()

    def _stands(self, opened: _Open) -> bool:
        """Whether the run's own mongod is still the one that was opened."""
        if opened.mongod_port is None:
            return True
        data = opened.place.folder / "mongo"
        if opened.started is not None:
            return not ended(opened.started)
        return mongod_holds(data) and embedded_port(data) == opened.mongod_port

    async def _enter(self, name: str) -> _Open:
        given = self._elsewhere.get(name, self._root / name)
        place = {"run_name": name, "output_dir": str(given)}
        if self._url is not None and not (given / "mongo").is_dir():
            place["db_connection_string"] = self._url
        config = run_place(place)
        folder, url, started, port = config.output, config.run.db_connection_string, None, None
        stack = AsyncExitStack()
        data = folder / "mongo"
        if url is None:
            if not data.is_dir():
                raise ConfigError(f"there is no run {name!r} in {given.parent}")
            url = await asyncio.to_thread(running_mongod, data, ANSWER_S)
            if url is None:
                started = mongod_of(config)
                url = await asyncio.to_thread(started.start)
                stack.push_async_callback(asyncio.to_thread, started.stop)
            port = embedded_port(data)
        try:
            # Indexes are made by those who write.
            client: AsyncMongoClient[Any] = await stack.enter_async_context(server(url))
            if name not in await client.list_database_names():
                raise ConfigError(f"there is no run {name!r} in its database")
        except BaseException:
            await stack.aclose()
            raise
        database = RunDatabase(client, client[name])
        progress = ProgressReader(database, folder)
        metrics = MetricsTail(folder / "metrics.jsonl", most=None)
        found = Place(name, database, folder, url, progress, metrics)
        return _Open(found, stack, port, started)

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            async with self._lock:
                for name, opened in list(self._open.items()):
                    idle = not opened.users and time.monotonic() - opened.used > _IDLE_S
                    if idle and opened.started is not None:
                        await self._open.pop(name).stack.aclose()
