"""What `/generate` promises a trainer: exact tokens and logprobs, honest endings, real limits."""

import asyncio
from collections.abc import Callable

import pytest
from asking import ask, until_used

from agentrl.inference.client import ModelLimits, SGLangClient
from agentrl.inference.protocol import (
    RequestRejected,
    RequestTimedOut,
)

PROMPT = tuple(range(40, 60))
VOCABULARY, CONTEXT = 406, 1024


async def until_idle(client: SGLangClient) -> None:
    while (await client.loads()).running:
        await asyncio.sleep(0.02)


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
    client, folders, reference, params: dict[str, float]
) -> None:
    made = await client.generate(ask(PROMPT, 60, **params))
    expected = reference(folders.first, PROMPT, made.output_ids, params.get("temperature", 1.0))
    assert made.output_logprobs == pytest.approx(expected, abs=1e-4)
    assert len(made.output_ids) == 60 and made.prompt_tokens == len(PROMPT)
    assert [(span.start, span.end) for span in made.versions] == [(0, 60)]


async def test_greedy_takes_the_likeliest_token_of_the_model(client, folders, reference) -> None:
    made = await client.generate(ask(PROMPT, 40, temperature=0.0))
    # Any other token in place of the last one is less likely.
    best = reference(folders.first, PROMPT, made.output_ids)[-1]
    others = [t for t in range(VOCABULARY) if t != made.output_ids[-1]][::7]
    assert all(
        reference(folders.first, PROMPT, (*made.output_ids[:-1], other))[-1] < best
        for other in others
    )


async def test_a_stop_token_ends_the_output_and_stays_in_it(client) -> None:
    free = await client.generate(ask(PROMPT, 30, temperature=0.0))
    stop = free.output_ids[-1]
    made = await client.generate(
        ask(PROMPT, 30, temperature=0.0, ignore_eos=False, stop_token_ids=(stop,))
    )
    assert made.finish_reason == "stop"
    assert made.output_ids == free.output_ids[: free.output_ids.index(stop) + 1]


async def test_length_ends_a_request_that_nothing_else_ends(client) -> None:
    made = await client.generate(ask(PROMPT, 5))
    assert made.finish_reason == "length" and len(made.output_ids) == 5


async def test_limits_come_from_the_service_and_its_model_folder(client) -> None:
    assert client.limits == ModelLimits(vocab_size=VOCABULARY, context_length=CONTEXT)


async def test_the_context_is_filled_to_its_last_place(client) -> None:
    made = await client.generate(ask(PROMPT, 5000))
    assert made.finish_reason == "length"
    assert len(made.output_ids) == CONTEXT - 2 - len(PROMPT)
    brim = (40,) * (CONTEXT - 7)
    made = await client.generate(ask(brim, 9))
    assert len(made.output_ids) == 5


async def test_what_would_kill_the_server_or_be_refused_is_never_sent(client) -> None:
    for prompt, message in [
        ((1, VOCABULARY), "vocabulary is 406"),
        ((1, -1), "vocabulary is 406"),
        ((), "empty"),
        ((40,) * (CONTEXT - 6), "leaves no room"),
    ]:
        with pytest.raises(RequestRejected, match=message) as refused:
            await client.generate(ask(prompt, 4))
        assert refused.value.status is None
    assert (await client.generate(ask(PROMPT, 3))).finish_reason == "length"


async def test_the_largest_id_of_the_vocabulary_is_served(client) -> None:
    made = await client.generate(ask((0, VOCABULARY - 1), 2))
    assert made.prompt_tokens == 2


async def test_the_service_s_own_refusal_is_an_error_with_its_message(service) -> None:
    async with SGLangClient(service.url) as client:  # it has not learned the limits
        with pytest.raises(RequestRejected, match="longer than the model's context") as refused:
            await client.generate(ask((1,) * 2000, 4))
        assert refused.value.status == 400
        with pytest.raises(RequestRejected, match="temperature"):
            await client.generate(ask(PROMPT, 4, temperature=-1))


async def test_a_prefix_that_was_served_is_served_from_the_cache(client) -> None:
    prompt = tuple(range(100, 160))
    await client.flush_cache()
    first = await client.generate(ask(prompt, 4))
    again = await client.generate(ask(prompt, 4))
    assert first.cached_tokens == 0
    assert len(prompt) - 8 <= again.cached_tokens < len(prompt)


async def test_an_aborted_request_keeps_the_tokens_it_has(client, folders, reference) -> None:
    request = ask(PROMPT, 900)
    running = asyncio.create_task(client.generate(request))
    await until_used(client, len(PROMPT) + 5, [running])
    await client.abort(request.rid)
    made = await running
    await client.abort("nobody")
    assert made.finish_reason == "abort"
    assert 1 <= len(made.output_ids) < 900
    expected = reference(folders.first, PROMPT, made.output_ids)
    assert made.output_logprobs == pytest.approx(expected, abs=1e-4)


async def test_all_requests_are_aborted_at_once(client) -> None:
    running = [asyncio.create_task(client.generate(ask(PROMPT, 900))) for i in range(3)]
    while (await client.loads()).running < 3:
        await asyncio.sleep(0.01)
    await client.abort()
    assert {made.finish_reason for made in await asyncio.gather(*running)} == {"abort"}


async def test_a_time_out_is_an_error_and_ends_the_generation(client) -> None:
    with pytest.raises(RequestTimedOut, match=r"0\.1 s"):
        await client.generate(ask(PROMPT, 900), timeout_s=0.1)
    async with asyncio.timeout(20):
        await until_idle(client)


async def test_the_load_counts_what_runs(client) -> None:
    await until_idle(client)
    running = [asyncio.create_task(client.generate(ask(PROMPT, 900))) for i in range(4)]
    while (load := await client.loads()).running < 4:
        await asyncio.sleep(0.01)
    assert load.waiting == 0 and load.used_tokens >= 4
    await asyncio.gather(*running)


async def test_many_requests_at_once_each_get_their_own_answer(
    client, folders, reference: Callable[..., list[float]]
) -> None:
    prompts = [(50 + i, *PROMPT, 60 + i) for i in range(24)]
    made = await asyncio.gather(*(client.generate(ask(p, 20 + i)) for i, p in enumerate(prompts)))
    for i, (prompt, generation) in enumerate(zip(prompts, made, strict=True)):
        assert len(generation.output_ids) == 20 + i
        expected = reference(folders.first, prompt, generation.output_ids)
        assert generation.output_logprobs == pytest.approx(expected, abs=1e-4)


async def test_it_is_ready_and_healthy(client) -> None:
    assert await client.ready() and await client.health()
