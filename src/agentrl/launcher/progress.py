"""The progress of a run, read from its metrics file and database, by indexes only.

The history of a resumed run is read once, of a hundred of its steps.
"""

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from statistics import mean, median
from typing import Any

from agentrl.databases import outages
from agentrl.databases.attempt_tally import AttemptCounts, AttemptTally
from agentrl.databases.connection import RunDatabase
from agentrl.databases.diagnosis import GroupEnd, failures, why_no_step
from agentrl.databases.documents import HANDED_BACK, Run, SlotStatus, Split, TaskStatus
from agentrl.databases.outcomes import attempt_end, latest_groups
from agentrl.databases.row_ledger import count_waiting
from agentrl.databases.runs import TRAINING, load_run
from agentrl.databases.server_time import server_time
from agentrl.databases.services import live_services
from agentrl.databases.success import SUCCESS_SCORE, Evaluating, Evaluations, HeldOut, success_curve
from agentrl.databases.transitions import ENDED_TASKS
from agentrl.launcher.other_samplers import OtherSamplers
from agentrl.launcher.run_folder import last_checkpoint

Metrics = Mapping[str, Any]  # a line of metrics.jsonl

_RECENT_RECORDS = 256
_RECORD_FIELDS = (
    "score", "n_turns", "n_tool_calls", "tokens", "finished_at", "owner", "status", "error",
    "task", "rollout",
)  # fmt: skip
_RECENT_GROUPS = 64
_RECENT_STEPS = 10
_HISTORY_STEPS = 100  # of what was before the first look
_RATE_WINDOW = timedelta(seconds=30)
_AT_WORK = timedelta(seconds=30)  # a sampler that ended an attempt within this time is at work


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment. None is unknown. Recent records are the last 256 finished.

    Success and reward are of the last groups that ended, with some 256 scores: rollouts that end
    early are mostly failures, so those of groups that still run do not count.
    Loss, gradient norm, KL and staleness are of the last step.
    """

    status: str = "starting"
    step: int = 0
    max_steps: int | None = None
    success: float | None = None
    reward: float | None = None  # mean score
    turns: float | None = None  # mean per recent record
    tool_calls: float | None = None  # mean per recent record
    sampled_per_s: float | None = None  # generated tokens per second in the last 30 s
    trained_per_s: float | None = None  # trained tokens per second of recent steps
    attempts: AttemptCounts = field(default_factory=AttemptCounts)  # of this launch
    loss: float | None = None
    grad_norm: float | None = None  # before clipping
    kl: float | None = None  # between trainer and sampler
    reference_kl: float | None = None  # to the reference, with --beta
    staleness: float | None = None  # mean and largest
    max_staleness: int | None = None
    waiting: int | None = None  # rows that are ready for training
    services: int = 0  # registered and alive
    samplers_elsewhere: int = 0  # at work on this run, not started by this launch
    checkpoint: int | None = None  # the last one's step
    held_out: tuple[HeldOut, ...] = ()
    evaluating: Evaluating | None = None
    seconds_left: float | None = None
    history: tuple[float, ...] = ()  # success at each step so far
    failures: str | None = None  # count, share and errors of recent failed attempts
    why_no_step: str | None = None  # the reason while no step can begin
    waiting_for: tuple[str, ...] = ()  # one sentence for each outage
    groups: tuple[int, int] | None = None  # ended and all groups, of a run without a trainer


class MetricsTail:
    """Follows a metrics file. `most`: lines that are kept, the last ones; None: all."""

    def __init__(self, path: Path, most: int | None = _RECENT_STEPS) -> None:
        self._path = path
        self._inode = self._offset = 0
        self.recent: deque[Metrics] = deque(maxlen=most)

    def read(self) -> None:
        """Read the lines added since the last call. An incomplete line is read next time."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self._inode, self._offset = stat.st_ino, 0  # a resumed run wrote it anew
                self.recent.clear()
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self.recent.append(json.loads(line))


def read_metrics(path: Path) -> list[Metrics]:
    """Read all complete lines of a metrics file, one per step."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


class ProgressReader:
    """Reads snapshots of a run. `output`: the run's folder."""

    def __init__(self, database: RunDatabase, output: Path) -> None:
        self._database = database
        self._output = output
        self._tail = MetricsTail(output / "metrics.jsonl")
        self._history: dict[int, float] | None = None
        self._evaluations = Evaluations(database)
        self._samplers = OtherSamplers()
        self._tally: AttemptTally | None = None

    async def read(self) -> Snapshot:
        """Read a snapshot, with about ten small queries."""
        if self._history is None:
            points = await success_curve(self._database, _HISTORY_STEPS)
            self._history = {point.step: point.success for point in points}
        self._tail.read()
        recent = list(self._tail.recent)
        run = await load_run(self._database)
        records = await self._recent_records(Split.TRAIN)
        evaluated = await self._recent_records(Split.EVAL)
        scored = [record for record in records if record["score"] is not None]
        ended = await latest_groups(self._database, _RECENT_GROUPS)
        scores = _recent_scores(ended)
        success = _mean([score >= SUCCESS_SCORE for score in scores])
        step = max(run.step if run else 0, recent[-1]["step"] if recent else 0)
        if success is not None:
            self._history[step] = success
        max_steps = run.max_steps if run and run.max_steps else None
        now = await server_time(self._database.client)
        # Earlier launches do not count: their failures may be fixed now.
        tally = self._tally = self._tally or AttemptTally(self._database, now)
        began = tally.since
        attempts = [
            attempt_end(record)
            for record in (*records, *evaluated)
            if record["finished_at"] >= began and not _is_handed_back(record)
        ]
        groups = [group for group in ended if group.at > began]
        waiting = await count_waiting(self._database)
        n_services = len(await live_services(self._database))
        waits = run is not None and run.status == TRAINING and waiting < run.rows_per_step
        finished = [r["owner"] for r in records + evaluated if now - r["finished_at"] < _AT_WORK]
        holders, silent = await self._leases()
        owners = {*finished, *holders}
        await self._evaluations.read(run)
        all_groups = await self._groups(run)
        left = _time_left(recent, step, max_steps)
        if all_groups is not None:
            left = _time_left_of_groups(ended, all_groups, began, now)
        last: Metrics = recent[-1] if recent else {}
        return Snapshot(
            status=run.status if run and run.status != "created" else "starting",
            step=step,
            max_steps=max_steps,
            success=success,
            reward=_mean(scores),
            turns=_mean([record["n_turns"] for record in scored]),
            tool_calls=_mean([record["n_tool_calls"] for record in scored]),
            sampled_per_s=_add(_sampling_rate(records, now), _sampling_rate(evaluated, now)),
            trained_per_s=_training_rate(recent),
            attempts=await tally.read(now),
            loss=last.get("loss"),
            grad_norm=last.get("grad_norm"),
            kl=last.get("mismatch_kl"),
            reference_kl=last.get("reference_kl"),
            staleness=last.get("staleness_mean"),
            max_staleness=last.get("staleness_max"),
            waiting=waiting,
            services=n_services,
            samplers_elsewhere=self._samplers.count(owners),
            checkpoint=last_checkpoint(self._output),
            held_out=tuple(self._evaluations.finished),
            evaluating=self._evaluations.under_way,
            seconds_left=left,
            history=tuple(self._history[step] for step in sorted(self._history)),
            failures=failures(attempts, groups),
            waiting_for=tuple(o.sentence(now) for o in await outages.current(self._database)),
            why_no_step=why_no_step(attempts, groups, n_services, silent) if waits else None,
            groups=all_groups,
        )

    async def _groups(self, run: Run | None) -> tuple[int, int] | None:
        if run is None or not run.n_groups or run.max_steps:
            return None
        ended = {"status": {"$in": list(ENDED_TASKS)}, "split": Split.TRAIN}
        return await self._database.tasks.count_documents(ended, hint="state"), run.n_groups

    async def _recent_records(self, split: Split) -> list[dict[str, Any]]:
        """The latest finished records of a split, newest first."""
        cursor = (
            self._database.records.find(
                {"split": split, "finished_at": {"$ne": None}}, _RECORD_FIELDS
            )
            .sort("finished_at", -1)
            .limit(_RECENT_RECORDS)
        )
        return [document async for document in cursor]

    async def _leases(self) -> tuple[set[str], int]:
        """The samplers with a live lease, and the number of rollouts with an expired one."""
        cursor = await self._database.tasks.aggregate(
            [
                {"$match": {"status": TaskStatus.RUNNING, "split": {"$in": list(Split)}}},
                {"$project": {"slots.owner": 1, "slots.status": 1, "slots.lease_expires": 1}},
                {"$unwind": "$slots"},
                {"$match": {"slots.status": SlotStatus.LEASED}},
                {
                    "$group": {
                        "_id": "$slots.owner",
                        "lives": {"$max": {"$gt": ["$slots.lease_expires", "$$NOW"]}},
                        "rollouts": {"$sum": 1},
                    }
                },
            ]
        )
        groups = [group async for group in cursor]
        silent = sum(group["rollouts"] for group in groups if not group["lives"])
        return {group["_id"] for group in groups if group["lives"]}, silent


def _is_handed_back(record: Mapping[str, Any]) -> bool:
    return (record["error"] or "").startswith(HANDED_BACK)


def _recent_scores(ended: Sequence[GroupEnd]) -> list[float]:
    """The scores of the newest groups, of whole groups, and no more than suffice."""
    scores: list[float] = []
    for group in ended:
        if len(scores) >= _RECENT_RECORDS:
            break
        scores += group.scores
    return scores


def _add(a: float | None, b: float | None) -> float | None:
    return a + b if a is not None and b is not None else a if b is None else b


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def _sampling_rate(records: Sequence[Mapping[str, Any]], now: datetime) -> float | None:
    """Generated tokens per second in the last 30 s, or in the part of it that was read."""
    if not records:
        return None
    within = [record for record in records if now - record["finished_at"] < _RATE_WINDOW]
    if len(within) < 2:
        return 0.0
    # Records before the oldest one read are unknown, so the time before it does not count.
    whole = len(within) == len(records)
    span = now - within[-1]["finished_at"] if whole else _RATE_WINDOW
    tokens = sum(record["tokens"]["generated"] for record in within)
    return float(tokens / max(span.total_seconds(), 1.0))


def _training_rate(recent: Sequence[Metrics]) -> float | None:
    seconds = sum(metrics["step_seconds"] for metrics in recent)
    if seconds <= 0:
        return None
    return float(sum(metrics["n_train_tokens"] for metrics in recent) / seconds)


def _time_left(recent: Sequence[Metrics], step: int, max_steps: int | None) -> float | None:
    """Seconds for the remaining steps at the recent pace, without the final evaluation."""
    if max_steps is None or not recent:
        return None
    return float((max_steps - step) * median(metrics["step_seconds"] for metrics in recent))


def _time_left_of_groups(
    newest: Sequence[GroupEnd], groups: tuple[int, int], began: datetime, now: datetime
) -> float | None:
    """Seconds for the groups that have not ended, at the pace of the newest that ended since
    `began`, when we first looked."""
    times = sorted(group.at for group in newest if group.at > began)
    n_left = groups[1] - groups[0]
    if not times:
        return 0.0 if n_left == 0 else None
    # Of more only the newest were read.
    all_read = len(times) < _RECENT_GROUPS
    since, n_ended = (began, len(times)) if all_read else (times[0], len(times) - 1)
    return float(n_left * (now - since).total_seconds() / n_ended)
