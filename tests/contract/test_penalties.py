"""Penalties: the logprobs are those of the logits that they have lowered, token by token.

SGLang 0.5.23 does so with `--disable-overlap-schedule`. With its overlap scheduler, the default, it
counts each token one token late.
"""

import os
from collections.abc import AsyncIterator, Callable

import pytest
import torch
from conformance import PROMPT, ask

from agentrl.inference.engine_protocol import Engine
from agentrl.inference.engines import engine_at

PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.25}


@pytest.fixture
async def exact(
    engine_name: str,
    start_service: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Engine]:
    """The engine, without overlap."""
    if engine_name != "local":
        command = f"{os.environ['SGLANG_COMMAND']} --disable-overlap-schedule"
        monkeypatch.setenv("SGLANG_COMMAND", command)
    service = start_service()  # of its own: others are given other weights
    async with engine_at(service.url) as engine:
        yield engine


async def test_penalties_lower_the_logits_of_what_was_made(exact, folders, distribution) -> None:
    made = await exact.generate(ask(PROMPT, 60, **PENALTIES))
    logits = distribution(folders.first, PROMPT, made.output_ids).clone()
    for at in range(len(made.output_ids)):
        for seen in set(made.output_ids[:at]):
            logits[at, seen] -= 0.5 + 0.25 * made.output_ids[:at].count(seen)
    chosen = torch.tensor(made.output_ids)[:, None]
    expected = logits.log_softmax(-1).gather(-1, chosen)[:, 0].tolist()
    assert made.output_logprobs == pytest.approx(expected, abs=1e-4)
