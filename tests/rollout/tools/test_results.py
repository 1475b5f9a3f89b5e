"""A result as the model reads it, and what the database keeps of it."""

import base64
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from tool_session import session_with

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import ResultFile, ToolResult
from agentrl.databases.records import RecordLedger
from agentrl.rollout.tools.results import MAX_KEPT_BYTES, kept_result, read_result, shorten

PICTURE = b"\x89PNG not really"


def text(content: str) -> TextContent:
    return TextContent(text=content)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_parts_are_read_in_order_and_what_is_no_text_becomes_a_file_with_a_note() -> None:
    reading = read_result(
        CallToolResult(
            content=[
                text("see:"),
                ImageContent(data=encoded(PICTURE), mime_type="image/png"),
                AudioContent(data=encoded(b"la"), mime_type="audio/wav"),
                EmbeddedResource(resource=TextResourceContents(uri="file:///a", text="of a file")),
                EmbeddedResource(
                    resource=BlobResourceContents(uri="file:///b.pdf", blob=encoded(b"%PDF"))
                ),
                ResourceLink(name="more", uri="https://host/more"),
            ]
        )
    )
    assert reading.text.split("\n") == [
        "see:",
        "[image (image/png, 15 bytes) left out: only text can be read]",
        "[audio (audio/wav, 2 bytes) left out: only text can be read]",
        "of a file",
        "[resource file:///b.pdf (application/octet-stream, 4 bytes) left out: "
        "only text can be read]",
        "[link to more: https://host/more]",
    ]
    assert [(file.kind, file.uri, file.data) for file in reading.files] == [
        ("image", None, PICTURE),
        ("audio", None, b"la"),
        ("resource", "file:///b.pdf", b"%PDF"),
    ]


@pytest.mark.parametrize(
    ("texts", "content", "read"),
    [
        ([], {"a": 1}, '{"a":1}'),
        (['{"a": 1}'], {"a": 1}, '{"a": 1}'),
        (["7"], {"result": 7}, "7"),
        (["seven"], {"result": "seven"}, "seven"),
        (["1", "2"], {"result": [1, 2]}, "1\n2"),
        (["a", "b"], {"result": ["a", "b"]}, "a\nb"),
        (["[DIR] a"], {"content": "[DIR] a"}, "[DIR] a"),
        (["a"], {"content": [{"type": "text", "text": "a"}]}, "a"),
        (["2 rows"], {"rows": [1, 2]}, '2 rows\n{"rows":[1,2]}'),
        (["the result"], {"result": None}, 'the result\n{"result":null}'),
    ],
)
def test_structured_content_is_added_unless_the_text_says_it(
    texts: list[str], content: Any, read: str
) -> None:
    result = CallToolResult(content=[text(t) for t in texts], structured_content=content)
    assert read_result(result).text == read


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.lists(st.text(st.characters()), max_size=3), JSON)
def test_whatever_a_server_says_is_a_text_that_can_be_stored(
    texts: list[str], content: Any
) -> None:
    result = CallToolResult(content=[text(t) for t in texts], structured_content=content)
    read_result(result).text.encode("utf-8")


@pytest.mark.parametrize("deep", ["[" * 100_000, "[" * 900 + "]" * 900])
def test_a_text_that_is_nested_json_is_no_trouble(deep: str) -> None:
    result = CallToolResult(content=[text(deep)], structured_content={"a": 1})
    assert read_result(result).text == deep + '\n{"a":1}'


def test_data_that_is_not_base64_is_kept_as_it_came() -> None:
    [file] = read_result(
        CallToolResult(content=[ImageContent(data="é?", mime_type="image/png")])
    ).files
    assert file.data == "é?".encode()


def test_what_utf8_cannot_hold_is_replaced() -> None:
    assert read_result(CallToolResult(content=[text("half \ud83d of a pair")])).text == (
        "half ? of a pair"
    )


def test_a_long_text_is_cut_with_a_note_and_one_at_the_limit_is_not() -> None:
    assert shorten("abcde", 5) == "abcde"
    assert shorten("abcdefg", 5) == "abcde\n[2 characters left out]"


def test_what_no_document_can_hold_is_named_in_it() -> None:
    small = ResultFile(kind="image", mime_type="image/png", data=b"x")
    large = ResultFile(kind="audio", mime_type="audio/wav", data=b"x" * MAX_KEPT_BYTES)
    kept = kept_result("key", "record", "tool", "some text", [large, small])
    assert (kept.text, kept.files) == ("some text", [small])
    assert kept.omitted == [f"audio (audio/wav, {MAX_KEPT_BYTES} bytes)"]
    kept = kept_result("key", "record", "tool", "é" * MAX_KEPT_BYTES, [small])
    assert kept.text == "é" * (MAX_KEPT_BYTES // 2)
    assert kept.files == []
    assert kept.omitted == [
        f"the text's last {MAX_KEPT_BYTES} bytes",
        "image (image/png, 1 bytes)",
    ]


@pytest.fixture
def ledger(database: RunDatabase) -> Iterator[RecordLedger]:
    ledger = RecordLedger(database, 60.0)
    ledger.leases.begin(["record"], time.monotonic())
    yield ledger


async def test_the_database_keeps_whole_what_the_model_reads_cut(
    hostile_server: Any, ledger: RecordLedger, database: RunDatabase
) -> None:
    async with session_with(
        hostile_server.url, records=ledger, max_tool_result_chars=10
    ) as session:
        short = await session.call("echo", {"text": "0123456789"})
        assert (short.text, short.whole, short.kept) == ("0123456789", None, None)
        long = await session.call("echo", {"text": "0123456789ab"})
        assert long.text == "0123456789\n[2 characters left out]"
        assert long.whole == "0123456789ab"
        picture = await session.call("picture", {})
    assert (long.kept, picture.kept) == ("record-result-0", "record-result-1")
    cursor = database.tool_results.find().sort("_id", 1)
    whole, pictured = [ToolResult.from_mongo(document) async for document in cursor]
    assert (whole.record_id, whole.tool, whole.text) == ("record", "echo", "0123456789ab")
    assert pictured.text.startswith("see:\n[image (image/png, 3 bytes)")
    assert [file.data for file in pictured.files] == [b"\0\0\0"]


async def test_an_agent_may_keep_a_text_of_its_own(
    hostile_server: Any, ledger: RecordLedger, database: RunDatabase
) -> None:
    async with session_with(hostile_server.url, records=ledger) as session:
        key = await session.keep("fetch", "a whole page")
    stored = await database.tool_results.find_one({"_id": key})
    assert stored is not None
    assert (stored["tool"], stored["text"]) == ("fetch", "a whole page")


@pytest.mark.parametrize(
    ("whole", "files"), [("x" * MAX_KEPT_BYTES, 0), ("é" * (MAX_KEPT_BYTES // 2), 0), ("", 1)]
)
async def test_the_largest_result_that_is_kept_is_stored_whole(
    ledger: RecordLedger, database: RunDatabase, whole: str, files: int
) -> None:
    image = ResultFile(kind="image", mime_type="image/png", data=b"x" * MAX_KEPT_BYTES)
    result = kept_result("key", "record", "tool", whole, [image] * files)
    await ledger.add_tool_result(result)
    stored = await database.tool_results.find_one({"_id": "key"})
    assert stored is not None and stored["text"] == whole
    assert [len(file["data"]) for file in stored["files"]] == [MAX_KEPT_BYTES] * files
