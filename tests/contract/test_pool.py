"""The pool over real services, one of which really dies."""

import asyncio
from collections.abc import Callable

import pytest

from agentrl.inference.pool import ServicePool
from agentrl.inference.protocol import GenerateRequest, RequestRejected, SamplingParams

PROMPT = tuple(range(30, 50))


def request(rid: str, tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(rid, PROMPT, SamplingParams(max_new_tokens=tokens, ignore_eos=True))


async def test_a_record_stays_with_its_service_until_that_dies(
    service, start_service: Callable
) -> None:
    other = start_service()
    async with ServicePool() as pool:
        pool.update([service.url])
        await pool.wait_ready(10)
        busy = asyncio.create_task(pool.generate(request("busy", 900), record_id="a"))
        await asyncio.sleep(0)
        pool.update([service.url, other.url])
        turns = [await pool.generate(request(f"t{i}"), record_id="b") for i in range(3)]
        assert {turn.service for turn in turns} == {other.url}
        assert (await busy).service == service.url

        # The record's service dies with a request on it: the request goes on at the other.
        (member,) = [client for client in pool.clients if client.url == other.url]
        cut_off = asyncio.create_task(pool.generate(request("cut", 900), record_id="b"))
        while not (await member.loads()).running_requests:
            await asyncio.sleep(0.01)
        other.kill()
        answer = await cut_off
        assert answer.service == service.url and len(answer.generation.output_ids) == 900
        assert [client.url for client in pool.clients] == [service.url]


async def test_a_token_that_would_kill_a_server_is_never_sent(service) -> None:
    async with ServicePool() as pool:
        pool.update([service.url])
        with pytest.raises(RequestRejected, match="vocabulary is 406") as refused:
            await pool.generate(GenerateRequest("kill", (1, 406)), record_id="r")
        assert refused.value.status is None
        answer = await pool.generate(request("alive"), record_id="r")
    assert len(answer.generation.output_ids) == 4
