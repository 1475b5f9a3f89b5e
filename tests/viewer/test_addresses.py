"""Addresses that nobody's page leads to: each is answered by a sentence."""

import re

import httpx2
import pytest
from two_segments import OF_RECORD


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
