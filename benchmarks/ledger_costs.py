"""The cost of each operation of the ledger, in microseconds of mongod's CPU time.

A part of `ledger.py`; `scaling.py` calculates with the result. Operations that take several
documents are measured with one and with many, which gives a cost per command and one per document.
CPU time depends little on other load of the machine.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from modelless_sampler import GROUP, OWNER, fresh_run, make_turn, task_ledger

from agentrl.databases import runs, services
from agentrl.databases.changes import Changes, updated
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DBRecordData, Record, RecordStatus, Split
from agentrl.databases.records import RecordLedger, new_record
from agentrl.databases.row_ledger import count_waiting
from agentrl.databases.tasks import open_groups
from agentrl.rollout.groups.row_building import build_row

MANY = 32  # documents in a large bulk write
STREAMS = 20
LONG_LEASE_S = 3600.0

Costs = dict[str, dict[str, float]]


class ServerClock:
    """The processor time that mongod has used."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")

    def seconds(self) -> float:
        fields = self._stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / self._ticks_per_s

    async def microseconds(
        self, times: int, operation: Callable[[int], Awaitable[object]]
    ) -> float:
        """Microseconds of one call of `operation`, the mean over calls with numbers 0, 1, ..."""
        began = self.seconds()
        for number in range(times):
            await operation(number)
        return (self.seconds() - began) / times * 1e6


def per_document(one: float, many: float, documents: int) -> dict[str, float]:
    """The line through the costs of a command with one and with many documents."""
    slope = max(0.0, (many - one) / (documents - 1))
    return {"command": round(max(0.0, one - slope), 1), "document": round(slope, 2)}


async def measure_costs(url: str, pid: int, groups: int) -> Costs:
    """All operations, on a run with so many groups that are all open."""
    clock = ServerClock(pid)
    async with fresh_run(url, groups) as database:
        costs = await _work_costs(database, clock, groups)
        costs.update(await _look_costs(database, clock, groups))
        costs["change stream"] = await _stream_cost(database, clock)
    for name, cost in costs.items():
        print(f"cost of {name}: {cost} us", flush=True)
    return costs


async def _work_costs(database: RunDatabase, clock: ServerClock, groups: int) -> Costs:
    """Costs of the samplers' operations on their records, in order."""
    tasks, records = task_ledger(database, LONG_LEASE_S), RecordLedger(database, LONG_LEASE_S)
    slots = groups * GROUP
    claims = []

    async def claim(number: int) -> None:
        claims.extend(await tasks.claim(Split.TRAIN))

    costs: Costs = {"claim": {"command": round(await clock.microseconds(slots, claim), 1)}}
    made = [new_record(claim, OWNER, "mcp") for claim in claims]
    half = slots // 2  # written alone; the others in bulk
    lots = [made[first : first + MANY] for first in range(half, slots, MANY)]

    async def each(one: Callable[[Record], Awaitable[object]]) -> dict[str, float]:
        async def together(number: int) -> None:
            await asyncio.gather(*(one(record) for record in lots[number]))

        alone = await clock.microseconds(half, lambda number: one(made[number]))
        return per_document(alone, await clock.microseconds(len(lots), together), MANY)

    rows: dict[str, DBRecordData] = {}
    costs["records insert"] = await each(lambda x: records.start([x], time.monotonic()))
    costs["turns insert"] = await each(lambda x: records.add_turn(make_turn(x.id, 0)))
    held = [record.id for record in made]
    few = await clock.microseconds(200, lambda number: tasks.heartbeat(held[:GROUP]))
    many = await clock.microseconds(200, lambda number: tasks.heartbeat(held[: MANY * GROUP]))
    costs["heartbeat"] = per_document(few, many, MANY)  # a document: a group
    few_turns = await clock.microseconds(200, lambda number: records.turns(held[:1]))
    many_turns = await clock.microseconds(200, lambda number: records.turns(held[:MANY]))
    costs["turns read"] = per_document(few_turns, many_turns, MANY)
    reaped = await clock.microseconds(100, lambda _: tasks.reap())
    costs["reap"] = {"document": round(reaped / groups, 2)}
    sampled = {"status": RecordStatus.SAMPLED, "turns": [""] * 4}
    scored = {"status": RecordStatus.SCORED, "score": 1.0, "turns": [""] * 4}
    costs["records update"] = await each(lambda x: records.sampled(x.model_copy(update=sampled)))
    for record in made:
        await records.finish(record.model_copy(update=scored))
    for record in made:
        turn = make_turn(record.id, 0)
        rows[record.id] = build_row(record.model_copy(update=scored), [turn], 1.0, 1.0, 0)
    costs["rows insert"] = await each(lambda x: records.add_rows([rows[x.id]]))
    finished = []

    async def complete(number: int) -> None:
        task = await tasks.complete(claims[number], 1.0)
        if task is not None:
            finished.append(task)

    costs["complete"] = {"command": round(await clock.microseconds(slots, complete), 1)}
    finalised = await clock.microseconds(len(finished), lambda x: tasks.finalised(finished[x]))
    costs["finalised"] = {"command": round(finalised, 1)}
    return costs


async def _look_costs(database: RunDatabase, clock: ServerClock, groups: int) -> Costs:
    """Costs of the samplers' queries for the admission limit."""
    await services.register_urls(database, ["http://127.0.0.1:30000"])
    await runs.RunLease(database, "trainer", "here", LONG_LEASE_S).acquire(64)
    point = await clock.microseconds(300, lambda _: runs.load_run(database))
    waiting = await clock.microseconds(100, lambda _: count_waiting(database))
    await database.tasks.update_many({}, {"$set": {"status": "running"}})
    begun = await clock.microseconds(100, lambda _: open_groups(database, Split.TRAIN))
    return {
        "point read": {"command": round(point, 1)},
        "count of rows": {"document": round(max(0.0, waiting - point) / (groups * GROUP), 3)},
        "count of groups": {"document": round(max(0.0, begun - point) / groups, 3)},
    }


async def _stream_cost(database: RunDatabase, clock: ServerClock) -> dict[str, float]:
    """Cost of a written document for each open change stream that does not match it."""
    turns = [
        [make_turn(f"watched-{lot}-{n}", 0).to_mongo() for n in range(MANY)] for lot in range(60)
    ]

    async def write(lot: int) -> None:
        await database.turns.insert_many(turns[lot], ordered=False)

    alone = await clock.microseconds(30, write)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(STREAMS):
            await stack.enter_async_context(Changes(database, updated(database.runs, "step")))
        watched = await clock.microseconds(30, lambda lot: write(30 + lot))
    return {"document": round(max(0.0, watched - alone) / MANY / STREAMS, 2)}
