"""The figures of a service: the local engine has SGLang's names, and they mean the same."""

import asyncio

import aiohttp
from conformance import PROMPT, ask
from exposed_samples import Samples

from agentrl.inference.engine import engine_figures
from agentrl.metrics.figure import Counter, Gauge

FIGURES = [each for each in vars(engine_figures).values() if isinstance(each, Gauge | Counter)]


async def read(url: str) -> Samples:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        assert response.status == 200
        return Samples(await response.text())


async def test_a_service_counts_what_it_generates_under_sglangs_names(
    service, engine, engine_name: str
) -> None:
    for _ in range(2):  # a figure that was never touched has no sample: the second has a cache
        await engine.generate(ask(PROMPT, 3))
    async with asyncio.timeout(20):  # SGLang counts a moment later
        while not {figure.name for figure in FIGURES} <= (before := await read(service.url)).names:
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.5)
        before = await read(service.url)
        await engine.generate(ask(PROMPT, 7))
        after = before
        while grown(before, after, "generation_tokens") < 7:
            await asyncio.sleep(0.05)
            after = await read(service.url)
    assert grown(before, after, "generation_tokens") == 7
    assert grown(before, after, "prompt_tokens") == len(PROMPT)
    assert grown(before, after, "num_requests") == 1
    assert 0 < grown(before, after, "cached_tokens") < len(PROMPT)
    if engine_name == "local":  # SGLang writes them from time to time
        assert after.total("sglang:num_running_reqs") == after.total("sglang:num_queue_reqs") == 0


def grown(before: Samples, after: Samples, name: str) -> float:
    return after.total(f"sglang:{name}_total") - before.total(f"sglang:{name}_total")
