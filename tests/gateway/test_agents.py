"""Programs of several agents: which of them are trained, and by which rewards."""

import asyncio
import sys
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from chat_endpoint import chat_endpoint
from numpy.typing import NDArray
from open_session import Open, opened
from rich.console import Console
from stage import Stage

from agentrl.configs import ConfigError
from agentrl.databases.documents import DispatchedSamplingTask, Record
from agentrl.launcher.show_record import print_record
from agentrl.rollout.agents import load_agents
from agentrl.rollout.agents.recorded import RecordedAnswers, recorded_turns
from agentrl.rollout.groups.row_building import NothingToTrain, build_row

NAMING = Path(__file__).with_name("naming.py")
PLANNER: dict[str, Any] = {"role": "system", "content": "You plan."}
CRITIC: dict[str, Any] = {"role": "system", "content": "You judge."}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "find", "parameters": {"type": "object", "properties": {}}},
    }
]
LINES = ["Look in B7.", "Too vague.", "In <answer>B7</answer>"]


async def ask(there: Open, messages: list[Any], agent: str | None = None, **options: Any) -> str:
    client = openai.AsyncOpenAI(
        base_url=f"{there.url}/v1", api_key=there.session.key, max_retries=0,
        default_headers={"x-agentrl-agent": agent} if agent else {},
    )  # fmt: skip
    answer = await client.chat.completions.create(messages=messages, **{"model": "m", **options})
    return str(answer.choices[0].message.content)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def plan(there: Open, named: bool = True) -> list[str]:
    """A planner asks a critic what it thinks of its plan, and goes on."""
    planner, critic = ("planner", "critic") if named else (None, None)
    messages = [PLANNER, user("Where is it?")]
    first = await ask(there, messages, planner)
    judged = await ask(there, [CRITIC, user(f"Is this a plan? {first}")], critic, model="gpt-9")
    messages += [{"role": "assistant", "content": first}, user(f"The critic says: {judged}")]
    return [first, judged, await ask(there, messages, planner)]


async def run_plan(stage: Stage, *flags: str) -> tuple[Record, list[DispatchedSamplingTask]]:
    stage.lines, before = list(LINES), stage.flags
    stage.flags += flags
    async with opened(stage) as there:
        assert await plan(there) == LINES
        await there.session.close()
        record = there.sampler.record.model_copy(update={"score": 1.0})
    stage.flags = before
    return record, await stage.turns(record)


def trained_ids(row: Any) -> NDArray[np.int32]:
    ids: NDArray[np.int32] = row.tree["ids"][row.tree["mask"] == 1]
    return ids


async def test_turns_of_another_agent_are_the_same_and_are_not_trained(stage: Stage) -> None:
    all_record, all_turns = await run_plan(stage)
    prompts, outputs = stage.service.prompts[:], stage.service.outputs[:]
    record, turns = await run_plan(stage, "--train_agents", "planner,coder")
    # Its behaviour is the same: every prompt and every output, of both agents.
    assert (stage.service.prompts[3:], stage.service.outputs[3:]) == (prompts, outputs)
    assert [turn.agent for turn in turns] == ["planner", "critic", "planner"]
    assert [turn.trained for turn in turns] == [True, False, True]
    every = build_row(all_record, all_turns, 1.0, 1.0, 0)
    row = build_row(record, turns, 1.0, 1.0, 0)
    assert np.array_equal(row.tree["ids"], every.tree["ids"]) and row.tree.nodes == every.tree.nodes
    assert trained_ids(every).tolist() == [*outputs[0], *outputs[2], *outputs[1]]
    assert trained_ids(row).tolist() == [*outputs[0], *outputs[2]]
    assert row.n_train_tokens == len(outputs[0]) + len(outputs[2])  # what a loss is divided by
    assert row.tree["logprobs"][row.tree["mask"] == 1] == pytest.approx(-trained_ids(row) / 1000)
    with pytest.raises(NothingToTrain):
        build_row(record, [turns[1].model_copy(update={"turn": 0})], 1.0, 1.0, 0)


async def test_an_agent_without_a_header_has_a_name_that_is_shown_and_can_be_given(
    stage: Stage,
) -> None:
    stage.lines = list(LINES)
    async with opened(stage) as there:
        await plan(there, named=False)
        await there.session.close()
        record = there.sampler.record
    turns = await stage.turns(record)
    names = [str(turn.agent) for turn in turns]
    assert names[0] == names[2] != names[1]
    console = Console(file=StringIO(), width=200)
    print_record(console, record, turns)
    assert isinstance(console.file, StringIO) and names[1] in console.file.getvalue()
    stage.flags += ("--train_agents", names[0])
    stage.lines = list(LINES)
    async with opened(stage, query="Another one") as there:
        await plan(there, named=False)
        await there.session.close()
        turns = await stage.turns(there.sampler.record)
    assert [turn.trained for turn in turns] == [True, False, True]


async def test_a_function_of_the_user_s_names_agents(stage: Stage) -> None:
    stage.flags += ("--agent_of_turn", f"{NAMING}:by_tools", "--train_agents", "worker")
    stage.lines = ["one", "two", "three"]
    async with opened(stage) as there:
        await ask(there, [user("x")])
        await ask(there, [user("x")], tools=TOOLS)
        await ask(there, [user("x")], "boss", tools=TOOLS)  # a header comes first
        await there.session.close()
        turns = await stage.turns(there.sampler.record)
    assert [turn.agent for turn in turns][1:] == ["worker", "boss"]
    assert [turn.trained for turn in turns] == [False, True, False]


async def test_a_naming_that_fails_fails_the_attempt(stage: Stage) -> None:
    program = Path(__file__).with_name("agent_program.py")
    stage.flags = (
        "--agent_name", "program", "--agent_command", f"{sys.executable} {program} answer",
        "--agent_of_turn", f"{NAMING}:raises",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"--agent_of_turn fails: IndexError"):
        await stage.attempt("program")


async def test_another_model_answers_an_agent_and_the_others_tokens_stay_exact(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRITICS_KEY", "secret")
    stage.lines = [LINES[0], LINES[2]]
    async with chat_endpoint() as api:
        api.replies["gpt-9"] = [503, LINES[1]]
        stage.flags += (
            "--agent_models", f"critic={api.url}", "--agent_models_key_env", "CRITICS_KEY",
        )  # fmt: skip
        async with opened(stage) as there:
            assert await plan(there) == LINES
            await there.session.close()
            record = there.sampler.record.model_copy(update={"score": 1.0})
        # A later attempt that asks the same gets what was said, from the critic as well.
        async with opened(stage) as again:
            again.sampler.recorded = RecordedAnswers([recorded_turns(await stage.turns(record))])
            assert await plan(again) == LINES
            await again.session.close()
            replayed = again.sampler.record
        assert [turn.replayed for turn in await stage.turns(replayed)] == record.turns
        assert replayed.replay is not None and replayed.replay.turns == 3
    assert api.keys == ["Bearer secret"] * 2 and api.requests[1]["messages"][0] == CRITIC
    turns = await stage.turns(record)
    assert record.n_turns == 3 and record.turns == [turn.id for turn in turns]
    assert [turn.agent for turn in turns] == ["planner", "critic", "planner"]
    assert turns[1].output_text == LINES[1] and not turns[1].output_ids
    assert turns[1].messages == [CRITIC, user(f"Is this a plan? {LINES[0]}")]
    row = build_row(record, turns, 1.0, 1.0, 0)
    assert len(row.tree.nodes) == 1 and record.n_segments == 1
    assert trained_ids(row).tolist() == list(chain(*stage.service.outputs))


async def test_a_prompt_that_another_model_never_answers_with_a_turn_is_refused(
    stage: Stage,
) -> None:
    async with chat_endpoint() as api:
        api.replies = {"m": [7.5] * 20}
        stage.flags += ("--agent_models", f"critic={api.url}", "--startup_timeout", "1")
        async with opened(stage) as there:
            answered = asyncio.create_task(ask(there, [user("x")], "critic"))
            while not api.requests:
                await asyncio.sleep(0.01)
            api.replies["m"] = [7.5, "Hello!"]  # to the same request, and to another one
            with pytest.raises(openai.BadRequestError, match="answers others, but this request"):
                await answered
            assert there.sampler.outage is None
    assert api.requests[-1]["messages"] == [user("Hello")]


async def test_max_turns_counts_requests_to_another_model_that_are_being_answered(
    stage: Stage,
) -> None:
    async with chat_endpoint() as api:
        api.replies["m"] = ["x"] * 6
        stage.flags += ("--agent_models", f"critic={api.url}", "--max_turns", "2")
        async with opened(stage) as there:
            asked = [ask(there, [user(f"{n}")], "critic") for n in range(6)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            refused = [each for each in answers if isinstance(each, openai.BadRequestError)]
            assert len(refused) == 4 and "--max_turns" in str(refused[0])
            assert there.sampler.record.n_turns == 2 and len(api.requests) == 2


async def test_rewards_of_agents_are_kept_by_agent_and_their_mean_is_the_score(
    stage: Stage,
) -> None:
    stage.lines = ["one"]
    async with opened(stage) as there:
        await ask(there, [user("x")], "planner")
        client = openai.AsyncOpenAI(base_url=there.url, api_key=there.session.key, max_retries=0)
        for told in ({"agent": "planner", "reward": 1.0}, {"agent": "critic", "reward": 0.5}):
            await client.post("/reward", body=told, cast_to=object)
        with pytest.raises(openai.BadRequestError, match="1 to 64 letters"):
            await client.post("/reward", body={"agent": "a.b", "reward": 1}, cast_to=object)
        record = there.sampler.record
        assert record.agent_rewards == {"planner": 1.0, "critic": 0.5}
        assert (await there.sampler.score(record)).score == 0.75
        await client.post("/reward", body={"reward": 0.25}, cast_to=object)
        assert (await there.sampler.score(record)).score == 0.25


async def test_a_name_that_cannot_be_one_is_refused(stage: Stage) -> None:
    async with opened(stage) as there:
        with pytest.raises(openai.BadRequestError, match="x-agentrl-agent: the name of an agent"):
            await ask(there, [user("x")], "my agent")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--train_agents", "a b"), "--train_agents a b: the name of an agent has"),
        (("--agent_models", "critic"), "must be NAME=URL"),
        (("--agent_models", "a=https://x/v1,a=https://y/v1"), "a is given twice"),
        (("--agent_models", "a=https://x/v1", "--train_agents", "a"), "cannot be trained"),
        (("--agent_of_turn", "no.py:f"), "there is no such Python file"),
    ],
)
def test_flags_of_agents_that_cannot_be_used_are_refused(
    stage: Stage, flags: tuple[str, ...], said: str
) -> None:
    stage.flags += flags
    with pytest.raises(ConfigError, match=said):
        load_agents(stage.config)


def test_agents_are_told_apart_in_programs_only(stage: Stage) -> None:
    stage.flags = ("--agent_name", "math", "--train_agents", "planner")
    with pytest.raises(ConfigError, match="no effect without --agent_name program"):
        _ = stage.config
