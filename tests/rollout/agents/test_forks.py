"""Forks of the agent with tools: results are those of the forked rollout, state is made again."""

from itertools import count
from pathlib import Path

import pytest
from sampler_at_work import add, at_work, records_of
from scripted_run import all_tasks, completed, until
from stage import END, Stage, tool_call

from agentrl.databases.documents import Record, SlotStatus
from agentrl.rollout.scorers import register_scorer

SERVERS = Path(__file__).parents[1] / "tools" / "warehouse_server.py"
FORKS = ("--fork_turns", "1", "--fork_at", "every", "--forks", "1", "--advantage", "mean")
COUNT = tool_call("count", "{}")


@pytest.fixture
def servers(tmp_path: Path) -> Path:
    copy = tmp_path / "warehouse.py"
    copy.write_text(SERVERS.read_text().replace("room: str", 'room: str = "red"'))
    return copy


def calls_twice_and_answers(stage: Stage, tool: str) -> None:
    numbers = count()

    async def answer(prompt: str) -> str:
        asked = prompt.count("</tool_response>")
        thought = f"{next(numbers)} "  # so that no turn repeats another
        return thought + (tool if asked < 2 else "<answer>42</answer>") + END

    stage.service.answer = answer


@pytest.mark.parametrize(("name", "second"), [("server", "1"), ("with_sessions", "2")])
async def test_calls_before_a_fork_are_made_again_only_in_a_session_of_the_record_s_own(
    stage: Stage, servers: Path, name: str, second: str
) -> None:
    stage.mcp_url = f"{servers}:{name}"
    calls_twice_and_answers(stage, COUNT)
    await add(stage.database, 1)
    async with at_work(stage, "mcp", *FORKS):
        await until(completed(stage.database, 1))
    records = {record.id: record for record in await records_of(stage.database)}
    forks = [record for record in records.values() if record.fork is not None]
    assert len(forks) == 2 and len(stage.service.prompts) == 2 * 3 + 2 * 2
    for fork in forks:
        assert fork.fork is not None and fork.score == 1.0
        [first, *_] = await stage.turns(records[fork.fork.record])
        [shared, own, _] = await stage.turns(fork)
        assert shared.tool_calls == first.tool_calls and shared.replayed == first.id
        # The server counts the calls of each record. A shared one was not called for the first
        # turn; a record's own session has the state that its rollout left in it.
        assert own.tool_calls[0].result == second


async def test_rollouts_that_only_a_scorer_of_the_whole_group_scores_are_forked(
    stage: Stage, servers: Path
) -> None:
    asked: list[int] = []

    def later_is_better(records: list[Record]) -> list[float]:
        asked.append(len(records))
        return [float(record.rollout) for record in records]

    register_scorer("later_is_better", later_is_better)
    stage.mcp_url = f"{servers}:server"
    calls_twice_and_answers(stage, COUNT)
    await add(stage.database, 1, scorer="later_is_better")
    async with at_work(stage, "mcp", *FORKS):
        await until(completed(stage.database, 1))
    records = await records_of(stage.database)
    assert asked == [4]  # once, with the forks
    assert [record.score for record in records] == [0.0, 1.0, 2.0, 3.0]
    # Each fork is compared with the rollout that it forks, which goes on to another score.
    assert [record.fork is not None for record in records] == [False, False, True, True]
    for fork in records[2:]:
        [parent] = [r for r in records if fork.fork and r.id == fork.fork.record]
        half = (fork.rollout - parent.rollout) / 2
        assert [(s.turn, s.advantage) for s in fork.stretches] == [(1, half)]
        assert [(s.turn, s.advantage) for s in parent.stretches][1] == (1, -half)


async def test_a_tool_that_answers_otherwise_makes_no_fork(stage: Stage, servers: Path) -> None:
    stage.mcp_url = f"{servers}:with_sessions"
    calls_twice_and_answers(stage, tool_call("rooms", "{}"))  # grows with each session
    await add(stage.database, 1)
    async with at_work(stage, "mcp", *FORKS):
        await until(completed(stage.database, 1))
    [task] = await all_tasks(stage.database)
    forks = [slot for slot in task.slots if slot.fork is not None]
    assert [slot.status for slot in forks] == [SlotStatus.FAILED] * 2
    assert all("rooms answers otherwise" in str(slot.error) for slot in forks)
    assert len(stage.service.prompts) == 2 * 3
