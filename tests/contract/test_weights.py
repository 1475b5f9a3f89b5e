"""Publication to a service while it generates: every token carries the version that made it."""

import asyncio
import socket
from pathlib import Path

import pytest

from agentrl.inference.client import SGLangClient
from agentrl.inference.protocol import GenerateRequest, Generation, SamplingParams
from agentrl.inference.weights import publish_from_disk

PROMPT = tuple(range(60, 90))


async def start(client: SGLangClient, count: int = 3, tokens: int = 700) -> list[asyncio.Task]:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return [
        asyncio.create_task(client.generate(GenerateRequest(f"across{i}", PROMPT, params)))
        for i in range(count)
    ]


async def until_used(client: SGLangClient, tokens: int) -> None:
    while (await client.loads()).used_tokens < tokens:
        await asyncio.sleep(0.005)


def check_logprobs(made: Generation, folder_of: dict[int, Path], reference) -> None:
    for span in made.versions:
        expected = reference(folder_of[span.version], PROMPT, made.output_ids)
        mine = slice(span.start, span.end)
        assert made.output_logprobs[mine] == pytest.approx(expected[mine], abs=1e-4)


async def test_each_token_has_the_logprob_of_the_version_it_carries(
    client, folders, reference
) -> None:
    folder_of = {10: folders.first, 11: folders.second, 12: folders.first}
    await publish_from_disk([client], folder_of[10], 10)
    running = await start(client)
    for version in (11, 12):
        await until_used(client, 3 * (len(PROMPT) + 60 * (version - 10)))
        (outcome,) = await publish_from_disk([client], folder_of[version], version)
        assert outcome.ok and outcome.stall_s > 0
    assert await client.weight_version() == 12
    for made in await asyncio.gather(*running):
        assert [span.version for span in made.versions] == [10, 11, 12]
        assert len(made.output_ids) == 700
        check_logprobs(made, folder_of, reference)


async def test_nothing_is_generated_while_it_is_paused(client, folders) -> None:
    for mode in ("retract", "in_place"):
        running = await start(client, 2, tokens=400)
        await until_used(client, 2 * (len(PROMPT) + 10))
        await client.pause(mode)
        late = asyncio.create_task(
            client.generate(GenerateRequest(f"late-{mode}", PROMPT, SamplingParams(3)))
        )
        done, _ = await asyncio.wait([*running, late], timeout=1.0)
        assert not done
        await client.continue_()
        made = await asyncio.gather(*running, late)
        assert [len(one.output_ids) for one in made[:2]] == [400, 400]


async def test_a_pause_that_aborts_keeps_what_was_made_and_holds_what_comes(client) -> None:
    running = await start(client, 2)
    await until_used(client, 2 * (len(PROMPT) + 10))
    await client.pause("abort")
    ended = await asyncio.gather(*running)
    assert {made.finish_reason for made in ended} == {"abort"}
    assert all(0 < len(made.output_ids) < 700 for made in ended)
    late = asyncio.create_task(client.generate(GenerateRequest("held", PROMPT, SamplingParams(3))))
    done, _ = await asyncio.wait([late], timeout=0.5)
    assert not done
    await client.continue_()
    assert (await late).finish_reason != "abort"


async def test_an_update_in_place_goes_on_over_the_old_keys_and_values(
    client, folders, reference
) -> None:
    await publish_from_disk([client], folders.first, 30)
    (running,) = await start(client, 1, tokens=500)
    await until_used(client, len(PROMPT) + 50)
    await client.pause("in_place")
    await client.update_weights_from_disk(folders.second, 31, flush_cache=False)
    await client.continue_()
    made = await running
    assert [span.version for span in made.versions] == [30, 31]
    before, after = made.versions
    expected = reference(folders.first, PROMPT, made.output_ids)[: before.end]
    assert made.output_logprobs[: before.end] == pytest.approx(expected, abs=1e-4)
    # The first token that the new weights chose still saw keys of the old ones.
    exact = reference(folders.second, PROMPT, made.output_ids)[after.start]
    assert made.output_logprobs[after.start] != pytest.approx(exact, abs=1e-4)
    await client.flush_cache()


async def test_a_failed_publication_is_told_and_generation_goes_on(client, folders) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = SGLangClient(f"http://127.0.0.1:{free.getsockname()[1]}")
    async with nobody:
        before = await client.weight_version()
        outcomes = await publish_from_disk([client, nobody], folders.first.parent, 99)
    assert [outcome.url for outcome in outcomes] == [client.url, nobody.url]
    assert outcomes[0].error and "cannot connect" in (outcomes[1].error or "")
    assert await client.weight_version() == before
    made = await client.generate(GenerateRequest("after", PROMPT, SamplingParams(3)))
    assert made.versions[0].version == before


async def test_a_published_service_forgets_prefixes_of_the_old_version(client, folders) -> None:
    await client.generate(GenerateRequest("warm", PROMPT, SamplingParams(3)))
    warm = await client.generate(GenerateRequest("hit", PROMPT, SamplingParams(3)))
    assert warm.cached_tokens == len(PROMPT) - 1
    await publish_from_disk([client], folders.second, 40)
    cold = await client.generate(GenerateRequest("cold", PROMPT, SamplingParams(3)))
    assert cold.cached_tokens == 0


async def test_publications_without_anything_running_are_versions_too(client, folders) -> None:
    for version in (50, 51, 52):
        (outcome,) = await publish_from_disk([client], folders.first, version)
        assert outcome.ok
    made = await client.generate(GenerateRequest("latest", PROMPT, SamplingParams(3)))
    assert {span.version for span in made.versions} == {52}
