"""Rewards that programs report: what is refused, and that nothing of it is kept."""

import json
from typing import Any

import aiohttp
import pytest
from open_session import Open, opened
from stage import Stage
from test_clients import QUESTION, openai_client

from agentrl.databases.documents import Record
from agentrl.gateway.function import run_function
from agentrl.rollout.groups.boundary import check_scored


async def told(there: Open, path: str, body: object) -> tuple[int, str]:
    """The status and the text of an answer; a text is sent as it is."""
    headers = {"Authorization": f"Bearer {there.session.key}"}
    data = body if isinstance(body, str) else json.dumps(body)
    async with (
        aiohttp.ClientSession() as http,
        http.post(there.url + path, data=data, headers=headers) as response,
    ):
        return response.status, await response.text()


def kept(there: Open) -> dict[str, Any]:
    record = there.sampler.record
    return record.model_dump(include={"scores", "agent_rewards", "explanations"})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"reward": 1e30}, "reward is 1e+30, beyond 1e+09"),
        ({"agent": "planner", "reward": -1e30}, "reward is -1e+30, beyond 1e+09"),
        ({"rewards": {"turn 0": 1e30}}, "rewards.turn 0 is 1e+30"),
        ({"agent": "a.b", "reward": 1}, "1 to 64 letters"),
        ({"agent": 5, "reward": 1}, "1 to 64 letters"),
        ({"reward": 0.1, "rewards": {"reward": 0.9}}, "the name of the attempt's own"),
        ({"reward": 0.1, "rewards": {"": 1}}, "a name has 1 to 100 printable characters"),
        ({"reward": 0.1, "rewards": {"x" * 101: 1}}, "a name has 1 to 100 printable characters"),
        ({"reward": 0.1, "rewards": {"a\0": 1}}, "a name has 1 to 100 printable characters"),
        ({"reward": 1, "rewards": {f"turn {n}": 1 for n in range(1100)}}, "1000 names"),
    ],
)
async def test_what_is_no_reward_is_refused_and_changes_nothing(
    stage: Stage, body: object, said: str
) -> None:
    async with opened(stage) as there:
        assert (await told(there, "/reward", {"reward": 0.5, "explanation": "half"}))[0] == 200
        before = kept(there)
        status, text = await told(there, "/reward", body)
        assert status == 400 and said in json.loads(text)["error"]["message"]
        assert kept(there) == before
        assert (await told(there, "/reward", {"reward": 0.75}))[0] == 200


@pytest.mark.parametrize(
    ("reward", "agent", "said"),
    [
        (float("nan"), None, "must be finite"),
        (float("inf"), "planner", "must be finite"),
        (1e30, "planner", "beyond 1e\\+09"),
        (1.0, "a.b $x", "1 to 64 letters"),
    ],
)
async def test_what_is_no_reward_of_a_function_fails_it(
    stage: Stage, reward: float, agent: str | None, said: str
) -> None:
    def reports(task: dict[str, Any], session: Any) -> None:
        session.reward(reward, agent=agent)

    async with opened(stage) as there:
        outcome = await run_function(reports, there.session, there.url)
        assert isinstance(outcome.error, ValueError)
        with pytest.raises(ValueError, match=said):
            raise outcome.error
        assert kept(there) == {"scores": {}, "agent_rewards": {}, "explanations": {}}


def test_a_record_with_a_reward_of_an_agent_that_cannot_be_trained_is_not_scored() -> None:
    record = Record.model_construct(
        id="r", task="t", task_id="t", rollout=0, attempt=0, split="train", epoch=0, owner="o",
        agent_name="program", query="?", score=1.0, agent_rewards={"planner": float("nan")},
    )  # fmt: skip
    with pytest.raises(ValueError, match="reward of agent planner of record r is nan"):
        check_scored(record, "r")


async def test_after_its_end_a_program_asks_and_reports_no_more(stage: Stage) -> None:
    stage.lines = ["one", "two"]
    async with opened(stage) as there:
        chat = openai_client(there).chat.completions
        await chat.create(model="m", messages=[QUESTION])  # type: ignore[list-item]
        first = {"reward": 1.0, "rewards": {"steps": 2}, "explanation": "all of it"}
        assert (await told(there, "/reward", first))[0] == 200
        assert (await told(there, "/finish", {"answer": "B7"}))[0] == 200
        before = kept(there)
        # What is told again, since its answer got lost, is answered again.
        assert (await told(there, "/finish", {"answer": "B7"}))[0] == 200
        assert (await told(there, "/reward", first))[0] == 200
        for path, body in (
            ("/v1/chat/completions", {"messages": [QUESTION]}),
            ("/reward", {"reward": 0.0}),
            ("/reward", {"agent": "planner", "reward": 1.0}),
            ("/finish", {"answer": "B8"}),
            ("/fail", {"error": "late"}),
        ):
            status, text = await told(there, path, body)
            assert status == 410 and "said that it is done" in text, (path, text)
        assert kept(there) == before and there.session.error is None
        assert there.sampler.record.n_turns == 1 and there.session.answer == "B7"


async def test_what_a_function_does_after_its_end_does_not_fail_it(stage: Stage) -> None:
    async def ends(task: dict[str, Any], session: Any) -> None:
        await there.session.finish("B7")
        session.reward(1.0)

    async with opened(stage) as there:
        assert (await run_function(ends, there.session, there.url)).error is None
        assert there.sampler.record.scores == {}
