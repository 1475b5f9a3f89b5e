"""From task lines to the ledger, again and again."""

import random
from collections.abc import Sequence
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Split, TaskStatus
from agentrl.databases.feeder import BLOCK, TaskFeeder, make_tasks
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger

TRAIN = [TaskLine(id=f"t{i}", query=f"q{i}", fields={"level": i}) for i in range(4)]
HELD_OUT = [TaskLine(id=f"h{i}", query=f"q{i}") for i in range(3)]


def feeder(database: RunDatabase, epochs: int | None = None, low_water: int = 2) -> TaskFeeder:
    return TaskFeeder(
        database, TRAIN, HELD_OUT, num_generations=2, eval_rollouts=5, epochs=epochs,
        low_water=low_water, seed=1,
    )  # fmt: skip


async def order(database: RunDatabase, epoch: int) -> list[str]:
    cursor = database.tasks.find({"split": Split.TRAIN, "epoch": epoch}).sort("seq", 1)
    return [task["task_id"] async for task in cursor]


async def finish_all(database: RunDatabase, split: Split) -> int:
    ledger = TaskLedger(database, "s", lease_seconds=30, max_failures=1)
    finished = 0
    while claims := await ledger.claim(split):
        task = await ledger.complete(claims[0], 1.0)
        if task is not None:
            await ledger.finalised(task)
            finished += 1
    return finished


async def test_every_epoch_holds_each_line_once_in_an_order_of_its_own(
    database: RunDatabase,
) -> None:
    await feeder(database, low_water=9).start()
    first, second, third = [await order(database, epoch) for epoch in range(3)]
    assert sorted(first) == sorted(second) == sorted(third) == ["t0", "t1", "t2", "t3"]
    assert len({tuple(first), tuple(second), tuple(third)}) > 1
    task = await database.tasks.find_one({"task_id": "t3"})
    assert task is not None and task["fields"] == {"level": 3} and task["pending"] == 2


async def test_a_task_keeps_the_agent_and_the_messages_of_its_line(database: RunDatabase) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    line = TaskLine(id="t", query="q", agent_name="tool_agent", messages=messages)
    (task,) = make_tasks([line], Split.TRAIN, 0, 2, [0])
    await TaskLedger(database, "feeder", lease_seconds=30, max_failures=1).add([task])
    stored = await database.tasks.find_one({})
    assert stored is not None
    assert (stored["agent_name"], stored["messages"]) == ("tool_agent", messages)


async def test_epochs_are_added_as_the_work_needs_them_and_no_further(
    database: RunDatabase,
) -> None:
    feed = feeder(database, epochs=2)
    await feed.start()
    assert await order(database, 1) == []
    assert await finish_all(database, Split.TRAIN) == 4
    assert not await feed.exhausted()
    await feed.top_up()
    assert len(await order(database, 1)) == 4
    assert await finish_all(database, Split.TRAIN) == 4
    await feed.top_up()
    assert await feed.exhausted()


async def test_a_feeder_that_starts_again_goes_on_where_the_ledger_is(
    database: RunDatabase,
) -> None:
    await feeder(database).start()
    whole = await order(database, 0)
    await database.tasks.delete_many({"seq": {"$gte": 2}})  # a crash while storing the epoch
    again = feeder(database, low_water=4)
    await again.start()
    assert await order(database, 0) == whole and again.epochs == 1
    assert await order(database, 1) == []


async def test_lines_are_read_and_stored_as_they_are_needed_and_in_the_order_of_the_seed(
    database: RunDatabase,
) -> None:
    class Counted(Sequence[TaskLine]):
        read = 0

        def __len__(self) -> int:
            return 3 * BLOCK

        def __getitem__(self, index: Any) -> Any:
            self.read += 1
            return TaskLine(id=f"t{index}", query="q")

    lines = Counted()

    def large(seed: int = 1) -> TaskFeeder:
        return TaskFeeder(
            database,
            lines,
            [],
            num_generations=1,
            eval_rollouts=1,
            epochs=1,
            low_water=9,
            seed=seed,
        )

    feed = large()
    await feed.start()
    assert (lines.read, len(await order(database, 0))) == (BLOCK, BLOCK)
    for _ in range(BLOCK - 9):
        await database.tasks.update_one({"status": "created"}, {"$set": {"status": "completed"}})
    await feed.top_up()
    assert lines.read == BLOCK, "there are enough yet"
    await database.tasks.update_one({"status": "created"}, {"$set": {"status": "completed"}})
    # another trainer goes on, with the seed of the data set
    feed = large(seed=2)
    await feed.start(seed=1)
    await database.tasks.update_many({}, {"$set": {"status": "completed"}})
    await feed.top_up()
    assert lines.read == 3 * BLOCK
    assert feed.epochs == 1 and not await feed.exhausted()
    expected = list(range(3 * BLOCK))
    random.Random("1:0").shuffle(expected)
    assert await order(database, 0) == [f"t{line}" for line in expected]
    await database.tasks.update_many({}, {"$set": {"status": "completed"}})
    assert await feed.exhausted()


async def test_an_evaluation_is_done_when_all_its_groups_are(database: RunDatabase) -> None:
    feed = feeder(database)
    await feed.add_evaluation(7)
    await feed.add_evaluation(7)
    assert await database.tasks.count_documents({"split": Split.EVAL}) == 3
    assert not await feed.evaluation_done(7)
    assert await finish_all(database, Split.EVAL) == 3
    assert await feed.evaluation_done(7)


async def test_groups_of_other_data_that_were_begun_are_finished_and_those_that_were_not_left_out(
    database: RunDatabase,
) -> None:
    await feeder(database).start()
    ledger = TaskLedger(database, "s", lease_seconds=30, max_failures=1)
    (begun,) = await ledger.claim(Split.TRAIN)
    feed = TaskFeeder(
        database, TRAIN[:1], HELD_OUT, num_generations=2, eval_rollouts=5, epochs=3, low_water=3,
        seed=1,
    )  # fmt: skip
    first_epoch = await feed.next_epoch()
    assert await feed.leave(1) == len(TRAIN) - 1
    await feed.start(1, first_epoch)
    assert await ledger.complete(begun, 1.0) is None, "one rollout of the group is left"
    assert not await feed.exhausted()
    assert await finish_all(database, Split.TRAIN) == 1 + 3
    assert await feed.exhausted()
    unbegun = await database.tasks.find({"status": TaskStatus.LEFT_OUT}).to_list()
    assert {task["data"] for task in unbegun} == {0} and len(unbegun) == len(TRAIN) - 1
