"""A Record whose insert was held up on its way until its slot had gone to another."""

import asyncio
from pathlib import Path

from agentrl.configs import parse_config
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, RecordStatus, Split
from agentrl.databases.feeder import make_tasks
from agentrl.databases.finalisations import Finalisations
from agentrl.databases.records import RecordLedger
from agentrl.databases.scorings import ScoringLedger
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import Claim, TaskLedger
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.groups.finalise import Finaliser
from agentrl.rollout.scheduling.attempt import Attempt
from agentrl.rollout.scheduling.breakers import Breakers
from agentrl.rollout.scorers import Scorers

DEMO_MODEL = Path(__file__).resolve().parents[2] / "assets" / "demo" / "model"


async def unasked(claim: Claim, record: Record) -> AsyncSampler:
    raise AssertionError("nothing is sampled for a lost slot")


async def test_a_record_stored_after_its_slot_was_lost_is_closed_by_its_attempt(
    database: RunDatabase,
) -> None:
    config = parse_config(["--model_name_or_path", str(DEMO_MODEL)])
    ledger = TaskLedger(database, "late", lease_seconds=60, max_failures=2)
    line = TaskLine(id="a", query="?")
    await ledger.add(make_tasks([line], Split.TRAIN, 0, 1, [0]))
    (claim,) = await ledger.claim(Split.TRAIN)
    record = Record(
        id=claim.record_id, task=claim.task.id, task_id="a", rollout=0, attempt=0,
        split=Split.TRAIN,
        epoch=0, owner="late", query="?",
    )  # fmt: skip
    arrives = asyncio.Event()

    async def start() -> None:
        await arrives.wait()
        await database.records.insert_one(record.to_mongo())

    records = RecordLedger(database, 60)
    attempt = Attempt(
        claim=claim,
        record=record,
        make_sampler=unasked,
        started=asyncio.create_task(start()),
        ledger=ledger,
        scorings=ScoringLedger(database, ledger, max_failures=2),
        records=records,
        finaliser=Finaliser(
            ledger,
            Finalisations(database, "late", 60, max_failures=2),
            records,
            Scorers.of_run(config, records),
            config.reward,
            config.temperature,
            config.sampling.record_timeout,
        ),
        breakers=Breakers(lambda agent: frozenset(), lambda: None),
        config=config.sampling,
    )
    attempt.lose()
    running = asyncio.create_task(attempt.run())
    arrives.set()
    await running
    stored = await database.records.find_one({"_id": record.id})
    assert stored is not None and stored["status"] == RecordStatus.FAILED
    assert "lost" in stored["error"]
