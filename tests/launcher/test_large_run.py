"""What people ask of a run of any size is answered by indexes, on a real mongod."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from plans import noted_plans

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    Record,
    RecordStatus,
    Slot,
    SlotStatus,
    Split,
    StopReason,
    Task,
    TaskStatus,
    TokenCounts,
    VersionRange,
    group_order,
)
from agentrl.databases.evaluations import begin_evaluation, open_tasks
from agentrl.databases.failed_tasks import count_failed_tasks, failed_tasks
from agentrl.databases.policies import publish
from agentrl.databases.quarantine import list_quarantined
from agentrl.databases.task_file import TaskLine
from agentrl.launcher.evaluation import read_rollouts
from agentrl.launcher.progress import ProgressReader
from agentrl.launcher.report import gather_report
from agentrl.launcher.show_list import ORDERS, list_records, place_of
from agentrl.launcher.trajectory import find_record
from agentrl.rollout.scheduling.work_view import Observer

GROUPS, FAILED = 1500, 7
SHOWN = 5


async def add_run(database: RunDatabase) -> None:
    """Groups of two rollouts, a few with one that was given up; and two evaluations of twenty."""
    tasks, records = [], []
    for split, epoch, count in ((Split.TRAIN, 0, GROUPS), (Split.EVAL, 1, 20), (Split.EVAL, 2, 20)):
        for seq in range(count):
            name = f"{split}-{epoch}-{seq}"
            failed = split == Split.TRAIN and seq % (GROUPS // FAILED) == 0
            ended = datetime.now(UTC) - timedelta(hours=2, seconds=-seq)
            slots = [
                Slot(rollout=0, status=SlotStatus.COMPLETED, record=f"{name}-0-0", score=1.0),
                Slot(rollout=1, status=SlotStatus.COMPLETED, record=f"{name}-1-0", score=0.0),
            ]
            if failed:
                given_up = {"status": SlotStatus.FAILED, "score": None, "error": "ValueError: no"}
                slots[1] = slots[1].model_copy(update=given_up)
            tasks.append(
                Task(
                    id=name, split=split, epoch=epoch, seq=seq, task_id=str(seq), query="?",
                    group_order=group_order(epoch, seq), status=TaskStatus.COMPLETED, pending=0,
                    slots=slots, completed_at=ended,
                ).to_mongo()
            )  # fmt: skip
            for slot in slots:
                status = RecordStatus.READY if slot.error is None else RecordStatus.FAILED
                records.append(
                    Record(
                        id=str(slot.record), task=name, task_id=str(seq), rollout=slot.rollout,
                        attempt=0, split=split, epoch=epoch, owner="s", query="?", n_turns=1,
                        status=status,
                        score=slot.score, error=slot.error, stop_reason=StopReason.ANSWERED,
                        tokens=TokenCounts(generated=seq), versions=VersionRange(min=0, max=0),
                        n_segments=1, n_continuations=2, started_at=ended, finished_at=ended,
                    ).to_mongo()
                )  # fmt: skip
    await database.tasks.insert_many(tasks)
    await database.records.insert_many(records)
    await database.rows.insert_many(
        [{"_id": str(n), "status": "trained", "group_order": n} for n in range(GROUPS)]
    )
    await publish(database, 0, 0, "v0")


async def test_failures_and_lists_read_what_they_show(database: RunDatabase) -> None:
    await add_run(database)
    async with noted_plans(database) as plans:
        shown = await failed_tasks(database, SHOWN)
        assert await list_quarantined(database, SHOWN) == []
        await find_record(database, None, Split.TRAIN)
        await list_records(database, "newest", {}, Split.TRAIN, SHOWN)
        [best, *_] = await list_records(database, "best", {}, Split.TRAIN, SHOWN)
        [worst, *_] = await list_records(database, "worst", {}, Split.TRAIN, SHOWN)
        for order in ORDERS.keys() - {"newest"}:
            first = await list_records(database, order, {}, Split.TRAIN, SHOWN)
            after = place_of(first[-1].to_mongo(), order)
            second = await list_records(database, order, {}, Split.TRAIN, SHOWN, after)
            both = await list_records(database, order, {}, Split.TRAIN, 2 * SHOWN)
            assert first + second == both
    assert plans.documents <= 2 * SHOWN and plans.keys <= 3 * SHOWN
    assert [int(task.task_id) for task in shown] == [
        n * (GROUPS // FAILED) for n in range(FAILED + 1 - SHOWN, FAILED + 1)
    ]
    assert (best.score, best.tokens.generated) == (1, 0)
    assert (worst.score, worst.tokens.generated) == (0, GROUPS - 1)
    async with noted_plans(database) as plans:
        assert await count_failed_tasks(database) == FAILED + 1
    assert plans.documents <= FAILED + 1


async def test_the_summary_and_the_first_look_read_no_record_of_training(
    database: RunDatabase, tmp_path: Path
) -> None:
    await add_run(database)
    async with noted_plans(database) as plans:
        report = await gather_report(database, tmp_path, 1.0)
    assert plans.documents <= 2 * 20  # those of the evaluations
    summary = report.summary
    assert (summary.slots.total, summary.slots.failed) == (2 * GROUPS + 80, FAILED + 1)
    assert summary.rows.trained == GROUPS
    assert summary.conversations.records == 2 * GROUPS
    assert summary.conversations.continuations == 4 * GROUPS
    assert summary.tokens.sampled == GROUPS * (GROUPS - 1)
    [point] = report.curve
    assert (point.step, point.records) == (0, 2 * GROUPS - FAILED - 1)
    async with noted_plans(database) as plans:
        snapshot = await ProgressReader(database, tmp_path).read()
    assert plans.documents <= 256  # the recent records
    assert snapshot.history and [e.step for e in snapshot.held_out] == [1, 2]


async def test_an_evaluation_reads_its_own_groups(database: RunDatabase) -> None:
    await add_run(database)
    async with noted_plans(database) as plans:
        rollouts = await read_rollouts(database, 2)
        look = await Observer(database, 2, False, 2, 2).look()
    assert len(rollouts) == 20 and look.finished
    assert [rollout.turns for rollout in rollouts] == 20 * [[1, 1]]
    assert plans.documents <= 40


async def test_an_evaluation_goes_on_and_is_numbered_by_an_index(
    database: RunDatabase,
) -> None:
    await add_run(database)
    same = {
        "model": "m", "model_digest": "d", "task_digest": "t", "rollouts": 2, "flags": {"a": 1},
        "digests": {},
    }  # fmt: skip
    lines = [TaskLine(id="a", query="?")]

    async def begin(again: bool = False, **other: object) -> int:
        return await begin_evaluation(database, lines, **{**same, **other}, again=again)  # type: ignore[arg-type]

    async with noted_plans(database) as plans:
        assert [await begin(), await begin(), await begin(model_digest="e")] == [-1, -1, -2]
        assert await open_tasks(database, -2) == 1
        assert await begin(again=True) == -1  # it has not ended yet
        assert await begin(flags={"a": 2}) == -3
        assert await begin(digests={"a": "edited"}) == -4
    assert plans.documents <= 8
    await database.tasks.update_many({"epoch": -1}, {"$set": {"status": TaskStatus.COMPLETED}})
    assert [await begin(), await begin(again=True), await begin()] == [-1, -5, -5]
