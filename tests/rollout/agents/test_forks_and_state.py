"""Where rollouts whose tools change a state are forked, and which calls their forks make again."""

import json
import shutil
import sys
from itertools import count
from pathlib import Path

import pytest
from sampler_at_work import add, at_work, records_of
from scripted_run import completed, until
from stage import END, Stage, tool_call

from agentrl.configs import ConfigError
from agentrl.databases.documents import Record
from agentrl.rollout.tools.toolbox import open_tools

SERVER = Path(__file__).parents[1] / "tools" / "account_server.py"
FORKS = ("--fork_turns", "9", "--fork_at", "every", "--forks", "1", "--advantage", "mean")
CALLS = (tool_call("rate", "{}"), tool_call("balance", "{}"),
         tool_call("withdraw", '{"amount": 10}'), tool_call("balance", "{}"))  # fmt: skip


@pytest.fixture
def account(tmp_path: Path) -> Path:
    return Path(shutil.copy(SERVER, tmp_path / "account.py"))


async def forks_of_a_run(stage: Stage, mcp_url: str) -> tuple[list[Record], list[Record]]:
    """The rollouts of a group, each of which makes `CALLS` and answers, and their forks."""
    numbers = count()

    async def answer(prompt: str) -> str:
        asked = prompt.count("</tool_response>")
        thought = f"{next(numbers)} "  # so that no turn repeats another
        return thought + (CALLS[asked] if asked < len(CALLS) else "<answer>42</answer>") + END

    stage.mcp_url = mcp_url
    stage.service.answer = answer
    await add(stage.database, 1)
    async with at_work(stage, "mcp", *FORKS):
        await until(completed(stage.database, 1))
    records = await records_of(stage.database)
    return [r for r in records if r.fork is None], [r for r in records if r.fork is not None]


def turns_of(forks: list[Record], rollout: Record) -> list[int]:
    return sorted(f.fork.turn for f in forks if f.fork and f.fork.record == rollout.id)


async def test_no_fork_begins_after_a_call_that_changed_what_records_share(
    stage: Stage, account: Path
) -> None:
    rollouts, forks = await forks_of_a_run(stage, f"{account}:shared")
    for rollout in rollouts:
        # Turn 2 is sampled before its call is made; the tool without a hint is taken to read.
        assert turns_of(forks, rollout) == [1, 2]
        turns = await stage.turns(rollout)
        lasting = [[call.lasting for call in turn.tool_calls] for turn in turns]
        assert lasting == [[False], [False], [True], [False], []]
    assert len(rollouts) == 2 and all(fork.score == 1.0 for fork in forks)


async def test_a_record_s_own_session_is_made_again_without_the_calls_that_only_read(
    stage: Stage, account: Path
) -> None:
    rollouts, forks = await forks_of_a_run(stage, f"{account}:with_sessions")
    assert [turns_of(forks, rollout) for rollout in rollouts] == [[1, 2, 3, 4]] * 2
    asked = account.with_suffix(".log").read_text().split()
    # A rollout asks rate, balance, withdraw, balance. Its fork at turn k makes the first k again,
    # except those that only read, and the others for the first time.
    assert asked.count("rate") == 2 + 2 * 4
    assert asked.count("withdraw") == 2 + 2 * 4
    assert asked.count("balance") == 2 * 2 + 2 * (1 + 2 - 1 + 1 + 0 + 1)


async def test_a_server_that_is_not_resettable_is_not_asked_again(
    stage: Stage, account: Path, tmp_path: Path
) -> None:
    entry = {"command": sys.executable, "args": [str(account), str(account)], "session": "record",
             "resettable": False}  # fmt: skip
    file = tmp_path / "tools.json"
    file.write_text(json.dumps({"mcpServers": {"account": entry}}))
    rollouts, forks = await forks_of_a_run(stage, str(file))
    # Its tool without a hint may change its state: that is MCP's default.
    assert [turns_of(forks, rollout) for rollout in rollouts] == [[], []]
    asked = account.with_suffix(".log").read_text().split()
    assert asked.count("withdraw") == 2


async def test_a_shared_server_cannot_be_resettable(
    stage: Stage, account: Path, tmp_path: Path
) -> None:
    entry = {"python": f"{account}:shared", "resettable": True}
    file = tmp_path / "tools.json"
    file.write_text(json.dumps({"mcpServers": {"account": entry}}))
    stage.mcp_url = str(file)
    with pytest.raises(ConfigError, match='give it "session": "record"'):
        async with open_tools(stage.config.agent, 5.0, None):
            pass
