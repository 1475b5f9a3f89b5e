"""Notes of `agentrl view`: none is lost, and no page of another address writes one."""

import html
from pathlib import Path

import httpx2
import pytest
from two_segments import OF_RECORD
from viewed import SECRET, seen_in, shown

from agentrl.databases.connection import RunDatabase
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.viewer.places import Places
from agentrl.viewer.server import Viewer


async def test_a_note_that_somebody_has_changed_meanwhile_is_not_overwritten_unseen(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    record = f"/run/{run}/records/{OF_RECORD['record']}"
    nothing = seen_in(await shown(page, record))
    first = await page.post(f"{record}/note", data={"text": "hers", "changed_at": nothing})
    assert first.status_code == 200 and 'value="hers"' in first.text
    mine = {"text": "mine", "labels": "odd", "changed_at": nothing}
    refused = await page.post(f"{record}/note", data=mine)
    assert refused.status_code == 409 and "somebody has changed this note" in refused.text
    assert "<b>hers</b>" in refused.text and 'value="mine"' in refused.text
    # Who has seen both may write; and what is sent twice is no conflict.
    mine["changed_at"] = seen_in(refused.text)
    for _ in range(2):
        assert (await page.post(f"{record}/note", data=mine)).status_code == 200
    removed = {"text": "", "changed_at": seen_in(await shown(page, record))}
    assert (await page.post(f"{record}/note", data=removed)).status_code == 200
    assert await database.notes.count_documents({}) == 0
    refused = await page.post(f"{record}/note", data={**mine, "text": "more"})
    assert refused.status_code == 409 and "somebody has removed this note" in refused.text


@pytest.mark.parametrize(
    ("record", "text", "status", "sentence"),
    [
        ("none", "<b>my thought", 400, "has no record"),
        (OF_RECORD["record"], "x" * 30_000, 400, "20000 characters"),
    ],
)
async def test_a_refused_note_gives_its_text_back(
    page: httpx2.AsyncClient, run: str, database: RunDatabase,
    record: str, text: str, status: int, sentence: str,
) -> None:  # fmt: skip
    refused = await page.post(f"/run/{run}/records/{record}/note", data={"text": text})
    assert refused.status_code == status and sentence in refused.text
    assert html.escape(text) in refused.text and "<b>my" not in refused.text
    assert await database.notes.count_documents({}) == 0


async def test_a_note_sent_after_the_login_is_lost_comes_back_and_shows_no_run(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    page.cookies.clear()
    note = {"text": "long thought"}
    for record in (OF_RECORD["record"], "none"):
        refused = await page.post(f"/run/{run}/records/{record}/note", data=note)
        assert refused.status_code == 401 and 'value="long thought"' in refused.text
        assert "not logged in" in refused.text and "forty-six" not in refused.text
    assert await database.notes.count_documents({}) == 0


@pytest.mark.parametrize(
    ("sent", "written"),
    [
        ({"Origin": "http://127.0.0.1:1"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://elsewhere.example", "Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Origin": "the page's"}, True),
        # Behind a proxy with TLS that names this server by its own address.
        ({"Origin": "https://runs.example", "Sec-Fetch-Site": "same-origin"}, True),
    ],
)
async def test_only_the_pages_of_this_server_write(
    page: httpx2.AsyncClient, run: str, database: RunDatabase, sent: dict[str, str], written: bool
) -> None:
    own = str(page.base_url).rstrip("/")
    headers = {name: own if value == "the page's" else value for name, value in sent.items()}
    note = f"/run/{run}/records/{OF_RECORD['record']}/note"
    answer = await page.post(note, data={"text": "mine"}, headers=headers)
    assert answer.status_code == (200 if written else 403), answer.text
    assert await database.notes.count_documents({}) == int(written)


async def test_two_viewers_of_one_host_do_not_log_each_other_out(
    page: httpx2.AsyncClient, mongod: EmbeddedMongod
) -> None:
    async with (
        Places(Path("output"), mongod.url) as places,
        Viewer(places, SECRET[::-1]).running("127.0.0.1", 0) as port,
    ):
        other = f"http://127.0.0.1:{port}/"  # a browser sends it the cookies of the first one
        assert (await page.get(other)).status_code == 401
        assert (await page.get(other, params={"token": SECRET[::-1]})).status_code == 200
        for address in ("/", other):
            assert (await page.get(address)).status_code == 200


async def test_a_form_that_cannot_be_read_is_answered_in_a_sentence(
    page: httpx2.AsyncClient, run: str
) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"}
    for known in (True, False):
        if not known:
            page.cookies.clear()
        note = f"/run/{run}/records/{OF_RECORD['record']}/note"
        answer = await page.post(note, content=b"text=\xff", headers=form)
        assert answer.status_code == 500 and "UnicodeDecodeError" in answer.text
