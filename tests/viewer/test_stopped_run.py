"""The pages of a run that no launch holds: they say so, and make way for one that resumes it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest
from pymongo import MongoClient

from agentrl.databases.documents import Run
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.mongod_lock import mongod_holds
from agentrl.launcher.run_folder import LaunchRecord, RunLock, write_launch
from agentrl.viewer.places import Places
from agentrl.viewer.server import Viewer

PAGES = ("", "/tasks", "/records", "/failures", "/compare", "/records/none", "/groups/none")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run whose launch was killed while it trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DB_URL", raising=False)
    folder = Path("output/held")
    run = Run(id="held", status="training", step=2, max_steps=4)
    with (
        EmbeddedMongod(folder / "mongo", tmp_path / "log") as server,
        MongoClient[dict[str, object]](server.url) as client,
    ):
        client["held"]["runs"].insert_one(run.to_mongo())
    write_launch(folder, LaunchRecord("grpo", []))
    return folder


@pytest.fixture
def launched(folder: Path, tmp_path: Path) -> Iterator[EmbeddedMongod]:
    """The mongod that the next launch starts."""
    mongod = EmbeddedMongod(folder / "mongo", tmp_path / "log")
    yield mongod
    mongod.stop()


@pytest.fixture
async def page(folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        Places(folder.parent, None) as places,
        Viewer(places, "a secret").running("127.0.0.1", 0) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", follow_redirects=True) as client,
    ):
        await client.get("/", params={"token": "a secret"})
        yield client


async def test_pages_of_a_stopped_run_say_so_and_do_not_ask_to_be_read_again(
    page: httpx2.AsyncClient,
) -> None:
    for path in PAGES:
        assert "data-live" not in (await page.get(f"/run/held{path}")).text, path
    listed, run = (await page.get("/")).text, (await page.get("/run/held")).text
    for text in (listed, run):
        assert '<span class="state stopped">stopped</span>' in text and "killed; no check" in text
    assert "no inference service" not in run and "training</small>" not in run


async def test_a_launch_gets_the_database_that_a_page_has_open(
    launched: EmbeddedMongod, page: httpx2.AsyncClient, folder: Path
) -> None:
    assert (await page.get("/run/held")).status_code == 200
    assert mongod_holds(folder / "mongo"), "the page has started it"
    with RunLock(folder):
        launched.begin()
        early = await page.get("/run/held")  # another look does not keep it open
        assert early.status_code == 503 and "data-live" in early.text
        await asyncio.to_thread(launched.await_ready, 30)
        run = (await page.get("/run/held")).text
        assert '<span class="state live">live</span>' in run and "data-live" in run
