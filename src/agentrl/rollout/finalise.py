"""Finishing a group: its Records become training rows, or are left out.

Everything is written under ids that follow from the Records, so that whoever takes over from an
owner that died half way writes the same again.
"""

from dataclasses import dataclass

from agentrl.configs import RewardConfig
from agentrl.databases.documents import DBRecordData, Record, RecordStatus, Split, Task
from agentrl.databases.records import RecordLedger
from agentrl.databases.tasks import TaskLedger
from agentrl.rollout.rewarding import Reward, reward_group
from agentrl.rollout.rows import build_row


@dataclass(frozen=True)
class Finaliser:
    """Finalises groups whose finalisation this process holds."""

    ledger: TaskLedger
    records: RecordLedger
    reward: RewardConfig
    temperature: float

    async def finalise(self, task: Task) -> int:
        """Write the group's rows and settle its Records; returns how many rows.

        Raises `LeaseLost`. An evaluation makes no rows: its Records stay as they were scored.
        """
        rows: list[DBRecordData] = []
        if task.split == Split.TRAIN:
            records = await self.records.scored(task)
            scores = [record.score for record in records]
            assert None not in scores, f"a completed slot of {task.id} has a Record without a score"
            rewards = reward_group([score for score in scores if score is not None], self.reward)
            rows = await self._rows(task, records, rewards)
            await self.records.add_rows(rows)
            await self.records.settle(
                {
                    record.id: (
                        RecordStatus.READY if reward.trained else RecordStatus.ABANDONED,
                        reward.advantage,
                    )
                    for record, reward in zip(records, rewards, strict=True)
                }
            )
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
        turns = await self.records.turns(list(trained)) if trained else {}
        return [
            build_row(record, turns[record.id], advantage, self.temperature, task.place)
            for record, advantage in trained.values()
        ]
