"""Answers that leave as they are sampled, by the providers' own clients."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from open_session import opened
from slow_service import SlowService
from stage import Stage, tool_call
from test_clients import (
    FIND,
    QUESTION,
    anthropic_client,
    assert_trained_as_sampled,
    openai_client,
)

from agentrl.databases.connection import RunDatabase
from agentrl.databases.records import RecordLedger
from agentrl.rollout.chat import ChatRenderer

THOUGHT = "<think>\nIt is small. </think>\n\n"
WORDS = "The 家 is in bin B7, I think."
LINE = f"{THOUGHT}{WORDS}\n" + tool_call("find", '{"item":  "bolt"}')
TOOLS: Any = [{"type": "function", "function": FIND}]
ANTHROPIC_TOOLS: Any = [
    {"name": "find", "description": "Finds.", "input_schema": FIND["parameters"]}
]
QUESTIONS: Any = [QUESTION]


@pytest.fixture
async def slow(
    database: RunDatabase, demo_renderer: ChatRenderer, stage: Stage
) -> AsyncIterator[SlowService]:
    """The stage's service, in place of which tokens come one by one."""
    service = SlowService(demo_renderer, stage._say)
    async with service.running():
        stage.service = service
        yield service


async def test_words_of_chat_completions_arrive_while_the_model_samples(
    stage: Stage, slow: SlowService
) -> None:
    stage.lines = [LINE]
    n_thought = len(stage.renderer.encode(THOUGHT))
    slow.allow(n_thought - 4)
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions
        stream = await chat.create(
            model="m", messages=QUESTIONS, tools=TOOLS, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        thought, text = "", ""
        chunks = stream.__aiter__()
        while "small" not in thought:
            delta = (await anext(chunks)).choices[0].delta
            thought += (delta.model_extra or {}).get("reasoning_content", "")
        slow.allow(n_thought + 12)
        while "家" not in text:
            text += (await anext(chunks)).choices[0].delta.content or ""
        assert there.sampler.record.n_turns == 0, "the turn is being sampled"
        slow.allow(float("inf"))
        rest = [chunk async for chunk in chunks]
        text += "".join(c.choices[0].delta.content or "" for c in rest if c.choices)
        assert text == WORDS
        [call] = [c for r in rest if r.choices for c in r.choices[0].delta.tool_calls or ()]
        assert call.function and json.loads(call.function.arguments or "") == {"item": "bolt"}
        assert [r.choices[0].finish_reason for r in rest if r.choices][-1] == "tool_calls"
        assert rest[-1].usage and rest[-1].usage.completion_tokens == len(slow.outputs[0])
        assert slow.intervals[0] < 32 and len(await stage.turns(there.sampler.record)) == 1
        await assert_trained_as_sampled(stage, there)


async def test_words_of_messages_arrive_while_the_model_samples(
    stage: Stage, slow: SlowService
) -> None:
    stage.lines = [LINE, LINE]
    slow.allow(len(stage.renderer.encode(THOUGHT)) + 12)
    async with opened(stage) as there:
        client = anthropic_client(there)
        ask: dict[str, Any] = {
            "model": "m", "max_tokens": 300, "messages": QUESTIONS, "tools": ANTHROPIC_TOOLS,
        }  # fmt: skip
        kinds: list[str] = []
        async with client.messages.stream(**ask) as stream:
            async for event in stream:
                kinds.append(event.type)
                if event.type == "text" and "家" in event.snapshot:
                    slow.allow(float("inf"))
            streamed = await stream.get_final_message()
        assert kinds.index("thinking") < kinds.index("text") and kinds.count("text") > 1
        whole = await client.messages.create(**ask)
        assert [block.model_dump(exclude={"id"}) for block in streamed.content] == [
            block.model_dump(exclude={"id"}) for block in whole.content
        ]
        assert (streamed.usage, streamed.stop_reason) == (whole.usage, whole.stop_reason)
        await assert_trained_as_sampled(stage, there)


async def test_words_of_responses_arrive_while_the_model_samples(
    stage: Stage, slow: SlowService
) -> None:
    stage.lines = [LINE, "In B7"]
    slow.allow(len(stage.renderer.encode(THOUGHT)) + 12)
    async with opened(stage) as there:
        client = openai_client(there)
        ask: dict[str, Any] = {"model": "m", "tools": [{"type": "function", **FIND}]}
        told: list[str] = []
        async with client.responses.stream(input=QUESTIONS, **ask) as stream:
            async for event in stream:
                told.append(event.type)
                if event.type == "response.output_text.delta" and "家" in event.snapshot:
                    slow.allow(float("inf"))
            first = await stream.get_final_response()
        assert told.count("response.output_text.delta") > 1
        assert "response.reasoning_summary_text.delta" in told
        assert first.output_text == WORDS and [item.type for item in first.output] == [
            "reasoning", "message", "function_call",
        ]  # fmt: skip
        call = first.output[2]
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "B7"}
        second = await client.responses.create(input=[result], previous_response_id=first.id, **ask)
        assert second.output_text == "In B7"
        row = await assert_trained_as_sampled(stage, there)
        assert len(row.tree.nodes) == 1


async def test_several_answers_are_streamed_beside_each_other(
    stage: Stage, slow: SlowService
) -> None:
    stage.lines = ["one and more", "two and more"]
    async with opened(stage) as there:
        stream = await openai_client(there).chat.completions.create(
            model="m", messages=QUESTIONS, n=2, stream=True, logprobs=True
        )
        texts, tokens = ["", ""], [0, 0]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                tokens[choice.index] += len((choice.logprobs and choice.logprobs.content) or ())
        assert sorted(texts) == ["one and more", "two and more"]
        assert sorted(tokens) == sorted(map(len, slow.outputs))


async def test_a_stream_goes_on_at_another_service_when_one_dies(
    stage: Stage, slow: SlowService, demo_renderer: ChatRenderer
) -> None:
    """What the second service says is what the first one would have said."""
    stage.lines = [WORDS]
    n_words = len(stage.renderer.encode(WORDS))
    slow.dies_after = n_words // 2
    async with opened(stage) as there:

        async def rest(prompt: str) -> str:
            said = prompt.rpartition("<|im_start|>assistant\n")[2]
            return WORDS.removeprefix(said) + "<|im_end|>"

        second = SlowService(demo_renderer, rest)
        async with second.running():
            there.sampler.resources.pool.update([slow.url, second.url])
            stage.lines, slow.answer = [], rest
            stream = await openai_client(there).chat.completions.create(
                model="m", messages=QUESTIONS, stream=True
            )
            text = "".join([c.choices[0].delta.content or "" async for c in stream])
        assert text == WORDS and len(slow.intervals) + len(second.intervals) == 2
        [turn] = await stage.turns(there.sampler.record)
        assert turn.output_text == WORDS


async def test_a_turn_that_cannot_be_stored_ends_its_stream_with_an_error_and_is_asked_again(
    stage: Stage, slow: SlowService, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.lines = ["one", "two", "three", "four"]
    fails = [True, True]
    add_turn = RecordLedger.add_turn

    async def failing(self: RecordLedger, turn: Any) -> None:
        if fails and fails.pop():
            raise OSError("the disk is full")
        await add_turn(self, turn)

    monkeypatch.setattr(RecordLedger, "add_turn", failing)
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions
        texts = ""
        with pytest.raises(openai.APIError, match="the disk is full"):
            async for chunk in await chat.create(model="m", messages=QUESTIONS, stream=True):
                texts += chunk.choices[0].delta.content or ""
        assert texts in ("", "one"), "its words may have left, and its end has not"
        with pytest.raises(anthropic.APIStatusError, match="the disk is full"):
            async with anthropic_client(there).messages.stream(
                model="m", max_tokens=9, messages=QUESTIONS
            ) as stream:
                await stream.get_final_message()
        again = await chat.create(
            model="m", messages=QUESTIONS, extra_headers={"x-stainless-retry-count": "1"}
        )
        assert again.choices[0].message.content == "three"
        await there.session.close()
        turns = await stage.turns(there.sampler.record)
        assert [turn.output_text for turn in turns] == ["one", "two", "three"]
        await assert_trained_as_sampled(stage, there)


async def test_one_that_asks_again_while_it_is_answered_gets_all_of_the_stream(
    stage: Stage, slow: SlowService
) -> None:
    stage.lines = [WORDS]
    slow.allow(9)
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions
        ask: dict[str, Any] = {"model": "m", "messages": QUESTIONS, "stream": True}
        first = (await chat.create(**ask)).__aiter__()
        while not (await anext(first)).choices[0].delta.content:
            pass
        again = await chat.create(**ask, extra_headers={"x-stainless-retry-count": "1"})
        slow.allow(float("inf"))
        text = "".join([c.choices[0].delta.content or "" async for c in again])
        assert text == WORDS and len(slow.outputs) == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_one_that_hung_up_and_asks_the_same_gets_the_answer_that_is_being_made(
    stage: Stage, slow: SlowService, streamed: bool
) -> None:
    """Whether it asks before the answer is there or after, and says that it asked or not."""
    stage.lines = [WORDS, WORDS]
    ask: dict[str, Any] = {"model": "m", "messages": QUESTIONS, "stream": streamed}
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions

        async def hang_up() -> None:
            if not streamed:
                with pytest.raises(openai.APITimeoutError):
                    await chat.create(**ask, timeout=0.3)
                return
            stream = await chat.create(**ask)
            await anext(stream.__aiter__())
            await stream.close()

        async def text() -> str:
            answer = await chat.create(**ask)
            if not streamed:
                return str(answer.choices[0].message.content)
            return "".join([c.choices[0].delta.content or "" async for c in answer])

        slow.allow(9)
        await hang_up()
        await asyncio.sleep(0.1)
        await hang_up()
        await asyncio.sleep(0.1)
        slow.allow(float("inf"))
        while there.sampler.record.n_turns == 0:
            await asyncio.sleep(0.02)
        assert [await text(), len(slow.outputs)] == [WORDS, 1]
        assert [await text(), len(slow.outputs)] == [WORDS, 2], "the first one has arrived"
        await there.session.close()
        turns = await stage.turns(there.sampler.record)
        assert [turn.request and turn.request.delivered for turn in turns] == [True, True]


async def test_of_equal_requests_at_once_each_gets_its_own_answer_though_it_hangs_up(
    stage: Stage, slow: SlowService
) -> None:
    stage.lines = ["vote A", "vote B", "vote C"]
    slow.allow(1)
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions
        ask: dict[str, Any] = {"model": "m", "messages": QUESTIONS}
        hanging = [asyncio.create_task(chat.create(**ask, timeout=0.6)) for _ in range(2)]
        await asyncio.sleep(0.3)
        waits = asyncio.create_task(chat.create(**ask))
        for hung in hanging:
            with pytest.raises(openai.APITimeoutError):
                await hung
        await asyncio.sleep(0.1)
        again = [
            asyncio.create_task(chat.create(**ask, extra_headers=headers))
            for headers in ({"x-stainless-retry-count": "1"}, {})
        ]
        await asyncio.sleep(0.2)
        slow.allow(float("inf"))
        votes = await asyncio.gather(waits, *again)
        assert len({vote.id for vote in votes}) == 3 and len(slow.outputs) == 3
        said = {vote.choices[0].message.content for vote in votes}
        assert said == {"vote A", "vote B", "vote C"}


async def test_a_session_that_ends_in_a_stream_ends_it_with_an_error(
    stage: Stage, slow: SlowService
) -> None:
    stage.lines = [WORDS, WORDS]
    slow.allow(5)
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions
        stream = (await chat.create(model="m", messages=QUESTIONS, stream=True)).__aiter__()
        await anext(stream)
        whole = asyncio.create_task(chat.create(model="m", messages=QUESTIONS))
        await asyncio.sleep(0.2)
        closing = asyncio.create_task(there.session.close())
        with pytest.raises(openai.APIError, match="the session was closed before"):
            while True:
                await anext(stream)
        with pytest.raises(openai.InternalServerError, match="the session was closed before"):
            await whole
        await closing


@pytest.mark.parametrize("seed", range(3))
async def test_a_streamed_answer_is_the_one_that_is_not_streamed(
    stage: Stage, slow: SlowService, seed: int
) -> None:
    """Any tokens, among them pieces of marks, of characters and of stops."""
    source = random.Random(seed)
    parts = [THOUGHT, WORDS, "<tool", "_call>", "STOP", " ", "\n\n", "</think>", "é", LINE, "<|im"]
    async with opened(stage) as there:
        client, chat = anthropic_client(there), openai_client(there).chat.completions
        for _ in range(6):
            said = "".join(source.choices(parts, k=source.randint(1, 5)))
            stage.lines = [said] * 4
            stop = source.choice([[], ["STOP"], ["B7", "\n\n"]])
            ask: dict[str, Any] = {"model": "m", "messages": QUESTIONS, "tools": TOOLS}
            whole = (await chat.create(**ask, stop=stop or None)).choices[0]
            async with chat.stream(**ask, stop=stop or None) as stream:
                async for _event in stream:
                    pass
                made = (await stream.get_final_completion()).choices[0]
            assert (made.message.content or "") == (whole.message.content or "")
            assert made.finish_reason == whole.finish_reason
            assert len(made.message.tool_calls or ()) == len(whole.message.tool_calls or ())
            asked: dict[str, Any] = {
                "model": "m", "max_tokens": 300, "messages": QUESTIONS, "tools": ANTHROPIC_TOOLS,
                "stop_sequences": stop,
            }  # fmt: skip
            message = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as events:
                final = await events.get_final_message()
            assert [b.model_dump(exclude={"id"}) for b in final.content] == [
                b.model_dump(exclude={"id"}) for b in message.content
            ]
        await asyncio.sleep(0)
