"""The pool over real engines, one of which really dies."""

import asyncio
import socket
import time

import pytest

from agentrl.inference.pool import RequestCounts, ServicePool
from agentrl.inference.protocol import (
    GenerateRequest,
    RequestRejected,
    SamplingParams,
    ServiceUnreachable,
)


def request(rid: str, tokens: int = 4) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return GenerateRequest(rid, tuple(range(30, 50)), params)


@pytest.fixture
def dead_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


async def test_a_record_stays_with_its_service_and_others_go_to_the_least_busy(
    engine, spare
) -> None:
    other = spare
    async with ServicePool() as pool:
        # The only service there is takes the first request.
        pool.update([engine.url])
        await pool.wait_ready(10)
        busy = asyncio.create_task(pool.generate(request("busy", 900), record_id="a"))
        await asyncio.sleep(0)
        pool.update([engine.url, other.url + "/"])
        assert set(pool.up) == {engine.url, other.url}
        turns = [await pool.generate(request(f"t{i}"), record_id="b") for i in range(3)]
        services = {turn.service for turn in turns}
        assert len(services) == 1
        assert services == {other.url} and (await busy).service == engine.url

        # The record's service dies with a request on it: the request goes on at the other.
        here, there = other, engine
        cut_off = asyncio.create_task(pool.generate(request("cut", 900), record_id="b"))
        await asyncio.sleep(0.1)
        here.kill()
        answer = await cut_off
        assert answer.service == there.url and len(answer.output_ids) == 900
        assert pool.up == [there.url]


async def test_a_dead_service_costs_no_request(engine, dead_url: str) -> None:
    async with ServicePool() as pool:
        pool.update([dead_url, engine.url])
        answers = await asyncio.gather(
            *(pool.generate(request(f"d{i}"), record_id=str(i)) for i in range(6))
        )
        assert pool.counts == RequestCounts(answered=6, unreachable=pool.counts.unreachable)
        assert 1 <= pool.counts.unreachable <= 6
        assert pool.outstanding == {dead_url: 0, engine.url: 0}
    assert {answer.service for answer in answers} == {engine.url}


async def test_a_token_that_would_kill_a_server_is_never_sent(engine) -> None:
    async with ServicePool() as pool:
        pool.update([engine.url])
        with pytest.raises(RequestRejected, match="vocabulary is 264") as refused:
            await pool.generate(GenerateRequest("kill", (1, 264)), record_id="r")
    assert refused.value.status is None


async def test_no_service_at_all_names_the_urls_and_the_time(dead_url: str) -> None:
    async with ServicePool(patience_s=0.3) as pool:
        with pytest.raises(ServiceUnreachable, match="no inference service is registered"):
            await pool.generate(request("n"), record_id="r")
        pool.update([dead_url])
        began = time.monotonic()
        with pytest.raises(ServiceUnreachable, match=f"tried {dead_url}"):
            await pool.generate(request("n"), record_id="r")
        assert 0.25 < time.monotonic() - began < 5
        with pytest.raises(ServiceUnreachable, match=dead_url):
            await pool.wait_ready(0.1)


async def test_a_request_waits_for_a_service_to_be_registered(engine) -> None:
    async with ServicePool(patience_s=10) as pool:
        waiting = asyncio.create_task(pool.generate(request("w"), record_id="r"))
        await asyncio.sleep(0.05)
        pool.update([engine.url])
        assert (await waiting).service == engine.url


async def test_a_service_that_is_ready_again_is_used_again(engine) -> None:
    taken = asyncio.Event()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hangs up on `/generate` once, then answers `/ready`."""
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/ready" in head:
            taken.set()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with ServicePool(patience_s=5) as pool:
            pool.update([url])
            turn = asyncio.create_task(pool.generate(request("again"), record_id="r"))
            await asyncio.wait_for(taken.wait(), 5)
            pool.update([url, engine.url])
            assert (await turn).service == engine.url
