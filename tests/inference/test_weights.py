"""Publication to real engines while they generate, by every way."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.inference.client import SGLangClient
from agentrl.inference.protocol import GenerateRequest, Generation, SamplingParams
from agentrl.inference.weights import updates
from agentrl.inference.weights.disk import DiskUpdater
from agentrl.inference.weights.distributed import DistributedUpdater
from agentrl.inference.weights.group import WeightGroup
from agentrl.inference.weights.updates import (
    PublishedWeights,
    UpdateFailed,
    UpdatePause,
    WeightUpdater,
    update_services,
)
from agentrl.inference.weights.ways import make_updater

PROMPT = tuple(range(60, 90))
CPU = torch.device("cpu")
# tests/contract has every way in the fast suite.
WAYS = ["tensor", *(pytest.param(way, marks=pytest.mark.slow) for way in ("disk", "distributed"))]


def weights(folder: Path, version: int) -> PublishedWeights:
    """A folder's weights; only what `tensors` and the folder have in common can be loaded."""
    return PublishedWeights(version, folder, load_file(folder / "model.safetensors"))


def out_of_memory(folder: Path, version: int) -> PublishedWeights:
    """A folder's weights as tensors only: there is no such folder."""
    return PublishedWeights(version, folder / "gone", load_file(folder / "model.safetensors"))


async def generate_across(
    client: SGLangClient,
    updater: WeightUpdater,
    published: Sequence[PublishedWeights],
    pause: UpdatePause,
) -> list[Generation]:
    """Requests that run while each of `published` comes in turn."""
    params = SamplingParams(max_new_tokens=700, ignore_eos=True)
    running = [
        asyncio.create_task(client.generate(GenerateRequest(f"across{i}", PROMPT, params)))
        for i in range(3)
    ]
    for number, each in enumerate(published, 1):
        while (await client.loads()).used_tokens < 3 * (len(PROMPT) + 60 * number):
            await asyncio.sleep(0.005)
        (outcome,) = await update_services(updater, [client], each, pause)
        assert outcome.ok, outcome.error
        assert 0 < outcome.stall_s < 30
    return list(await asyncio.gather(*running))


@pytest.mark.parametrize("way", WAYS)
async def test_each_token_has_the_logprob_of_the_version_it_carries(
    engine, folders, error: Callable, way: str
) -> None:
    make = weights if way == "disk" else out_of_memory
    async with SGLangClient(engine.url) as client:
        updater = make_updater(way, CPU)
        await update_services(updater, [client], make(folders.first, 10))
        made = await generate_across(
            client, updater, [make(folders.second, 11), make(folders.first, 12)], "retract"
        )
        assert await client.weight_version() == 12
        await updater.close()
    by_version = {10: folders.first, 11: folders.second, 12: folders.first}
    for generation in made:
        assert [span.version for span in generation.versions] == [10, 11, 12]
        assert error(by_version, PROMPT, generation) < 1e-4


@pytest.mark.parametrize("way", WAYS)
async def test_in_place_running_requests_go_on_without_computing_anything_again(
    engine, folders, way: str
) -> None:
    async with SGLangClient(engine.url) as client:
        updater = make_updater(way, CPU)
        await update_services(updater, [client], weights(folders.first, 40))
        before = (await client.server_info())["internal_states"][0]["prompt_tokens"]
        made = await generate_across(client, updater, [weights(folders.second, 41)], "in_place")
        after = (await client.server_info())["internal_states"][0]["prompt_tokens"]
        await updater.close()
    for generation in made:
        assert [span.version for span in generation.versions] == [40, 41]
    assert after - before == 3 * len(PROMPT)


async def test_bfloat16_weights_arrive_by_every_way(engine, folders) -> None:
    # The engine computes in float32: what it holds is rounded by the way, not by itself.
    tensors = load_file(folders.second / "model.safetensors")
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    greedy = SamplingParams(40, temperature=0.0, ignore_eos=True)
    outputs = []
    async with SGLangClient(engine.url) as client:
        for version, way in enumerate(["distributed", "tensor"], 50):
            updater = make_updater(way, CPU)
            (outcome,) = await update_services(
                updater, [client], PublishedWeights(version, folders.first, rounded)
            )
            assert outcome.ok, outcome.error
            made = await client.generate(GenerateRequest(way, PROMPT, greedy))
            outputs.append(made.output_ids)
    assert outputs[0] == outputs[1]


async def test_many_buckets_are_one_version(engine, folders, error, monkeypatch) -> None:
    monkeypatch.setattr("agentrl.inference.weights.buckets.BUCKET_BYTES", 4096)
    async with SGLangClient(engine.url) as client:
        for version, way in enumerate(["distributed", "tensor"], 60):
            folder = folders.second if version % 2 else folders.first
            updater = make_updater(way, CPU)
            (outcome,) = await update_services(updater, [client], out_of_memory(folder, version))
            assert outcome.ok, outcome.error
            made = await client.generate(GenerateRequest(way, PROMPT, SamplingParams(20)))
            assert [span.version for span in made.versions] == [version]
            assert error({version: folder}, PROMPT, made) < 1e-4


async def test_a_failed_publication_is_told_and_generation_goes_on(engine, folders) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = SGLangClient(f"http://127.0.0.1:{free.getsockname()[1]}")
    async with SGLangClient(engine.url) as client, nobody:
        before = await client.weight_version()
        outcomes = await update_services(
            DiskUpdater(), [client, nobody], PublishedWeights(99, folders.first.parent)
        )
        assert [outcome.url for outcome in outcomes] == [client.url, nobody.url]
        assert "model.safetensors" in (outcomes[0].error or "") and not outcomes[0].mixed
        assert "cannot connect" in (outcomes[1].error or "")
        assert await client.weight_version() == before
        made = await client.generate(GenerateRequest("after", PROMPT, SamplingParams(3)))
    assert made.versions[0].version == before


@pytest.mark.parametrize("way", ["distributed", "tensor"])
async def test_half_an_update_ends_what_runs_and_is_told_as_mixed(
    engine, folders, way: str, monkeypatch
) -> None:
    monkeypatch.setattr("agentrl.inference.weights.buckets.BUCKET_BYTES", 1)
    broken = load_file(folders.second / "model.safetensors") | {"none.weight": torch.zeros(3)}
    async with SGLangClient(engine.url) as client:
        await update_services(DiskUpdater(), [client], weights(folders.first, 70))
        params = SamplingParams(max_new_tokens=900, ignore_eos=True)
        running = asyncio.create_task(client.generate(GenerateRequest("half", PROMPT, params)))
        while (await client.loads()).used_tokens < len(PROMPT) + 5:
            await asyncio.sleep(0.005)
        updater = make_updater(way, CPU)
        (outcome,) = await update_services(
            updater, [client], PublishedWeights(71, folders.second, broken)
        )
        assert outcome.mixed and "none.weight" in (outcome.error or "")
        made = await running
        assert made.finish_reason == "abort"
        assert [span.version for span in made.versions] == [70]
        # It is brought up to date by the next one, whatever state it was left in.
        (outcome,) = await update_services(updater, [client], weights(folders.second, 72))
        assert outcome.ok, outcome.error


async def test_a_published_service_forgets_prefixes_of_the_old_version(engine, folders) -> None:
    async with SGLangClient(engine.url) as client:
        await client.generate(GenerateRequest("warm", PROMPT, SamplingParams(3)))
        warm = await client.generate(GenerateRequest("hit", PROMPT, SamplingParams(3)))
        assert warm.cached_tokens == len(PROMPT) - 1
        await update_services(DiskUpdater(), [client], weights(folders.second, 80))
        cold = await client.generate(GenerateRequest("cold", PROMPT, SamplingParams(3)))
    assert cold.cached_tokens == 0


async def test_a_hanging_service_holds_up_the_others_for_a_bounded_time_only(
    engine, spare, folders, monkeypatch
) -> None:
    monkeypatch.setattr(updates, "_GRACE_S", 0.5)
    monkeypatch.setattr(updates, "_CONTINUE_S", 0.5)
    hanging = spare
    hanging.process.send_signal(signal.SIGSTOP)
    try:
        async with SGLangClient(engine.url) as client, SGLangClient(hanging.url) as stopped:
            began = time.monotonic()
            outcomes = await update_services(
                DiskUpdater(), [stopped, client], weights(folders.first, 90)
            )
            assert time.monotonic() - began < 30  # and not the time-outs of requests
            assert outcomes[1].ok and not outcomes[0].ok
            assert "did not take" in (outcomes[0].error or "")
            hanging.process.send_signal(signal.SIGCONT)
            (outcome,) = await update_services(DiskUpdater(), [stopped], weights(folders.first, 91))
            assert outcome.ok, outcome.error
            made = await stopped.generate(GenerateRequest("woken", PROMPT, SamplingParams(3)))
            assert [span.version for span in made.versions] == [91]
    finally:
        hanging.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("when", ["within a broadcast", "once it has the tensors"])
async def test_a_service_that_hangs_blocks_for_the_time_out_and_is_met_in_a_new_group(
    spare, folders, monkeypatch, when: str
) -> None:
    updater = DistributedUpdater(CPU, timeout_s=20)
    send = WeightGroup.send

    def hang(group: WeightGroup, tensors: Sequence[torch.Tensor]) -> None:
        spare.process.send_signal(signal.SIGSTOP)
        if when == "within a broadcast":
            send(group, tensors)

    async with SGLangClient(spare.url) as client:
        (outcome,) = await update_services(updater, [client], weights(folders.first, 1))
        assert outcome.ok, outcome.error
        ((first, group),) = updater._groups.values()
        updater._timeout_s = group._timeout_s = 1.0
        monkeypatch.setattr(WeightGroup, "send", hang)
        began = time.monotonic()
        try:
            with pytest.raises(UpdateFailed) as failure:
                await updater.load(client, weights(folders.second, 2), flush_cache=True)
            waited = time.monotonic() - began
        finally:
            spare.process.send_signal(signal.SIGCONT)
        assert failure.value.mixed and waited < 10
        monkeypatch.setattr(WeightGroup, "send", send)
        updater._timeout_s = 20
        (outcome,) = await update_services(updater, [client], weights(folders.second, 3))
        assert outcome.ok, outcome.error
        assert first not in [name for name, _ in updater._groups.values()]
        made = await client.generate(GenerateRequest("woken", PROMPT, SamplingParams(3)))
        assert [span.version for span in made.versions] == [3]
    spare.kill()


async def test_a_service_that_was_restarted_is_met_in_a_new_group(
    spare, start_engine: Callable, folders
) -> None:
    updater = make_updater("distributed", CPU)
    async with SGLangClient(spare.url) as client:
        (outcome,) = await update_services(updater, [client], weights(folders.first, 1))
        assert outcome.ok, outcome.error
        spare.kill()
        again = start_engine(int(spare.url.rpartition(":")[2]))
        (outcome,) = await update_services(updater, [client], weights(folders.first, 2))
        assert not outcome.ok and outcome.mixed
        (outcome,) = await update_services(updater, [client], weights(folders.first, 2))
        assert outcome.ok, outcome.error
    again.kill()
