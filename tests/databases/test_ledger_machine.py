"""The ledger of sampling against a model of it in memory: any order of events, on a real mongod.

Several samplers claim, begin, sample, score, put off, fail, hand back, quarantine, release, keep
their leases, fork, reap and finalise. Any of them is killed between any two writes of its, stops
for longer than its leases, or has the answer of a write lost. After every event the database is as
the model says; at the end whoever is left finishes everything, and each slot was ended once and
each scored Record is one row.

Time is the machine's: it passes by moving the ends of all leases in the database back, and the
samplers' own clocks on.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)
from ledger_model import (
    LEASE_S,
    MAX_ATTEMPTS,
    MAX_SCORINGS,
    Attempt,
    Clock,
    GroupModel,
    Sampler,
    SlotModel,
    turn_of,
)
from machines import run_machine

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    RecordStatus,
    SlotStatus,
    Split,
    Task,
    TaskStatus,
)
from agentrl.databases.feeder import make_tasks
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.quarantine import Quarantined, release
from agentrl.databases.reaping import FREE_LOSSES
from agentrl.databases.records import new_record
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import UNBOUNDED, Claim, LeaseLost, task_of
from agentrl.databases.transitions import TERMINAL_SLOTS

T = TypeVar("T")

GROUPS, ATTEMPTS, SAMPLERS = 2, 2, 2
PAUSE_S = 0.5 * LEASE_S  # before a scoring is tried again
_ENDS = {
    RecordStatus.SCORED: SlotStatus.COMPLETED,
    RecordStatus.FAILED: SlotStatus.FAILED,
    RecordStatus.QUARANTINED: SlotStatus.QUARANTINED,
}  # of a slot, by that of its Record


@dataclass(frozen=True)
class Choice:
    """Which of those that are there: a draw that does not know how many they will be."""

    number: int

    def __call__(self, things: Sequence[T]) -> T:
        return things[self.number % len(things)]


CHOICES = st.integers(0, SAMPLERS * ATTEMPTS - 1).map(Choice)


class LedgerMachine(RuleBasedStateMachine):
    """Events of the ledger; `model` and `records` are what it must be after them."""

    def __init__(self, run: asyncio.Runner, database: RunDatabase) -> None:
        super().__init__()
        self._run = run
        self.database = database
        self.now = Clock()
        lines = [TaskLine(id=f"line{i}", query="?") for i in range(GROUPS)]
        tasks = make_tasks(lines, Split.TRAIN, 0, ATTEMPTS, range(GROUPS))
        self.model = {
            task.id: GroupModel(task.id, task.group_order, [SlotModel() for _ in task.slots])
            for task in tasks
        }
        self.records: dict[str, RecordStatus] = {}
        self.scores: dict[str, float | None] = {}
        # Records of leases that ran out, whose reaper was killed before it could close them
        self.unclosed: set[str] = set()
        self.agrees = False
        self.samplers: list[Sampler] = []
        self._names = iter(range(10**6))

        async def begin() -> None:
            collections = (database.tasks, database.records, database.turns, database.rows)
            for collection in collections:
                await collection.delete_many({})
            self.samplers = [self._sampler() for _ in range(SAMPLERS)]
            await self.samplers[0].ledger.add(tasks)

        self.do(begin())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._run.run(work)

    def _sampler(self) -> Sampler:
        return Sampler(self.database, f"s{next(self._names)}", self.now)

    def _slot(self, claim: Claim) -> SlotModel:
        return self.model[claim.task.id].slots[claim.rollout]

    def _attempts(self, stage: str) -> list[tuple[Sampler, Attempt]]:
        """The samplers' attempts that are claimed, begun or ended."""
        return [
            (sampler, attempt)
            for sampler in self.samplers
            for attempt in sampler.attempts.values()
            if attempt.stage == stage
        ]

    def _kill(self, sampler: Sampler) -> None:
        """It is gone with all it knows; another process takes its place."""
        self.samplers[self.samplers.index(sampler)] = self._sampler()

    @contextmanager
    def _killed_after(self, sampler: Sampler, writes: int | None) -> Iterator[list[bool]]:
        """What it does in the block ends after so many writes. Yields [whether it was killed]."""
        with sampler.database.killed_after(writes) as killed:
            yield killed
        if killed[0]:
            self._kill(sampler)

    # -- the way of an attempt

    @rule(
        number=st.integers(0, SAMPLERS - 1),
        count=st.integers(1, ATTEMPTS + 1),
        admission_limit=st.sampled_from([None, 0, 1, UNBOUNDED, UNBOUNDED]),
        answered=st.integers(0, 4).map(bool),
    )
    def claim(self, number: int, count: int, admission_limit: int | None, answered: bool) -> None:
        """`answered`: if not, the sampler never learns what it was given."""
        sampler = self.samplers[number]
        claims = self.do(
            sampler.ledger.claim(Split.TRAIN, count=count, admission_limit=admission_limit)
        )
        free = [
            group
            for group in self.model.values()
            if any(slot.status == SlotStatus.PENDING for slot in group.slots)
        ]
        admitted = [
            group
            for group in free
            if admission_limit is not None and group.group_order <= admission_limit
        ]
        begun = [group for group in free if group.status == TaskStatus.RUNNING]
        given = [(c.task.id, c.rollout, c.attempt, c.failures) for c in claims]
        if not (admitted or begun):
            assert given == []
            return
        group = (admitted or begun)[0]
        pending = [
            (rollout, slot)
            for rollout, slot in enumerate(group.slots)
            if slot.status == SlotStatus.PENDING
        ][:count]
        assert given == [
            (group.id, rollout, slot.attempt, slot.failures) for rollout, slot in pending
        ]
        group.status = TaskStatus.RUNNING
        for (_, slot), claim in zip(pending, claims, strict=True):
            slot.status, slot.owner, slot.record = SlotStatus.LEASED, sampler.name, claim.record_id
            slot.until = self.now() + LEASE_S
            if answered:
                record = new_record(claim, sampler.name, "mcp")
                sampler.attempts[claim.record_id] = Attempt(claim, record)
                sampler.records.leases.begin([claim.record_id], self.now())

    @precondition(lambda self: self._attempts("claimed"))
    @rule(choose=CHOICES)
    def begin(self, choose: Choice) -> None:
        """Store the attempt's Record."""
        self._begin(*choose(self._attempts("claimed")))

    def _begin(self, sampler: Sampler, attempt: Attempt) -> None:
        if not self._may_write(sampler, attempt):
            return
        asked = self._slot(attempt.claim).until - LEASE_S
        self.do(sampler.records.start([attempt.record], asked))
        attempt.begun = True
        self.records[attempt.record.id] = RecordStatus.SAMPLING

    @precondition(lambda self: self._attempts("begun"))
    @rule(choose=CHOICES, works=st.booleans())
    def sample(self, choose: Choice, works: bool) -> None:
        """Store its turn, and the Record as sampled, or with the error that ended it."""
        self._sample(*choose(self._attempts("begun")), works)

    def _sample(self, sampler: Sampler, attempt: Attempt, works: bool) -> None:
        if not self._may_write(sampler, attempt):
            return
        turn = turn_of(attempt.record)
        end = (
            {"status": RecordStatus.SAMPLED} if works
            else {"status": RecordStatus.FAILED, "error": "it broke"}
        )  # fmt: skip
        attempt.record = attempt.record.model_copy(update={**end, "turns": [turn.id]})

        async def write() -> None:
            await sampler.records.add_turn(turn)
            store = sampler.records.sampled if works else sampler.records.finish
            await store(attempt.record)

        self.do(write())
        self.records[attempt.record.id] = RecordStatus(attempt.record.status)

    @precondition(lambda self: self._attempts("sampled"))
    @rule(choose=CHOICES, score=st.sampled_from([0.0, 1.0, None]), counts=st.booleans())
    def score(self, choose: Choice, score: float | None, counts: bool) -> None:
        """Store the Record with its score; or its scorer fails (None), which `counts` or not."""
        self._score(*choose(self._attempts("sampled")), score, counts)

    def _score(
        self, sampler: Sampler, attempt: Attempt, score: float | None, counts: bool = True
    ) -> None:
        claim, slot = attempt.claim, self._slot(attempt.claim)
        assert sampler.scorings.limit.spent(claim.scoring_failures) == (
            claim.scoring_failures >= MAX_SCORINGS
        )
        quarantined = sampler.scorings.limit.spent(claim.scoring_failures) or (
            score is None and counts and sampler.scorings.limit.last_try(claim.scoring_failures)
        )
        if score is None and not quarantined:
            del sampler.attempts[claim.record_id]
            if (slot.owner, slot.record, slot.scorings) != (
                sampler.name, claim.record_id, claim.scorings,
            ):  # fmt: skip
                with pytest.raises(LeaseLost):
                    self.do(sampler.scorings.put_off(claim, "no score", counts=counts))
                return
            self.do(sampler.scorings.put_off(claim, "no score", counts=counts))
            slot.leave(
                SlotStatus.SAMPLED,
                scorings=slot.scorings + 1,
                scoring_failures=slot.scoring_failures + counts,
                not_before=self.now() + PAUSE_S,
            )
            return
        if not self._may_write(sampler, attempt):
            return
        end = (
            {"status": RecordStatus.QUARANTINED, "error": "no score"} if quarantined
            else {"status": RecordStatus.SCORED, "score": score}
        )  # fmt: skip
        attempt.record = attempt.record.model_copy(update=end)
        self.do(sampler.records.finish(attempt.record))
        self.records[attempt.record.id] = RecordStatus(attempt.record.status)
        self.scores[attempt.record.id] = attempt.record.score

    @rule(number=st.integers(0, SAMPLERS - 1), answered=st.integers(0, 4).map(bool))
    def claim_scoring(self, number: int, answered: bool) -> None:
        """Of a trajectory that has been put off, handed back, or left by a sampler that died."""
        sampler = self.samplers[number]
        claim = self.do(sampler.scorings.claim())
        due = [
            slot
            for group in self.model.values()
            for slot in group.slots
            if slot.status == SlotStatus.SAMPLED and slot.not_before <= self.now()
        ]
        if claim is None:
            assert not due
            return
        slot = self._slot(claim)
        assert slot in due and slot.record == claim.record_id
        assert (claim.attempt, claim.failures) == (slot.attempt, slot.failures)
        assert (claim.scorings, claim.scoring_failures) == (slot.scorings, slot.scoring_failures)
        slot.status, slot.owner, slot.until = SlotStatus.LEASED, sampler.name, self.now() + LEASE_S
        if answered:
            record = self.do(sampler.records.resume(claim.record_id, self.now()))
            assert record.status == RecordStatus.SAMPLED and record.turns
            sampler.attempts[claim.record_id] = Attempt(claim, record, begun=True)

    @precondition(lambda self: self._attempts("ended"))
    @rule(choose=CHOICES, retry=st.booleans(), tell_twice=st.booleans(), forks=st.integers(0, 2))
    def end_slot(self, choose: Choice, retry: bool, tell_twice: bool, forks: int) -> None:
        """Complete the slot of a scored Record, fail that of a failed one, quarantine that of a
        quarantined one. The lease may be gone.

        `tell_twice`: the answer of the first time was lost. `forks`: of a rollout that is completed
        and no fork.
        """
        self._end_slot(*choose(self._attempts("ended")), retry, tell_twice, forks)

    def _end_slot(
        self, sampler: Sampler, attempt: Attempt, retry: bool, tell_twice: bool, forks: int = 0
    ) -> None:
        claim, score = attempt.claim, attempt.record.score
        turns = [0] * (forks if attempt.record.fork is None else 0)
        status = RecordStatus(attempt.record.status)
        slot, group = self._slot(claim), self.model[claim.task.id]
        del sampler.attempts[attempt.record.id]

        def end() -> Task | None:
            if status == RecordStatus.SCORED:
                return self.do(sampler.ledger.complete(claim, score, turns))
            if status == RecordStatus.QUARANTINED:
                return self.do(sampler.scorings.quarantine(claim, "no score"))
            return self.do(sampler.ledger.fail(claim, "it broke", retry=retry))

        failed = status == RecordStatus.FAILED
        again = failed and retry and claim.failures + 1 < MAX_ATTEMPTS
        wanted = SlotStatus.PENDING if again else _ENDS[status]
        held = (slot.owner, slot.record, slot.scorings)
        if held != (sampler.name, claim.record_id, claim.scorings):
            # It is gone; but a reaper may have ended it just as we would have.
            if wanted in TERMINAL_SLOTS and (slot.status, slot.record) == (wanted, claim.record_id):
                task = end()
                assert (task is not None) == (group.finaliser == sampler.name)
                if task is not None:
                    sampler.finishing.append(task)
                return
            with pytest.raises(LeaseLost):
                end()
            return
        task = end()
        if not failed:
            slot.leave(wanted, score=score)
            if status == RecordStatus.SCORED:
                group.slots += [SlotModel(fork=claim.record_id) for _ in turns]
        else:
            slot.leave(wanted, failures=slot.failures + 1, attempt=slot.attempt + again)
        assert (task is not None) == group.finished
        if task is not None:
            group.status, group.finaliser = TaskStatus.FINALISING, sampler.name
            group.until = self.now() + LEASE_S
            sampler.finishing.append(task)
        if tell_twice and again:
            with pytest.raises(LeaseLost):
                end()
        elif tell_twice:
            assert (end() is not None) == group.finished

    @precondition(lambda self: self._attempts("begun"))
    @rule(choose=CHOICES)
    def hand_back(self, choose: Choice) -> None:
        """The sampler stops in order with what it has begun."""
        sampler, attempt = choose(self._attempts("begun"))
        if not self._may_write(sampler, attempt):
            return
        ended = attempt.record.model_copy(
            update={"status": RecordStatus.FAILED, "error": "handed back"}
        )
        self.do(sampler.records.finish(ended))
        self.do(sampler.ledger.release(attempt.claim))
        self.records[ended.id] = RecordStatus.FAILED
        slot = self._slot(attempt.claim)
        slot.leave(SlotStatus.PENDING, attempt=slot.attempt + 1)
        del sampler.attempts[ended.id]

    @precondition(lambda self: self._attempts("sampled"))
    @rule(choose=CHOICES)
    def hand_back_scoring(self, choose: Choice) -> None:
        """The sampler stops in order with what it has sampled."""
        sampler, attempt = choose(self._attempts("sampled"))
        if not self._may_write(sampler, attempt):
            return
        self.do(sampler.scorings.hand_back(attempt.claim))
        slot = self._slot(attempt.claim)
        slot.leave(SlotStatus.SAMPLED, scorings=slot.scorings + 1, not_before=self.now())
        del sampler.attempts[attempt.record.id]

    @precondition(lambda self: any(sampler.attempts for sampler in self.samplers))
    @rule(number=st.integers(0, SAMPLERS - 1), score=st.sampled_from([1.0, None]))
    def go_on(self, number: int, score: float | None) -> None:
        """One sampler takes all it has a step further, so that groups end often enough."""
        sampler = self.samplers[number]
        for record, stage in [(one, each.stage) for one, each in sampler.attempts.items()]:
            if (attempt := sampler.attempts.get(record)) is None:
                continue  # lost, as it found out on the way
            if stage == "claimed":
                self._begin(sampler, attempt)
            elif stage == "begun":
                self._sample(sampler, attempt, works=score is not None)
            elif stage == "sampled":
                self._score(sampler, attempt, score)
            else:
                self._end_slot(sampler, attempt, retry=False, tell_twice=False)

    def _may_write(self, sampler: Sampler, attempt: Attempt) -> bool:
        """Whether its lease is the sampler's, which asks the server if that is not sure."""
        if not sampler.records.leases.holds(attempt.record.id):
            self._extend(sampler)
        return attempt.record.id in sampler.attempts

    # -- leases

    @rule(number=st.integers(0, SAMPLERS - 1))
    def heartbeat(self, number: int) -> None:
        self._extend(self.samplers[number])

    def _extend(self, sampler: Sampler) -> None:
        named = dict(sampler.attempts)
        held = self.do(sampler.heartbeat(self.now()))
        expected = set()
        for record, attempt in named.items():
            slot = self._slot(attempt.claim)
            if slot.status == SlotStatus.LEASED and (slot.owner, slot.record) == (
                sampler.name, record,
            ):  # fmt: skip
                slot.until = self.now() + LEASE_S
                expected.add(record)
        assert held == expected

    @rule(seconds=st.sampled_from([0.4 * LEASE_S, 1.1 * LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now.seconds += seconds

        async def pass_time() -> None:
            def earlier(time: str) -> Any:
                return {"$cond": [{"$eq": [time, None]}, None,
                                  {"$subtract": [time, int(seconds * 1000)]}]}  # fmt: skip

            times = {name: earlier(f"$$slot.{name}") for name in ("lease_expires", "not_before")}
            slot = {"$mergeObjects": ["$$slot", times]}
            slots = {"$map": {"input": "$slots", "as": "slot", "in": slot}}
            await self.database.tasks.update_many(
                {}, [{"$set": {"slots": slots, "score_at": earlier("$score_at")}}]
            )
            await self.database.tasks.update_many(
                {"finalisation": {"$ne": None}},
                [{"$set": {
                    "finalisation.lease_expires": earlier("$finalisation.lease_expires")
                }}],
            )  # fmt: skip

        self.do(pass_time())

    @rule(number=st.integers(0, SAMPLERS - 1))
    def kill(self, number: int) -> None:
        self._kill(self.samplers[number])

    @rule(number=st.integers(0, SAMPLERS - 1), writes=st.sampled_from([None, None, 0, 1, 2, 3]))
    def reap(self, number: int, writes: int | None) -> None:
        sampler = self.samplers[number]
        with self._killed_after(sampler, writes) as killed:
            self.do(sampler.ledger.reap())
        for group in self.model.values():
            expired = [
                slot
                for slot in group.slots
                if slot.status == SlotStatus.LEASED and slot.until < self.now()
            ]
            if expired and not (killed[0] and self._still_leased(group, expired)):
                self._take_away(sampler, group, expired, killed[0])

    def _still_leased(self, group: GroupModel, expired: list[SlotModel]) -> bool:
        """Whether a reaper that was killed had not come to this group."""
        slots = self.do(self._stored())[group.id].slots
        return any(
            slot.status == SlotStatus.LEASED and slot.record == expired[0].record for slot in slots
        )

    def _take_away(
        self, reaper: Sampler, group: GroupModel, expired: list[SlotModel], killed: bool
    ) -> None:
        for slot in expired:
            assert slot.record is not None
            status = self.records.get(slot.record)
            if status is None:
                slot.leave(SlotStatus.PENDING, attempt=slot.attempt + 1)
            elif status == RecordStatus.SCORED:
                slot.leave(SlotStatus.COMPLETED, score=self.scores[slot.record])
            elif status == RecordStatus.QUARANTINED:
                slot.leave(SlotStatus.QUARANTINED)
            elif status == RecordStatus.SAMPLED:
                slot.leave(
                    SlotStatus.SAMPLED,
                    scorings=slot.scorings + 1,
                    scoring_failures=slot.scoring_failures + 1,
                    not_before=self.now(),
                )
            else:
                counts = slot.losses >= FREE_LOSSES
                spent = counts and slot.failures + 1 >= MAX_ATTEMPTS
                slot.leave(
                    SlotStatus.FAILED if spent else SlotStatus.PENDING,
                    losses=slot.losses + 1,
                    failures=slot.failures + counts,
                    attempt=slot.attempt + (not spent),
                )
                self.records[slot.record] = RecordStatus.FAILED
                if status == RecordStatus.SAMPLING and killed:
                    self.unclosed.add(slot.record)
        if group.finished:
            group.status, group.finaliser = TaskStatus.FINALISING, None
            group.until = self.now()

    # -- the end of a group

    @precondition(lambda self: any(sampler.finishing for sampler in self.samplers))
    @rule(choose=CHOICES, writes=st.sampled_from([None, 0, 1, 2, 3]))
    def finalise(self, choose: Choice, writes: int | None) -> None:
        """By whoever was given it, which may be long ago. It is killed after so many writes."""
        sampler = choose([one for one in self.samplers if one.finishing])
        task = sampler.finishing.pop()
        group = self.model[task.id]
        lost = group.status == TaskStatus.FINALISING and group.finaliser != sampler.name
        refused = False
        with self._killed_after(sampler, writes) as killed:
            try:
                self.do(sampler.finaliser.finalise(task))
            except LeaseLost:
                refused = True
        if not killed[0]:
            assert refused == lost
            if not lost:
                self._finalised(group)

    def _finalised(self, group: GroupModel) -> None:
        group.status, group.finaliser = TaskStatus.COMPLETED, None
        for record in group.completed_records:
            assert record is not None
            self.records[record] = RecordStatus.READY
        self.unclosed = {record for record in self.unclosed if task_of(record) != group.id}

    @rule()
    def release(self) -> None:
        """A person has what is in quarantine scored again; not while its group is finalised."""
        released = 0
        for group in self.model.values():
            for slot in group.slots:
                if slot.status == SlotStatus.QUARANTINED and group.status != TaskStatus.FINALISING:
                    assert slot.record is not None
                    slot.status, slot.not_before = SlotStatus.SAMPLED, self.now()
                    slot.scorings, slot.scoring_failures = slot.scorings + 1, 0
                    self.records[slot.record] = RecordStatus.SAMPLED
                    group.status = TaskStatus.RUNNING
                    released += 1
        assert self.do(release(self.database)) == Quarantined(records=released)

    @rule(number=st.integers(0, SAMPLERS - 1))
    def take_over(self, number: int) -> None:
        sampler = self.samplers[number]
        task = self.do(sampler.ledger.claim_finalisation())
        orphans = {
            group.id: group
            for group in self.model.values()
            if group.status == TaskStatus.FINALISING and group.until <= self.now()
        }
        assert (task is not None) == bool(orphans)
        if task is not None:
            taken = orphans[task.id]
            assert taken.until == min(group.until for group in orphans.values())
            taken.finaliser, taken.until = sampler.name, self.now() + LEASE_S
            sampler.finishing.append(task)

    # -- what must hold

    async def _stored(self) -> dict[str, Task]:
        return {task["_id"]: Task.from_mongo(task) async for task in self.database.tasks.find()}

    @invariant()
    def the_database_is_as_the_model_says(self) -> None:
        self.agrees = False

        async def read() -> tuple[dict[str, Task], dict[str, str], list[str]]:
            records = {r["_id"]: r["status"] async for r in self.database.records.find()}
            return (
                await self._stored(),
                records,
                [r["_id"] async for r in self.database.rows.find()],
            )

        tasks, records, rows = self.do(read())
        made: set[str | None] = set()
        for group in self.model.values():
            task = tasks[group.id]
            assert task.status == group.status
            assert task.pending == sum(s.status == SlotStatus.PENDING for s in group.slots)
            to_score = any(slot.status == SlotStatus.SAMPLED for slot in group.slots)
            assert (task.score_at is not None) == to_score
            assert (task.finalisation and task.finalisation.owner) == group.finaliser
            for slot, stored in zip(group.slots, task.slots, strict=True):
                assert (stored.status, stored.owner) == (slot.status, slot.owner)
                assert (stored.attempt, stored.failures) == (slot.attempt, slot.failures)
                assert stored.losses == slot.losses
                counted = (stored.scorings, stored.scoring_failures)
                assert counted == (slot.scorings, slot.scoring_failures)
                assert (stored.record, stored.score) == (slot.record, slot.score)
                assert (stored.fork and stored.fork.record) == slot.fork
                gone = stored.status in (SlotStatus.FAILED, SlotStatus.QUARANTINED)
                assert gone <= (stored.error is not None)
            of_group = {row for row in rows if task_of(row) == group.id}
            assert of_group <= group.completed_records
            if group.status == TaskStatus.COMPLETED:
                assert of_group == group.completed_records
            elif group.status != TaskStatus.FINALISING:
                # of Records that were ready before another was released from quarantine
                assert of_group == {
                    record
                    for record in group.completed_records
                    if record and self.records[record] == RecordStatus.READY
                }
            made |= of_group
        assert set(rows) == made and len(rows) == len(made)
        assert records.keys() == self.records.keys()
        for record, status in self.records.items():
            finalising = self.model[task_of(record)].status == TaskStatus.FINALISING
            possible = {status}
            if record in self.unclosed:
                possible.add(RecordStatus.SAMPLING)
            if finalising and status == RecordStatus.SCORED:
                possible.add(RecordStatus.READY)
            assert records[record] in possible
        self.agrees = True

    def teardown(self) -> None:
        """All are killed at once; one sampler that starts then finishes whatever there is."""
        if not self.agrees:
            return  # the test has failed already
        self.samplers = [self._sampler()]
        self.time_passes(1.1 * LEASE_S)
        rounds = 0
        while not all(group.status == TaskStatus.COMPLETED for group in self.model.values()):
            rounds += 1
            most = GROUPS * ATTEMPTS * 3 * (MAX_ATTEMPTS + 1)  # with two forks of each
            assert rounds <= most, "there is work that nobody is given"
            self.time_passes(1.1 * LEASE_S)
            self.reap(0, None)
            self.take_over(0)
            self._work_off(self.samplers[0])
            self.the_database_is_as_the_model_says()
        ended = [slot for group in self.model.values() for slot in group.slots]
        assert all(slot.status in TERMINAL_SLOTS for slot in ended)
        unsettled = {RecordStatus.SAMPLING, RecordStatus.SAMPLED, RecordStatus.SCORED}
        assert unsettled.isdisjoint(self.records.values())
        ready = {r for r, status in self.records.items() if status == RecordStatus.READY}
        assert ready == {slot.record for slot in ended if slot.status == SlotStatus.COMPLETED}

    def _work_off(self, sampler: Sampler) -> None:
        """Sample, score and finalise as far as there is work."""
        self.claim(0, ATTEMPTS, UNBOUNDED, answered=True)
        self.claim_scoring(0, answered=True)
        while sampler.attempts:
            self.go_on(0, 1.0)
        while sampler.finishing:
            self.finalise(Choice(0), None)


@pytest.mark.hypothesis
@pytest.mark.timeout(600)  # of a failure, the smallest example is looked for
def test_the_ledger_is_as_its_model_says_whatever_happens_in_whatever_order(
    mongod: EmbeddedMongod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.databases.scorings.pause_after", lambda scorings: PAUSE_S)
    run_machine(LedgerMachine, mongod, steps=50)
