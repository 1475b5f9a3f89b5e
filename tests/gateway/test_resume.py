"""A session that goes on after a crash, from what is stored of it and nothing else."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

import openai
import pytest
from open_session import Open, opened
from stage import Stage, tool_call
from test_clients import FIND, QUESTION, anthropic_client, assert_trained_as_sampled, openai_client

from agentrl.databases.documents import Record
from agentrl.gateway.outside import OutsideResources, OutsideSampler
from agentrl.gateway.program import ProgramSampler
from agentrl.gateway.sessions import Session
from agentrl.rollout.scheduling.attempt import WentSilent

TOOLS: list[Any] = [{"type": "function", "function": FIND}]
CALL = tool_call("find", '{"item":  "bolt"}')  # with a space that no client keeps
RETRY = {"x-stainless-retry-count": "1"}
AGAIN: Any = {"role": "user", "content": "And then?"}


@asynccontextmanager
async def after_a_crash(stage: Stage, there: Open) -> AsyncIterator[Open]:
    """The same session in another process, as far as it can know: the ledger is all it has."""
    records = there.sampler.resources.records
    document = await stage.database.records.find_one({"_id": there.session.id})
    assert document is not None
    record = Record.from_mongo(document)
    sampler = ProgramSampler(there.sampler.claim, record, there.sampler.resources)
    agents = there.sampler.resources.agents
    session = Session(sampler, agents, there.session.key)
    session.resume((await records.turns([record.id]))[record.id])
    async with there.sampler.resources.gateway.session(session) as url:
        yield Open(url, session, sampler)


async def test_a_conversation_with_calls_goes_on_in_the_same_segment(stage: Stage) -> None:
    stage.lines = [CALL, CALL, "In B7"]
    async with opened(stage) as there:
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, QUESTION]
        ask: dict[str, Any] = {"model": "m", "tools": TOOLS}

        async def turn(at: Open) -> Any:
            chat = openai_client(at).chat.completions
            said = (await chat.create(messages=messages, **ask)).choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "in B7"})
            return said

        await turn(there)
        before = dict(there.session.__dict__)
        async with after_a_crash(stage, there) as second:
            await turn(second)
            async with after_a_crash(stage, second) as third:
                assert (await turn(third)).content == "In B7"
                row = await assert_trained_as_sampled(stage, third)
        assert len(row.tree.nodes) == 1 and before["id"] == third.session.id
        record = third.sampler.record
        assert (record.n_segments, record.n_drifts, record.n_turns) == (1, 0, 3)
        assert (record.n_tool_calls, record.n_continuations) == (2, 2)
        assert record.turn_statuses == {"completed": 3} and len(record.turns) == 3
        assert record.tokens.generated == sum(map(len, stage.service.outputs))


async def test_an_answered_request_gets_its_answer_after_a_crash_and_no_new_tokens(
    stage: Stage,
) -> None:
    stage.lines = ["one", "two"]
    async with opened(stage) as there:
        ask: dict[str, Any] = {"model": "m", "messages": [QUESTION], "n": 2, "logprobs": True}
        first = await openai_client(there).chat.completions.create(**ask)
        async with after_a_crash(stage, there) as second:
            chat = openai_client(second).chat.completions
            same = await chat.create(**ask, extra_headers=RETRY)
            assert same.model_dump(exclude={"created"}) == first.model_dump(exclude={"created"})
            assert len(stage.service.outputs) == 2
            stage.lines = ["three", "four"]
            other = await chat.create(**ask)  # asked anew, as the answer had arrived
            said = sorted(choice.message.content or "" for choice in other.choices)
            assert said == ["four", "three"]
            await assert_trained_as_sampled(stage, second)


async def test_answers_of_equal_requests_that_never_left_are_given_out_one_by_one_after_a_crash(
    stage: Stage,
) -> None:
    stage.lines = ["one", "two"]
    async with opened(stage) as there:
        ask: dict[str, Any] = {"model": "m", "messages": [QUESTION]}
        for _ in range(2):
            await openai_client(there).chat.completions.create(**ask)
        await there.session.close()
        lost = {"$set": {"request.delivered": False}}
        await stage.database.turns.update_many({"record_id": there.session.id}, lost)
        async with after_a_crash(stage, there) as second:
            stage.lines = ["three"]
            chat = openai_client(second).chat.completions
            answers = [await chat.create(**ask) for _ in range(3)]
            said = [answer.choices[0].message.content for answer in answers]
            assert said == ["one", "two", "three"]


async def test_rewards_of_agents_are_there_after_a_crash_and_end_a_session_that_is_silent(
    stage: Stage,
) -> None:
    stage.lines = ["one"]
    stage.flags += ("--session_idle", "0.2")
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions
        await chat.create(model="m", messages=[QUESTION])
        client = openai.AsyncOpenAI(base_url=there.url, api_key=there.session.key, max_retries=0)
        told = {"agent": "planner", "reward": 1.0, "explanation": "as planned"}
        await client.post("/reward", body=told, cast_to=object)
        async with after_a_crash(stage, there) as second:
            record = second.sampler.record
            assert record.agent_rewards == {"planner": 1.0}
            shared = vars(second.sampler.resources)
            own = {field.name: shared[field.name] for field in fields(OutsideResources)}
            outside = OutsideSampler(second.sampler.claim, record, OutsideResources(**own))
            await outside._until_over(second.session)
            record.agent_rewards.clear()
            with pytest.raises(WentSilent, match="--session_idle"):
                await outside._until_over(second.session)


async def test_answers_of_which_a_crash_kept_only_some_are_completed(stage: Stage) -> None:
    stage.lines = ["one", "two"]
    async with opened(stage) as there:
        ask: dict[str, Any] = {"model": "m", "messages": [QUESTION], "n": 2}
        await openai_client(there).chat.completions.create(**ask)
        await stage.database.turns.delete_one({"_id": f"{there.session.id}-1"})
        stage.service.outputs.pop(1)
        async with after_a_crash(stage, there) as second:
            stage.lines = ["three"]
            chat = openai_client(second).chat.completions
            both = await chat.create(**ask, extra_headers=RETRY)
            assert "three" in [choice.message.content for choice in both.choices]
            await assert_trained_as_sampled(stage, second)


async def test_an_answer_that_never_left_is_given_to_who_asks_the_same_again(stage: Stage) -> None:
    stage.lines = ["one"]
    async with opened(stage) as there:
        ask: dict[str, Any] = {"model": "m", "messages": [QUESTION]}
        await openai_client(there).chat.completions.create(**ask)
        await there.session.close()
        [turn] = await stage.turns(there.sampler.record)
        assert turn.request is not None and turn.request.delivered
        await stage.database.turns.update_one(
            {"_id": turn.id}, {"$set": {"request.delivered": False}}
        )
        async with after_a_crash(stage, there) as second:  # no header says that it is a retry
            same = await openai_client(second).chat.completions.create(**ask)
            assert same.choices[0].message.content == "one" and len(stage.service.outputs) == 1


@pytest.mark.parametrize("instructed", [True, False])
async def test_a_response_is_continued_by_its_id_after_a_crash(
    stage: Stage, instructed: bool
) -> None:
    stage.lines = [CALL, "In B7"]
    tools: list[Any] = [{"type": "function", **FIND}]
    async with opened(stage) as there:
        ask: dict[str, Any] = {"model": "m", "tools": tools}
        if instructed:
            ask["instructions"] = "Be brief."
        first = await openai_client(there).responses.create(input=[QUESTION], **ask)
        [call] = [item for item in first.output if item.type == "function_call"]
        result: Any = {
            "type": "function_call_output", "call_id": call.call_id, "output": "in B7",
        }  # fmt: skip
        async with after_a_crash(stage, there) as second:
            client = openai_client(second)
            last = await client.responses.create(
                input=[result], previous_response_id=first.id, **ask
            )
            assert last.output_text == "In B7"
            with pytest.raises(openai.BadRequestError, match="no answer of this session"):
                await client.responses.create(input="x", previous_response_id="resp_p9_x", **ask)
            row = await assert_trained_as_sampled(stage, second)
            assert len(row.tree.nodes) == 1


async def test_other_tools_or_a_changed_history_begin_a_branch_after_a_crash(stage: Stage) -> None:
    stage.lines = ["one", "two", "three"]
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions
        one = await chat.create(model="m", messages=[QUESTION], tools=TOOLS)
        said: Any = {"role": "assistant", "content": one.choices[0].message.content}
        await chat.create(model="m", messages=[QUESTION, said, AGAIN], tools=TOOLS)
        async with after_a_crash(stage, there) as second:
            other: Any = {"role": "user", "content": "Or so?"}
            await openai_client(second).chat.completions.create(
                model="m", messages=[QUESTION, said, other], tools=TOOLS
            )
            row = await assert_trained_as_sampled(stage, second)
            assert second.sampler.record.n_segments == 2 and len(row.tree.nodes) == 3
            turns = await stage.turns(second.sampler.record)
            assert (turns[2].continues, turns[2].n_continued) == (1, 2)


async def test_a_stop_text_that_a_client_puts_back_is_known_after_a_crash(stage: Stage) -> None:
    stage.lines = ["one STOP", "two"]
    async with opened(stage) as there:
        ask: dict[str, Any] = {"model": "m", "max_tokens": 99, "stop_sequences": ["STOP"]}
        first = await anthropic_client(there).messages.create(messages=[QUESTION], **ask)
        assert first.content[0].text == "one "  # type: ignore[union-attr]
        async with after_a_crash(stage, there) as second:
            said: Any = {"role": "assistant", "content": "one STOP"}
            await anthropic_client(second).messages.create(messages=[QUESTION, said, AGAIN], **ask)
            row = await assert_trained_as_sampled(stage, second)
            assert len(row.tree.nodes) == 1


async def test_what_a_turn_stores_does_not_grow_with_the_history(stage: Stage) -> None:
    stage.flags += ("--max_tokens", "4000")
    stage.lines = ["one two three"] * 24
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions
        messages: list[Any] = [QUESTION]
        for _ in range(24):
            said = (await chat.create(model="m", messages=messages)).choices[0].message
            messages += [{"role": "assistant", "content": said.content}, AGAIN]
        await there.session.close()
        stored = [
            len(document) for document in [str(turn) for turn in await stage.turns(
                there.sampler.record)][1:]
        ]  # fmt: skip
        assert max(stored) - min(stored) < 100
