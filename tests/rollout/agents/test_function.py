"""Agents that are functions: what they are given works, and their tokens are exact."""

import asyncio
import random
import re
from itertools import chain
from typing import Any

import pytest
from stage import END, Stage, tool_call

from agentrl.databases.arrays import unpack_ints
from agentrl.databases.documents import Record, StopReason, TurnStatus
from agentrl.rollout.agents import register_agent
from agentrl.rollout.agents.limits import LimitReached
from agentrl.rollout.groups.row_building import build_row, replay

ECHO = tool_call("echo", '{"text": "B7"}')
TEXTS = ("one", "two  ", "\n\nthree", ECHO, "日本 é", "<tool_call>", "")


async def tool_user(task: Any, llm: Any, tools: Any) -> str:
    """The agent that the documentation shows."""
    messages = llm.task_messages()
    while True:
        reply = await llm.chat(messages, tools.schemas)
        if not reply.tool_calls:
            return reply.content
        messages += [reply.message, *await tools.answer(reply)]


async def assert_trained_as_sampled(stage: Stage, record: Record) -> None:
    """Every answer of the service is in the row, once, with its logprobs; nothing else is."""
    row = build_row(record, await stage.turns(record), 1.0, 1.0, 0)
    ids, mask = row.tree["ids"], row.tree["mask"]
    assert sorted(ids[mask == 1].tolist()) == sorted(chain(*stage.service.outputs))
    assert row.tree["logprobs"][mask == 1] == pytest.approx(-ids[mask == 1] / 1000)


def paths_of(record: Record, turns: list[Any]) -> list[list[int]]:
    """The prompts of a record's turns, read back from what is stored."""
    row = build_row(record, turns, 1.0, 1.0, 0)
    ids = row.tree["ids"].tolist()
    paths: list[list[int]] = []
    for node in row.tree.nodes:
        before = paths[node.parent] if node.parent >= 0 else []
        paths.append(before + ids[node.start : node.end])
    return paths


async def test_a_function_uses_tools_and_answers_as_the_built_in_agent_does(stage: Stage) -> None:
    register_agent("mine", tool_user)
    told = [ECHO, "The bin is <answer>42</answer>"]
    stage.lines = [*told, *told]
    mine, built_in = await stage.attempt("mine"), await stage.attempt("mcp")

    prompts = stage.service.prompts
    assert prompts[:2] == prompts[2:]
    same = {
        "n_turns", "n_tool_calls", "n_tool_errors", "n_segments", "n_continuations", "n_drifts",
        "turn_statuses", "tokens", "versions", "final_answer", "stop_reason", "score", "scores",
    }  # fmt: skip
    assert mine.model_dump(include=same) == built_in.model_dump(include=same)
    assert (mine.score, mine.n_turns, mine.n_tool_calls, mine.n_segments) == (1.0, 2, 1, 1)
    assert mine.agent_name == "mine"

    [first, second] = await stage.turns(mine)
    [call] = first.tool_calls
    assert (call.name, call.arguments, call.result) == ("echo", {"text": "B7"}, "B7")
    assert second.messages == [{"role": "tool", "content": "B7"}]
    assert mine.turns == [first.id, second.id]


async def test_calls_of_the_agents_own_code_and_the_tools_offered_are_kept(stage: Stage) -> None:
    async def looks_itself(task: Any, llm: Any, tools: Any) -> str:
        await tools.call("echo", {"text": "before"})
        first = await llm.chat(llm.task_messages(), tools.schemas)
        await tools.call("echo", {"text": "between"})
        messages = [*llm.task_messages(), first.message, {"role": "user", "content": "go on"}]
        last = await llm.chat(messages, tools.schemas)
        await tools.answer(first)  # whose turn is stored by now
        return str(last.content)

    register_agent("mine", looks_itself)
    stage.lines = [ECHO, "<answer>42</answer>"]
    record = await stage.attempt("mine")
    before, late = record.own_calls
    assert (before.arguments, before.result, before.by_agent) == (
        {"text": "before"}, "before", True,
    )  # fmt: skip
    assert (late.arguments, late.by_agent) == ({"text": "B7"}, False)
    [first, second] = await stage.turns(record)
    [between] = first.tool_calls
    assert (between.result, between.by_agent) == ("between", True)
    assert second.tool_calls == [] and record.n_tool_calls == 3
    assert "echo" in record.tools_offered
    stage.lines = [ECHO, "<answer>42</answer>"]
    assert "echo" in (await stage.attempt("mcp")).tools_offered


async def test_a_call_that_cannot_be_read_is_answered_and_marks_the_turn(stage: Stage) -> None:
    register_agent("mine", tool_user)
    stage.lines = ["<tool_call>\n{nonsense\n</tool_call>" + ECHO, "<answer>42</answer>"]
    record = await stage.attempt("mine")
    [first, second] = await stage.turns(record)
    assert [message["role"] for message in second.messages] == ["tool", "tool"]
    assert "not valid JSON" in second.messages[0]["content"]
    assert second.messages[1]["content"] == "B7"
    assert (first.status, second.status) == (TurnStatus.FORMAT_ERROR, TurnStatus.COMPLETED)
    assert (record.n_tool_calls, record.n_tool_errors) == (2, 1)


async def test_messages_that_the_agent_edits_in_place_are_other_messages(stage: Stage) -> None:
    async def editor(task: Any, llm: Any, tools: Any) -> str:
        notes = {"role": "system", "content": "Notes: one."}
        messages = [notes, *llm.task_messages()]
        reply = await llm.chat(messages)
        notes["content"] = "Notes: two."
        reply.message["content"] = "Hidden."
        return (await llm.chat([*messages, reply.message, user("And?")])).content

    register_agent("editor", editor)
    stage.lines = ["Hmm.", "<answer>42</answer>"]
    record = await stage.attempt("editor")
    first, second = await stage.turns(record)
    assert (first.segment, second.segment) == (0, 1)
    assert first.messages[0]["content"] == "Notes: one."
    prompts = [stage.renderer.codec.decode(prompt) for prompt in stage.service.prompts]
    assert "Notes: two." in prompts[1] and "Hidden." in prompts[1]


async def test_an_agent_has_a_task_of_its_own(stage: Stage) -> None:
    async def cheat(task: Any, llm: Any, tools: Any) -> str:
        await llm.chat(llm.task_messages())
        task.answer = "43"
        return "<answer>43</answer>"

    register_agent("cheat", cheat)
    stage.lines = ["Hmm."]
    assert (await stage.attempt("cheat")).score == 0.0


async def test_a_limit_that_is_reached_in_a_task_group_ends_the_record(stage: Stage) -> None:
    async def grouped(task: Any, llm: Any, tools: Any) -> str:
        while True:
            async with asyncio.TaskGroup() as group:
                group.create_task(llm.chat(llm.task_messages()))

    register_agent("grouped", grouped)
    stage.lines, stage.flags = ["Hmm."] * 3, ("--max_turns", "2")
    assert (await stage.attempt("grouped")).stop_reason == "max_turns"


async def test_other_messages_begin_a_segment_that_keeps_what_the_model_wrote(
    stage: Stage,
) -> None:
    async def forgetful(task: Any, llm: Any, tools: Any) -> str:
        question = llm.task_messages()
        first = await llm.chat([*question], tools.schemas)
        result = await tools.answer(first)
        second = await llm.chat([*question, first.message, *result], tools.schemas)
        # The result is taken back, the reply before it stays.
        said = [*question, first.message, {"role": "tool", "content": "(removed)"}]
        return (await llm.chat([*said, second.message, user("Go on.")], tools.schemas)).content

    register_agent("forgetful", forgetful)
    stage.lines = [ECHO, "Hmm.", "<answer>42</answer>"]
    record = await stage.attempt("forgetful")
    turns = await stage.turns(record)
    assert [turn.segment for turn in turns] == [0, 0, 1]
    assert turns[2].rewrite == "agent"
    hmm = {"role": "assistant", "content": "Hmm."}
    assert turns[2].messages == [{"role": "tool", "content": "(removed)"}, hmm, user("Go on.")]
    assert (turns[2].continues, turns[2].n_continued) == (1, len(turns[0].messages) + 1)
    first, second, third = stage.service.prompts
    reply = stage.service.outputs[0]
    assert third[: len(first) + len(reply)] == first + reply == second[: len(first) + len(reply)]
    assert turns[2].shared_len >= len(first) + len(reply)
    assert (
        stage.service.outputs[1]
        == ids_after(third, "(removed)", stage)[: len(stage.service.outputs[1])]
    )
    assert paths_of(record, turns)[-1] == third + stage.service.outputs[2]
    await assert_trained_as_sampled(stage, record)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ids_after(prompt: list[int], text: str, stage: Stage) -> list[int]:
    """The ids of the turn that follows the message with this text."""
    header = stage.renderer.encode("<|im_start|>assistant\n")
    whole = stage.renderer.codec.decode(prompt)
    before = whole[: whole.index(text)]
    start = len(stage.renderer.encode(before))
    place = next(i for i in range(start, len(prompt)) if prompt[i : i + len(header)] == header)
    return prompt[place + len(header) :]


async def test_conversations_side_by_side_are_exact_and_share_what_they_have_in_common(
    stage: Stage,
) -> None:
    async def parallel(task: Any, llm: Any, tools: Any) -> str:
        async def talk(name: str) -> str:
            messages = [user(f"You are {name}."), *llm.task_messages()][:1]
            for _ in range(3):
                reply = await llm.chat(messages)
                messages += [reply.message, user("More.")]
            return reply.text

        said = await asyncio.gather(*(talk(name) for name in ("A", "B", "C")))
        return f"<answer>{' '.join(said)}</answer>"

    everybody = asyncio.Event()
    waiting = 0

    async def say(prompt: str) -> str:
        nonlocal waiting
        waiting += 1
        if waiting == 3:
            everybody.set()
        await everybody.wait()  # all three are asked before one is answered
        name = next(name for name in "ABC" if f"You are {name}." in prompt)
        return f"{name}{prompt.count('More.')}{END}"

    stage.service.answer = say
    register_agent("parallel", parallel)
    record = await stage.attempt("parallel", answer="A2 B2 C2")
    assert (record.score, record.n_turns, record.n_drifts) == (1.0, 9, 0)
    turns = await stage.turns(record)
    assert record.turns == [turn.id for turn in turns]
    # Each prompt holds the ones before it, with what the service answered.
    outputs = dict(zip(map(tuple, stage.service.prompts), stage.service.outputs, strict=True))
    for prompt in stage.service.prompts:
        for shorter in stage.service.prompts:
            if len(shorter) < len(prompt) and prompt[: len(shorter)] == shorter:
                output = outputs[tuple(shorter)]
                assert prompt[len(shorter) : len(shorter) + len(output)] == output
    await assert_trained_as_sampled(stage, record)


async def test_a_reply_that_was_not_waited_for_leaves_no_trace(stage: Stage) -> None:
    hangs = asyncio.Event()

    async def say(prompt: str) -> str:
        if not hangs.is_set():
            hangs.set()
            await asyncio.Event().wait()
        return f"<answer>42</answer>{END}"

    async def impatient(task: Any, llm: Any, tools: Any) -> str:
        asked = asyncio.create_task(llm.chat(llm.task_messages()))
        await hangs.wait()
        asked.cancel()
        await asyncio.wait({asked})
        return (await llm.chat(llm.task_messages())).text

    stage.service.answer = say
    register_agent("impatient", impatient)
    record = await stage.attempt("impatient")
    assert (record.score, record.n_turns, record.n_segments) == (1.0, 1, 1)
    await assert_trained_as_sampled(stage, record)


async def test_a_tool_that_the_function_calls_itself_is_kept_with_the_last_reply(
    stage: Stage,
) -> None:
    async def direct(task: Any, llm: Any, tools: Any) -> str:
        await llm.chat(llm.task_messages())
        answer = await tools.call("echo", {"text": "by hand"})
        return f"<answer>{answer.text}</answer>"

    register_agent("direct", direct)
    stage.lines = ["I wait."]
    record = await stage.attempt("direct", answer="by hand")
    [turn] = await stage.turns(record)
    assert [(call.name, call.result) for call in turn.tool_calls] == [("echo", "by hand")]
    assert (record.score, record.n_tool_calls) == (1.0, 1)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--max_turns", "2"), StopReason.MAX_TURNS),
        (("--max_tokens", "400"), StopReason.MAX_TOKENS),
        (("--max_prompt_tokens", "300"), StopReason.MAX_PROMPT_TOKENS),
    ],
)
async def test_a_function_that_asks_on_and_on_ends_at_the_limit(
    stage: Stage, flags: tuple[str, ...], reason: StopReason
) -> None:
    stage.flags = flags
    register_agent("mine", tool_user)
    stage.lines = [ECHO] * 9
    record = await stage.attempt("mine")
    assert (record.stop_reason, record.final_answer, record.score) == (reason, None, 0.0)
    assert record.n_turns == len(await stage.turns(record)) > 0, record.tokens
    await assert_trained_as_sampled(stage, record)


async def test_a_function_may_answer_when_the_limit_is_reached(stage: Stage) -> None:
    async def careful(task: Any, llm: Any, tools: Any) -> str | None:
        messages = llm.task_messages()
        try:
            while True:
                reply = await llm.chat(messages)
                messages += [reply.message, user("More.")]
        except LimitReached as limit:
            return f"<answer>{limit.stop_reason}</answer>"

    stage.flags = ("--max_turns", "3")
    register_agent("careful", careful)
    stage.lines = ["a", "b", "c"]
    record = await stage.attempt("careful", answer="max_turns")
    assert (record.stop_reason, record.score, record.n_turns) == (StopReason.ANSWERED, 1.0, 3)


async def test_what_a_function_raises_leaves_its_turns_stored(stage: Stage) -> None:
    async def clumsy(task: Any, llm: Any, tools: Any) -> str:
        await llm.chat(llm.task_messages())
        raise KeyError("my own bug")

    register_agent("clumsy", clumsy)
    stage.lines = ["Hm."]
    async with stage.sampler("clumsy") as sampler:
        with pytest.raises(KeyError, match="my own bug"):
            await sampler.run()
        assert [turn.output_text for turn in await stage.turns(sampler.record)] == ["Hm."]
        assert len(sampler.record.turns) == 1


async def test_a_reply_that_comes_after_the_answer_is_no_part_of_the_record(
    stage: Stage,
) -> None:
    late, asked = asyncio.Event(), asyncio.Event()
    left_behind: list[asyncio.Task[Any]] = []

    async def say(prompt: str) -> str:
        if "later" in prompt:
            asked.set()
            await late.wait()
        return f"<answer>42</answer>{END}"

    async def hasty(task: Any, llm: Any, tools: Any) -> str:
        left_behind.append(asyncio.create_task(llm.chat([user("later")])))
        await asked.wait()
        return (await llm.chat(llm.task_messages())).text

    stage.service.answer = say
    register_agent("hasty", hasty)
    async with stage.sampler("hasty") as sampler:
        record = await sampler.evaluate_record(await sampler.run())
        late.set()
        with pytest.raises(RuntimeError, match="the agent has answered before this reply came"):
            await left_behind[0]
    assert (record.n_turns, sampler.record.n_turns, record.score) == (1, 1, 1.0)


async def test_an_answer_that_is_no_text_and_an_agent_without_a_model_are_errors(
    stage: Stage,
) -> None:
    async def number(task: Any, llm: Any, tools: Any) -> Any:
        await llm.chat(llm.task_messages())
        return 42

    async def silent(task: Any, llm: Any, tools: Any) -> str:
        return "42"

    register_agent("number", number)
    register_agent("silent", silent)
    stage.lines = ["Hm."]
    with pytest.raises(ValueError, match="the agent returned 42, not a text"):
        await stage.attempt("number")
    with pytest.raises(ValueError, match="did not ask the model"):
        await stage.attempt("silent")


async def test_wherever_an_agent_wanders_what_is_stored_is_what_was_asked_and_answered(
    stage: Stage,
) -> None:
    async def wandering(task: Any, llm: Any, tools: Any) -> str:
        source = random.Random(task.query)
        places = [llm.task_messages()]

        async def step() -> None:
            messages = list(source.choice(places))
            for _ in range(source.randint(0, 2)):
                if len(messages) > 2:
                    del messages[source.randint(1, len(messages) - 1)]
            role = source.choice(["tool", "user"])
            messages += [{"role": role, "content": source.choice(TEXTS)} for _ in range(2)]
            reply = await llm.chat(messages, source.choice([(), tools.schemas]))
            places.append([*messages, reply.message])

        for _ in range(source.randint(1, 5)):
            await asyncio.gather(*(step() for _ in range(source.randint(1, 2))))
        return "done"

    async def say(prompt: str) -> str:
        number = len(stage.service.outputs)
        return f"{TEXTS[number % len(TEXTS)]} reply {number}.{END}"

    stage.flags = ("--max_tokens", "20000", "--max_new_tokens", "100")
    stage.service.answer = say
    register_agent("wandering", wandering)
    for seed in range(6):
        stage.service.prompts.clear()
        stage.service.outputs.clear()
        record = await stage.attempt("wandering", query=f"{seed}")
        turns = await stage.turns(record)
        context = replay(turns)
        asked = [
            [*context.line(turn.segment)["ids"][: turn.prompt_len], *unpack_ints(turn.output_ids)]
            for turn in turns
        ]
        prompts, outputs = stage.service.prompts, stage.service.outputs
        assert sorted(asked) == sorted(p + o for p, o in zip(prompts, outputs, strict=True))
        # A reply that stands in a later prompt stands there with its own ids.
        for prompt in prompts:
            text = stage.renderer.codec.decode(prompt)
            for number in re.findall(r" reply (\d+)\.", text):
                reply = outputs[int(number)]
                assert any(prompt[i : i + len(reply)] == reply for i in range(len(prompt)))
        await assert_trained_as_sampled(stage, record)
