"""Scorers and agents that break what they can, under the real scheduler on a real mongod."""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from scripted_run import (
    ScriptedAgent,
    add,
    all_tasks,
    begin_run,
    completed,
    config,
    scheduler,
    until,
)

from agentrl.configs import AgentConfig
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, SlotStatus, TaskStatus
from agentrl.failures import InfrastructureFailure
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.scorers import register_scorer
from agentrl.rollout.scorers.scorer_registry import find_scorer
from agentrl.rollout.tools.toolbox import open_tools


class Unspeakable(Exception):
    """Neither its text nor its repr can be had."""

    def __str__(self) -> NoReturn:
        raise LookupError("no words")

    __repr__ = __str__


class Away(InfrastructureFailure):
    """Of a user who forgot `super().__init__`, and whose text fails."""

    def __init__(self) -> None:
        pass

    def __str__(self) -> NoReturn:
        raise LookupError("no words")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a test can wait for."""
    monkeypatch.setattr("agentrl.databases.retries.FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr("agentrl.databases.retries.LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr("agentrl.rollout.scheduling.scheduler.SCORINGS_S", 0.05)
    monkeypatch.setattr("agentrl.rollout.scheduling.breaker.LONGEST_PAUSE_S", 0.05)


class Answering(ScriptedAgent):
    """Says its turn, and is scored as its task asks."""

    evaluate_record = AsyncSampler.evaluate_record

    async def run(self) -> Record:
        self.record.final_answer = "said"
        return await super().run()


async def sample(
    database: RunDatabase,
    agent: type[AsyncSampler],
    ended: Callable[[], Awaitable[bool]],
    *flags: str,
) -> None:
    """Sample until `ended`, and stop."""
    async with scheduler(database, agent, config(*flags)) as sampler:
        running = asyncio.create_task(sampler.run())
        await until(lambda: _or_done(running, ended))
        sampler.stop()
        await asyncio.wait_for(running, 20)


async def _or_done(running: "asyncio.Task[None]", ended: Callable[[], Awaitable[bool]]) -> bool:
    return running.done() or await ended()


async def quarantined(database: RunDatabase) -> bool:
    """Whether a group is."""
    return await database.tasks.count_documents({"status": TaskStatus.QUARANTINED}) == 1


async def slots_of(database: RunDatabase) -> list[Any]:
    return [slot for task in await all_tasks(database) for slot in task.slots]


async def test_errors_whose_text_raises_fail_their_attempt_and_nothing_else(
    database: RunDatabase,
) -> None:
    class Wordless(Answering):
        async def run(self) -> Record:
            if self.claim.rollout == 0:
                raise Unspeakable
            return await super().run()

    await add(database, 1, scorer="contains", rollouts=3)
    await database.tasks.update_many({}, {"$set": {"answer": "said"}})
    await begin_run(database)
    await sample(database, Wordless, completed(database, 1), "--lease_seconds", "600")
    slots = await slots_of(database)
    assert [slot.status for slot in slots] == [SlotStatus.FAILED, *2 * [SlotStatus.COMPLETED]]
    assert slots[0].error.startswith(
        "Unspeakable: a Unspeakable whose text raises LookupError (at run, "
    )


@pytest.mark.parametrize("awaited", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize(
    "error",
    [Unspeakable(), SystemExit(Unspeakable()), StopIteration(Unspeakable())],
    ids=["exception", "exit", "stop iteration"],
)
async def test_a_scorers_errors_whose_text_raises_are_its_scorings(
    database: RunDatabase, awaited: bool, error: BaseException
) -> None:
    def plain(record: Record) -> float:
        if record.rollout == 0:
            raise error
        return 1.0

    async def waits(record: Record) -> float:
        return plain(record)

    register_scorer("wordless", waits if awaited else plain)
    await add(database, 1, scorer="wordless")
    await begin_run(database)
    flags = ("--max_scoring_failures", "1", "--lease_seconds", "600")
    await sample(database, Answering, completed(database, 1), *flags)
    slots = await slots_of(database)
    assert [slot.status for slot in slots] == [SlotStatus.QUARANTINED, SlotStatus.COMPLETED]
    assert any(told in slots[0].error for told in ("Unspeakable", "sys.exit", "StopIteration"))


async def test_a_group_scorers_error_whose_text_raises_quarantines_its_group(
    database: RunDatabase,
) -> None:
    def wordless(records: list[Record]) -> NoReturn:
        raise Unspeakable

    register_scorer("wordless_group", wordless)
    await add(database, 1, scorer="wordless_group")
    await begin_run(database)

    await sample(database, Answering, partial(quarantined, database), "--max_scoring_failures", "2")
    (task,) = await all_tasks(database)
    assert task.error == "Unspeakable: a Unspeakable whose text raises LookupError"


async def test_an_outage_without_a_name_or_a_text_hands_its_attempts_back(
    database: RunDatabase,
) -> None:
    class Needy(Answering):
        async def run(self) -> Record:
            if self.claim.attempt < 2:
                raise Away
            return await super().run()

    scorings: list[str] = []

    async def needy(record: Record) -> float:
        scorings.append(record.id)
        if scorings.count(record.id) < 3:
            raise Away
        return 1.0

    register_scorer("needy", needy)
    await add(database, 1, scorer="needy", rollouts=1)
    await begin_run(database)
    await sample(database, Needy, completed(database, 1), "--max_scoring_failures", "1")
    (slot,) = await slots_of(database)
    assert (slot.status, slot.failures, slot.outages, slot.scoring_failures) == (
        SlotStatus.COMPLETED, 0, 2, 0,
    )  # fmt: skip


def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (lambda: sys.exit(3), "called sys.exit(3)"),
        (cancels_itself, "was cancelled, and not by the sampler"),
    ],
    ids=["exit", "cancel"],
)
@pytest.mark.parametrize("where", ["run", "evaluate_record", "scorer", "group scorer"])
async def test_who_left_or_cancelled_itself_is_named(
    database: RunDatabase, where: str, leave: Callable[[], None], said: str
) -> None:
    async def leaves(record: Record) -> float:
        if where == "scorer":
            leave()
            await asyncio.sleep(9)
        return 1.0

    async def leaves_group(records: list[Record]) -> list[float]:
        leave()
        await asyncio.sleep(9)
        return []

    class Leaves(Answering):
        async def run(self) -> Record:
            if where == "run":
                leave()
                await asyncio.sleep(9)
            return await super().run()

    class Scores(Leaves):
        async def evaluate_record(self, record: Record) -> Record:
            leave()
            await asyncio.sleep(9)
            return record

    register_scorer("leaves", leaves)
    register_scorer("leaves_group", leaves_group)
    name = "leaves_group" if where == "group scorer" else "leaves"
    await add(database, 1, scorer=name, rollouts=1)
    await begin_run(database)
    agent = Scores if where == "evaluate_record" else Leaves
    of_group = where == "group scorer"
    ended = partial(quarantined, database) if of_group else completed(database, 1)
    await sample(
        database, agent, ended,
        "--agent_name", "math", "--max_scoring_failures", "1", "--max_failures", "1",
    )  # fmt: skip
    (task,) = await all_tasks(database)
    (error,) = [error for error in (task.error, task.slots[0].error) if error is not None]
    who = {"run": "agent 'math'", "evaluate_record": "agent 'math', in evaluate_record,"}
    assert error.startswith(f"RuntimeError: {who.get(where, f'scorer {name!r}')} {said}")


async def test_a_group_scorer_that_never_returns_fails_after_the_time_of_a_scoring(
    database: RunDatabase,
) -> None:
    async def endless(records: list[Record]) -> list[float]:
        await asyncio.sleep(600)
        return []

    register_scorer("endless_group", endless)
    await add(database, 1, scorer="endless_group")
    await begin_run(database)
    flags = ("--record_timeout", "0.5", "--max_scoring_failures", "2")
    await sample(database, Answering, partial(quarantined, database), *flags)
    (task,) = await all_tasks(database)
    assert task.error == "TimeoutError: not finished within --record_timeout 0.5 s"


@pytest.mark.parametrize("of_group", [False, True], ids=["of a Record", "of a group"])
async def test_a_score_too_large_for_a_groups_statistics_fails_its_scoring(
    database: RunDatabase, of_group: bool
) -> None:
    async def huge(record: Record) -> float:
        return 1e300 if record.rollout == 0 else float(record.rollout)

    async def huge_group(records: list[Record]) -> list[float]:
        return [await huge(record) for record in records]

    register_scorer("huge", huge_group if of_group else huge)
    await add(database, 1, scorer="huge", rollouts=3)
    await begin_run(database)
    ended = partial(quarantined, database) if of_group else completed(database, 1)
    await sample(database, Answering, ended, "--max_scoring_failures", "1")
    (task,) = await all_tasks(database)
    error = task.error if of_group else task.slots[0].error
    assert error is not None and "is 1e+300, beyond 1e+09: scores so large" in error
    if of_group:
        assert task.group_scores is None  # a scorer that is mended is asked again
        return
    advantages = [r["advantage"] async for r in database.records.find().sort("rollout", 1)]
    assert advantages == pytest.approx([None, -0.707, 0.707], abs=1e-3)


async def test_a_scorer_whose_calls_never_return_fails_at_once_and_holds_up_no_other(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentrl.rollout.scorers.threads.THREADS", 4)
    let_go = threading.Event()
    called: list[str] = []

    def hangs(record: Record) -> float:
        called.append(record.id)
        let_go.wait()
        return 1.0

    def answers(record: Record) -> float:
        return 1.0

    register_scorer("hangs", hangs)
    register_scorer("answers", answers)
    await add(database, 4, scorer="hangs")
    await add(database, 4, scorer="answers", epoch=1)
    await begin_run(database)
    flags = ("--record_timeout", "1", "--max_scoring_failures", "2")
    try:
        await sample(database, Answering, completed(database, 8), *flags)
        tasks = await all_tasks(database)
        held = [slot for task in tasks if task.scorer == "hangs" for slot in task.slots]
        free = [slot for task in tasks if task.scorer == "answers" for slot in task.slots]
        assert len(called) == 4
        assert {slot.status for slot in free} == {SlotStatus.COMPLETED}
        assert {slot.status for slot in held} == {SlotStatus.QUARANTINED}
        assert all(
            slot.error.startswith("RuntimeError: 4 calls of scorer 'hangs' have not returned")
            for slot in held
        )
        said = [r for r in caplog.messages if r.startswith("4 calls of scorer 'hangs'")]
        assert len(said) == 1
        let_go.set()  # what returns after all gives its thread back
        scorer = find_scorer("hangs")
        await until(lambda: asyncio.sleep(0, not scorer.threads._all_held()))
        assert await scorer.threads.run(lambda: 7) == 7
    finally:
        let_go.set()


@pytest.mark.parametrize("where", ["run", "evaluate_record"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda record: None, "returned None, not its Record"),
        (lambda record: record.model_copy(update={"id": "other"}), "returned the Record 'other'"),
        (
            lambda record: record.model_copy(update={"final_answer": 42}),
            "with `final_answer` 42: Input should be a valid string",
        ),
        (
            lambda record: record.model_copy(update={"explanations": {"mine": 0.5}}),
            "with `explanations.mine` 0.5: Input should be a valid string",
        ),
    ],
    ids=["none", "another", "answer", "explanation"],
)
async def test_a_record_that_cannot_be_stored_or_read_again_is_its_agents_error(
    database: RunDatabase, where: str, changed: Callable[[Record], Any], said: str
) -> None:
    class Careless(Answering):
        async def run(self) -> Record:
            record = await super().run()
            return changed(record) if where == "run" and self.claim.rollout == 0 else record

    class Scores(Careless):
        async def evaluate_record(self, record: Record) -> Record:
            scored = record.model_copy(update={"score": 1.0})
            return changed(scored) if self.claim.rollout == 0 else scored

    async def fails_first(record: Record) -> float:
        seen.append(record.id)
        if seen.count(record.id) == 1:
            raise LookupError("again")  # so that its Record is read again
        return 1.0

    seen: list[str] = []
    register_scorer("fails_first", fails_first)
    await add(database, 1, scorer="fails_first")
    await begin_run(database)
    agent = Careless if where == "run" else Scores
    flags = ("--max_failures", "1", "--max_scoring_failures", "2")
    await sample(database, agent, completed(database, 1), *flags)
    slots = await slots_of(database)
    assert slots[1].status == SlotStatus.COMPLETED
    ended = SlotStatus.FAILED if where == "run" else SlotStatus.QUARANTINED
    assert (slots[0].status, said in slots[0].error) == (ended, True)


BLOCKS = """
import time
from mcp.server.mcpserver import MCPServer

server = MCPServer("tools", log_level="CRITICAL")

@server.tool(structured_output=False)
async def look(good: bool) -> str:
    if not good:
        time.sleep(15)
    return "seen"
"""


async def test_a_task_whose_tool_blocks_the_server_fails_and_all_others_go_on(
    database: RunDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.rollout.tools.server_thread._MOMENT_S", 0.3)
    path = tmp_path / "blocks.py"
    path.write_text(BLOCKS, encoding="utf-8")
    tools_flags = AgentConfig(mcp_manager_url=f"{path}:server", tool_timeout=1)

    async with open_tools(tools_flags, 30, None) as box:

        class Looks(Answering):
            async def run(self) -> Record:
                async with box.session(self.claim.task, self.record.id, self.meet_outage) as tools:
                    await tools.call("look", {"good": self.claim.rollout != 0})
                return await super().run()

        await add(database, 1, scorer="contains", rollouts=3)
        await database.tasks.update_many({}, {"$set": {"answer": "said"}})
        await begin_run(database)
        await sample(database, Looks, completed(database, 1), "--lease_seconds", "600")
    slots = await slots_of(database)
    assert [slot.status for slot in slots] == [SlotStatus.FAILED, *2 * [SlotStatus.COMPLETED]]
    assert slots[0].failures == 2
    assert f"ToolBlocks: the tool look of blocks (`{path}:server`) blocked" in slots[0].error
    assert f"at look, {path}:" in slots[0].error
