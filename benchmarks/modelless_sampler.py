"""A sampler process without a model, which makes only the database operations.

A part of `ledger.py`: a run's database with tasks, and a stand-in for the scheduler that claims,
writes turns of fixed contents and scores without generating anything.
"""

import asyncio
import datetime
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

from agentrl.configs import RewardConfig
from agentrl.databases.arrays import pack_floats, pack_ints
from agentrl.databases.batches import Pace
from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.documents import (
    DispatchedSamplingTask,
    Record,
    RecordStatus,
    Split,
)
from agentrl.databases.feeder import make_tasks
from agentrl.databases.finalisations import Finalisations
from agentrl.databases.records import RecordLedger, new_record
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import Claim, TaskLedger
from agentrl.policy_version import VersionSpan
from agentrl.rollout.groups.finalise import Finaliser
from agentrl.rollout.llm.models import AgentModels
from agentrl.rollout.scorers import Scorers

GROUP, TURNS = 8, 4
PROMPT, OUTPUT = 256, 128  # tokens that a turn adds: of the tools and headers, and of the model
LEASE_S = 3.0
OWNER = "sampler"
MESSAGE, TEXT = "The bin holds: " + "bolt, " * 130, "I look into the next bin. " * 23


@asynccontextmanager
async def fresh_run(url: str, groups: int) -> AsyncIterator[RunDatabase]:
    """A run's database with `groups` groups that have not begun."""
    database = await connect(url, f"ledger-{uuid4().hex[:12]}")
    lines = [
        TaskLine(id=f"line-{seq}", query="How many bolts are in the bin?", answer="3")
        for seq in range(groups)
    ]
    tasks = make_tasks(lines, Split.TRAIN, epoch=0, rollouts=GROUP, order=range(groups))
    await task_ledger(database).add(tasks)
    try:
        yield database
    finally:
        await database.client.drop_database(database.name)
        await database.close()


def task_ledger(
    database: RunDatabase, lease_seconds: float = LEASE_S, pace: Pace | None = None
) -> TaskLedger:
    return TaskLedger(database, OWNER, lease_seconds, max_failures=3, pace=pace)


def make_turn(record: str, turn: int) -> DispatchedSamplingTask:
    return DispatchedSamplingTask(
        _id=f"{record}-{turn}",
        record_id=record,
        turn=turn,
        segment=0,
        service="http://127.0.0.1:30000",
        messages=[{"role": "tool", "content": MESSAGE}],
        prompt_delta_ids=pack_ints(range(PROMPT)),
        prompt_len=PROMPT + turn * (PROMPT + OUTPUT),
        output_ids=pack_ints(range(OUTPUT)),
        output_logprobs=pack_floats([-0.5] * OUTPUT),
        output_text=TEXT,
        finish_reason="stop",
        versions=[VersionSpan(version=0, start=0, end=OUTPUT)],
        generate_latency_s=1.0,
        created_at=datetime.datetime.now(datetime.UTC),
    )


@dataclass
class ModellessSampler:
    """Makes the database operations of a sampler process, without a model or tools."""

    database: RunDatabase
    workers: int

    def __post_init__(self) -> None:
        self.records = RecordLedger(self.database, LEASE_S)
        self.tasks = task_ledger(self.database, pace=self.records.pace)
        self.finaliser = Finaliser(
            self.tasks,
            Finalisations(self.database, OWNER, LEASE_S, max_failures=3),
            self.records,
            Scorers(AgentModels(), self.records),
            RewardConfig(),
            temperature=1.0,
            scoring_s=60.0,
        )
        self.working: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Work until no slot is free and nothing is in progress."""
        keeper = asyncio.create_task(self._keep_leases())
        while True:
            asked, free = time.monotonic(), self.workers - len(self.working)
            claims = await self.tasks.claim(Split.TRAIN, count=free) if free else []
            if claims:
                await self._begin(claims, asked)
                continue
            if not self.working:
                break
            done, _ = await asyncio.wait(self.working.values(), return_when=asyncio.FIRST_COMPLETED)
            for attempt in done:
                del self.working[attempt.get_name()]
                attempt.result()
        keeper.cancel()

    async def _begin(self, claims: list[Claim], asked: float) -> None:
        records = [new_record(claim, OWNER, "mcp") for claim in claims]
        await self.records.start(records, asked)
        for claim, record in zip(claims, records, strict=True):
            self.working[record.id] = asyncio.create_task(
                self._sample(claim, record), name=record.id
            )

    async def _sample(self, claim: Claim, record: Record) -> None:
        for number in range(TURNS):
            turn = make_turn(record.id, number)
            await self.records.add_turn(turn)
            record.turns.append(turn.id)
        await self.records.sampled(record.model_copy(update={"status": RecordStatus.SAMPLED}))
        record.score = float(claim.rollout % 2)
        await self.records.finish(record.model_copy(update={"status": RecordStatus.SCORED}))
        finished = await self.tasks.complete(claim, record.score)
        if finished is not None:
            await self.finaliser.finalise(finished)

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            ours, asked = set(self.working), time.monotonic()
            held = await self.tasks.heartbeat(ours)
            self.records.leases.answered(held, set(), asked)
            await self.tasks.reap()
            await self.tasks.claim_finalisation()
