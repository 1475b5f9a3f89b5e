"""What the ledger's state machine needs: samplers, and the ledger as it must be, in memory."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mortal import MortalDatabase

from agentrl.configs import RewardConfig
from agentrl.databases.arrays import pack_floats, pack_ints
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    DispatchedSamplingTask,
    Record,
    RecordStatus,
    SlotStatus,
    Task,
    TaskStatus,
)
from agentrl.databases.finalisations import Finalisations
from agentrl.databases.held_leases import HeldLeases
from agentrl.databases.records import RecordLedger
from agentrl.databases.scorings import ScoringLedger
from agentrl.databases.tasks import Claim, TaskLedger
from agentrl.databases.transitions import TERMINAL_SLOTS
from agentrl.policy_version import VersionSpan
from agentrl.rollout.groups.finalise import Finaliser
from agentrl.rollout.llm.models import AgentModels
from agentrl.rollout.scorers import Scorers

MAX_ATTEMPTS = 2
MAX_SCORINGS = 2
LEASE_S = 600.0  # so long that real time does not matter


@dataclass
class Attempt:
    """What a sampler knows of a slot that it works on."""

    claim: Claim
    record: Record
    begun: bool = False

    @property
    def stage(self) -> str:
        if self.record.status == RecordStatus.SAMPLED:
            return "sampled"
        if self.record.status != RecordStatus.SAMPLING:
            return "ended"
        return "begun" if self.begun else "claimed"


class Sampler:
    """A sampler process, as `SamplingScheduler` uses the ledgers, one write at a time."""

    def __init__(self, database: RunDatabase, name: str, now: "Clock") -> None:
        self.name = name
        self.database = MortalDatabase(database.client, database.database)
        self.ledger = TaskLedger(self.database, name, LEASE_S, MAX_ATTEMPTS)
        self.scorings = ScoringLedger(self.database, self.ledger, MAX_SCORINGS)
        self.records = RecordLedger(self.database, LEASE_S)
        self.records.leases = HeldLeases(LEASE_S, now)
        self.finaliser = Finaliser(
            self.ledger,
            Finalisations(self.database, name, LEASE_S, max_failures=10**6),
            self.records,
            Scorers(AgentModels(), self.records),
            RewardConfig(drop_zero_advantage=False),
            temperature=1.0,
            scoring_s=60.0,
        )
        self.attempts: dict[str, Attempt] = {}
        self.finishing: list[Task] = []  # groups whose finalisation it was given

    async def heartbeat(self, now: float) -> set[str]:
        """Ask which leases are still ours, and stop the work on those that are not."""
        held = await self.ledger.heartbeat(self.attempts)
        lost = self.attempts.keys() - held
        self.records.leases.answered(held, lost, now)
        for record in lost:
            del self.attempts[record]
        return held


class Clock:
    """Seconds since the machine began."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class SlotModel:
    status: SlotStatus = SlotStatus.PENDING
    owner: str | None = None
    until: float = 0.0
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    scorings: int = 0
    scoring_failures: int = 0
    not_before: float = 0.0
    record: str | None = None
    score: float | None = None
    fork: str | None = None  # the Record that it is forked from

    def leave(self, status: SlotStatus, **changes: Any) -> None:
        """As every end of a lease does."""
        assert self.status == SlotStatus.LEASED
        self.status, self.owner = status, None
        if status == SlotStatus.PENDING:  # another trajectory
            self.scorings = self.scoring_failures = 0
        for name, value in changes.items():
            setattr(self, name, value)


@dataclass
class GroupModel:
    id: str
    group_order: int
    slots: list[SlotModel]
    status: TaskStatus = TaskStatus.CREATED
    finaliser: str | None = None
    until: float = 0.0

    @property
    def finished(self) -> bool:
        return all(slot.status in TERMINAL_SLOTS for slot in self.slots)

    @property
    def completed_records(self) -> set[str | None]:
        return {slot.record for slot in self.slots if slot.status == SlotStatus.COMPLETED}


def turn_of(record: Record) -> DispatchedSamplingTask:
    """Three tokens of prompt, two of output."""
    return DispatchedSamplingTask(
        _id=f"{record.id}-0", record_id=record.id, turn=0, segment=0, service="http://127.0.0.1:1",
        messages=[], prompt_delta_ids=pack_ints([1, 2, 3]), prompt_len=3,
        output_ids=pack_ints([4, 5]), output_logprobs=pack_floats([-0.5, -0.25]),
        output_text="", finish_reason="stop", versions=[VersionSpan(version=0, start=0, end=2)],
        generate_latency_s=0.0, created_at=datetime.now(UTC),
    )  # fmt: skip
