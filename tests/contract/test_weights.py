"""New weights for a service while it generates: every token carries the version that made it.

By each way of `--weight_update`, with both of `--weight_update_pause`.
"""

import asyncio
import socket
from pathlib import Path

import pytest
import torch
from asking import ask, start, until_used
from safetensors.torch import load_file

from agentrl.inference.client import PauseMode, SGLangClient
from agentrl.inference.protocol import (
    Generation,
    RequestRejected,
)
from agentrl.inference.weights.disk import DiskUpdater
from agentrl.inference.weights.updates import (
    PublishedWeights,
    PublishOutcome,
    UpdatePause,
    WeightUpdater,
    update_services,
)
from agentrl.inference.weights.ways import make_updater

PROMPT = tuple(range(60, 90))


@pytest.fixture(params=["disk", "distributed", "tensor"])
async def updater(request: pytest.FixtureRequest):
    updater = make_updater(request.param, torch.device("cpu"))
    yield updater
    await updater.close()


async def publish(
    client: SGLangClient,
    folder: Path,
    version: int,
    updater: WeightUpdater | None = None,
    pause: UpdatePause = "retract",
) -> PublishOutcome:
    tensors = load_file(folder / "model.safetensors")
    weights = PublishedWeights(version, folder, tensors)
    (outcome,) = await update_services(updater or DiskUpdater(), [client], weights, pause)
    return outcome


def check_logprobs(made: Generation, folder_of: dict[int, Path], reference) -> None:
    for span in made.versions:
        expected = reference(folder_of[span.version], PROMPT, made.output_ids)
        mine = slice(span.start, span.end)
        assert made.output_logprobs[mine] == pytest.approx(expected[mine], abs=1e-4)


async def test_each_token_has_the_logprob_of_the_version_it_carries(
    client, folders, reference, updater: WeightUpdater
) -> None:
    first = await client.weight_version() + 1
    folder_of = {first: folders.first, first + 1: folders.second, first + 2: folders.first}
    assert (await publish(client, folders.first, first, updater)).ok
    running = await start(client, PROMPT, 3, 700)
    for crossed, version in enumerate((first + 1, first + 2), 1):
        await until_used(client, 3 * (len(PROMPT) + 60 * crossed), running)
        outcome = await publish(client, folder_of[version], version, updater)
        assert outcome.error is None and outcome.stall_s > 0
    assert await client.weight_version() == first + 2
    for made in await asyncio.gather(*running):
        assert [span.version for span in made.versions] == list(folder_of)
        assert len(made.output_ids) == 700
        check_logprobs(made, folder_of, reference)


async def test_in_place_the_old_keys_and_values_go_on_serving(
    client, folders, reference, updater: WeightUpdater
) -> None:
    old = await client.weight_version() + 1
    assert (await publish(client, folders.first, old, updater)).ok
    (running,) = await start(client, PROMPT, 1, 500)
    await until_used(client, len(PROMPT) + 50, [running])
    assert (await publish(client, folders.second, old + 1, updater, "in_place")).ok
    made = await running
    assert [span.version for span in made.versions] == [old, old + 1]
    before, after = made.versions
    expected = reference(folders.first, PROMPT, made.output_ids)[: before.end]
    assert made.output_logprobs[: before.end] == pytest.approx(expected, abs=1e-4)
    # What the new weights chose still saw keys and values of the old ones.
    exact = reference(folders.second, PROMPT, made.output_ids)[after.start :]
    assert made.output_logprobs[after.start :] != pytest.approx(exact, abs=1e-2)
    await client.flush_cache()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_nothing_is_generated_while_it_is_paused(client, mode: PauseMode) -> None:
    running = await start(client, PROMPT, 2, 400)
    await client.pause(mode)
    late = asyncio.create_task(client.generate(ask(PROMPT, 3)))
    done, _ = await asyncio.wait([*running, late], timeout=1.0)
    assert not done
    # It takes no new work, but it is not gone: what is here waits.
    assert not await client.ready() and await client.alive()
    await client.continue_()
    assert await client.ready()
    made = await asyncio.gather(*running, late)
    assert [len(one.output_ids) for one in made[:2]] == [400, 400]


async def test_requests_outlive_a_pause_in_which_their_service_says_nothing(service) -> None:
    async with SGLangClient(service.url, silence_s=0.2) as client:
        (running,) = await start(client, PROMPT, 1, 400)
        await client.pause("in_place")
        done, _ = await asyncio.wait([running], timeout=1.5)
        assert not done
        await client.continue_()
        assert len((await running).output_ids) == 400


async def test_a_pause_that_aborts_keeps_what_was_made_and_holds_what_comes(client) -> None:
    running = await start(client, PROMPT, 2, 700)
    await client.pause("abort")
    ended = await asyncio.gather(*running)
    assert {made.finish_reason for made in ended} == {"abort"}
    assert all(0 < len(made.output_ids) < 700 for made in ended)
    late = asyncio.create_task(client.generate(ask(PROMPT, 3)))
    done, _ = await asyncio.wait([late], timeout=0.5)
    assert not done
    await client.continue_()
    assert (await late).finish_reason != "abort"


async def test_a_failed_publication_is_told_and_generation_goes_on(client, folders) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = SGLangClient(f"http://127.0.0.1:{free.getsockname()[1]}")
    before = await client.weight_version()
    async with nobody:
        outcomes = await update_services(
            DiskUpdater(), [client, nobody], PublishedWeights(99, folders.first.parent)
        )
    assert [outcome.url for outcome in outcomes] == [client.url, nobody.url]
    assert outcomes[0].error and "cannot connect" in (outcomes[1].error or "")
    assert not outcomes[0].mixed
    assert await client.weight_version() == before
    made = await client.generate(ask(PROMPT, 3))
    assert made.versions[0].version == before


async def test_a_published_service_forgets_prefixes_of_the_old_version(
    client, folders, updater: WeightUpdater
) -> None:
    await client.generate(ask(PROMPT, 3))
    warm = await client.generate(ask(PROMPT, 3))
    assert warm.cached_tokens == len(PROMPT) - 1
    version = await client.weight_version() + 1
    assert (await publish(client, folders.second, version, updater)).ok
    cold = await client.generate(ask(PROMPT, 3))
    assert cold.cached_tokens == 0


async def test_publications_without_anything_running_are_versions_too(
    client, folders, updater: WeightUpdater
) -> None:
    first = await client.weight_version() + 1
    for version in (first, first + 1, first + 2):
        assert (await publish(client, folders.first, version, updater)).ok
    made = await client.generate(ask(PROMPT, 3))
    assert {span.version for span in made.versions} == {first + 2}


async def test_tensors_are_refused_outside_a_session_which_a_second_begin_reopens(client) -> None:
    with pytest.raises(RequestRejected, match="must run between begin_weight_update"):
        await client.update_weights_from_tensor(["AAAA"], version=1, flush_cache=False)
    with pytest.raises(RequestRejected, match="must run between begin_weight_update"):
        await client.update_weights_from_distributed({}, group="g", version=1, flush_cache=False)
    await client.begin_weight_update()
    await client.begin_weight_update()
    await client.end_weight_update()
