"""Requests whose service dies, hangs, drains or aborts them: all go on elsewhere, exactly."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentrl.inference.client import SGLangClient
from agentrl.inference.pool import RequestCounts, ServicePool
from agentrl.inference.protocol import (
    GenerateRequest,
    RequestTimedOut,
    SamplingParams,
    ServiceUnreachable,
)
from agentrl.inference.weights.disk import DiskUpdater
from agentrl.inference.weights.updates import PublishedWeights, update_services

PROMPT = tuple(range(30, 50))
TOKENS = 900


def request(rid: str, tokens: int = TOKENS) -> GenerateRequest:
    return GenerateRequest(rid, PROMPT, SamplingParams(max_new_tokens=tokens, ignore_eos=True))


async def until_made(url: str, tokens: int) -> None:
    """Until the only request of a service has so many tokens."""
    async with SGLangClient(url) as client:
        while (await client.loads()).used_tokens < len(PROMPT) + tokens:
            await asyncio.sleep(0.005)


async def set_version(url: str, folder, version: int) -> None:
    async with SGLangClient(url) as client:
        (outcome,) = await update_services(
            DiskUpdater(), [client], PublishedWeights(version, folder)
        )
        assert outcome.ok, outcome.error


@pytest.fixture
async def two(engine, spare, folders) -> AsyncIterator[tuple]:
    """A pool of two services with versions 1 and 2; its record "r" is at the first."""
    first = spare
    await set_version(first.url, folders.first, 1)
    await set_version(engine.url, folders.second, 2)
    async with ServicePool(silence_s=0.5) as pool:
        pool.update([first.url])
        await pool.generate(request("warm", 1), record_id="r")
        pool.update([first.url, engine.url])
        yield pool, first, engine


async def test_the_tokens_of_a_killed_service_are_kept_and_not_made_twice(
    two, folders, error
) -> None:
    pool, first, second = two
    running = asyncio.create_task(pool.generate(request("cut"), record_id="r"))
    await until_made(first.url, 200)
    first.kill()
    made = await running
    assert made.service == second.url and made.finish_reason == "length"
    assert len(made.output_ids) == TOKENS and made.prompt_tokens == len(PROMPT)
    assert [span.version for span in made.versions] == [1, 2]
    # All but a chunk's worth of the tokens that the first one had made.
    assert made.versions[0].end > 200 - 2 * 32
    assert error({1: folders.first, 2: folders.second}, PROMPT, made) < 1e-4
    assert pool.up == [second.url]


@pytest.mark.slow
async def test_a_service_that_hangs_is_left_with_the_tokens_it_gave(two, folders, error) -> None:
    pool, first, second = two
    running = asyncio.create_task(pool.generate(request("hang"), record_id="r"))
    await until_made(first.url, 100)
    first.process.send_signal(signal.SIGSTOP)
    made = await running
    assert len(made.output_ids) == TOKENS
    assert [span.version for span in made.versions] == [1, 2]
    assert error({1: folders.first, 2: folders.second}, PROMPT, made) < 1e-4
    assert pool.up == [second.url]


async def test_a_service_that_drains_hands_its_requests_over(two, folders, error) -> None:
    pool, first, second = two
    running = asyncio.create_task(pool.generate(request("drain"), record_id="r"))
    await until_made(first.url, 100)
    first.process.terminate()
    made = await running
    assert made.service == second.url and len(made.output_ids) == TOKENS
    assert made.versions[0].version == 1 and made.versions[0].end >= 100
    assert error({1: folders.first, 2: folders.second}, PROMPT, made) < 1e-4
    assert first.process.wait(timeout=10) == 0


async def test_a_request_too_slow_at_one_service_goes_on_at_the_next(two) -> None:
    pool, first, second = two
    async with SGLangClient(first.url) as client:
        # Paused, it answers everything else, so that it is not down.
        await client.pause("in_place")
        pool.request_timeout_s = 2.0
        running = asyncio.create_task(pool.generate(request("slow", 50), record_id="r"))
        while not (await client.loads()).waiting:
            await asyncio.sleep(0.005)
        pool.request_timeout_s = 60.0  # for the other one
        answer = await running
        assert answer.service == second.url and len(answer.output_ids) == 50
        assert set(pool.up) == {first.url, second.url}
        pool.update([first.url])
        pool.request_timeout_s = 0.2
        with pytest.raises(RequestTimedOut, match=first.url):
            await pool.generate(request("alone"), record_id="r")
        assert pool.counts == RequestCounts(answered=2, timed_out=2)
        await client.continue_()


async def test_an_abort_is_no_end(engine, folders) -> None:
    async with ServicePool() as pool, SGLangClient(engine.url) as client:
        pool.update([engine.url])
        running = asyncio.create_task(pool.generate(request("again"), record_id="r"))
        for tokens in (100, 200, 300):
            await until_made(engine.url, tokens)
            await client.abort()
        made = await running
        version = await client.weight_version()
    assert len(made.output_ids) == TOKENS and made.finish_reason == "length"
    assert [span.version for span in made.versions] == [version]


@asynccontextmanager
async def serving(handlers: dict[str, Callable]) -> AsyncIterator[str]:
    """A real HTTP server with these routes."""
    app = web.Application()
    for path, handler in handlers.items():
        app.router.add_route("*", path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def test_a_service_that_aborts_everything_is_told_of_in_the_end() -> None:
    aborted = {"type": "abort", "message": "no", "status_code": None, "err_type": None}
    meta = {
        "finish_reason": aborted, "prompt_tokens": 1, "completion_tokens": 0, "cached_tokens": 0,
        "weight_version": "1", "weight_versions": [],
    }  # fmt: skip
    asked = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        event = web.json_response({"output_ids": [], "meta_info": meta}).text
        return web.Response(text=f"data: {event}\n\ndata: [DONE]\n\n")

    async with serving({"/generate": generate}) as url, ServicePool(patience_s=0.3) as pool:
        pool.update([url])
        with pytest.raises(ServiceUnreachable, match="was aborted"):
            await pool.generate(request("never"), record_id="r")
        assert pool.counts == RequestCounts(aborted=asked)
    assert 1 < asked < 20


async def test_a_router_works_as_a_service(engine, folders) -> None:
    async def workers(request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": engine.url, "is_healthy": True}]})

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def forward(request: web.Request) -> web.StreamResponse:
        """What sglang-router does with `/generate`: the body goes to a worker, the stream back."""
        async with SGLangClient(engine.url) as client:
            response = web.StreamResponse()
            await response.prepare(request)
            async for piece in client._transport.stream("/generate", await request.read()):
                await response.write(piece)
        return response

    routes = {"/workers": workers, "/health": health, "/generate": forward}
    async with serving(routes) as url, ServicePool() as pool, SGLangClient(url) as client:
        (outcome,) = await update_services(
            DiskUpdater(), [client], PublishedWeights(31, folders.first)
        )
        assert outcome.ok and outcome.url == url
        pool.update([url])
        await pool.wait_ready(5)
        answer = await pool.generate(request("routed", 50), record_id="r")
        assert await pool.loads() == {}
        with pytest.raises(Exception, match="vocabulary is 264"):
            await pool.generate(GenerateRequest("kill", (1, 264)), record_id="r")
    assert answer.service == url
    assert [span.version for span in answer.versions] == [31]


async def test_loads_are_those_of_the_services_that_are_up(engine) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with ServicePool() as pool:
        pool.update([engine.url, dead])
        loads = await pool.loads()
    assert loads.keys() == {engine.url}
    load = loads[engine.url]
    assert (load.running, load.waiting, load.retractions) == (0, 0, 0)
    assert load.total_tokens >= 1024
