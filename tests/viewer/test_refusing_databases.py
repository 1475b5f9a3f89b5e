"""A database that is silent, slow, or lets nobody write: pages say so, and no note is lost."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from ports import free_port
from pymongo import MongoClient
from two_segments import OF_RECORD
from viewed import SECRET, figures_in, seen_in, shown

from agentrl.databases.connection import RunDatabase
from agentrl.databases.mongod import EmbeddedMongod, find_mongod
from agentrl.databases.success import CurvePoint
from agentrl.viewer import run_page
from agentrl.viewer.places import Place, Places
from agentrl.viewer.server import Viewer

RECORD = OF_RECORD["record"]


@pytest.mark.parametrize("opened", [True, False])
async def test_a_silent_database_is_told_within_seconds_and_its_return_is_noticed(
    page: httpx2.AsyncClient, run: str, mongod: EmbeddedMongod, monkeypatch: pytest.MonkeyPatch,
    opened: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("agentrl.viewer.places.ANSWER_S", 0.5)
    monkeypatch.setattr("agentrl.viewer.server.ANSWER_S", 0.5)
    record = f"/run/{run}/records/{RECORD}"
    note = {"text": "a thought", "changed_at": ""}
    if opened:
        await shown(page, record)
    assert mongod.pid is not None
    os.kill(mongod.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for path in (f"/run/{run}", record, f"/run/{run}/records", "/") if opened else ("/",):
            answer = await page.get(path, timeout=30)
            assert answer.status_code == 503, answer.text
            assert "answer" in answer.text
        if opened:
            assert "has not answered within 0.5 s" in (await page.get(record, timeout=30)).text
            refused = await page.post(f"{record}/note", data=note, timeout=30)
            assert refused.status_code == 503 and 'value="a thought"' in refused.text
            assert "has not answered within 0.5 s" in refused.text
        assert time.monotonic() - began < 20
    finally:
        os.kill(mongod.pid, signal.SIGCONT)
    assert "forty-six" in await shown(page, record)


async def test_a_runs_own_silent_database_is_told_within_seconds_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.viewer.places.ANSWER_S", 1.0)
    with EmbeddedMongod(tmp_path / "output/own/mongo", tmp_path / "own.log") as own:
        assert own.pid is not None
        os.kill(own.pid, signal.SIGSTOP)
        try:
            async with (
                Places(tmp_path / "output", None) as places,
                Viewer(places, SECRET).running("127.0.0.1", 0) as port,
                httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as reader,
            ):
                await reader.get("/", params={"token": SECRET})
                answer = await reader.get("/run/own", timeout=30)
        finally:
            os.kill(own.pid, signal.SIGCONT)
    assert answer.status_code == 404
    assert "has neither answered nor ended for 1 s" in answer.text


async def test_a_run_page_does_without_sums_that_take_longer_than_it_has_and_shows_them_later(
    page: httpx2.AsyncClient, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.viewer.places.ANSWER_S", 2.0)
    monkeypatch.setattr("agentrl.viewer.kept._PATIENCE_S", 0.1)
    tokens, curve = run_page._sampled_tokens, run_page.success_curve

    async def slow_tokens(place: Place) -> int:
        await asyncio.sleep(3)  # longer than the page has
        return await tokens(place)

    async def slow_curve(database: RunDatabase, most: int) -> list[CurvePoint]:
        await asyncio.sleep(3)
        return await curve(database, most)

    monkeypatch.setattr(run_page, "_sampled_tokens", slow_tokens)
    monkeypatch.setattr(run_page, "success_curve", slow_curve)
    for _ in range(2):
        early = await shown(page, f"/run/{run}")
        assert figures_in(early)["tokens so far"].startswith("– sampled")
        assert "training tasks (not summed yet)" in early
    async with asyncio.timeout(30):
        while True:
            text = await shown(page, f"/run/{run}")
            if "– sampled" not in figures_in(text)["tokens so far"] and "yet)" not in text:
                break
            await asyncio.sleep(0.2)
    assert figures_in(text)["tokens so far"].startswith("5 sampled")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    """The address of a mongod that asks for passwords, of which `admin` may do all."""
    port, data = free_port(), tmp_path / "guarded"
    data.mkdir()
    with (tmp_path / "guarded.log").open("wb") as log:
        mongod = subprocess.Popen(
            [str(find_mongod()), "--dbpath", str(data), "--port", str(port), "--auth",
             "--bind_ip", "127.0.0.1", "--nounixsocket"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        with MongoClient[dict[str, Any]](f"127.0.0.1:{port}", directConnection=True) as client:
            client.admin.command("createUser", "admin", pwd="a", roles=["root"])
        yield f"127.0.0.1:{port}"
    finally:
        mongod.terminate()
        mongod.wait()


async def test_who_may_only_read_keeps_the_text_of_a_note_and_is_told_in_a_sentence(
    run: str, database: RunDatabase, guarded: str
) -> None:
    with MongoClient[dict[str, Any]](f"mongodb://admin:a@{guarded}/") as client:
        for name in await database.database.list_collection_names():
            found = await database.database[name].find().to_list()
            if found:
                client[run][name].insert_many(found)
        client.admin.command("createUser", "reader", pwd="r", roles=["readAnyDatabase"])
    url = f"mongodb://reader:r@{guarded}/?retryWrites=false"
    async with (
        Places(Path("output"), url) as places,
        Viewer(places, SECRET).running("127.0.0.1", 0) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", follow_redirects=True) as reader,
    ):
        await reader.get("/", params={"token": SECRET})
        record = f"/run/{run}/records/{RECORD}"
        seen = seen_in(await shown(reader, record))
        note = {"text": "a thought", "labels": "odd", "changed_at": seen}
        refused = await reader.post(f"{record}/note", data=note)
    assert refused.status_code == 503
    assert "The user of DB_URL may not write in the run&#39;s database" in refused.text
    assert 'value="a thought"' in refused.text and 'value="odd"' in refused.text
    assert "not authorized" not in refused.text
