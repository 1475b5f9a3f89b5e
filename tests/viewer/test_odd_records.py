"""Pages of records that hold what nobody expects: each is shown, or says in a sentence why not."""

import html
import json
import logging
import re
import shlex
from typing import Any

import httpx2
import pytest
from two_segments import OF_RECORD
from viewed import shown

from agentrl.databases.connection import RunDatabase
from agentrl.training.run.rollout_table import look_at
from agentrl.viewer.folded_json import folded_json


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000, "[" * 300 + "]" * 300, '{"price": 1, "price": 2}', "1.10", "[1, 2", "",
        "12345678901234567890123", "[" + "9" * 5000 + ",", "[" + "1," * 150_000 + "1]",
    ],
)  # fmt: skip
def test_a_text_that_cannot_be_folded_is_shown_as_it_is(text: str) -> None:
    assert folded_json(text) == text


def test_a_folded_text_has_its_literals_as_they_were_written() -> None:
    text = (
        '{"a":1.10,"big":12345678901234567890123.0e+2,"s":"\\u00e9, {\\"x\\": [1]}","e":[],"o":{ }}'
    )
    folded = folded_json(text)
    assert folded == (
        '{\n  "a": 1.10,\n  "big": 12345678901234567890123.0e+2,\n'
        '  "s": "\\u00e9, {\\"x\\": [1]}",\n  "e": [],\n  "o": {}\n}'
    )
    nested = {"list": [{"a": 1, "b": [[], [None, True]]}], "x": "y\n"}
    assert folded_json(json.dumps(nested)) == json.dumps(nested, indent=2)


async def change_turn(database: RunDatabase, **fields: Any) -> None:
    await database.turns.update_one({"turn": 0}, {"$set": fields})


async def test_a_result_that_is_a_hundred_thousand_brackets_is_shown(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    await change_turn(database, **{"tool_calls.0.result": "[" * 100_000})
    assert "[" * 100_000 in await shown(page, f"/run/{run}/records/{OF_RECORD['record']}")


async def test_a_message_without_content_shows_the_calls_that_it_has(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    odd = [{"role": "assistant", "tool_calls": [call]}, {"content": "of nobody"}]
    await change_turn(database, messages=odd)
    text = await shown(page, f"/run/{run}/records/{OF_RECORD['record']}")
    assert "of nobody" in text and "&#34;name&#34;: &#34;look&#34;" in text


async def test_a_record_that_cannot_be_read_says_so_in_a_sentence_and_in_the_log(
    page: httpx2.AsyncClient, run: str, database: RunDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    await change_turn(database, output_ids=b"\0" * 7, prompt_delta_ids=b"\0" * 7)
    record = f"/run/{run}/records/{OF_RECORD['record']}"
    with caplog.at_level(logging.ERROR):
        for part in ("tokens", "json", "turns/0/curl"):
            answer = await page.get(f"{record}/{part}")
            assert answer.status_code == 500
            [sentence] = re.findall(r'role="alert">(.*)</p>', answer.text)
            assert f"/{part} cannot be shown: ValueError: " in sentence
            assert "Content-Security-Policy" in answer.headers
    assert "Traceback" in caplog.text and "unpack_ints" in caplog.text
    assert "let me look" in await shown(page, record)
    await database.records.update_one({}, {"$set": {"n_turns": "many"}})
    answer = await page.get(record)
    assert answer.status_code == 500 and "ValidationError" in answer.text


async def test_commands_to_copy_have_ids_as_a_shell_takes_them(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    one = await database.records.find_one({})
    assert one is not None
    odd = "a 'b' $(touch c)"
    await database.records.insert_one({**one, "_id": odd})
    text = await shown(page, f"/run/{run}/records/{odd}")
    [command] = re.findall(r'data-text="(agentrl show [^"]*)"', text)
    wanted = ["agentrl", "show", run, odd]
    assert shlex.split(html.unescape(command)) == wanted
    assert shlex.split(look_at(run, odd, None)) == wanted
