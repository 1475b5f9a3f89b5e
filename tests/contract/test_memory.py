"""Memory given back to a trainer and taken again, with requests that wait meanwhile.

On a CPU this shows the order of things, not that a GPU's memory is really free.
"""

import asyncio

import pytest
from asking import ask, start

from agentrl.inference.memory import release_memory, resume_memory
from agentrl.inference.weights.disk import DiskUpdater
from agentrl.inference.weights.updates import PublishedWeights, update_services

PROMPT = tuple(range(60, 90))


async def test_requests_wait_for_the_memory_and_go_on_with_the_new_weights(
    client, folders, reference
) -> None:
    old = await client.weight_version() + 1
    await update_services(DiskUpdater(), [client], PublishedWeights(old, folders.first))
    running = await start(client, PROMPT, 3, 500)
    await release_memory(client)
    late = asyncio.create_task(client.generate(ask(PROMPT, 5)))
    done, _ = await asyncio.wait([*running, late], timeout=0.5)
    assert not done

    await resume_memory(client)
    new = PublishedWeights(old + 1, folders.second)
    (outcome,) = await update_services(DiskUpdater(), [client], new)
    assert outcome.ok
    for made in await asyncio.gather(*running):
        assert len(made.output_ids) == 500
        assert [span.version for span in made.versions] == [old, old + 1]
        joint = made.versions[0].end
        before = reference(folders.first, PROMPT, made.output_ids)[:joint]
        after = reference(folders.second, PROMPT, made.output_ids)[joint:]
        assert made.output_logprobs == pytest.approx(before + after, abs=1e-4)
    assert {span.version for span in (await late).versions} == {old + 1}


async def test_memory_comes_back_with_the_weights_that_were_there(
    client, folders, reference
) -> None:
    version = await client.weight_version() + 1
    await update_services(DiskUpdater(), [client], PublishedWeights(version, folders.second))
    for _ in range(2):
        await release_memory(client)
        await resume_memory(client)
        await client.continue_()
    made = await client.generate(ask(PROMPT, 20))
    assert {span.version for span in made.versions} == {version}
    expected = reference(folders.second, PROMPT, made.output_ids)
    assert made.output_logprobs == pytest.approx(expected, abs=1e-4)
