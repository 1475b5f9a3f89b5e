"""The sampler process: as many trajectories at once as the services take, claimed as slots.

Evaluations come first, then attempts of groups already begun, then new groups as far as the
staleness bound admits them. What becomes of a slot is decided in `attempt.py`, what may be begun in
`work_view.py` and `admission.py`, when to look and to claim again in `claim_state.py`, how many at
once in `concurrency.py`.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agentrl.configs import Config, ConfigError
from agentrl.configs.run_flags import refuse_changed
from agentrl.databases.changes import Changes
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, RecordStatus, Run, Split, Task
from agentrl.databases.due import anything_due, finalisations_due, scorings_due
from agentrl.databases.finalisations import Finalisations
from agentrl.databases.owners import owners_at
from agentrl.databases.records import new_record
from agentrl.databases.scorings import ScoringLedger
from agentrl.databases.task_choice import TaskChoice
from agentrl.databases.tasks import Claim, LeaseLost, TaskLedger
from agentrl.inference.protocol import ServiceLoad
from agentrl.rollout.agents.process import Agents
from agentrl.rollout.groups.finalise import Finaliser
from agentrl.rollout.scheduling.attempt import Attempt
from agentrl.rollout.scheduling.attempt_counts import AttemptCounts
from agentrl.rollout.scheduling.breaker import Breaker
from agentrl.rollout.scheduling.breakers import Breakers
from agentrl.rollout.scheduling.claim_state import ClaimState, Work
from agentrl.rollout.scheduling.concurrency import Concurrency
from agentrl.rollout.scheduling.demand import Demand
from agentrl.rollout.scheduling.load_report import LoadReport
from agentrl.rollout.scheduling.work_view import Observer, WorkView
from agentrl.rollout.traces.tracing import Tracing

log = logging.getLogger(__name__)

LOOK_S = 1.0  # longest time between two looks at the ledger
LOADS_S = 1.0  # time between two looks at the services' loads
SCORINGS_S = 1.0  # shortest time between two looks for scorings and finalisations that are due
TAKEN_OVER = 16  # concurrent finalisations, so that their leases can be kept


@dataclass
class SamplingScheduler:
    """Runs samplers until the run is finished or `stop()` is called.

    `evaluation`: sample this evaluation only, and end with it. `endpoint`: URL of an API that is
    asked instead of services. `demand`: who asks for attempts, if they are begun for somebody. When
    such a process is stopped, it leaves its attempts to the next one in its place. `tracing`: where
    ended Records are traced. `counts`: what became of attempts.
    """

    database: RunDatabase
    config: Config
    agents: Agents
    owner: str
    evaluation: int | None = None
    endpoint: str | None = None
    demand: Demand | None = None
    tracing: Tracing | None = None
    counts: AttemptCounts = field(default_factory=AttemptCounts)
    _attempts: dict[str, tuple[Attempt, asyncio.Task[None]]] = field(default_factory=dict)
    _finalising: set[asyncio.Task[None]] = field(default_factory=set)  # groups left by others
    _wake: asyncio.Event = field(default_factory=asyncio.Event)  # there may be something to do
    _hurry: asyncio.Event = field(default_factory=asyncio.Event)  # second call of `stop`
    _mistakes: asyncio.Queue[ConfigError] = field(default_factory=asyncio.Queue)  # of flags
    _stopping: bool = False
    _state: ClaimState = field(default_factory=ClaimState)
    _load_report: LoadReport = field(default_factory=LoadReport)

    def __post_init__(self) -> None:
        sampling = self.config.sampling
        self._records = self.agents.shared.records
        self._ledger = TaskLedger(
            self.database,
            self.owner,
            sampling.lease_seconds,
            sampling.max_failures,
            self._records.pace,
        )
        self._scorings = ScoringLedger(self.database, self._ledger, sampling.max_scoring_failures)
        self._pool = self.agents.shared.pool
        self._breakers = Breakers(self.agents.with_the_tools_of, self._freed)
        self._finaliser = Finaliser(
            self._ledger,
            Finalisations(
                self.database,
                self.owner,
                sampling.lease_seconds,
                sampling.max_scoring_failures,
            ),
            self._records,
            self.agents.shared.scorers,
            self.config.reward,
            self.config.temperature,
            sampling.record_timeout,
            self._breakers.met_by_group,
            sampling.max_tokens,
        )
        self._observer = Observer(
            self.database,
            self.evaluation,
            sampling.enable_sampling,
            self.config.steps_ahead,
            self.config.group_size,
            self.endpoint,
        )
        self._concurrency = Concurrency(
            sampling.max_concurrent_samples_per_process, sampling.target_concurrency
        )

    def stop(self) -> None:
        """Claim nothing more, finish attempts that end within `--drain_seconds`, hand back the
        others, and return from `run()`. A second call hands back everything at once."""
        if self._stopping:
            self._hurry.set()
        self._stopping = True
        self._wake.set()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts in progress."""
        return [attempt for attempt, _ in self._attempts.values()]

    @property
    def limit(self) -> int:
        """How many trajectories may be sampled at once."""
        return self._concurrency.limit

    @property
    def breakers(self) -> list[Breaker]:
        """The breakers of all dependencies that were unreachable at some time."""
        return self._breakers.known

    async def run(self) -> None:
        """Sample until the run is finished or `stop` is called.

        Raises `WaitedLongEnough` if a dependency stays away, `RunHopeless` if the trainer gave the
        run up, `ConfigError` if a user's function in a flag fails, the reason if an agent cannot be
        started, and errors in keeping the leases.
        """
        async with self._observer.changes() as changes:
            # These tasks end only with an error.
            background = {
                asyncio.create_task(self._keep_leases(), name="leases"),
                asyncio.create_task(self._watch(changes), name="changes"),
                asyncio.create_task(self._adapt(), name="concurrency"),
                asyncio.create_task(self._take_up(), name="what was put off"),
                asyncio.create_task(self._breakers.run(self.database, self.owner), name="breakers"),
                asyncio.create_task(
                    self._load_report.run(self.database, self.owner, self._occupied), name="loads"
                ),
                asyncio.create_task(self.agents.failed(), name="agents"),
                asyncio.create_task(self._until_misled(), name="flags"),
            }
            for task in background:
                task.add_done_callback(lambda _: self._wake.set())
            try:
                if self.demand is not None:
                    await self._take_over(self.demand)
                await self._claim_until_finished(background)
                await self._drain(background)
            finally:
                for task in background:
                    task.cancel()
                self._records.leases.close()
                if self.demand is not None and self._stopping:
                    await self._leave()
                else:
                    await self._hand_back("the sampler stopped")
                for outcome in await asyncio.gather(*background, return_exceptions=True):
                    if isinstance(outcome, Exception):
                        raise outcome

    async def _claim_until_finished(self, background: set[asyncio.Task[None]]) -> None:
        work_view = WorkView()
        while not self._stopping and not any(task.done() for task in background):
            self._wake.clear()
            if self._state.work is Work.UNKNOWN:
                work_view = await self._look()
            if work_view.finished:
                if self.demand is not None:
                    self.demand.over()
                return
            if not await self._claim(work_view):
                await self._wake.wait()

    async def _look(self) -> WorkView:
        """Look at the ledger, and tell the pool which services it may use."""
        self._state.looking()
        work_view = await self._observer.look()
        taken_over = self._state.seen(work_view)
        self._pool.update(work_view.services)
        if set(work_view.services) != set(self._concurrency.services):
            self._observe_loads(dict.fromkeys(work_view.services))
        if taken_over is not None:
            self._compare_flags(taken_over)
        return work_view

    def _compare_flags(self, run: Run) -> None:
        """End the sampler if the run was resumed with flags that change trajectories."""
        if run.flags is None:
            return
        try:
            refuse_changed(run.id, run.flags, run.digests, self.config)
        except ConfigError as error:
            self._mislead(error)

    async def _take_over(self, demand: Demand) -> None:
        """Go on with the attempts that an earlier process at the same place has left."""
        demand.on_change(self._freed)
        asked = time.monotonic()
        claims = await self._ledger.take_over(owners_at(demand.place))
        records = await self._records.taken_over([claim.record_id for claim in claims], asked)
        sampling = [id for id, record in records.items() if record.status == RecordStatus.SAMPLING]
        demand.resumed(sampling)
        for claim in claims:
            record = records.get(claim.record_id)
            if record is None or record.status == RecordStatus.FAILED:
                self._records.leases.end(claim.record_id)  # the reaper ends it as it should
            elif claim.record_id in sampling:
                self._start(claim, record, asyncio.create_task(asyncio.sleep(0)))
            else:
                self._start(replace(claim, to_score=True), record)
        if claims:
            log.info("took over %d attempts, %d to sample", len(claims), len(sampling))

    async def _claim(self, work_view: WorkView) -> bool:
        """Claim slots of one group and begin them. Returns whether any were claimed."""
        if self.demand is None:
            return await self._claim_some(work_view, None, None)
        for line, wanted in self.demand.wanted().items():
            if await self._claim_some(work_view, wanted, line):
                return True
        return False

    async def _claim_some(self, work_view: WorkView, wanted: int | None, line: str | None) -> bool:
        """As `_claim`. `wanted`: no more than so many; None: as many as there is room for. `line`:
        only of this line of the tasks."""
        room = self._concurrency.limit - self._count(to_score=False)
        room = room if wanted is None else min(room, wanted)
        if self._stopping or self._state.work is Work.NONE or not work_view.services or room <= 0:
            return False
        self._state.trying()
        claims: list[Claim] = []
        asked = time.monotonic()
        held_back = self._breakers.held_back()
        if self._breakers.trying:
            room = 1
        if work_view.evaluation:
            claims = await self._ledger.claim(
                Split.EVAL, count=room, epoch=self.evaluation, without=held_back, line=line
            )
        if not claims and work_view.training is not None:
            claims, asked = await self._claim_training(work_view.training, room, held_back, line)
        if claims:
            self._state.found()
            for claim in claims:
                self._breakers.claimed(claim)
            self._begin(claims, asked)
        return bool(claims)

    async def _claim_training(
        self, run: Run, room: int, without: TaskChoice, line: str | None
    ) -> tuple[list[Claim], float]:
        """Claim slots of the first training group that may be worked on.

        Returns the claims, and the time before the request (`asked` of `HeldLeases`).
        """
        asked, claims = time.monotonic(), await self._claim_admitted(room, without, line)
        # A new admission limit is needed only when all groups up to the old one are begun.
        if not claims and self._state.admitted(await self._observer.admission_limit(run)):
            asked, claims = time.monotonic(), await self._claim_admitted(room, without, line)
        return claims, asked

    async def _claim_admitted(
        self, room: int, without: TaskChoice, line: str | None
    ) -> list[Claim]:
        if self._stopping:  # since the claim began
            return []
        limit = self._state.admission_limit
        return await self._ledger.claim(
            Split.TRAIN, count=room, admission_limit=limit, without=without, line=line
        )

    def _begin(self, claims: list[Claim], asked: float) -> None:
        """Store the Records of a claim, and start their attempts."""
        default = self.config.agent.agent_name
        records = [new_record(claim, self.owner, default) for claim in claims]
        started = asyncio.create_task(self._records.start(records, asked))
        # Each attempt raises an error of this task itself; mark it as retrieved in any case.
        started.add_done_callback(lambda task: task.cancelled() or task.exception())
        for claim, record in zip(claims, records, strict=True):
            if self.demand is not None:
                self.demand.begun(record.id)
            self._start(claim, record, started)

    def _start(
        self, claim: Claim, record: Record, started: "asyncio.Task[None] | None" = None
    ) -> None:
        """Start the attempt of a claim; `started`: the write of a new Record."""
        attempt = Attempt(
            claim=claim,
            record=record,
            make_sampler=self.agents.sampler,
            started=started,
            ledger=self._ledger,
            scorings=self._scorings,
            records=self._records,
            finaliser=self._finaliser,
            breakers=self._breakers,
            config=self.config.sampling,
            tracing=self.tracing,
            counts=self.counts,
        )
        task = asyncio.create_task(attempt.run(), name=f"attempt {record.id}")
        self._attempts[record.id] = (attempt, task)
        task.add_done_callback(partial(self._ended, record.id))

    def _count(self, *, to_score: bool) -> int:
        """The number of attempts in progress that only score, or that sample."""
        return sum(attempt.claim.to_score == to_score for attempt in self.attempts)

    async def _take_up(self) -> None:
        """Claim finalisations and scorings that are due: put off, or left by dead samplers.

        The pause between two looks grows while there are none.
        """
        pause_s = SCORINGS_S
        while True:
            await asyncio.sleep(pause_s)
            found = 0
            if not self._stopping and await self._anything_due():
                found = await self._take_finalisations() + await self._take_scorings()
            busy = found > 0 or bool(self._attempts) or bool(self._finalising)
            pause_s = SCORINGS_S if busy else min(1.5 * pause_s, 10 * SCORINGS_S)

    async def _anything_due(self) -> bool:
        return await anything_due(
            self.database,
            finalisations_due(self._finaliser.in_progress),
            scorings_due(self.evaluation, self._breakers.held_back()),
        )

    async def _take_scorings(self) -> int:
        """Start scorings that are due; returns how many.

        They do not use the inference services, so they have a separate limit of the same size as
        sampling.
        """
        most, found = self.config.sampling.max_concurrent_samples_per_process, 0
        while not self._stopping and self._count(to_score=True) < most:
            asked = time.monotonic()
            claim = await self._scorings.claim(
                evaluation=self.evaluation, without=self._breakers.held_back()
            )
            if claim is None:
                break
            found += 1
            self._breakers.claimed(claim)
            if claim.record_id in self._attempts:
                # Our own lease expired while this process stood still. End its attempt first.
                earlier, ending = self._attempts[claim.record_id]
                earlier.lose()
                await asyncio.wait({ending})
            self._start(claim, await self._records.resume(claim.record_id, asked))
        return found

    async def _take_finalisations(self) -> int:
        """Start finalisations that are due, up to `TAKEN_OVER` at once; returns how many."""
        found = 0
        while len(self._finalising) < TAKEN_OVER:
            # Skip our own: their leases expire if this process stands still, and they continue.
            task = await self._ledger.claim_finalisation(self._finaliser.in_progress)
            if task is None:
                break
            found += 1
            # In a task, beside the heartbeats: a scorer of the group may take longer than a lease.
            finalising = asyncio.create_task(self._finalise(task), name=f"group {task.id}")
            self._finalising.add(finalising)
            finalising.add_done_callback(self._finalising.discard)
        return found

    def _ended(self, record: str, task: asyncio.Task[None]) -> None:
        attempt, _ = self._attempts.pop(record)
        self._records.leases.end(record)
        if self.demand is not None:
            self.demand.ended(record)
        if attempt.opens:
            self._state.opened()
        self._wake.set()
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ConfigError):
            self._mislead(error)
        elif error is not None:
            log.error("attempt %s", record, exc_info=error)

    async def _drain(self, background: set[asyncio.Task[None]]) -> None:
        """After `stop`, let attempts finish for `--drain_seconds`.

        Not after the end of the run: nobody would train them.
        """
        if not self._stopping or not self._attempts or self.demand is not None:
            return
        seconds = self.config.sampling.drain_seconds
        log.info("stopping: %d trajectories have %g s to finish", len(self._attempts), seconds)
        hurry = asyncio.create_task(self._hurry.wait())
        finished = asyncio.create_task(asyncio.wait(self._tasks()))
        ends: set[asyncio.Task[Any]] = {hurry, finished, *background}
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        finished.cancel()

    async def _hand_back(self, reason: str) -> None:
        """Hand back all attempts in progress, and wait until this is stored."""
        self._finaliser.stop()
        for attempt in self.attempts:
            attempt.hand_back(reason)
        await asyncio.gather(*self._tasks(), *self._finalising, return_exceptions=True)

    async def _leave(self) -> None:
        """Stop all attempts in progress and write nothing of it."""
        self._finaliser.stop()
        for attempt in self.attempts:
            attempt.leave()
        await asyncio.gather(*self._tasks(), *self._finalising, return_exceptions=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for _, task in self._attempts.values()]

    def _freed(self) -> None:
        """Tasks that were held back may be claimed."""
        self._state.opened()
        self._wake.set()

    def _mislead(self, error: ConfigError) -> None:
        """End the sampler because of an unusable flag."""
        self._mistakes.put_nowait(error)

    async def _until_misled(self) -> None:
        """Wait for a `ConfigError` and raise it."""
        raise await self._mistakes.get()

    async def _watch(self, changes: Changes) -> None:
        """Look again after changes."""
        while True:
            await changes.wait(LOOK_S, found=self._state.take_found())
            self._state.changed()
            self._wake.set()

    async def _adapt(self) -> None:
        """Adapt the concurrency to the services' loads."""
        while True:
            due = time.monotonic() + LOADS_S
            await asyncio.sleep(LOADS_S)
            late_s = time.monotonic() - due
            if (outage := self._pool.outage) is not None:
                outage.probe = self._pool.check
                self._breakers.out_of_reach(outage)
            loads = await self._pool.loads()
            self._observe_loads({url: loads.get(url) for url in self._concurrency.services})
            self._load_report.looked(loads, late_s)

    def _occupied(self) -> tuple[int, int]:
        return self._count(to_score=False), self._concurrency.limit

    def _observe_loads(self, loads: dict[str, ServiceLoad | None]) -> None:
        before = self._concurrency.limit
        self._concurrency = self._concurrency.observe(loads, self._count(to_score=False))
        limit = self._concurrency.limit
        if limit > before:
            self._wake.set()
        if limit != before:
            level = logging.INFO if limit < before else logging.DEBUG
            log.log(level, "%d trajectories at once, %d before: %s", limit, before, loads)

    async def _keep_leases(self) -> None:
        """Extend our leases, end expired ones, and take over finalisations."""
        while True:
            await asyncio.sleep(self.config.sampling.lease_seconds / 3)
            asked = time.monotonic()
            ours = {record: attempt for record, (attempt, _) in self._attempts.items()}
            held = await self._ledger.heartbeat(ours.keys())
            lost = ours.keys() - held
            self._records.leases.answered(held, lost, asked)
            for record in lost:
                ours[record].lose()
            reaped = await self._ledger.reap()
            if reaped.returned or reaped.failed or reaped.sampled:
                log.warning(
                    "reaped %d slots, %d of them with a trajectory to score; gave up %d",
                    reaped.returned + reaped.sampled, reaped.sampled, reaped.failed,
                )  # fmt: skip
            await self._take_finalisations()
            self._state.changed()
            self._wake.set()

    async def _finalise(self, task: Task) -> None:
        """Finish a group that its owner left.

        Errors other than `ConfigError` are logged: raised, they would end every sampler in turn.
        """
        try:
            await self._finaliser.finalise(task)
        except LeaseLost as lost:
            log.warning("%s", lost)
        except ConfigError as error:
            self._mislead(error)
        except Exception:
            log.exception("%s cannot be finalised", task.id)
        self._state.changed()
        self._wake.set()
