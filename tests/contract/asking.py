"""Requests of the contract tests, and the wait until they are under way."""

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from agentrl.inference.client import SGLangClient
from agentrl.inference.protocol import GenerateRequest, Generation, SamplingParams


def ask(prompt: Sequence[int], max_new_tokens: int, **params: Any) -> GenerateRequest:
    """A request that goes on to its last token, unless `params` say otherwise."""
    sampling = SamplingParams(max_new_tokens, **{"ignore_eos": True, **params})
    return GenerateRequest(uuid4().hex, tuple(prompt), sampling)


async def until_used(
    client: SGLangClient, tokens: int, running: Sequence[asyncio.Task[Any]] = ()
) -> None:
    """Wait until what runs has so many tokens, prompts included; `running` must not end before."""
    while (await client.loads()).used_tokens < tokens:
        for request in running:
            assert not request.done(), f"it ended too early: {request!r:.300}"
        await asyncio.sleep(0.005)


async def start(
    client: SGLangClient, prompt: Sequence[int], count: int, tokens: int
) -> list[asyncio.Task[Generation]]:
    """So many equal requests, under way: each has begun to generate."""
    running = [asyncio.create_task(client.generate(ask(prompt, tokens))) for _ in range(count)]
    await until_used(client, count * (len(prompt) + 10), running)
    return running
