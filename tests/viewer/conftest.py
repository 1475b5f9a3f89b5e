"""A run of one Record, and a browser that looks at its pages."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from two_segments import FIRST, OF_RECORD, SECOND
from viewed import SECRET

from agentrl.cli import main
from agentrl.databases.connection import RunDatabase
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.viewer.places import Places
from agentrl.viewer.server import Viewer


@pytest.fixture
async def run(
    database: RunDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mongod: EmbeddedMongod
) -> str:
    """The name of a run with one Record of two segments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DB_URL", mongod.url)
    rows = [{**FIRST, **OF_RECORD}, {**SECOND, **OF_RECORD}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["import", "rows.jsonl", "--run_name", database.name]
    assert await asyncio.to_thread(main, command) == 0
    return database.name


@pytest.fixture
async def page(run: str, mongod: EmbeddedMongod) -> AsyncIterator[httpx2.AsyncClient]:
    """A browser that has opened the address with the secret."""
    async with (
        Places(Path("output"), mongod.url) as places,
        Viewer(places, SECRET).running("127.0.0.1", 0) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", follow_redirects=True) as client,
    ):
        assert (await client.get("/", params={"token": SECRET})).status_code == 200
        yield client
