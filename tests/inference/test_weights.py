"""Publication to a real engine while it generates."""

import asyncio
import socket
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from agentrl.inference.client import SGLangClient
from agentrl.inference.protocol import GenerateRequest, Generation, SamplingParams
from agentrl.inference.weights.disk import DiskUpdater
from agentrl.inference.weights.updates import PublishedWeights, PublishOutcome, update_services

PROMPT = tuple(range(60, 90))


async def publish_from_disk(
    clients: list[SGLangClient], folder: Path, version: int
) -> list[PublishOutcome]:
    return await update_services(DiskUpdater(), clients, PublishedWeights(version, folder))


def logprobs(folder: Path, output_ids: tuple[int, ...]) -> list[float]:
    """What a plain forward pass of prompt and output says about the output's tokens."""
    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([PROMPT + output_ids])
    with torch.inference_mode():
        all_logprobs = model(ids).logits[0].log_softmax(-1)
    return all_logprobs[len(PROMPT) - 1 : -1].gather(-1, ids[0, len(PROMPT) :, None])[:, 0].tolist()


async def generate_across(
    client: SGLangClient, folders: list[Path], first_version: int
) -> tuple[list[Generation], list[bool]]:
    """Requests that run while each folder is published in turn."""
    params = SamplingParams(max_new_tokens=700, ignore_eos=True)
    running = [
        asyncio.create_task(client.generate(GenerateRequest(f"across{i}", PROMPT, params)))
        for i in range(3)
    ]
    succeeded = []
    for version, folder in enumerate(folders, first_version):
        wanted = 3 * (len(PROMPT) + 60 * (version - first_version + 1))
        while (await client.loads()).used_tokens < wanted:
            await asyncio.sleep(0.005)
        outcomes = await publish_from_disk([client], folder, version)
        succeeded += [outcome.ok for outcome in outcomes]
    return list(await asyncio.gather(*running)), succeeded


async def test_each_token_has_the_logprob_of_the_version_it_carries(engine, folders) -> None:
    async with SGLangClient(engine.url) as client:
        await publish_from_disk([client], folders.first, 10)
        made, succeeded = await generate_across(client, [folders.second, folders.first], 11)
        assert succeeded == [True, True]
        assert await client.weight_version() == 12
    for generation in made:
        assert [span.version for span in generation.versions] == [10, 11, 12]
        expected = {
            version: logprobs(folder, generation.output_ids)
            for version, folder in ((10, folders.first), (11, folders.second), (12, folders.first))
        }
        for span in generation.versions:
            for i in range(span.start, span.end):
                assert abs(generation.output_logprobs[i] - expected[span.version][i]) < 1e-4


async def test_a_failed_publication_is_told_and_generation_goes_on(engine, folders) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = SGLangClient(f"http://127.0.0.1:{free.getsockname()[1]}")
    async with SGLangClient(engine.url) as client, nobody:
        before = await client.weight_version()
        outcomes = await publish_from_disk([client, nobody], folders.first.parent, 99)
        assert [outcome.url for outcome in outcomes] == [client.url, nobody.url]
        assert "model.safetensors" in (outcomes[0].error or "")
        assert "cannot connect" in (outcomes[1].error or "")
        assert await client.weight_version() == before
        made = await client.generate(GenerateRequest("after", PROMPT, SamplingParams(3)))
    assert made.versions[0].version == before


async def test_a_published_service_forgets_prefixes_of_the_old_version(engine, folders) -> None:
    async with SGLangClient(engine.url) as client:
        await client.generate(GenerateRequest("warm", PROMPT, SamplingParams(3)))
        warm = await client.generate(GenerateRequest("hit", PROMPT, SamplingParams(3)))
        assert warm.cached_tokens == len(PROMPT) - 1
        await publish_from_disk([client], folders.second, 20)
        cold = await client.generate(GenerateRequest("cold", PROMPT, SamplingParams(3)))
    assert cold.cached_tokens == 0
