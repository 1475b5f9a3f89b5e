"""A run that gets nowhere is ended with its cause; one that only stumbles goes on."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from scripted_run import (
    ScriptedAgent,
    add,
    agent,
    begin_run,
    completed,
    config,
    scheduler,
    until,
)

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Fork, Record, RecordStatus, Split
from agentrl.databases.failed_tasks import failed_tasks
from agentrl.databases.hopeless import OUTLIVED_S, HopelessWatch
from agentrl.databases.outcomes import latest_groups
from agentrl.databases.quarantine import count_quarantined
from agentrl.databases.runs import RunHopeless, RunLease
from agentrl.databases.tasks import Claim
from agentrl.launcher.progress import ProgressReader
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.scorers import register_scorer
from agentrl.tracebacks import OneTraceback

NO_METRICS = Path("there-are-none.jsonl")


class Clock:
    """The time of a watch, which goes on as a trainer's looks do: in steps of a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def looks(watch: HopelessWatch, clock: Clock, seconds: float) -> str | None:
    """What the watch says in so many seconds."""
    reason = None
    until = clock.now + seconds
    while clock.now < until and reason is None:
        clock.now += 1
        reason = await watch.look()
    return reason


def failing(claim: Claim) -> float:
    raise KeyError("nowhere")


async def sampled(
    database: RunDatabase,
    script: Callable[[Claim], float],
    condition: Callable[[], Awaitable[bool]],
) -> None:
    """Two samplers work until the condition holds."""
    async with (
        scheduler(database, agent(script), config(), owner="one") as one,
        scheduler(database, agent(script), config(), owner="two") as two,
    ):
        running = [asyncio.create_task(sampler.run()) for sampler in (one, two)]
        await until(condition)
        one.stop()
        two.stop()
        await asyncio.gather(*running)


async def test_attempts_that_all_fail_end_the_run_with_their_error_but_no_short_outage_does(
    database: RunDatabase,
) -> None:
    await begin_run(database)
    clock = Clock()
    watch = HopelessWatch(database, 16, clock)
    assert await looks(watch, clock, 1) is None  # what was before is not counted
    await add(database, 4)
    await sampled(database, failing, completed(database, 4))
    assert await database.records.count_documents({"status": RecordStatus.FAILED}) == 16
    assert await looks(watch, clock, OUTLIVED_S - 5) is None, "tools may be away for so long"
    patient = HopelessWatch(database, 17, clock)
    reason = await looks(watch, clock, 6)
    assert reason is not None and len(reason.splitlines()) == 1
    for words in ("its last 16 attempts all failed", "KeyError: 'nowhere'", "test_hopeless.py",
                  "--failed", "--max_failures_without_success 16"):  # fmt: skip
        assert words in reason
    assert await looks(patient, clock, 2 * OUTLIVED_S) is None
    disabled = HopelessWatch(database, 0, clock)
    assert await looks(disabled, clock, 2 * OUTLIVED_S) is None


async def test_attempts_that_all_fail_are_told_and_not_the_groups_that_they_leave_without_rows(
    database: RunDatabase,
) -> None:
    await begin_run(database)
    clock = Clock()
    watch = HopelessWatch(database, 4, clock)
    await looks(watch, clock, 10)  # groups are watched from here on, attempts once they fail
    await add(database, 4)
    await sampled(database, failing, completed(database, 4))
    reason = await looks(watch, clock, 2 * OUTLIVED_S)
    assert reason is not None and "its last 4 attempts all failed" in reason


@pytest.mark.parametrize(
    ("left", "told"),
    [
        (SystemExit("no more tasks"), "called sys.exit('no more tasks')"),
        (KeyboardInterrupt(), "raised KeyboardInterrupt"),
    ],
)
async def test_an_agent_that_leaves_fails_its_attempt_and_not_its_sampler(
    database: RunDatabase, left: BaseException, told: str
) -> None:
    def leaving(claim: Claim) -> float:
        raise left

    await begin_run(database)
    await add(database, 1)
    await sampled(database, leaving, completed(database, 1))
    async for record in database.records.find({}):
        assert told in record["error"]


async def test_a_run_of_which_half_the_rollouts_fail_goes_on_until_all_do(
    database: RunDatabase,
) -> None:
    await begin_run(database)
    clock = Clock()
    watch = HopelessWatch(database, 6, clock)
    await looks(watch, clock, 1)
    for epoch, script in enumerate((failing, lambda _: 1.0, failing)):
        await add(database, 1, epoch=epoch)  # 4 failures, or 2 successes
        await sampled(database, script, completed(database, epoch + 1))
    assert await database.records.count_documents({"status": RecordStatus.FAILED}) == 8
    assert await looks(watch, clock, 2 * OUTLIVED_S) is None
    await add(database, 1, epoch=3)
    await sampled(database, failing, completed(database, 4))
    assert await looks(watch, clock, OUTLIVED_S - 5) is None
    assert await looks(watch, clock, 10) is not None, "8 in a row, and for long"


@pytest.mark.parametrize(("others", "ended"), [(2, False), (0, True)])
async def test_a_run_of_which_most_rollouts_fail_in_the_same_way_is_ended(
    database: RunDatabase, others: int, ended: bool
) -> None:
    def script(claim: Claim) -> float:
        if claim.task.seq == 0:
            return 1.0
        if claim.task.seq <= others:
            raise LookupError("another way")
        raise KeyError("nowhere")

    clock = Clock()
    await begin_run(database)
    watch = HopelessWatch(database, 26, clock)
    await looks(watch, clock, 1)
    await add(database, 7)  # with 2 rollouts each, which are attempted twice if they fail
    await sampled(database, script, completed(database, 7))
    reason = await looks(watch, clock, OUTLIVED_S + 5)
    assert (reason is not None) is ended
    if reason is not None:
        assert "24 of its last 26 attempts failed, and 12 of 14 rollouts in the same way" in reason
        assert "KeyError: 'nowhere' (at script" in reason


async def test_forks_that_fail_beside_rollouts_that_succeed_do_not_end_the_run(
    database: RunDatabase,
) -> None:
    await begin_run(database)
    clock = Clock()
    watch = HopelessWatch(database, 4, clock)
    await looks(watch, clock, 1)
    await add(database, 2)
    await sampled(database, lambda _: 1.0, completed(database, 2))
    now = datetime.now(UTC)
    async for record in database.records.find({}):
        for number in range(3):  # as of a program that does not do the same again
            failed = {
                "_id": f"{record['_id']}-fork{number}", "rollout": 2 + number,
                "fork": Fork(record=record["_id"], turn=1).model_dump(), "finished_at": now,
                "status": RecordStatus.FAILED, "error": "Diverged: the agent does otherwise",
            }  # fmt: skip
            await database.records.insert_one({**record, **failed})
    assert await looks(watch, clock, 2 * OUTLIVED_S) is None
    await add(database, 2, epoch=1)
    await sampled(database, failing, completed(database, 4))
    reason = await looks(watch, clock, 2 * OUTLIVED_S)
    assert reason is not None and "KeyError" in reason and "Diverged" not in reason


async def test_time_in_which_nobody_looked_is_no_time_without_success(
    database: RunDatabase,
) -> None:
    await begin_run(database)
    clock = Clock()
    watch = HopelessWatch(database, 4, clock)
    await looks(watch, clock, 1)
    clock.now += 600  # a long step
    await add(database, 2, Split.EVAL)
    await sampled(database, failing, completed(database, 2))
    assert await looks(watch, clock, OUTLIVED_S - 5) is None
    assert await looks(watch, clock, 10) is not None


@pytest.mark.parametrize(("score", "hard"), [(0.0, "too hard for"), (1.0, "too easy for")])
async def test_groups_of_equal_scores_end_the_run_and_say_what_to_do(
    database: RunDatabase, score: float, hard: str
) -> None:
    await begin_run(database)
    clock = Clock()
    watch = HopelessWatch(database, 6, clock)
    await looks(watch, clock, 1)
    reader = ProgressReader(database, NO_METRICS)
    await reader.read()
    await add(database, 6)
    await sampled(database, lambda _: score, completed(database, 6))
    reason = await looks(watch, clock, OUTLIVED_S + 5)
    assert reason is not None
    for words in ("6 groups finished, in 6 of them all scores were equal", hard,
                  "--drop_zero_advantage", "--num_generations"):  # fmt: skip
        assert words in reason
    # The live view says the same, long before.
    snapshot = await reader.read()
    assert snapshot.why_no_step is not None and snapshot.why_no_step in reason
    assert snapshot.failures is None


async def test_a_group_that_is_trained_among_equal_ones_keeps_the_run_alive(
    database: RunDatabase,
) -> None:
    await begin_run(database)
    clock = Clock()
    watch = HopelessWatch(database, 6, clock)
    await looks(watch, clock, 1)
    await add(database, 6)  # whichever ends first, fewer than six barren ones follow it
    await sampled(
        database, lambda c: float(c.task.seq == 3 and c.rollout == 0), completed(database, 6)
    )
    groups = await latest_groups(database, 10)
    assert sorted(group.rows or 0 for group in groups) == [0] * 5 + [2]
    assert await looks(watch, clock, 2 * OUTLIVED_S) is None


class ScoredByItsTask(ScriptedAgent):
    """Says its turn, and is scored as its task asks."""

    evaluate_record = AsyncSampler.evaluate_record


async def test_a_failing_scorer_of_groups_is_counted_named_and_listed(
    database: RunDatabase,
) -> None:
    async def confused(records: list[Record]) -> list[float]:
        raise ValueError("no model ranked the group")

    register_scorer("confused", confused)
    await begin_run(database)
    clock = Clock()
    watch = HopelessWatch(database, 3, clock)
    await looks(watch, clock, 1)
    reader = ProgressReader(database, NO_METRICS)
    await reader.read()
    await add(database, 3, scorer="confused")

    async def quarantined() -> bool:
        return (await count_quarantined(database)).groups == 3

    flags = config("--max_scoring_failures", "1")
    async with scheduler(database, ScoredByItsTask, flags) as sampler:
        running = asyncio.create_task(sampler.run())
        await until(quarantined)
        sampler.stop()
        await running
    reason = await looks(watch, clock, OUTLIVED_S + 5)
    assert reason is not None
    assert "the scorer of the group failed: ValueError: no model ranked the group" in reason
    snapshot = await reader.read()
    assert snapshot.failures is not None
    assert snapshot.failures.startswith("3 of the last 3 groups could not be finalised (100%)")
    listed = await failed_tasks(database)
    assert [(task.group, task.failed, task.again) for task in listed] == [(True, 0, 0)] * 3
    assert listed[0].error == "ValueError: no model ranked the group"


async def test_what_is_tried_again_is_listed_and_the_view_counts_kinds(
    database: RunDatabase,
) -> None:
    await begin_run(database)
    reader = ProgressReader(database, NO_METRICS)
    await reader.read()
    await add(database, 1)
    again = asyncio.Event()

    class Waiting(ScriptedAgent):
        """Fails at first, and works on its second attempts until the test has looked."""

        @staticmethod
        def script(claim: Claim) -> float:
            if claim.rollout == 0:
                raise KeyError(claim.task.id)
            raise ZeroDivisionError("0 turns")

        async def run(self) -> Record:
            if self.claim.attempt:
                again.set()
                await asyncio.sleep(60)
            return await super().run()

    async with scheduler(database, Waiting, config()) as sampler:
        running = asyncio.create_task(sampler.run())

        async def both_again() -> bool:
            tasks = await failed_tasks(database)
            return again.is_set() and [task.again for task in tasks] == [2]

        await until(both_again)
        (listed,) = await failed_tasks(database)
        assert listed.failed == 0 and listed.record.endswith("-a0")
        snapshot = await reader.read()
        sampler.stop()
        sampler.stop()
        await running
    assert snapshot.failures is not None
    assert snapshot.failures.startswith("2 of the last 2 attempts failed (100%): 1 x ")
    assert "KeyError" in snapshot.failures and "ZeroDivisionError: 0 turns" in snapshot.failures
    assert snapshot.why_no_step == "no group finished: all 2 attempts failed so far"
    # Those handed back at the stop failed nobody.
    assert (await reader.read()).failures == snapshot.failures


async def test_a_sampler_ends_with_the_sentence_of_the_trainer_that_gave_the_run_up(
    database: RunDatabase,
) -> None:
    lease = await begin_run(database)
    async with scheduler(database, agent(lambda _: 0.0), config()) as sampler:
        running = asyncio.create_task(sampler.run())
        await add(database, 1)
        await until(completed(database, 1))
        await lease.give_up("the judge went home")
        with pytest.raises(RunHopeless, match="the judge went home"):
            await asyncio.wait_for(running, 10)
    # One that comes before the next trainer waits for it, and works then.
    async with scheduler(database, agent(lambda _: 0.0), config(), owner="later") as sampler:
        running = asyncio.create_task(sampler.run())
        await add(database, 1, epoch=1)
        await asyncio.sleep(1.5)
        assert not running.done() and not await completed(database, 2)()
        await lease.release()
        again = RunLease(database, "mended", "here", lease_seconds=60)
        await again.acquire(1000)
        await again.progress(step=0, max_steps=9, version=0, status="training")
        await until(completed(database, 2))
        sampler.stop()
        await running


def test_a_kind_of_error_has_one_traceback_in_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(OneTraceback())
    log = logging.getLogger("agentrl.test")
    for number in range(3):
        try:
            raise ValueError(f"{number}\nof many")
        except ValueError as error:
            log.warning("attempt %d failed: %s", number, error, exc_info=error)
    try:
        raise ValueError("from another line")
    except ValueError as error:
        log.warning("attempt 3 failed", exc_info=error)
    tracebacks = [record.getMessage() for record in caplog.records if record.exc_info]
    assert tracebacks == ["attempt 0 failed: 0\nof many", "attempt 3 failed"]
    second, third = (record.getMessage() for record in caplog.records[1:3])
    assert second == "attempt 1 failed: 1 of many (no. 2 of its kind, see the first above)"
    assert third.endswith("(no. 3 of its kind, see the first above)")
    assert caplog.text.count("Traceback") == 2
