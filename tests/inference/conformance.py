"""What any engine must do, whatever API it speaks: the tests behind the protocol.

Here is what generating promises; weight_conformance.py has new weights and memory. A module of
tests subclasses the classes (see tests/contract/test_conformance.py), and has the fixtures they ask
for:

    engine        under test: idle, with the first weights, its limits fetched, its cache empty
    folders       `first` and `second`: two sets of weights of one model, far apart
    limits        the `ModelLimits` of that model as it is served
    capacity      how many requests the service runs at once
    distribution  what a plain forward pass says: (folder, prompt, output, temperature) -> logprobs
                  of the whole vocabulary in place of each output token, `[output, vocabulary]`
    reference     the same of the output tokens alone, `[output]`

Tests of what an engine's `capabilities` leave out are skipped.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import pytest
import torch

from agentrl.inference.engine_protocol import Engine
from agentrl.inference.generation_builder import GenerationBuilder
from agentrl.inference.protocol import (
    GenerateRequest,
    Generation,
    PromptTooLong,
    RequestRejected,
    RequestTimedOut,
    SamplingParams,
)

PROMPT = tuple(range(40, 60))


def ask(prompt: Sequence[int], max_new_tokens: int, **params: Any) -> GenerateRequest:
    """A request that goes on to its last token, unless `params` say otherwise."""
    sampling = SamplingParams(max_new_tokens, **{"ignore_eos": True, **params})
    return GenerateRequest(uuid4().hex, tuple(prompt), sampling)


async def until_used(
    engine: Engine, tokens: int, running: Sequence[asyncio.Task[Any]] = ()
) -> None:
    """Wait until what runs has so many tokens, prompts included; `running` must not end before."""
    while (await engine.loads()).used_tokens < tokens:
        for request in running:
            assert not request.done(), f"it ended too early: {request!r:.300}"
        await asyncio.sleep(0.005)


async def start(
    engine: Engine, prompt: Sequence[int], count: int, tokens: int
) -> list[asyncio.Task[Generation]]:
    """So many equal requests, under way: each has begun to generate."""
    running = [asyncio.create_task(engine.generate(ask(prompt, tokens))) for _ in range(count)]
    await until_used(engine, count * (len(prompt) + 10), running)
    return running


async def until_idle(engine: Engine) -> None:
    """Wait until nothing runs."""
    while (await engine.loads()).running:
        await asyncio.sleep(0.02)


class GenerationConformance:
    """Exact tokens and logprobs, honest endings, real limits."""

    @pytest.mark.parametrize(
        "params",
        [
            {},
            {"temperature": 0.6},
            {"temperature": 1.4, "top_p": 0.7, "top_k": 40, "min_p": 0.01},
        ],
        ids=["plain", "cold", "cut"],
    )
    async def test_logprobs_are_the_model_s_at_the_temperature_before_any_cut(
        self, engine, folders, reference, params: dict[str, float]
    ) -> None:
        made = await engine.generate(ask(PROMPT, 60, **params))
        expected = reference(folders.first, PROMPT, made.output_ids, params.get("temperature", 1.0))
        assert made.output_logprobs == pytest.approx(expected, abs=1e-4)
        assert len(made.output_ids) == 60 and made.prompt_tokens == len(PROMPT)
        assert [(span.start, span.end) for span in made.versions] == [(0, 60)]

    async def test_greedy_takes_the_likeliest_token_of_the_model(
        self, engine, folders, limits, reference
    ) -> None:
        made = await engine.generate(ask(PROMPT, 40, temperature=0.0))
        # Any other token in place of the last one is less likely.
        best = reference(folders.first, PROMPT, made.output_ids)[-1]
        others = [t for t in range(limits.vocab_size) if t != made.output_ids[-1]][::7]
        assert all(
            reference(folders.first, PROMPT, (*made.output_ids[:-1], other))[-1] < best
            for other in others
        )

    @pytest.mark.parametrize(
        "params", [{"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}], ids=["top_k", "top_p", "min_p"]
    )
    async def test_truncated_sampling_draws_no_token_that_it_cuts_away(
        self, engine, folders, distribution, params: dict[str, float]
    ) -> None:
        made = await asyncio.gather(
            *(engine.generate(ask(PROMPT, 60, temperature=1.5, **params)) for _ in range(4))
        )
        for one in made:
            logprobs = distribution(folders.first, PROMPT, one.output_ids, 1.5)
            chosen = logprobs.gather(-1, torch.tensor(one.output_ids)[:, None])
            likelier = logprobs > chosen + 1e-4  # than the token that was drawn
            if "top_k" in params:
                assert (likelier.sum(-1) < params["top_k"]).all()
            elif "top_p" in params:
                mass = (logprobs.exp() * likelier).sum(-1)
                assert (mass < params["top_p"] + 1e-4).all()
            else:
                best = logprobs.max(-1, keepdim=True).values
                assert ((chosen - best).exp() > params["min_p"] - 1e-4).all()
        # It draws, rather than taking the likeliest.
        assert len({one.output_ids for one in made}) > 1

    async def test_a_stop_token_ends_the_output_and_stays_in_it(self, engine) -> None:
        free = await engine.generate(ask(PROMPT, 30, temperature=0.0))
        stop = free.output_ids[-1]
        made = await engine.generate(
            ask(PROMPT, 30, temperature=0.0, ignore_eos=False, stop_token_ids=(stop,))
        )
        assert made.finish_reason == "stop"
        assert made.output_ids == free.output_ids[: free.output_ids.index(stop) + 1]

    async def test_length_ends_a_request_that_nothing_else_ends(self, engine) -> None:
        made = await engine.generate(ask(PROMPT, 5))
        assert made.finish_reason == "length" and len(made.output_ids) == 5

    async def test_tokens_of_an_answer_that_is_watched_come_a_few_at_a_time(self, engine) -> None:
        told: list[int] = []
        building = GenerationBuilder(ask(PROMPT, 24), lambda ids: told.append(len(ids)))
        await engine.extend(building)
        assert told == sorted(told) and told[0] <= 4 and len(told) >= 6 and told[-1] == 24

    async def test_limits_come_from_the_service_and_its_model_folder(self, engine, limits) -> None:
        assert engine.limits == limits

    async def test_the_largest_id_of_the_vocabulary_is_served(self, engine, limits) -> None:
        made = await engine.generate(ask((0, limits.vocab_size - 1), 2))
        assert made.prompt_tokens == 2

    async def test_no_token_outside_the_vocabulary_and_no_empty_prompt_is_sent(
        self, engine, limits
    ) -> None:
        for prompt in [(1, limits.vocab_size), (1, -1), ()]:
            with pytest.raises(RequestRejected) as refused:
                await engine.generate(ask(prompt, 4))
            assert refused.value.status is None
        with pytest.raises(PromptTooLong):
            await engine.generate(ask((40,) * limits.context_length, 4))
        assert (await engine.generate(ask(PROMPT, 3))).finish_reason == "length"

    async def test_a_prefix_that_was_served_is_served_from_the_cache(self, engine) -> None:
        prompt = tuple(range(100, 160))
        await engine.flush_cache()
        first = await engine.generate(ask(prompt, 4))
        again = await engine.generate(ask(prompt, 4))
        assert first.cached_tokens == 0
        assert len(prompt) - 8 <= again.cached_tokens < len(prompt)

    async def test_an_aborted_request_keeps_the_tokens_it_has(
        self, engine, folders, reference
    ) -> None:
        request = ask(PROMPT, 900)
        running = asyncio.create_task(engine.generate(request))
        await until_used(engine, len(PROMPT) + 5, [running])
        await engine.abort(request.rid)
        made = await running
        await engine.abort("nobody")
        assert made.finish_reason == "abort"
        assert 1 <= len(made.output_ids) < 900
        expected = reference(folders.first, PROMPT, made.output_ids)
        assert made.output_logprobs == pytest.approx(expected, abs=1e-4)

    async def test_all_requests_are_aborted_at_once(self, engine) -> None:
        running = [asyncio.create_task(engine.generate(ask(PROMPT, 900))) for i in range(3)]
        while (await engine.loads()).running < 3:
            await asyncio.sleep(0.01)
        await engine.abort()
        assert {made.finish_reason for made in await asyncio.gather(*running)} == {"abort"}

    async def test_an_answer_that_stands_still_is_an_error_and_ends(self, engine) -> None:
        if "in_place" not in engine.capabilities.pauses:
            pytest.skip("the engine cannot be held")
        (running,) = await start(engine, PROMPT, 1, 900)
        await engine.pause("in_place")
        try:
            with pytest.raises(RequestTimedOut, match=r"0\.3 s"):
                await engine.generate(ask(PROMPT, 9), timeout_s=0.3)
            assert not running.done()  # it may wait for longer
        finally:
            await engine.continue_()
        await running
        async with asyncio.timeout(20):
            await until_idle(engine)

    @pytest.mark.slow
    async def test_an_answer_that_goes_on_may_take_longer_than_the_time_out(self, engine) -> None:
        whole = await engine.generate(ask(PROMPT, 900))
        made = await engine.generate(ask(PROMPT, 900), timeout_s=max(0.2, whole.latency_s / 3))
        assert len(made.output_ids) == 900

    async def test_the_load_counts_what_runs(self, engine) -> None:
        await until_idle(engine)
        running = [asyncio.create_task(engine.generate(ask(PROMPT, 900))) for i in range(4)]
        while (load := await engine.loads()).running < 4:
            await asyncio.sleep(0.01)
        assert load.waiting == 0 and load.used_tokens >= 4
        await engine.abort()
        await asyncio.gather(*running)

    async def test_many_requests_at_once_each_get_their_own_answer(
        self, engine, folders, reference: Callable[..., list[float]]
    ) -> None:
        prompts = [(50 + i, *PROMPT, 60 + i) for i in range(24)]
        made = await asyncio.gather(
            *(engine.generate(ask(p, 20 + i)) for i, p in enumerate(prompts))
        )
        for i, (prompt, generation) in enumerate(zip(prompts, made, strict=True)):
            assert len(generation.output_ids) == 20 + i
            expected = reference(folders.first, prompt, generation.output_ids)
            assert generation.output_logprobs == pytest.approx(expected, abs=1e-4)

    async def test_more_requests_than_it_runs_at_once_wait_and_are_all_answered(
        self, engine, folders, capacity, reference
    ) -> None:
        prompts = [(*PROMPT, 100 + i) for i in range(3 * capacity)]
        asked = [asyncio.create_task(engine.generate(ask(p, 120))) for p in prompts]
        while not (load := await engine.loads()).waiting:
            assert not all(request.done() for request in asked), "nobody had to wait"
            await asyncio.sleep(0.01)
        assert load.running <= capacity
        for prompt, request in zip(prompts, asked, strict=True):
            made = await request
            assert made.finish_reason == "length" and len(made.output_ids) == 120
            expected = reference(folders.first, prompt, made.output_ids)
            assert made.output_logprobs == pytest.approx(expected, abs=1e-4)

    async def test_it_is_ready_and_healthy(self, engine) -> None:
        assert await engine.ready() and await engine.health()
