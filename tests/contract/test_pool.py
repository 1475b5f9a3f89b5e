"""The pool over real services, one of which really dies."""

import asyncio
from collections.abc import Callable

import pytest
from conformance import ask, until_used

from agentrl.inference.engines import engine_at
from agentrl.inference.pool import ServicePool
from agentrl.inference.protocol import RequestRejected

PROMPT = tuple(range(30, 50))


@pytest.mark.slow
async def test_a_record_stays_with_its_service_until_that_dies_and_goes_on_from_its_tokens(
    engine, service, start_service: Callable, folders, reference
) -> None:
    other = start_service("--weight_version", "1000")
    async with ServicePool() as pool, engine_at(other.url) as dying:
        pool.update([service.url])
        await pool.wait_ready(10)
        busy = asyncio.create_task(pool.generate(ask(PROMPT, 900), record_id="a"))
        await asyncio.sleep(0)
        pool.update([service.url, other.url])
        turns = [await pool.generate(ask(PROMPT, 4), record_id="b") for i in range(3)]
        assert {turn.service for turn in turns} == {other.url}
        assert (await busy).service == service.url

        here = await dying.weight_version()
        there = await engine.weight_version()
        cut_off = asyncio.create_task(pool.generate(ask(PROMPT, 900), record_id="b"))
        await until_used(dying, len(PROMPT) + 200, [cut_off])
        other.kill()
        made = await cut_off
        assert pool.up == [service.url]
    assert made.service == service.url
    assert len(made.output_ids) == 900 and made.finish_reason == "length"
    # What had arrived was not generated again, and says who made it.
    assert [span.version for span in made.versions] == [here, there]
    joint = made.versions[0].end
    assert 100 <= joint < 900
    expected = reference(folders.first, PROMPT, made.output_ids)
    assert made.output_logprobs == pytest.approx(expected, abs=1e-4)


async def test_a_request_that_is_aborted_goes_on_where_it_was_without_a_gap(
    engine, service, folders, reference
) -> None:
    version = await engine.weight_version()
    async with ServicePool() as pool:
        pool.update([service.url])
        turn = asyncio.create_task(pool.generate(ask(PROMPT, 600), record_id="r"))
        await until_used(engine, len(PROMPT) + 100, [turn])
        await engine.abort()
        made = await turn
    assert len(made.output_ids) == 600 and made.finish_reason == "length"
    assert [(span.version, span.end) for span in made.versions] == [(version, 600)]


async def test_a_token_that_would_kill_a_server_is_never_sent(service) -> None:
    async with ServicePool() as pool:
        pool.update([service.url])
        with pytest.raises(RequestRejected, match="vocabulary is 406") as refused:
            await pool.generate(ask((1, 406), 4), record_id="r")
        assert refused.value.status is None
        answer = await pool.generate(ask(PROMPT, 4), record_id="r")
    assert len(answer.output_ids) == 4
