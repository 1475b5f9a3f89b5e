"""Finishing a group: its Records become training rows, or are left out.

Everything is written under ids that follow from the Records, so that whoever takes over from an
owner that died half way writes the same again.
"""

from dataclasses import dataclass

from pymongo import UpdateOne

from agentrl.configs import RewardConfig
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    DBRecordData,
    DispatchedSamplingTask,
    Record,
    RecordStatus,
    Split,
    Task,
)
from agentrl.databases.tasks import TaskLedger
from agentrl.databases.transitions import RECORD_TRANSITIONS
from agentrl.rollout.rewarding import Reward, reward_group
from agentrl.rollout.rows import build_row

GROUPS_PER_EPOCH = 10**9  # room for the places of one epoch in a row's `seq`


@dataclass(frozen=True)
class Finaliser:
    """Finalises groups whose finalisation this process holds."""

    database: RunDatabase
    ledger: TaskLedger
    reward: RewardConfig
    temperature: float

    async def finalise(self, task: Task) -> int:
        """Write the group's rows and mark its Records; returns how many rows. Raises `LeaseLost`.

        An evaluation makes no rows: its Records stay as they were scored.
        """
        rows: list[DBRecordData] = []
        if task.split == Split.TRAIN:
            records = await self.ledger.records_of(task)
            scores = [record.score for record in records]
            assert None not in scores, f"a completed slot of {task.id} has a Record without a score"
            rewards = reward_group([score for score in scores if score is not None], self.reward)
            rows = await self._rows(task, records, rewards)
            await self._store(rows, records, rewards)
        await self.ledger.finalised(task)
        return len(rows)

    async def _rows(
        self, task: Task, records: list[Record], rewards: list[Reward]
    ) -> list[DBRecordData]:
        trained = {
            record.id: (record, reward.advantage)
            for record, reward in zip(records, rewards, strict=True)
            if reward.trained
        }
        turns: dict[str, list[DispatchedSamplingTask]] = {record: [] for record in trained}
        cursor = self.database.turns.find({"record_id": {"$in": list(trained)}}).sort(
            [("record_id", 1), ("turn", 1)]
        )
        async for document in cursor:
            turn = DispatchedSamplingTask.from_mongo(document)
            turns[turn.record_id].append(turn)
        seq = task.epoch * GROUPS_PER_EPOCH + task.seq
        return [
            build_row(record, turns[record.id], advantage, self.temperature, seq)
            for record, advantage in trained.values()
        ]

    async def _store(
        self, rows: list[DBRecordData], records: list[Record], rewards: list[Reward]
    ) -> None:
        if rows:
            await self.database.rows.bulk_write(
                [
                    UpdateOne({"_id": row.id}, {"$setOnInsert": row.to_mongo()}, upsert=True)
                    for row in rows
                ],
                ordered=False,
            )
        marks = []
        for record, reward in zip(records, rewards, strict=True):
            status = RecordStatus.READY if reward.trained else RecordStatus.ABANDONED
            assert status in RECORD_TRANSITIONS[RecordStatus.SCORED]
            marks.append(
                UpdateOne(
                    {"_id": record.id, "status": RecordStatus.SCORED},
                    {"$set": {"status": status, "advantage": reward.advantage}},
                )
            )
        if marks:
            await self.database.records.bulk_write(marks, ordered=False)
