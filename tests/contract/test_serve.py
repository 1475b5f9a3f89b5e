"""`agentrl serve` around the engine: the run's database, SIGTERM, an engine that dies."""

import asyncio
from collections.abc import Callable

import psutil
import pytest
from conformance import PROMPT, ask, start
from still_running import still_running

from agentrl.databases.services import live_services
from agentrl.inference.engines import engine_at


async def test_a_service_is_announced_while_it_serves_and_ends_in_order(
    database, mongod, start_service: Callable
) -> None:
    service = await asyncio.to_thread(
        start_service, "--db_connection_string", mongod.url, "--run_name", database.name,
        "--weight_version", "7",
    )  # fmt: skip
    while not (announced := await live_services(database, 60)):
        await asyncio.sleep(0.05)
    (known,) = announced
    assert (known.url, known.weight_version, known.capacity) == (service.url, 7, 16)

    family = psutil.Process(service.process.pid).children(recursive=True)
    async with engine_at(service.url) as engine:
        assert await engine.weight_version() == 7
        (running,) = await start(engine, range(40, 60), 1, 900)
        assert await asyncio.to_thread(service.stop) == 0
        made = await running
    assert made.finish_reason == "abort" and made.output_ids
    assert {span.version for span in made.versions} == {7}
    assert await live_services(database, 60) == []
    assert still_running(family) == []


@pytest.mark.slow
async def test_a_model_in_bfloat16_is_served_with_a_head_in_float32(
    start_service: Callable, folders, reference
) -> None:
    service = await asyncio.to_thread(start_service, "--dtype", "bfloat16", "--fp32_head")
    async with engine_at(service.url) as engine:
        made = await engine.generate(ask(PROMPT, 40, temperature=0.0))
    await asyncio.to_thread(service.stop)
    # The layers' own rounding is left; the likeliest tokens differ little by it.
    expected = reference(folders.first, PROMPT, made.output_ids)
    assert made.output_logprobs == pytest.approx(expected, abs=0.25)
