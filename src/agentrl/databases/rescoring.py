"""The writes of `agentrl rescore`, which scores stored Records again.

    rows -> Records -> Task          group after group, each finished before the next

Only completed groups are scored again; groups in progress belong to their samplers. A row that no
trainer has used gets the new advantages, is withdrawn, or is restored. Every other row stays as it
is, and its Record says so. Each update names the state that it expects, so a trainer that runs
meanwhile leases the row either before or after the change. After a crash the command is simply run
again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    DBRecordData,
    GroupScore,
    Record,
    RecordStatus,
    RowStatus,
    Scoring,
    Task,
    TaskStatus,
)
from agentrl.databases.expressions import literal, slots_scored
from agentrl.databases.row_parts import PARTS, divide
from agentrl.databases.transitions import TransitionRefused, change_records, change_rows

_SCORED = [RecordStatus.SCORED, RecordStatus.READY, RecordStatus.ABANDONED]
_UNTOUCHED: dict[str, Any] = {"trained": []}  # rows that no step has trained


class RowOutcome(Enum):
    """What happened to a Record's row."""

    NONE = "none"  # no row before, none now
    ADDED = "added"  # a new or a restored row
    REWRITTEN = "rewritten"  # the advantages and reward were replaced
    WITHDRAWN = "withdrawn"
    STAYED = "stayed"  # unchanged, because it was trained, leased, evicted or quarantined


@dataclass(frozen=True, slots=True)
class Rescored:
    """A Record with its new scores and the result of its group. `row` is None if left out."""

    record: Record
    advantage: float | None
    left_out: str | None
    row: DBRecordData | None


class Rescoring:
    """The database operations of `agentrl rescore`."""

    def __init__(self, database: RunDatabase) -> None:
        self._database = database

    async def groups(self, where: Mapping[str, Any]) -> list[str]:
        """The ids of Tasks with a scored Record that matches `where`, a MongoDB filter.

        Raises `OperationFailure` if MongoDB refuses the filter.
        """
        selection = {"$and": [{"status": {"$in": _SCORED}}, dict(where)]}
        # not `distinct`, whose answer is one document of at most 16 MB
        tasks = await self._database.records.aggregate(
            [{"$match": selection}, {"$group": {"_id": "$task"}}, {"$sort": {"_id": 1}}]
        )
        return [task["_id"] async for task in tasks]

    async def completed(self, task: str) -> Task | None:
        """The Task; None if it is not completed."""
        found = await self._database.tasks.find_one({"_id": task, "status": TaskStatus.COMPLETED})
        return Task.from_mongo(found) if found else None

    async def store_row(self, rescored: Rescored) -> RowOutcome:
        """Add, rewrite or withdraw a Record's row, unless a trainer has used it."""
        rows, own = self._database.rows, {"_id": rescored.record.id}
        if rescored.row is None:
            withdrawn = await change_rows(
                rows, {**own, **_UNTOUCHED}, RowStatus.WITHDRAWN, {}, expected=[RowStatus.READY]
            )
            if withdrawn:
                return RowOutcome.WITHDRAWN
            found = await rows.find_one(own, {"status": 1})
            gone = found is None or found["status"] == RowStatus.WITHDRAWN
            return RowOutcome.NONE if gone else RowOutcome.STAYED
        row, parts = divide(rescored.row)
        for part in parts:
            await self._database.parts.update_one(
                {"_id": part["_id"]}, {"$setOnInsert": part}, upsert=True
            )
        values = {"reward": row["reward"]}
        for column in ("advantages", "capped"):
            if parts:
                values[f"{PARTS}.{column}"] = row[PARTS][column]
            else:
                values[column] = row[column]
        rewritten = await rows.update_one(
            {**own, **_UNTOUCHED, "status": RowStatus.READY}, {"$set": values}
        )
        if rewritten.matched_count:
            return RowOutcome.REWRITTEN
        back = {name: literal(value) for name, value in values.items()}
        if await change_rows(rows, own, RowStatus.READY, back, expected=[RowStatus.WITHDRAWN]):
            return RowOutcome.ADDED
        added = await rows.update_one(own, {"$setOnInsert": row}, upsert=True)
        return RowOutcome.ADDED if added.upserted_id is not None else RowOutcome.STAYED

    async def store_record(self, task: Task, rescored: Rescored, outcome: RowOutcome) -> None:
        """Store a Record's new scores and move the old ones to `score_history`.

        Raises `TransitionRefused` if the Record is not scored any more.
        """
        record, records = rescored.record, self._database.records
        before = await records.find_one({"_id": record.id})
        assert before is not None, f"{record.id} is gone, and the pipeline deletes nothing"
        old = Record.from_mongo(before)
        history = Scoring(
            scorer=task.scorer,
            score=old.score,
            scores=old.scores,
            explanations=old.explanations,
            advantage=old.advantage,
            until=datetime.now(UTC),
            row_stayed=outcome == RowOutcome.STAYED,
        )
        # Rewards of a program's agents are the program's: no scorer gives others.
        scores = record.model_dump(
            include={"score", "scores", "explanations", "stretches", "agent_advantages"}
        )
        reward = {"advantage": rescored.advantage, "left_out": rescored.left_out}
        result = await records.update_one(
            {"_id": record.id, "status": {"$in": _SCORED}},
            {"$set": {**scores, **reward}, "$push": {"score_history": history.model_dump()}},
        )
        if not result.matched_count:
            raise TransitionRefused(f"record {record.id}", old.status, "scored anew")
        to = _STATUS_AFTER.get(outcome)
        if to is not None and old.status not in (RecordStatus.SCORED, to):
            await change_records(records, {"_id": record.id}, to, {})

    async def store_task(
        self,
        task: Task,
        scorer: str,
        scores: Mapping[str, float | None],
        said: Sequence[GroupScore] | None,
    ) -> None:
        """Store the Task's new scorer, scores (by Record id) and group scores."""
        group = None if said is None else [score.model_dump() for score in said]
        await self._database.tasks.update_one(
            {"_id": task.id, "status": TaskStatus.COMPLETED},
            [
                {"$set": {"scorer": literal(scorer), "group_scores": literal(group)}},
                *slots_scored(scores),
            ],
        )


_STATUS_AFTER = {
    RowOutcome.NONE: RecordStatus.ABANDONED,
    RowOutcome.WITHDRAWN: RecordStatus.ABANDONED,
    RowOutcome.ADDED: RecordStatus.READY,
    RowOutcome.REWRITTEN: RecordStatus.READY,
}  # without an entry, the Record keeps its status
