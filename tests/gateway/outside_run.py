"""A run whose attempts are made from outside: a gateway as a process of its own, and clients."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from answering_service import AnsweringService
from scripted_run import DEMO_MODEL, begin_run

from agentrl.databases import runs
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, Split, Task
from agentrl.databases.feeder import make_tasks
from agentrl.databases.runs import RunLease
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger
from agentrl.held_port import HeldPort

CLIENTS = Path(__file__).parents[2] / "clients"


@dataclass
class OutsideRun:
    """A run and its gateway. `url`: of the gateway, the same whenever it is started."""

    database: RunDatabase
    database_url: str
    service: AnsweringService
    lease: RunLease
    port: HeldPort
    log: Path
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port.number}"

    async def start(self) -> None:
        """Start the gateway, and wait until it answers."""
        command = [
            sys.executable, "-m", "agentrl.cli", "gateway", "--run_name", self.database.name,
            "--db_connection_string", self.database_url, "--agent_name", "outside",
            "--model_name_or_path", str(DEMO_MODEL), "--num_generations", "2",
            "--gateway_port", str(self.port.number), "--startup_timeout", "60", *self.flags,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            environment = {**os.environ, **self.environment, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        async with asyncio.timeout(90), aiohttp.ClientSession() as http:
            while True:
                assert self._process.poll() is None, self.log.read_text()
                try:
                    async with http.get(f"{self.url}/v1/models"):
                        return
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.1)

    async def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal, and wait for the end; returns the status."""
        assert self._process is not None
        self._process.send_signal(number)
        return await asyncio.to_thread(self._process.wait, 60)

    async def until_ended(self) -> int:
        """Wait until it ends by itself; returns the status."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait, 60)

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def finish(self) -> None:
        """The trainer has done its steps."""
        await self.lease.progress(step=9, max_steps=9, version=0, status=runs.FINISHED)

    async def claim(self, **asked: Any) -> tuple[int, dict[str, Any]]:
        """Ask for a task; returns status and body."""
        return await self.post("/tasks/claim", {"timeout": 20, **asked})

    async def post(self, path: str, body: Any, key: str = "") -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(self.url + path, json=body, headers=headers) as response,
        ):
            return response.status, (await response.json() if response.status != 204 else {})

    async def tasks(self) -> list[Task]:
        return [Task.from_mongo(task) async for task in self.database.tasks.find().sort("seq", 1)]

    async def records(self) -> list[Record]:
        found = self.database.records.find().sort("_id", 1)
        return [Record.from_mongo(record) async for record in found]


@asynccontextmanager
async def outside_run(
    database: RunDatabase, database_url: str, service: AnsweringService, log: Path, *flags: str
) -> AsyncIterator[OutsideRun]:
    """A run of four tasks with two rollouts each; its gateway is not started yet."""
    lines = [
        TaskLine(id=f"bin {n}", query=f"What is in bin {n}?", answer=str(n), scorer="exact_match")
        for n in range(4)
    ]
    ledger = TaskLedger(database, "feeder", lease_seconds=9, max_failures=1)
    await ledger.add(make_tasks(lines, Split.TRAIN, 0, 2, range(len(lines))))
    lease = await begin_run(database, service=service.url)
    with HeldPort() as port:
        run = OutsideRun(database, database_url, service, lease, port, log, flags)
        try:
            yield run
        finally:
            if run.runs:
                await run.end()
