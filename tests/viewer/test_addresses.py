"""Addresses that nobody's page leads to: each is answered by a sentence."""

import json
import re

import httpx2
import pytest
from two_segments import OF_RECORD

from agentrl.databases.connection import RunDatabase


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("records?order=bogus", 400, "order=bogus: there are newest, worst, best"),
        ("records?split=bogus", 400, "split=bogus: there are train, eval"),
        ("records?before=9999-12-31T23:59:59-23:59", 400, "not a time"),
        ("records?before=yesterday", 400, "before=yesterday: not a time"),
        ("records?text=a%00b", 400, "NUL character"),
        ("records?where=score%3E99999999999999999999999", 400, "MongoDB has no such value"),
        ('records?where={"$where":"sleep(1e6)"}', 400, "$where would run JavaScript"),
        ('records?where={"$oid":"5f43a1b2c3d4e5f6a7b8c9d0"}', 400, "a value, not a filter"),
        ("tasks?split=bogus", 400, "split=bogus: there are train, eval"),
        ("tasks?order=bogus", 400, "order=bogus: there are newest, learned, hardest"),
        ("tasks?text=a%00b", 400, "NUL character"),
        ("steps/12345678901234567890123", 404, "there is no page"),
        ("steps/" + "9" * 5000, 404, "there is no page"),
        (f"records/{OF_RECORD['record']}/turns/" + "9" * 5000 + "/curl", 404, "there is no page"),
        ("bogus", 404, "there is no page"),
        ("records/%ED%A0%80", 404, "has no record"),
        ("records/a%00b", 404, "has no record"),
        ("compare?run=no.such&first=bogus", 404, "no.such"),
    ],
)
async def test_an_odd_address_is_answered_in_a_sentence(
    page: httpx2.AsyncClient, run: str, path: str, status: int, sentence: str
) -> None:
    answer = await page.get(f"/run/{run}/{path}")
    [said] = re.findall(r'role="alert">(.*)</p>', answer.text)
    assert answer.status_code == status
    assert sentence in said.replace("&#34;", '"').replace("&#39;", "'")


async def test_a_filter_that_takes_mongodb_too_long_is_given_up_in_a_sentence(
    page: httpx2.AsyncClient, run: str, database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await database.records.find_one({})
    await database.records.insert_many({**(one or {}), "_id": f"r{at}"} for at in range(2000))
    many = {"$range": [0, 20_000]}
    slow = {"$expr": {"$eq": [{"$reduce": {"input": many, "initialValue": 0, "in": "$$this"}}, 0]}}
    monkeypatch.setattr("agentrl.viewer.places.ANSWER_S", 0.5)
    for order in ("newest", "best"):
        asked = {"where": json.dumps(slow), "order": order}
        answer = await page.get(f"/run/{run}/records", params=asked)
        assert answer.status_code == 400, answer.text
        assert "MongoDB takes too long to find the records" in answer.text
