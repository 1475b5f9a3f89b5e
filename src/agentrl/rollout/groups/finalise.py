"""Finishing a group: its Records become training rows, or are left out.

    scorers that look at the whole group -> rewards -> rows -> Records settled -> Task completed

Everything is written under ids that follow from the Records, and what a scorer said of the group is
kept on the Task, so that whoever takes over from an owner that died half way writes the same again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.configs import RewardConfig
from agentrl.databases.documents import (
    DBRecordData,
    GroupOutcome,
    GroupScore,
    Record,
    RecordStatus,
    Split,
    Task,
)
from agentrl.databases.group_scores import GroupScores
from agentrl.databases.records import RecordLedger, Settlement
from agentrl.databases.tasks import LeaseLost, TaskLedger
from agentrl.rollout.groups.group_rules import apply_group_rules
from agentrl.rollout.groups.row_building import build_row
from agentrl.rollout.scorers import Scorers
from agentrl.rollout.scorers.results import with_group_scores

log = logging.getLogger(__name__)

# Why a Record is left out that no rule had to leave out.
NOT_SCORED = "not_scored"
NO_TURNS = "no_turns"  # its first prompt was at a limit already: there is nothing to train


@dataclass(frozen=True)
class Finaliser:
    """Finalises groups whose finalisation this process holds."""

    ledger: TaskLedger
    group_scores: GroupScores
    records: RecordLedger
    scorers: Scorers
    reward: RewardConfig
    temperature: float
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """Wait for no scorer any longer: leave groups that are being scored to other samplers."""
        self._stopping.set()

    async def finalise(self, task: Task) -> int:
        """Write the group's rows and settle its Records; returns how many rows.

        Raises `LeaseLost`. An evaluation makes no rows: its Records stay as they were scored.
        """
        records = await self.records.scored(task)
        scores: dict[str, float | None] = {}
        if records and self.scorers.of_group(task.scorer):
            records = await self._scored_together(task, records)
            await self.records.add_scores(records)
            scores = {record.id: record.score for record in records}
        rows: list[DBRecordData] = []
        outcome: GroupOutcome | None = None
        if task.split == Split.TRAIN:
            settlements = settle_group(task, records, self.reward)
            rows = await make_rows(task, records, settlements, self.records, self.temperature)
            await self.records.add_rows(rows)
            await self.records.settle(settlements)
            left_out = Counter(s.left_out for s in settlements.values() if s.left_out is not None)
            outcome = GroupOutcome(rows=len(rows), left_out=dict(left_out))
        await self.ledger.finalised(task, scores, outcome)
        return len(rows)

    async def _scored_together(self, task: Task, records: Sequence[Record]) -> list[Record]:
        """The Records with what the group's scorers say of them, as the Task has it or will."""
        said = task.group_scores
        if said is None:
            said = await self.group_scores.keep(task, await self._ask_scorers(task, records))
        return [with_group_scores(task.scorer, record, said) for record in records]

    async def _ask_scorers(self, task: Task, records: Sequence[Record]) -> list[GroupScore]:
        """Ask the group's scorers, and keep the finalisation ours meanwhile. Raises `LeaseLost`,
        also when told to stop."""
        scoring = asyncio.create_task(self._group_scores(task, records))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while not scoring.done():
                await asyncio.wait(
                    {scoring, stopping},
                    timeout=self.group_scores.lease_seconds / 3,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if stopping.done() and not scoring.done():
                    await self.group_scores.leave(task)
                    raise LeaseLost(f"{task.id} is left to another sampler: this one stops")
                if not scoring.done():
                    await self.group_scores.hold(task)
            return scoring.result()
        finally:
            scoring.cancel()
            stopping.cancel()

    async def _group_scores(self, task: Task, records: Sequence[Record]) -> list[GroupScore]:
        """What the group's scorers say. If one fails, the group has no scores and is trained by
        nobody: to try again is what a scorer's own retries are for, and `agentrl rescore`."""
        try:
            return await self.scorers.score_group(task, records)
        except Exception as error:  # whatever a scorer raises is that group's
            log.warning("the group %s cannot be scored", task.id, exc_info=error)
            failure = f"{type(error).__name__}: {error}"
            return [
                GroupScore(
                    record=record.id,
                    scorer=name,
                    score=None,
                    explanation=f"failed: {failure}",
                    error=failure,
                )
                for record in records
                for name in self.scorers.of_group(task.scorer)
            ]


def settle_group(
    task: Task, records: Sequence[Record], config: RewardConfig
) -> dict[str, Settlement]:
    """What becomes of each Record of a group, by id."""
    group = [record for record in records if record.score is not None]
    rewards = apply_group_rules(task.id, group, config)
    settlements = {
        record.id: Settlement(RecordStatus.ABANDONED, None, NOT_SCORED) for record in records
    }
    for record, reward in zip(group, rewards, strict=True):
        left_out = reward.left_out if record.turns else NO_TURNS
        status = RecordStatus.READY if left_out is None else RecordStatus.ABANDONED
        settlements[record.id] = Settlement(status, reward.advantage, left_out)
    return settlements


async def make_rows(
    task: Task,
    records: Sequence[Record],
    settlements: Mapping[str, Settlement],
    ledger: RecordLedger,
    temperature: float,
) -> list[DBRecordData]:
    """The rows of those of a group's Records that are trained. Their turns are read from
    `ledger`."""
    trained = [r for r in records if settlements[r.id].status == RecordStatus.READY]
    turns = await ledger.turns([record.id for record in trained]) if trained else {}
    rows = []
    for record in trained:
        advantage = settlements[record.id].advantage
        assert advantage is not None, f"{record.id} is to be trained without an advantage"
        rows.append(build_row(record, turns[record.id], advantage, temperature, task.group_order))
    return rows
