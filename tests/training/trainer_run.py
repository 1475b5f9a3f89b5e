"""A run of the trainer for tests: its folders, its database, its flags, its process."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from forked import Forked
from tiny import write_tiny_folder

from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.documents import DBRecordData

T = TypeVar("T")


class Run:
    """A run's folders and database, and the trainer's flags for it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.name = f"run-{uuid4().hex[:8]}"
        self.url = url
        self.output = folder / "out"
        self.model = write_tiny_folder(folder / "model")
        self.tasks = folder / "tasks.jsonl"
        self.tasks.write_text('{"query": "one", "scorer": "exact_match", "answer": "1"}\n')

    def flags(self, *more: str) -> list[str]:
        return [
            "--run_name", self.name, "--output_dir", str(self.output),
            "--db_connection_string", self.url, "--model_name_or_path", str(self.model),
            "--per_device_train_batch_size", "4", "--learning_rate", "1e-3",
            "--max_tokens", "128", "--max_staleness", "50", "--save_steps", "2",
            "--lease_seconds", "2", *more,
        ]  # fmt: skip

    def database(self, use: Callable[[RunDatabase], Awaitable[T]]) -> T:
        async def connected() -> T:
            database = await connect(self.url, self.name)
            try:
                return await use(database)
            finally:
                await database.close()

        return asyncio.run(connected())

    def add(self, rows: list[DBRecordData]) -> None:
        self.database(lambda db: db.rows.insert_many([row.to_mongo() for row in rows]))

    def rows(self) -> list[dict[str, Any]]:
        return self.database(lambda db: db.rows.find({}).sort("group_order", 1).to_list())

    def metrics(self) -> list[dict[str, Any]]:
        file = self.output / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def await_steps(self, count: int, process: Forked | None = None) -> None:
        deadline = time.monotonic() + 60
        while len(self.metrics()) < count and time.monotonic() < deadline:
            assert process is None or process.poll() is None, "the trainer ended"
            time.sleep(0.02)

    def await_checkpoint(self, step: int, process: Forked) -> None:
        """Checkpoints are written while training goes on."""
        deadline = time.monotonic() + 60
        while not (self.output / f"checkpoint-{step}").exists() and time.monotonic() < deadline:
            assert process.poll() is None, "the trainer ended"
            time.sleep(0.02)


def start(flags: list[str], log: Path) -> Forked:
    return Forked(["-m", "agentrl.training.trainer", *flags], log=log)
