"""Success of a run's policies by step, on the training tasks and on the held-out tasks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DataSet, Run, Split, TaskStatus, group_order
from agentrl.databases.feeder import of_data
from agentrl.databases.runs import load_run
from agentrl.databases.transitions import ENDED_TASKS, TERMINAL_SLOTS

SUCCESS_SCORE = 0.5  # a Record with at least this score counts as right


@dataclass(frozen=True)
class CurvePoint:
    """The training records that the policy of one step began, in groups that have ended."""

    step: int
    records: int
    success: float
    reward: float  # mean score


@dataclass(frozen=True)
class HeldOut:
    """An evaluation on the held-out tasks, by the step of the policy that was evaluated."""

    step: int
    rollouts: int  # with a score
    successes: int
    mean_score: float

    @property
    def success(self) -> float:
        """Success rate."""
        return self.successes / self.rollouts


@dataclass(frozen=True)
class Evaluating:
    """An evaluation that is under way."""

    step: int
    done: int  # rollouts that ended
    rollouts: int


async def success_curve(database: RunDatabase, most: int | None = None) -> list[CurvePoint]:
    """Success and reward by the step whose policy began the records, on the run's present data.

    `most`: of so many steps at the most, which lie evenly. Else it reads an index of all records.

    All records count, not only trained rows: rows are filtered (groups that are all right or all
    wrong are dropped), so their mean reward does not measure the policy. Records of groups that
    still run do not: rollouts that end early are mostly failures. A step of which such groups have
    more records than those that ended is left out.
    """
    step_of = {
        document["version"]: document["step"]
        async for document in database.policy_versions.find({}, {"version": 1, "step": 1})
    }
    if most is not None:
        steps = sorted(set(step_of.values()))
        last = len(steps) - 1
        chosen = {steps[last * n // max(1, most - 1)] for n in range(most)} if steps else set()
        step_of = {version: step for version, step in step_of.items() if step in chosen}
    run = await load_run(database)
    data = run.data[-1] if run and run.data else DataSet()
    # Only then: each further bound makes the reading of the index take longer.
    of_data = {"epoch": {"$gte": data.epoch}} if data.epoch > 0 else {}
    running = await _running(database, of_data)  # before the sums, which then hold all that it does
    of_policies = {"$gte": 0} if most is None else {"$in": list(step_of)}
    success = {"$cond": [{"$gte": ["$score", SUCCESS_SCORE]}, 1, 0]}
    cursor = await database.records.aggregate(
        [
            {
                "$match": {
                    "split": Split.TRAIN,
                    "versions.min": of_policies,
                    "score": {"$gte": -math.inf},
                    **of_data,
                }
            },
            {
                "$group": {
                    "_id": "$versions.min",
                    "records": {"$sum": 1},
                    "successes": {"$sum": success},
                    "score": {"$sum": "$score"},
                }
            },
        ],
        hint="results",
    )
    # A resumed run publishes the weights of one step under several versions.
    pooled: dict[int, tuple[int, int, float, int]] = {}
    async for group in cursor:
        step = step_of.get(group["_id"])
        if step is None:
            continue
        left = running.get(group["_id"], _Running(0, 0, 0, 0.0))
        records, successes, score, begun = pooled.get(step, (0, 0, 0.0, 0))
        pooled[step] = (
            records + group["records"] - left.scored,
            successes + group["successes"] - left.successes,
            score + group["score"] - left.score,
            begun + left.records,
        )
    return [
        CurvePoint(step, records, successes / records, score / records)
        for step, (records, successes, score, begun) in sorted(pooled.items())
        if records and records >= begun
    ]


@dataclass(frozen=True)
class _Running:
    """The records of a policy in groups that still run; those with a score, and their sums."""

    records: int
    scored: int
    successes: int
    score: float


async def _running(database: RunDatabase, of_data: Mapping[str, Any]) -> dict[int, _Running]:
    """By version of the policy."""
    groups = database.tasks.find(
        {"status": TaskStatus.RUNNING, "split": Split.TRAIN, **of_data}, {"_id": 1}, hint="state"
    )
    tasks = [group["_id"] async for group in groups]
    scored = {"$gte": ["$score", -math.inf]}  # None is below all numbers
    cursor = await database.records.aggregate(
        [
            {"$match": {"task": {"$in": tasks}, "versions.min": {"$gte": 0}}},
            {
                "$group": {
                    "_id": "$versions.min",
                    "records": {"$sum": {"$cond": [{"$eq": ["$error", None]}, 1, 0]}},
                    "scored": {"$sum": {"$cond": [scored, 1, 0]}},
                    "successes": {"$sum": {"$cond": [{"$gte": ["$score", SUCCESS_SCORE]}, 1, 0]}},
                    "score": {"$sum": "$score"},
                }
            },
        ],
        hint="task",
    )
    return {group.pop("_id"): _Running(**group) async for group in cursor}


async def evaluations(database: RunDatabase) -> list[HeldOut]:
    """The finished evaluations of training on the run's present data, by step.

    Evaluations on earlier data, and evaluations of checkpoints by `agentrl eval`, are not included.
    """
    reader = Evaluations(database)
    await reader.read(await load_run(database))
    return reader.finished


class Evaluations:
    """Reads the evaluations of training incrementally. Finished ones are not read again."""

    def __init__(self, database: RunDatabase) -> None:
        self._database = database
        self._data = 0  # the number of the data set that these are on
        self._finished: dict[int, HeldOut] = {}
        self._begin = 0  # all evaluations of earlier steps are known
        self.under_way: Evaluating | None = None  # the oldest one

    @property
    def finished(self) -> list[HeldOut]:
        """Those with a result, by step."""
        return [self._finished[step] for step in sorted(self._finished)]

    async def read(self, run: Run | None) -> None:
        """Read the progress since the last call, on the present data of `run`."""
        self.under_way = None
        data = max(0, len(run.data) - 1) if run else 0
        if data != self._data:
            self._data, self._begin, self._finished = data, 0, {}
        for group in await self._groups():
            step = group["_id"]
            if group["open"]:
                self.under_way = self.under_way or Evaluating(
                    step, group["done"], group["rollouts"]
                )
                continue
            if self.under_way is None:
                self._begin = step + 1
            if group["scored"]:
                self._finished[step] = HeldOut(
                    step, group["scored"], group["successes"], group["mean_score"]
                )

    async def _groups(self) -> list[Mapping[str, Any]]:
        """Counts of each evaluation that is not known yet, by step."""
        success = {"$cond": [{"$gte": ["$slots.score", SUCCESS_SCORE]}, 1, 0]}
        ended = {"$in": ["$status", list(ENDED_TASKS)]}
        terminal = {"$in": ["$slots.status", list(TERMINAL_SLOTS)]}
        cursor = await self._database.tasks.aggregate(
            [
                # all statuses are named so that the index on (status, split, group_order) serves
                {"$match": {"status": {"$in": list(TaskStatus)}, "split": Split.EVAL}},
                {
                    "$match": {
                        "group_order": {"$gte": group_order(self._begin, 0)},
                        **of_data(self._data),
                    }
                },
                {"$project": {"epoch": 1, "slots.score": 1, "slots.status": 1, "status": 1}},
                {"$unwind": "$slots"},
                {
                    "$group": {
                        "_id": "$epoch",
                        "open": {"$sum": {"$cond": [ended, 0, 1]}},
                        "rollouts": {"$sum": 1},
                        "done": {"$sum": {"$cond": [terminal, 1, 0]}},
                        "scored": {"$sum": {"$cond": [{"$eq": ["$slots.score", None]}, 0, 1]}},
                        "successes": {"$sum": success},
                        "mean_score": {"$avg": "$slots.score"},
                    }
                },
                {"$sort": {"_id": 1}},
            ]
        )
        return [group async for group in cursor]
