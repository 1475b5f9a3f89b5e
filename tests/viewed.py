"""Pages of `agentrl view`, as tests read them."""

import html
import re

import httpx2

SECRET = "a secret of the test"


async def shown(page: httpx2.AsyncClient, path: str, **asked: str) -> str:
    answer = await page.get(path, params=asked)
    assert answer.status_code == 200, answer.text
    return answer.text


def seen_in(page: str) -> str:
    """When the note of this page was written, as its form says it."""
    field = re.search(r'name="changed_at" value="([^"]*)"', page)
    assert field is not None
    return html.unescape(field[1])


def figures_in(page: str) -> dict[str, str]:
    """The figures at the top of a page, as text, by name."""
    found = re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", page, re.DOTALL)
    return {_text(name): _text(value) for name, value in found}


def rows_in(page: str) -> dict[str, list[str]]:
    """The cells of each row of its tables, as text, by that of the first cell."""
    found = re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL)
    rows = [
        [_text(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)]
        for row in found
    ]
    return {row[0]: row for row in rows if row}


def _text(part: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", part)).strip()
