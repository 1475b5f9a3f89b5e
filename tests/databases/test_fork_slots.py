"""Forks in the ledger: a rollout that ends adds the slots of its forks in the same update."""

import asyncio

import pytest

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Fork, SlotStatus, Split, Task, TaskStatus
from agentrl.databases.feeder import make_tasks
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import Claim, LeaseLost, TaskLedger


async def begun(database: RunDatabase, owner: str = "one") -> tuple[TaskLedger, list[Claim]]:
    """A group of two rollouts, both leased."""
    ledger = TaskLedger(database, owner, 30.0, max_failures=2)
    await ledger.add(make_tasks([TaskLine(id="a", query="?")], Split.TRAIN, 0, 2, range(1)))
    return ledger, await ledger.claim(Split.TRAIN, count=2)


async def the_task(database: RunDatabase) -> Task:
    document = await database.tasks.find_one()
    assert document is not None
    return Task.from_mongo(document)


async def test_the_last_rollout_of_a_group_does_not_end_it_while_there_are_forks(
    database: RunDatabase,
) -> None:
    ledger, (first, second) = await begun(database)
    assert first.fork is None
    assert await ledger.complete(second, 0.0) is None
    assert await ledger.complete(first, 1.0, [2, 2, 3]) is None
    task = await the_task(database)
    assert (task.status, task.pending, len(task.slots)) == (TaskStatus.RUNNING, 3, 5)
    assert [slot.rollout for slot in task.slots] == [0, 1, 2, 3, 4]
    forks = await ledger.claim(Split.TRAIN, count=9)
    assert [claim.fork for claim in forks] == [
        Fork(record=first.record_id, turn=turn) for turn in (2, 2, 3)
    ]
    assert [claim.record_id for claim in forks] == [f"{task.id}-t{n}-a0" for n in (2, 3, 4)]
    assert await ledger.complete(forks[0], 0.0) is None
    await ledger.fail(forks[1], "diverged", retry=False)
    ended = await ledger.complete(forks[2], 1.0)
    assert ended is not None and ended.status == TaskStatus.FINALISING
    assert [slot.status for slot in ended.slots].count(SlotStatus.COMPLETED) == 4


async def test_an_end_that_is_repeated_adds_its_forks_once(database: RunDatabase) -> None:
    ledger, (first, second) = await begun(database)
    await ledger.complete(first, 1.0, [1, 1])
    assert await ledger.complete(first, 1.0, [1, 1]) is None  # its answer was lost
    await ledger.complete(second, 1.0, [1])
    forks = [slot.fork for slot in (await the_task(database)).slots if slot.fork is not None]
    assert [fork.record for fork in forks] == [first.record_id] * 2 + [second.record_id]


async def test_rollouts_that_end_in_one_update_fork_both(database: RunDatabase) -> None:
    ledger, (first, second) = await begun(database)
    await asyncio.gather(ledger.complete(first, 1.0, [1, 2]), ledger.complete(second, 0.0, [1, 2]))
    task = await the_task(database)
    assert [slot.rollout for slot in task.slots] == list(range(6)) and task.pending == 4
    turns = {(slot.fork.record, slot.fork.turn) for slot in task.slots if slot.fork}
    assert turns == {(claim.record_id, turn) for claim in (first, second) for turn in (1, 2)}


async def test_who_lost_the_lease_forks_nothing(database: RunDatabase) -> None:
    ledger, (first, _) = await begun(database)
    await ledger.release(first)
    other = TaskLedger(database, "two", 30.0, max_failures=2)
    [again] = await other.claim(Split.TRAIN)
    with pytest.raises(LeaseLost):
        await ledger.complete(first, 1.0, [1])
    assert len((await the_task(database)).slots) == 2
    await other.complete(again, 1.0, [1])
    assert len((await the_task(database)).slots) == 3
