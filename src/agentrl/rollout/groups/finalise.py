"""Finishing a group: its Records become training rows, or are left out.

    scorers that look at the whole group -> rewards -> rows -> Records settled -> Task completed

Everything is written under ids that follow from the Records, and what a scorer said of the group is
kept on the Task, so that whoever takes over from an owner that died half way writes the same again.

A Record of which no row can be made (`boundary.py`) is quarantined, and the group goes on. What
fails for the whole group is tried again after a pause that grows, and quarantines the group after
`--max_scoring_failures` of them.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Never, TypeVar

from agentrl.configs import ConfigError, RewardConfig
from agentrl.databases.connection import DatabaseUnreachable
from agentrl.databases.documents import (
    DBRecordData,
    DispatchedSamplingTask,
    GroupOutcome,
    GroupScore,
    Record,
    RecordStatus,
    Split,
    Task,
)
from agentrl.databases.finalisations import Finalisations, finalisation_of
from agentrl.databases.records import RecordLedger, Settlement
from agentrl.databases.tasks import LeaseLost, TaskLedger
from agentrl.failures import InfrastructureFailure
from agentrl.foreign_text import error_line, text_of
from agentrl.rollout.contained import was_cancelled
from agentrl.rollout.groups.boundary import check_row, check_scored
from agentrl.rollout.groups.group_rules import apply_group_rules
from agentrl.rollout.groups.row_building import NothingToTrain, build_row
from agentrl.rollout.scorers import Scorers
from agentrl.rollout.scorers.results import with_group_scores

log = logging.getLogger(__name__)

T = TypeVar("T")

# Reasons besides the rules for leaving out a Record.
NOT_SCORED = "not_scored"
QUARANTINED = "quarantined"  # no row can be built from it
NO_TURNS = "no_turns"  # its first prompt was at a limit, so nothing was generated

MAKING_ROWS = 4  # concurrent groups per process: all turns of each are in memory


def _unheard(outage: InfrastructureFailure, task: Task) -> None:
    """The default of `Finaliser.on_outage`: do nothing."""


@dataclass(frozen=True)
class Finaliser:
    """Finalises groups whose finalisation this process holds."""

    ledger: TaskLedger
    finalisations: Finalisations
    records: RecordLedger
    scorers: Scorers
    reward: RewardConfig
    temperature: float
    scoring_s: float  # time limit of the scorers of a whole group
    on_outage: Callable[[InfrastructureFailure, Task], None] = _unheard  # of a scorer of the group
    longest: int | None = None  # tokens of the longest trained sequence
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _making_rows: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAKING_ROWS))
    _in_progress: set[str] = field(default_factory=set)

    @property
    def in_progress(self) -> frozenset[str]:
        """Ids of the groups that this process is finalising."""
        return frozenset(self._in_progress)

    def stop(self) -> None:
        """Stop waiting for scorers: leave groups that are being scored to other samplers."""
        self._stopping.set()

    async def finalise(self, task: Task) -> int | None:
        """Write the group's rows and settle its Records.

        Returns the number of rows; None if the finalisation was put off or the group quarantined,
        or if this process is at it. An evaluation has no rows, and its Records stay scored. Raises
        `LeaseLost`, `DatabaseUnreachable`, and `ConfigError` for an unusable flag.
        """
        if task.id in self._in_progress:
            return None  # two ends of slots may both be told that they were the group's last
        self._in_progress.add(task.id)
        try:
            return await self._settle(task)
        finally:
            self._in_progress.discard(task.id)

    async def _settle(self, task: Task) -> int | None:
        limit, before = self.finalisations.limit, finalisation_of(task)
        if limit.spent(before.failures):
            died = "every sampler that finalised it went silent"
            await self._quarantine(task, before.error or died)
            return None
        try:
            return await self._finalise(task)
        except (LeaseLost, DatabaseUnreachable, ConfigError):
            raise
        except InfrastructureFailure as outage:
            reason = text_of(outage)
            log.info("%s is finalised later: %s", task.id, reason)
            self.on_outage(outage, task)
            await self.finalisations.put_off(task, reason, counts=False)
        except Exception as error:  # a scorer of the group may raise anything
            log.warning("%s cannot be finalised", task.id, exc_info=error)
            message = error_line(error)
            if limit.last_try(before.failures):
                await self._quarantine(task, message)
            else:
                await self.finalisations.put_off(task, message, counts=True)
        return None

    async def _quarantine(self, task: Task, error: str) -> None:
        log.error("%s is quarantined: %s", task.id, error)
        await self.finalisations.quarantine(task, error)

    async def _finalise(self, task: Task) -> int:
        scores, outcome = await self._held(task, self._write(task))
        await self.ledger.finalised(task, scores, outcome)
        return outcome.rows if outcome else 0

    async def _held(self, task: Task, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` while extending the lease on the finalisation; returns its result.

        Cancels it and raises `LeaseLost` if the lease is lost.
        """
        working = asyncio.create_task(work, name=f"rows of {task.id}")
        holding = asyncio.create_task(self._hold(task), name=f"lease of {task.id}")
        try:
            await asyncio.wait({working, holding}, return_when=asyncio.FIRST_COMPLETED)
            return await (working if working.done() else holding)
        finally:
            working.cancel()
            holding.cancel()
            await asyncio.gather(working, holding, return_exceptions=True)

    async def _hold(self, task: Task) -> Never:
        while True:
            await asyncio.sleep(self.finalisations.lease_seconds / 3)
            await self.finalisations.hold(task)

    async def _write(self, task: Task) -> tuple[dict[str, float | None], GroupOutcome | None]:
        """Write scores, rows and Records; returns scores and outcome to complete the Task with."""
        records = [
            record
            for record in await self.records.scored(task)
            if record.status != RecordStatus.QUARANTINED
        ]
        scores: dict[str, float | None] = {}
        if records and self.scorers.of_group(task.scorer):
            records = await self._scored_together(task, records)
            await self.records.add_scores(records)
            scores = {record.id: record.score for record in records if not _is_settled(record)}
        if task.split != Split.TRAIN:
            return scores, None
        async with self._making_rows:
            return scores, await self._write_rows(task, records)

    async def _write_rows(self, task: Task, records: Sequence[Record]) -> GroupOutcome:
        # Other Records are settled already if one was released from quarantine.
        settlements = {
            **settle_group(task, records, self.reward),
            **{record.id: _settlement(record) for record in records if _is_settled(record)},
        }
        rows, faults = await make_rows(
            task, records, settlements, self.records, self.reward, self.temperature, self.longest
        )
        for record, error in faults.items():
            log.error("record %s is quarantined: %s", record, error)
            settlements[record] = replace(
                settlements[record], status=RecordStatus.QUARANTINED, error=error
            )
        await self.records.add_rows(rows)
        await self.records.settle(settlements)
        left_out = Counter(s.left_out for s in settlements.values() if s.left_out is not None)
        if faults:
            left_out[QUARANTINED] = len(faults)
        return GroupOutcome(rows=len(rows), left_out=dict(left_out))

    async def _scored_together(self, task: Task, records: Sequence[Record]) -> list[Record]:
        """The Records with the scores of group scorers, which are stored on the Task once."""
        said = task.group_scores
        if said is None:
            answer = await self._ask_scorers(task, records)
            _with_checked_scores(task, records, answer)  # what is wrong is not kept
            said = await self.finalisations.keep(task, answer)
        return _with_checked_scores(task, records, said)

    async def _ask_scorers(self, task: Task, records: Sequence[Record]) -> list[GroupScore]:
        """Ask the group's scorers. Raises `LeaseLost` after `stop`, `TimeoutError` after
        `scoring_s`, and what they raise."""
        scoring = asyncio.create_task(self.scorers.score_group(task, records))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait(
                {scoring, stopping}, timeout=self.scoring_s, return_when=asyncio.FIRST_COMPLETED
            )
            if scoring.cancelled():
                raise was_cancelled(f"scorer {task.scorer!r}")
            if scoring.done():
                return scoring.result()
            if self._stopping.is_set():
                await self.finalisations.leave(task)
                raise LeaseLost(f"{task.id} is left to another sampler: this one stops")
            raise TimeoutError(f"not finished within --record_timeout {self.scoring_s:g} s")
        finally:
            scoring.cancel()
            stopping.cancel()


def _with_checked_scores(
    task: Task, records: Sequence[Record], said: Sequence[GroupScore]
) -> list[Record]:
    """The Records with what was said of them. Raises ValueError for a score of no use."""
    return [
        check_scored(with_group_scores(task.scorer, record, said), record.id) for record in records
    ]


def _is_settled(record: Record) -> bool:
    return record.status in (RecordStatus.READY, RecordStatus.ABANDONED)


def _settlement(record: Record) -> Settlement:
    """The result of an earlier finalisation of a Record's group."""
    return Settlement(
        RecordStatus(record.status), record.advantage, record.left_out,
        stretches=record.stretches, agent_advantages=record.agent_advantages,
    )  # fmt: skip


def settle_group(
    task: Task, records: Sequence[Record], config: RewardConfig
) -> dict[str, Settlement]:
    """The new state of each Record of a group, by id."""
    group = [record for record in records if record.score is not None]
    rewards = apply_group_rules(task.id, group, config)
    settlements = {
        record.id: Settlement(RecordStatus.ABANDONED, None, NOT_SCORED) for record in records
    }
    for record, reward in zip(group, rewards, strict=True):
        left_out = reward.left_out if record.turns else NO_TURNS
        status = RecordStatus.READY if left_out is None else RecordStatus.ABANDONED
        settlements[record.id] = Settlement(
            status,
            reward.advantage,
            left_out,
            stretches=reward.stretches,
            agent_advantages=reward.agent_advantages,
        )
    return settlements


def with_advantages(record: Record, settlement: Settlement) -> Record:
    """The Record with the advantages of its turns."""
    return record.model_copy(
        update={
            "stretches": list(settlement.stretches),
            "agent_advantages": dict(settlement.agent_advantages),
        }
    )


async def make_rows(
    task: Task,
    records: Sequence[Record],
    settlements: dict[str, Settlement],
    ledger: RecordLedger,
    reward: RewardConfig,
    temperature: float,
    longest: int | None,
) -> tuple[list[DBRecordData], dict[str, str]]:
    """Build rows for the group's READY Records. Turns are read from `ledger`.

    `reward`: the flags of rewards. `longest`: tokens of the longest trained sequence. A Record
    without a turn to train becomes abandoned in `settlements`. Returns the rows, and by Record id
    why a row could not be built.
    """
    trained = [r for r in records if settlements[r.id].status == RecordStatus.READY]
    turns = await ledger.turns([record.id for record in trained]) if trained else {}
    rows: list[DBRecordData] = []
    faults: dict[str, str] = {}
    for record in trained:
        settlement = settlements[record.id]
        advantage = settlement.advantage
        assert advantage is not None, f"{record.id} is to be trained without an advantage"
        settled = with_advantages(record, settlement)
        try:
            # In a thread: building rows of long records would delay heartbeats.
            row = await asyncio.to_thread(
                _checked_row, settled, turns[record.id], advantage, temperature, task.group_order,
                longest, reward.drops_zero,
            )  # fmt: skip
        except NothingToTrain as nothing:
            settlements[record.id] = replace(
                settlement, status=RecordStatus.ABANDONED, left_out=nothing.reason
            )
        except ValueError as error:
            faults[record.id] = f"no row can be made of it: {error}"
        else:
            rows.append(row)
    return rows, faults


def _checked_row(
    record: Record,
    turns: Sequence[DispatchedSamplingTask],
    advantage: float,
    temperature: float,
    group_order: int,
    longest: int | None,
    drops_zero: bool,
) -> DBRecordData:
    """The Record's row. Raises ValueError if the trainer could not use it."""
    row = build_row(record, turns, advantage, temperature, group_order, longest, drops_zero)
    check_row(row)
    return row
