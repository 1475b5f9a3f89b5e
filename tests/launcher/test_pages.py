"""The pages of a run that is launched: its port waits, and the viewer comes and goes."""

import asyncio
import os
import socket
from pathlib import Path

import httpx2
import pytest

from agentrl.configs.parsing import config_of
from agentrl.databases.connection import RunDatabase
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.launcher import pages
from agentrl.launcher.pages import Pages


def opened(database: RunDatabase, mongod: EmbeddedMongod, folder: Path) -> Pages:
    place = {"run_name": database.name, "db_connection_string": mongod.url}
    return Pages(config_of({**place, "output_dir": str(folder / "run")}), folder / "log")


async def test_the_viewer_begins_with_the_first_visitor_and_ends_with_the_launch(
    database: RunDatabase, mongod: EmbeddedMongod, tmp_path: Path
) -> None:
    await database.notes.insert_one({"_id": "so that there is a database"})
    shown = opened(database, mongod, tmp_path)
    try:
        await asyncio.sleep(0.1)
        assert shown._viewer is None, "nobody has looked"
        new = {"Connection": "close"}
        async with httpx2.AsyncClient(follow_redirects=True, timeout=60, headers=new) as visitor:
            answer = await visitor.get(shown.address)
            assert answer.status_code == 200 and f"<h1>{database.name}" in answer.text
            assert shown._viewer is not None
            shown._viewer.kill()
            again = await visitor.get(shown.address.partition("?")[0])
            assert again.status_code == 200, "the token is the same, so the cookie holds"
        stranger = shown.address.partition("?")[0]
        assert (await asyncio.to_thread(httpx2.get, stranger)).status_code == 401
        viewer = shown._viewer
    finally:
        await shown.close()
    assert viewer is not None and viewer.poll() is not None
    with pytest.raises(httpx2.ConnectError):
        await asyncio.to_thread(httpx2.get, shown.address)


async def test_a_launch_that_is_killed_takes_its_viewer_along(
    database: RunDatabase, mongod: EmbeddedMongod, tmp_path: Path
) -> None:
    await database.notes.insert_one({"_id": "so that there is a database"})
    shown = opened(database, mongod, tmp_path)
    try:
        async with httpx2.AsyncClient(timeout=60) as visitor:
            await visitor.get(shown.address)
        assert shown._viewer is not None and shown._viewer.stdin is not None
        os.close(shown._viewer.stdin.fileno())  # as the kernel does it
        assert await asyncio.to_thread(shown._viewer.wait, 20) == 0
        shown._viewer.stdin = None
    finally:
        await shown.close()


async def test_a_port_that_is_taken_is_no_failure(
    database: RunDatabase, mongod: EmbeddedMongod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(pages, "PORT", port)
        shown = opened(database, mongod, tmp_path)
        assert f":{port}/" not in shown.address
        await shown.close()
