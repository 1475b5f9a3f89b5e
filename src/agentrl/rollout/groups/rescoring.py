"""Scoring stored groups anew: `agentrl rescore`, without its command line.

A group is always scored as a whole, even if only some of its Records were selected: advantages
compare its Records, and scores of different scorers are not comparable.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.configs import RewardConfig
from agentrl.databases.connection import DatabaseUnreachable
from agentrl.databases.documents import GroupScore, Record, RecordStatus, Split, Task
from agentrl.databases.records import RecordLedger
from agentrl.databases.rescoring import Rescored, Rescoring, RowOutcome
from agentrl.databases.transitions import TransitionRefused
from agentrl.foreign_text import error_line
from agentrl.rollout.groups.boundary import check_scored
from agentrl.rollout.groups.finalise import make_rows, settle_group, with_advantages
from agentrl.rollout.scorers import Scorers
from agentrl.rollout.scorers.results import with_group_scores

_GROUPS_AT_ONCE = 8


@dataclass
class RescoringReport:
    """The result of a rescoring. `failures`: by group, why it was not scored, or only in part."""

    groups: int = 0
    records: int = 0
    unscored: int = 0  # Records without a score
    rows: Counter[RowOutcome] = field(default_factory=Counter)
    in_progress: int = 0  # groups skipped because they are not completed
    failures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rescorer:
    """Scores groups again. `reward`: the flags of rewards."""

    ledger: Rescoring
    records: RecordLedger
    scorers: Scorers
    reward: RewardConfig
    temperature: float
    longest: int | None = None  # tokens of the longest trained sequence

    async def rescore(self, tasks: Sequence[str], scorer: str) -> RescoringReport:
        """Score these groups (Task ids) by `scorer`, several concurrently.

        A group whose scorer fails stays as it is. Raises `DatabaseUnreachable`.
        """
        report = RescoringReport()
        room = asyncio.Semaphore(_GROUPS_AT_ONCE)

        async def one(task: str) -> None:
            async with room:
                await self._rescore_group(task, scorer, report)

        await asyncio.gather(*map(one, tasks))
        return report

    async def _rescore_group(self, task_id: str, scorer: str, report: RescoringReport) -> None:
        task = await self.ledger.completed(task_id)
        if task is None:
            report.in_progress += 1
            return
        try:
            records, said = await self._score(task, scorer)
            group = await self._rewarded(task, records)
        except DatabaseUnreachable:
            raise
        except Exception as error:  # a scorer may raise anything
            report.failures[task_id] = error_line(error)
            return
        try:
            for rescored in group:
                outcome = RowOutcome.NONE
                if task.split == Split.TRAIN:
                    outcome = await self.ledger.store_row(rescored)
                await self.ledger.store_record(task, rescored, outcome)
                report.rows[outcome] += 1
        except TransitionRefused as refused:  # it was quarantined meanwhile
            report.failures[task_id] = f"{refused}; rescore the group once more, without it"
            return
        scores = {record.id: record.score for record in records}
        await self.ledger.store_task(task, scorer, scores, said)
        report.groups += 1
        report.records += len(records)
        report.unscored += sum(score is None for score in scores.values())

    async def _score(self, task: Task, scorer: str) -> tuple[list[Record], list[GroupScore] | None]:
        """The group's Records with new scores only, and the scores of group scorers.

        Quarantined ones are left out, as in a finalisation.
        """
        judged = task.model_copy(update={"scorer": scorer})
        unscored: dict[str, object] = {"score": None, "scores": {}, "explanations": {}}
        stored = [
            record
            for record in await self.records.scored(task)
            if record.status != RecordStatus.QUARANTINED
        ]
        records = await asyncio.gather(
            *(self.scorers.score(judged, record.model_copy(update=unscored)) for record in stored)
        )
        said = None
        if self.scorers.of_group(scorer):
            said = await self.scorers.score_group(judged, records)
            records = [with_group_scores(scorer, record, said) for record in records]
        return [check_scored(record, record.id) for record in records], said

    async def _rewarded(self, task: Task, records: Sequence[Record]) -> list[Rescored]:
        """The Records with new advantages and rows; without them in an evaluation."""
        if task.split != Split.TRAIN:
            return [Rescored(record, None, None, None) for record in records]
        settlements = settle_group(task, records, self.reward)
        made, faults = await make_rows(
            task, records, settlements, self.records, self.reward, self.temperature, self.longest
        )
        if faults:
            raise ValueError(next(iter(faults.values())))
        rows = {row.id: row for row in made}
        return [
            Rescored(
                with_advantages(record, settlements[record.id]),
                settlements[record.id].advantage,
                settlements[record.id].left_out,
                rows.get(record.id),
            )
            for record in records
        ]
