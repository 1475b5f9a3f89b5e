"""Reward services that answer what none should, byte by byte, and one under load: written from what
`docs/reference/rewards.md` promises."""

import asyncio
import gzip
import json
import sys
import zlib
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from scoring import make_record, make_task

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record
from agentrl.databases.records import RecordLedger
from agentrl.failures import InfrastructureFailure
from agentrl.rollout.llm.models import AgentModels, RewardServiceConfig
from agentrl.rollout.scorers import Scorers, reward_service
from agentrl.rollout.scorers.reward_service import RewardServiceError

PROGRAM = Path(__file__).with_name("reward_program.py")
Write = Callable[[asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_service, "_RETRY_PAUSE_S", 0.01)


@asynccontextmanager
async def answering(write: Write | bytes) -> AsyncIterator[str]:
    """The URL of a server that reads a request and then sends these bytes, or what `write` does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            )
            await reader.readexactly(length)
            if isinstance(write, bytes):
                writer.write(write)
                await writer.drain()
            else:
                await write(writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/score"
    finally:
        server.close()


def http(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def ask(url: str, records: RecordLedger, **config: Any) -> Record:
    settings = RewardServiceConfig(url=url, **{"timeout": 5.0, "retries": 0, **config})
    task = make_task("http", answer="4", fields=config.pop("fields", {}))
    async with Scorers(AgentModels(http_scorer=settings), records) as scorers:
        return await scorers.score(task, make_record("4"))


def bomb() -> bytes:
    """A few bytes that unpack to 300 MB. Between full flushes equal bytes are packed alike, so that
    only one MB of it is packed here."""
    pack = zlib.compressobj(1, wbits=31)
    start = pack.compress(b'{"score": 1, "explanation": "') + pack.flush(zlib.Z_FULL_FLUSH)
    return start + 300 * (pack.compress(b" " * 1_000_000) + pack.flush(zlib.Z_FULL_FLUSH))


JSON = b'{"score": 0.5}'


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (http(b""), "answered '', not"),
        (http(b"<!doctype html><html><body>It works!</body></html>"), "answered '<!doctype html>"),
        (http(b"null"), "answered 'null'"),
        (http(b'{"score": NaN}'), "answered the score nan, which is not a finite number"),
        (http(b'{"score": -Infinity}'), "answered the score -inf, which is not"),
        (http(b'{"score": 1e999}'), "answered the score inf, which is not"),
        (http(b'{"score": 1' + b"0" * 400 + b"}"), "answered the score 10000"),
        (http(b'{"score": 1' + b"0" * 5000 + b"}"), "answered '{\"score\": 1000"),
        (http(b'{"score": "1"}'), "answered the score '1'"),
        (http(b'{"score": [1]}'), "answered the score"),
        (http(b'{"score": true}'), "answered the score True"),
        (http(b'{"score": 1, "explanation": {"a": 1}}'), "answered the explanation"),
        (http(b'{"score": 1, "explanation": "\xe9"}'), "answered '{"),  # Latin-1
        (http(b"\x80\x81\xff" * 1000), "answered '"),
        (http(b'{"score":' + b"[" * 200_000), "answered '{"),
        (http(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "answered '{"),
        (http(JSON[:-3]), "answered '{\"score\": 0'"),
        (http(b" " * 5_000_000 + JSON), "sent more than 4 MB"),
        (http(bomb(), "200 OK", "Content-Encoding: gzip"), "sent more than 4 MB, packed"),
        (http(JSON, "200 OK", "Content-Encoding: gzip"), "answered what is no gzip"),
        (http(gzip.compress(JSON)[:-12], "200 OK", "Content-Encoding: gzip"), "answered"),
        (http(JSON, "200 OK", "Content-Encoding: br"), "in the encoding 'br', which was not asked"),
        (http(gzip.compress(gzip.compress(JSON)), "200 OK", "Content-Encoding: gzip, gzip"),
         "in the encoding 'gzip, gzip'"),
        (http(b"", "301 Moved", "Location: http://127.0.0.1:9/x"), "redirects to http://127.0.0.1:9/x"),
        (http(b"", "307 Temporary Redirect", "Location: /score"), "redirects to /score"),
        (http(b"", "302 Found"), "redirects to nowhere"),
        (http(b"no", "401 Unauthorized"), "refused the request with status 401"),
        (http(b"no", "404 Not Found"), "refused the request with status 404"),
        (http(b"", "204 No Content"), "refused the request with status 204"),
        (http(JSON, "201 Created"), "refused the request with status 201"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "answered what is no HTTP"),
        (http(JSON, "200 OK", "X: " + "y" * 100_000), "answered what is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "what is no HTTP"),
        (http(b"", "204 No Content") + JSON, "answered what is no HTTP: Data after"),
    ],
)  # fmt: skip
async def test_an_odd_reply_is_the_services_error_in_one_sentence(
    records: RecordLedger, reply: bytes, said: str
) -> None:
    async with answering(reply) as url:
        with pytest.raises(RewardServiceError) as error:
            await ask(url, records)
    message = str(error.value)
    assert message.startswith(f"reward service {url} ")
    assert said in message
    assert "\n" not in message
    assert len(message) < 500


@pytest.mark.parametrize(
    "reply",
    [
        b"", b"HTTP/1.1 200 OK\r\nContent-Le", http(b"later", "503 Service Unavailable"),
        http(b"slow down", "429 Too Many Requests"), http(b"x" * 100_000, "500 Internal Error"),
        http(JSON).replace(b"Content-Length: 14", b"Content-Length: 99"),
    ],
)  # fmt: skip
async def test_a_service_that_breaks_off_or_is_overloaded_is_an_outage(
    records: RecordLedger, reply: bytes
) -> None:
    async with answering(reply) as url:
        with pytest.raises(InfrastructureFailure, match="gave no score in 2 tries") as error:
            await ask(url, records, retries=1)
    assert error.value.dependency == f"the reward service {url}"
    assert len(str(error.value)) < 500


async def test_a_reply_without_end_ends_at_the_limit_of_size_or_of_time(
    records: RecordLedger,
) -> None:
    def endless(part: bytes, pause_s: float) -> Write:
        async def write(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
                await asyncio.sleep(pause_s)

        return write

    async with answering(endless(b" " * 65536, 0)) as url:
        with pytest.raises(RewardServiceError, match="sent more than 4 MB"):
            await ask(url, records)
    async with answering(endless(b" ", 0.05)) as url:
        with pytest.raises(InfrastructureFailure, match=r"no answer within its timeout of 0\.5 s"):
            await ask(url, records, timeout=0.5)


@pytest.mark.parametrize(
    "reply",
    [
        http(b"\xef\xbb\xbf" + JSON), http(JSON.decode().encode("utf-16")),
        http(b'{"score": 1, "score": 0.5}'), http(b" \n\t" + JSON + b"\r\n"),
        http(gzip.compress(JSON), "200 OK", "Content-Encoding: GZIP"),
        http(zlib.compress(JSON), "200 OK", "Content-Encoding: deflate"),
        http(JSON, "200 OK", "Content-Type: text/html; charset=no-such-charset"),
        http(b'{"score": 5e-1, "more": [1, 2]}'),
    ],
)  # fmt: skip
async def test_what_can_be_read_is_a_score(records: RecordLedger, reply: bytes) -> None:
    async with answering(reply) as url:
        assert (await ask(url, records)).score == 0.5


async def test_an_explanation_of_megabytes_and_broken_signs_is_stored(
    records: RecordLedger, database: RunDatabase
) -> None:
    body = json.dumps({"score": 1, "explanation": "\ud800\x00" * 200_000}).encode()
    async with answering(http(body)) as url:
        record = await ask(url, records)
    await database.records.insert_one(record.to_mongo())
    stored = await database.records.find_one({"_id": record.id})
    assert stored is not None
    assert "characters left out" in stored["explanations"]["http"]


@asynccontextmanager
async def service(seconds: float, workers: int) -> AsyncIterator[str]:
    """A reward service in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), str(seconds), str(workers), stdin=PIPE, stdout=PIPE
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()


async def score_all(url: str, records: RecordLedger, n: int, **config: Any) -> list[Any]:
    settings = RewardServiceConfig(url=f"{url}/score", retries=0, **config)
    async with Scorers(AgentModels(http_scorer=settings), records) as scorers:
        return await asyncio.gather(
            *(scorers.score(make_task("http"), make_record(str(i % 7))) for i in range(n)),
            return_exceptions=True,
        )


async def most_at_once(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/most") as response:
        return int(await response.text())


async def test_waiting_for_a_place_is_not_the_services_time(records: RecordLedger) -> None:
    async with service(0.1, workers=8) as url:  # 200 of them take 2.5 s
        scored = await score_all(url, records, 200, timeout=2.0, concurrency=8)
        assert [record.score for record in scored] == [float(i % 7) for i in range(200)]
        assert await most_at_once(url) == 8


async def test_more_than_a_hundred_requests_may_be_with_the_service(records: RecordLedger) -> None:
    async with service(3.0, workers=1000) as url:
        scored = await score_all(url, records, 150, timeout=60.0, concurrency=150)
        assert [record.score for record in scored] == [float(i % 7) for i in range(150)]
        assert await most_at_once(url) > 100


@pytest.mark.slow
async def test_of_a_thousand_scores_of_two_seconds_none_fails_in_five(
    records: RecordLedger,
) -> None:
    async with service(2.0, workers=64) as url:
        scored = await score_all(url, records, 1000, timeout=5.0)
        assert [record.score for record in scored] == [float(i % 7) for i in range(1000)]
