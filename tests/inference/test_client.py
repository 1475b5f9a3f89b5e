"""The client against a real engine, and what it refuses to send or to believe."""

import asyncio
import socket
import time

import pytest

from agentrl.inference.client import SGLangClient
from agentrl.inference.context import fit_request
from agentrl.inference.protocol import (
    FRESH_VERSION,
    GenerateRequest,
    ModelLimits,
    PromptTooLong,
    RequestRejected,
    RequestTimedOut,
    SamplingParams,
    ServiceUnreachable,
    version_from_wire,
    version_to_wire,
)

PROMPT = tuple(range(40, 60))


def long_request(rid: str, tokens: int = 900) -> GenerateRequest:
    return GenerateRequest(rid, PROMPT, SamplingParams(max_new_tokens=tokens, ignore_eos=True))


async def test_a_generation_has_a_logprob_and_a_version_for_each_token(engine) -> None:
    async with SGLangClient(engine.url) as client:
        made = await client.generate(GenerateRequest("one", PROMPT, SamplingParams(7)))
    assert 1 <= len(made.output_ids) == len(made.output_logprobs) <= 7
    assert all(logprob <= 0 for logprob in made.output_logprobs)
    assert made.versions[0].start == 0 and made.versions[-1].end == len(made.output_ids)
    assert made.prompt_tokens == len(PROMPT)
    assert made.latency_s > 0


async def test_limits_come_from_the_service_and_its_model_folder(engine) -> None:
    async with SGLangClient(engine.url) as client:
        assert await client.fetch_limits() == ModelLimits(vocab_size=264, context_length=1024)
        with pytest.raises(RequestRejected, match="vocabulary is 264"):
            await client.generate(GenerateRequest("bad", (1, 264)))
        made = await client.generate(long_request("cut", tokens=5000))
    assert len(made.output_ids) == 1024 - 2 - len(PROMPT)


async def test_the_service_s_own_refusal_is_an_error_with_its_message(engine) -> None:
    async with SGLangClient(engine.url) as client:
        with pytest.raises(RequestRejected, match="temperature"):
            await client.generate(GenerateRequest("cold", PROMPT, SamplingParams(temperature=-1)))


async def test_an_aborted_request_keeps_the_tokens_it_has(engine) -> None:
    async with SGLangClient(engine.url) as client:
        running = asyncio.create_task(client.generate(long_request("abort-me")))
        while (await client.loads()).used_tokens < len(PROMPT) + 5:
            await asyncio.sleep(0.01)
        await client.abort("abort-me")
        made = await running
        await client.abort("nobody")
    assert made.finish_reason == "abort"
    assert 5 <= len(made.output_ids) < 900


async def test_a_time_out_is_an_error_and_ends_the_generation(engine) -> None:
    async with SGLangClient(engine.url) as client:
        with pytest.raises(RequestTimedOut, match=r"0 s"):
            await client.generate(long_request("slow"), timeout_s=0.0)
        began = time.monotonic()
        while (await client.loads()).running:
            assert time.monotonic() - began < 5
            await asyncio.sleep(0.01)


async def test_nobody_there_is_unreachable_and_neither_ready_nor_healthy() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with SGLangClient(url) as client:
        with pytest.raises(ServiceUnreachable, match=url):
            await client.generate(GenerateRequest("x", PROMPT))
        assert not await client.ready()
        assert not await client.health()


async def test_a_service_that_dies_while_it_answers_is_unreachable() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with SGLangClient(f"http://{host}:{port}") as client:
            with pytest.raises(ServiceUnreachable, match="broke off"):
                await client.generate(GenerateRequest("x", PROMPT))


async def test_control_requests_answer_what_the_service_says(engine) -> None:
    async with SGLangClient(engine.url) as client:
        assert await client.ready() and await client.health()
        await client.flush_cache()
        assert (await client.model_info())["model_type"] == "qwen3"
        with pytest.raises(RequestRejected, match=r"neither model\.safetensors"):
            await client.update_weights_from_disk("/nonexistent", 1)


def test_a_prompt_that_cannot_be_served_is_refused_before_sending() -> None:
    limits = ModelLimits(vocab_size=10, context_length=14)
    with pytest.raises(RequestRejected, match="empty"):
        fit_request(GenerateRequest("r", ()), limits)
    with pytest.raises(RequestRejected, match="vocabulary is 10"):
        fit_request(GenerateRequest("r", (3, -1)), limits)
    with pytest.raises(PromptTooLong, match="leaves no room"):
        fit_request(GenerateRequest("r", (1,) * 8), limits)
    fitted = fit_request(GenerateRequest("r", (1,) * 7, SamplingParams(9, top_p=0.5)), limits)
    assert fitted.sampling_params == SamplingParams(5, top_p=0.5)


def test_versions_go_through_the_wire_and_back() -> None:
    assert version_to_wire(FRESH_VERSION) == "default"
    assert [version_from_wire(version_to_wire(v)) for v in (FRESH_VERSION, 0, 17)] == [-1, 0, 17]


def test_only_what_differs_from_the_default_is_sent() -> None:
    assert SamplingParams(5).to_json() == {"max_new_tokens": 5}
    assert SamplingParams(5, temperature=0.0, stop_token_ids=(3,)).to_json() == {
        "max_new_tokens": 5,
        "temperature": 0.0,
        "stop_token_ids": [3],
    }
