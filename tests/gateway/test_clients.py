"""The providers' own clients against the gateway: what they get, and that tokens stay exact."""

import asyncio
import json
from itertools import chain
from typing import Any

import anthropic
import openai
import pytest
from open_session import Open, opened
from stage import Stage, tool_call

from agentrl.databases.documents import Record
from agentrl.rollout.groups.row_building import build_row

FIND = {
    "name": "find",
    "description": "Finds an item.",
    "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
}
CALL = tool_call("find", '{"item":  "bolt", "n": 2}')  # with a space that no client keeps
TWO_CALLS = "I look.\n" + tool_call("find", '{"item": "nut"}') + "\n" + tool_call("find", "{}")
QUESTION = {"role": "user", "content": "Where is it?"}


def openai_client(there: Open) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{there.url}/v1", api_key=there.session.key, max_retries=0)


def anthropic_client(there: Open) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=there.url, api_key=there.session.key, max_retries=0)


async def row_of(stage: Stage, record: Record) -> Any:
    """The training row of a record, from what is stored."""
    scored = record.model_copy(update={"score": 1.0})
    return build_row(scored, await stage.turns(record), 1.0, 1.0, 0)


async def assert_trained_as_sampled(stage: Stage, there: Open) -> Any:
    """Every answer of the service is in the row, once, with its logprobs; nothing else is."""
    await there.session.close()
    row = await row_of(stage, there.sampler.record)
    ids, mask = row.tree["ids"], row.tree["mask"]
    assert sorted(ids[mask == 1].tolist()) == sorted(chain(*stage.service.outputs))
    assert row.tree["logprobs"][mask == 1] == pytest.approx(-ids[mask == 1] / 1000)
    return row


def extends(stage: Stage, turn: int) -> bool:
    """Whether the prompt of a turn begins with the prompt and the output of the one before."""
    before = stage.service.prompts[turn - 1] + stage.service.outputs[turn - 1]
    return stage.service.prompts[turn][: len(before)] == before


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_completions_with_tools(stage: Stage, streamed: bool) -> None:
    stage.lines = [CALL, "In <answer>B7</answer>"]
    async with opened(stage) as there:
        client = openai_client(there)
        ask: dict[str, Any] = {
            "model": "gpt-9", "tools": [{"type": "function", "function": FIND}],
        }  # fmt: skip
        messages: list[Any] = [{"role": "developer", "content": "Be brief."}, QUESTION]
        if streamed:
            calls: list[Any] = []
            async with client.chat.completions.stream(messages=messages, **ask) as stream:
                async for _ in stream:
                    pass
                first = (await stream.get_final_completion()).choices[0]
        else:
            first = (await client.chat.completions.create(messages=messages, **ask)).choices[0]
        assert first.finish_reason == "tool_calls" and first.message.tool_calls
        calls = list(first.message.tool_calls)
        assert json.loads(calls[0].function.arguments) == {"item": "bolt", "n": 2}
        # As frameworks do: JSON written anew, the calls as the client's own objects.
        messages += [
            first.message.model_dump(exclude_none=True, exclude={"parsed"}),
            {"role": "tool", "tool_call_id": calls[0].id, "content": "in B7"},
        ]
        messages[2]["tool_calls"][0]["function"] = {
            "name": "find", "arguments": '{"n":2,"item":"bolt"}',
        }  # fmt: skip
        second = await client.chat.completions.create(messages=messages, **ask)
        assert second.choices[0].message.content == "In <answer>B7</answer>"
        assert second.choices[0].finish_reason == "stop"
        usage = second.usage
        assert usage and usage.prompt_tokens == len(stage.service.prompts[1])
        assert usage.completion_tokens == len(stage.service.outputs[1])
        assert extends(stage, 1)
        row = await assert_trained_as_sampled(stage, there)
        assert len(row.tree.nodes) == 1 and there.sampler.record.n_drifts == 0
        assert there.sampler.record.n_tool_calls == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_messages_with_tools_whose_results_come_in_another_order(
    stage: Stage, streamed: bool
) -> None:
    stage.lines = [TWO_CALLS, "In B7"]
    async with opened(stage) as there:
        client = anthropic_client(there)
        tools = [{"name": "find", "description": "Finds.", "input_schema": FIND["parameters"]}]
        ask: dict[str, Any] = {
            "model": "claude-x", "max_tokens": 300, "system": "Be brief.", "tools": tools,
        }  # fmt: skip
        messages: list[Any] = [QUESTION]
        if streamed:
            async with client.messages.stream(messages=messages, **ask) as stream:
                first = await stream.get_final_message()
        else:
            first = await client.messages.create(messages=messages, **ask)
        assert first.stop_reason == "tool_use"
        said, *uses = first.content
        assert said.type == "text" and said.text.strip() == "I look."
        assert [use.input for use in uses if use.type == "tool_use"] == [{"item": "nut"}, {}]
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": f"result {number}"}
            for number, use in enumerate(uses)
            if use.type == "tool_use"
        ]
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in first.content]},
            {"role": "user", "content": list(reversed(results))},
        ]
        counted = await client.messages.count_tokens(
            model="claude-x", system="Be brief.", messages=messages, tools=tools
        )
        second = await client.messages.create(messages=messages, **ask)
        assert second.stop_reason == "end_turn" and second.content[0].text == "In B7"
        assert second.usage.input_tokens == len(stage.service.prompts[1])
        assert abs(counted.input_tokens - second.usage.input_tokens) <= 4
        prompt = stage.renderer.codec.decode(stage.service.prompts[1])
        assert 0 < prompt.index("result 0") < prompt.index("result 1")
        assert extends(stage, 1)
        await assert_trained_as_sampled(stage, there)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
async def test_responses_with_tools(stage: Stage, streamed: bool, by_id: bool) -> None:
    stage.lines = [TWO_CALLS, "In B7"]
    async with opened(stage) as there:
        client = openai_client(there)
        ask: dict[str, Any] = {
            "model": "policy", "instructions": "Be brief.", "tools": [{"type": "function", **FIND}],
        }  # fmt: skip
        given: list[Any] = [QUESTION]
        if streamed:
            async with client.responses.stream(input=given, **ask) as stream:
                async for _ in stream:
                    pass
                first = await stream.get_final_response()
        else:
            first = await client.responses.create(input=given, **ask)
        assert first.output_text.strip() == "I look."
        calls = [item for item in first.output if item.type == "function_call"]
        results: list[Any] = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"result {number}"}
            for number, call in enumerate(calls)
        ]
        if by_id:
            ask["previous_response_id"], given = first.id, results
        else:
            given += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
            given += results
        second = await client.responses.create(input=given, **ask)
        assert second.output_text == "In B7" and second.status == "completed"
        assert second.usage and second.usage.output_tokens == len(stage.service.outputs[1])
        assert extends(stage, 1)
        await assert_trained_as_sampled(stage, there)


async def test_a_changed_history_is_a_branch_and_keeps_what_it_shares(stage: Stage) -> None:
    stage.lines = ["one", "two", "three"]
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions
        one = await chat.create(model="m", messages=[QUESTION])
        said = {"role": "assistant", "content": one.choices[0].message.content}
        again = {"role": "user", "content": "And?"}
        await chat.create(model="m", messages=[QUESTION, said, again])
        other: Any = {"role": "user", "content": "Or so?"}
        await chat.create(model="m", messages=[QUESTION, said, other])
        row = await assert_trained_as_sampled(stage, there)
        assert there.sampler.record.n_segments == 2 and len(row.tree.nodes) == 3
        edited: Any = {"role": "assistant", "content": "four"}
        assert edited  # what the model did not say is not trained
        assert (row.tree["mask"] == 1).sum() == sum(map(len, stage.service.outputs))


async def test_a_repeated_request_gets_the_same_answer_and_makes_no_tokens(stage: Stage) -> None:
    stage.lines = ["one", "two"]
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions
        ask: dict[str, Any] = {"model": "m", "messages": [QUESTION]}
        retried = {"x-stainless-retry-count": "1"}
        first, same = await asyncio.gather(
            chat.create(**ask), chat.create(**ask, extra_headers=retried)
        )
        later = await chat.create(**ask, extra_headers=retried)
        told = {answer.choices[0].message.content for answer in (first, same, later)}
        assert told == {"one"} and len(stage.service.outputs) == 1
        other = await chat.create(**ask)  # asked anew, without being a retry
        assert other.choices[0].message.content == "two"
        await assert_trained_as_sampled(stage, there)


async def test_an_answer_that_nobody_waited_for_is_there_for_the_retry(stage: Stage) -> None:
    answered = asyncio.Event()

    async def slow(prompt: str) -> str:
        await answered.wait()
        return "late<|im_end|>"

    stage.service.answer = slow
    async with opened(stage) as there:
        client = openai_client(there).with_options(timeout=0.3)
        ask: dict[str, Any] = {"model": "m", "messages": [QUESTION]}
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**ask)
        answered.set()
        retry = {"x-stainless-retry-count": "1"}
        answer = await client.chat.completions.create(**ask, extra_headers=retry)
        assert answer.choices[0].message.content == "late" and len(stage.service.outputs) == 1


async def test_several_answers_logprobs_and_stops(stage: Stage) -> None:
    stage.lines = ["one", "two"]
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions
        both = await chat.create(model="m", messages=[QUESTION], n=2, logprobs=True)
        assert sorted(choice.message.content or "" for choice in both.choices) == ["one", "two"]
        for choice, ids in zip(both.choices, stage.service.outputs, strict=True):
            told = choice.logprobs and choice.logprobs.content
            assert told and [t.logprob for t in told] == pytest.approx([-i / 1000 for i in ids])
        stage.lines = ["three STOP"]  # as a service says it that ended there
        ended = await chat.create(model="m", messages=[QUESTION], stop=["STOP"])
        assert ended.choices[0].message.content == "three "
        await assert_trained_as_sampled(stage, there)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role is 'wizard'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "reads text only",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type must be text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format has no schema"),
        ({"n": 1000}, "n is 1000"),
        ({"stop": [""]}, "stop must be a text"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] must be a function"),
    ],
)
async def test_a_request_that_cannot_be_answered_names_the_field(
    stage: Stage, change: dict[str, Any], said: str
) -> None:
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions
        with pytest.raises(openai.BadRequestError) as refused:
            await chat.create(**{"model": "m", "messages": [QUESTION], **change})
        assert said in str(refused.value)


async def test_without_the_sessions_key_nothing_is_answered(stage: Stage) -> None:
    async with opened(stage) as there:
        stranger = openai.AsyncOpenAI(base_url=f"{there.url}/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
        # The key alone tells the session, for clients whose base URL is fixed.
        root = there.url.partition("/s/")[0]
        known = openai.AsyncOpenAI(base_url=f"{root}/v1", api_key=there.session.key)
        assert [model.id async for model in await known.models.list()] == ["policy"]


async def test_a_limit_of_the_record_is_a_full_context(stage: Stage) -> None:
    stage.flags += ("--max_turns", "1")
    stage.lines = ["one"]
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions
        await chat.create(model="m", messages=[QUESTION])
        with pytest.raises(openai.BadRequestError, match="--max_turns") as refused:
            await chat.create(model="m", messages=[QUESTION])
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match="--max_turns"):
            await anthropic_client(there).messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}]
            )
