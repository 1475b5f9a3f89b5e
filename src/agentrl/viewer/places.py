"""Where runs are: their folders and databases. A database is opened when somebody looks at it.

A finished run with a MongoDB of its own has its mongod started for that. It is stopped when nobody
has looked for a while, and at once when a launch takes the run, which waits for that.
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
from agentrl.databases.connection import DatabaseUnreachable, RunDatabase
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.mongod_lock import mongod_holds
from agentrl.databases.run_list import server
from agentrl.launcher.database import (
    embedded_port,
    ended,
    mongod_of,
    run_place,
    running_mongod,
)
from agentrl.launcher.progress import MetricsTail, ProgressReader
from agentrl.launcher.run_folder import lock_holder
from agentrl.launcher.run_state import RunRow
from agentrl.launcher.runs import list_runs, read_row
from agentrl.viewer.kept import Kept

_IDLE_S = 60.0  # after which a mongod that was started for a look is stopped
_LOOK_S = 0.5
_NAMES_S = 10.0
_PORT_S, _OWN_PORT_S = 10.0, 3.0
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

    async def row(self) -> RunRow | None:
        """Its row in the list of runs, with its state; None if it was imported only."""
        return await read_row(self.folder, self.database, self.url)


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
        self._kept = Kept()
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

    async def names(self) -> list[str]:
        """Names of these runs, as they were some seconds ago; none if they cannot be listed."""

        async def read() -> list[str]:
            try:
                return [row.name for row in await self.runs()]
            except DatabaseUnreachable:  # the list says so; other runs have a database of their own
                return []

        return await self._kept.get("names", read, _NAMES_S)

    @asynccontextmanager
    async def run(self, name: str) -> AsyncIterator[Place]:
        """The run of this name. Raises `ConfigError` if there is none, `DatabaseUnreachable`.

        What the block asks of the database has `ANSWER_S` seconds; then a `PyMongoError` says so.
        """
        async with self._lock:
            opened = self._open.get(name)
            if opened is not None and not self._stands(opened):
                if opened.users and opened.started is not None:
                    # It is closed when they have their pages.
                    raise DatabaseUnreachable(_taken(name))
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
        """Whether the run's own mongod is still the one that was opened, and may stay open."""
        if opened.mongod_port is None:
            return True
        data = opened.place.folder / "mongo"
        if opened.started is not None:
            return not ended(opened.started) and lock_holder(opened.place.folder) is None
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
                raise _missing(name, str(given.parent), folder)
            url = await asyncio.to_thread(running_mongod, data, ANSWER_S)
            if url is None:
                if lock_holder(folder) is not None:  # whose mongod starts, or is started again
                    raise DatabaseUnreachable(_taken(name))
                started = mongod_of(config)
                url = await asyncio.to_thread(started.start)
                stack.push_async_callback(asyncio.to_thread, started.stop)
            port = embedded_port(data)
        try:
            # Indexes are made by those who write.
            # One on loopback answers, or is gone, which its client's end waits for too.
            patience = _PORT_S if port is None else _OWN_PORT_S
            client: AsyncMongoClient[Any] = await stack.enter_async_context(server(url, patience))
            if name not in await client.list_database_names():
                raise _missing(name, "its database", folder)
        except BaseException:
            await stack.aclose()
            raise
        database = RunDatabase(client, client[name])
        progress = ProgressReader(database, folder)
        metrics = MetricsTail(folder / "metrics.jsonl", most=None)
        found = Place(name, database, folder, url, progress, metrics)
        stack.push_async_callback(found.kept.close)
        return _Open(found, stack, port, started)

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            async with self._lock:
                for name, opened in list(self._open.items()):
                    if opened.started is None or opened.users:
                        continue
                    idle = time.monotonic() - opened.used > _IDLE_S
                    if idle or not self._stands(opened):
                        await self._open.pop(name).stack.aclose()


def _missing(name: str, place: str, folder: Path) -> ConfigError | DatabaseUnreachable:
    """What is not there, or not yet."""
    if lock_holder(folder) is not None:
        return DatabaseUnreachable(_taken(name))
    return ConfigError(f"there is no run {name!r} in {place}")


def _taken(name: str) -> str:
    return f"run {name} was taken by a launch, whose database is not open yet"
