"""The ledger of training against a model in memory: any order of events, on a real mongod.

A trainer leases rows, trains and commits steps, and saves checkpoints. It is killed between any two
writes of it, or stopped and replaced; then another goes on from the newest checkpoint, while the
old one may wake up and lease and commit what it still thinks is its. At the end of the lineage each
row was trained as often as asked.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from machines import run_machine
from mortal import MortalDatabase

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DBRecordData, RowStatus
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.policies import Lineage
from agentrl.databases.quarantine import Quarantined, release
from agentrl.databases.row_ledger import RowLedger
from agentrl.databases.token_tree import TokenTree

T = TypeVar("T")

ROWS = 5
LINEAGE = Lineage({0: 0})
ANY_AGE = 10**6
KILLED_AFTER = st.sampled_from([None, None, 0, 1, 2, 3])  # writes


def make_row(seq: int) -> DBRecordData:
    return DBRecordData(
        id=f"r{seq}", task="t", group_order=seq, reward=1.0, n_train_tokens=1, cost=2.0,
        policy_versions=[0], temperature=1.0,
        tree=TokenTree.line(
            [seq, 7], mask=[0, 1], advantages=[0, 1], logprobs=[0, -1], versions=[-1, 0]
        ),
        prefix_hash="p",
    )  # fmt: skip


@dataclass
class Trainer:
    """A trainer process: its view of the ledger, its weights' step, and what it holds for the
    next."""

    database: MortalDatabase
    fence: int
    max_trained_count: int
    step: int
    leased: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = RowLedger(
            self.database, f"trainer-{self.fence}", self.fence, self.max_trained_count
        )

    async def lease(self, count: int) -> None:
        headers = await self.ledger.lease(
            self.step + 1, count, LINEAGE, ANY_AGE, waive_interval=True
        )
        self.leased = [header.id for header in headers]

    async def commit(self) -> int:
        """The optimizer step is done: of all rows that were leased for it."""
        self.step += 1
        rows, self.leased = self.leased, []
        return await self.ledger.commit(self.step, rows)


class RowMachine(RuleBasedStateMachine):
    """Events of the ledger of training; `trained` is what the weights have seen of each row."""

    def __init__(self, run: asyncio.Runner, database: RunDatabase) -> None:
        super().__init__()
        self._run = run
        self.database = database
        self.agrees = False

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._run.run(work)

    @initialize(max_trained_count=st.integers(1, 2))
    def begin(self, max_trained_count: int) -> None:
        self.max_trained_count = max_trained_count
        self.trained: dict[str, list[int]] = {f"r{seq}": [] for seq in range(ROWS)}
        self.quarantined: set[str] = set()
        self.checkpoint = 0
        self.fence = 0
        self.replaced: list[Trainer] = []  # they do not know it yet

        async def fill() -> None:
            await self.database.rows.delete_many({})
            await self.database.rows.insert_many([make_row(seq).to_mongo() for seq in range(ROWS)])

        self.do(fill())
        self._start(None)

    def _start(self, writes: int | None) -> None:
        """A trainer takes the run and goes on from the newest checkpoint. If it is killed after so
        many writes, the next one does."""
        self.fence += 1
        mortal = MortalDatabase(self.database.client, self.database.database)
        self.trainer = Trainer(mortal, self.fence, self.max_trained_count, self.checkpoint)
        self.trained = {
            row: [step for step in steps if step <= self.checkpoint]
            for row, steps in self.trained.items()
        }
        with mortal.killed_after(writes) as killed:
            self.do(self.trainer.ledger.rewind(self.checkpoint))
        if killed[0]:
            self._start(None)

    @rule(count=st.integers(1, ROWS), writes=KILLED_AFTER)
    def lease(self, count: int, writes: int | None) -> None:
        with self.trainer.database.killed_after(writes) as killed:
            self.do(self.trainer.lease(count))
        if killed[0]:
            self._start(None)

    @precondition(lambda self: self.trainer.leased)
    @rule(writes=KILLED_AFTER, saves=st.booleans())
    def train(self, writes: int | None, saves: bool) -> None:
        """A step; its commit; then perhaps a checkpoint of it. Killed before the commit is over, it
        was in vain."""
        rows, step = self.trainer.leased, self.trainer.step + 1
        with self.trainer.database.killed_after(writes) as killed:
            assert self.do(self.trainer.commit()) == len(rows)
        for row in rows:
            self.trained[row].append(step)
        if killed[0]:
            self._start(None)
        elif saves:
            self.checkpoint = step

    @precondition(lambda self: self.trainer.leased)
    @rule()
    def quarantine(self) -> None:
        """A row of the step cannot be trained."""
        row = self.trainer.leased.pop(0)
        step = self.trainer.step + 1
        assert self.do(self.trainer.ledger.quarantine(step, {row: "no good"})) == 1
        self.quarantined.add(row)

    @rule()
    def release(self) -> None:
        """A person puts back what is in quarantine."""
        assert self.do(release(self.database)) == Quarantined(rows=len(self.quarantined))
        self.quarantined.clear()

    @rule(writes=KILLED_AFTER)
    def kill(self, writes: int | None) -> None:
        self._start(writes)

    @rule(writes=KILLED_AFTER)
    def replace(self, writes: int | None) -> None:
        """The trainer hangs until its lease on the run is over."""
        self.replaced.append(self.trainer)
        self._start(writes)

    @precondition(lambda self: self.replaced)
    @rule(number=st.integers(0, 9), count=st.integers(1, ROWS), leases=st.booleans())
    def wake(self, number: int, count: int, leases: bool) -> None:
        """A replaced trainer goes on where it was. Between a lease and the commit it makes sure of
        the run: after a lease it ends there. But it may have been stopped after that."""
        trainer = self.replaced.pop(number % len(self.replaced))
        if leases:
            self.do(trainer.ledger.lease(trainer.step + 1, count, LINEAGE, ANY_AGE))
        else:
            assert self.do(trainer.commit()) == 0

    async def _stored(self) -> dict[str, DBRecordData]:
        return {row["_id"]: DBRecordData.from_mongo(row) async for row in self.database.rows.find()}

    @invariant()
    def the_rows_know_what_the_weights_have_seen(self) -> None:
        self.agrees = False
        rows = self.do(self._stored())
        assert rows.keys() == self.trained.keys()
        for name, row in rows.items():
            assert [trained.step for trained in row.trained] == self.trained[name]
            assert len(row.trained) <= self.max_trained_count
            assert (row.status == RowStatus.QUARANTINED) == (name in self.quarantined)
            assert (row.status == RowStatus.TRAINED) == (len(row.trained) == self.max_trained_count)
        ours = {name for name, row in rows.items() if row.fence == self.trainer.fence}
        assert ours == set(self.trainer.leased) and all(
            rows[name].status == RowStatus.LEASED for name in ours
        )
        self.agrees = True

    def teardown(self) -> None:
        """The last trainer trains whatever there is."""
        if not self.agrees:
            return  # the test has failed already
        self.release()
        for _ in range(ROWS * self.max_trained_count):
            self.lease(2, None)
            if self.trainer.leased:
                self.train(None, False)
            self.the_rows_know_what_the_weights_have_seen()
        assert all(len(set(steps)) == self.max_trained_count for steps in self.trained.values())


@pytest.mark.hypothesis
@pytest.mark.timeout(600)  # of a failure, the smallest example is looked for
def test_rows_are_trained_as_often_as_asked_along_the_lineage_whatever_happens(
    mongod: EmbeddedMongod,
) -> None:
    run_machine(RowMachine, mongod, steps=30)
