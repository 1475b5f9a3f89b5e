"""The figures of a service: the local engine has SGLang's names, and they mean the same."""

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


async def test_a_service_counts_what_it_generates_under_sglangs_names(service, engine) -> None:
    await engine.generate(ask(PROMPT, 3))  # a figure that was never touched has no sample
    before = await read(service.url)
    assert {figure.name for figure in FIGURES} <= before.names
    await engine.generate(ask(PROMPT, 7))
    after = await read(service.url)

    def grew(name: str) -> float:
        return after.total(f"sglang:{name}_total") - before.total(f"sglang:{name}_total")

    assert (grew("generation_tokens"), grew("prompt_tokens")) == (7, len(PROMPT))
    assert grew("num_requests") == 1
    assert 0 < grew("cached_tokens") < len(PROMPT)
    assert after.total("sglang:num_running_reqs") == after.total("sglang:num_queue_reqs") == 0
