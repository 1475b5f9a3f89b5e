"""The sampler process: as many trajectories at once as allowed, claimed one slot at a time.

Evaluations come first, then attempts of groups already begun, then new groups as far as the
staleness bound admits them. What an attempt does is its `AsyncSampler`'s business; what becomes of
its slot is decided here.
"""

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from agentrl.configs import Config
from agentrl.databases import runs, services
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, RecordStatus, Run, Split, Task, TaskStatus
from agentrl.databases.rows import count_waiting
from agentrl.databases.tasks import UNBOUNDED, Claim, LeaseLost, TaskLedger, open_groups
from agentrl.databases.transitions import TransitionRefused
from agentrl.rollout.admission import admitted_groups
from agentrl.rollout.finalise import Finaliser
from agentrl.rollout.sampler import AsyncSampler, SamplerResources

log = logging.getLogger(__name__)

POLL_S = 0.2  # how often the ledger is looked at while nothing else happens
SERVICE_TIMEOUT_S = 30.0  # a service silent for so long is not used

SamplerFactory = Callable[[Claim, Record, SamplerResources], AsyncSampler]


@dataclass
class _Outlook:
    """What the database said at the last look: what may be begun now."""

    evaluation: bool = False  # evaluation slots are free
    training: bool = False  # training groups may be worked on
    new_groups: int = 0  # and so many may be begun
    served: bool = False  # a service with published weights is there
    finished: bool = False


@dataclass
class SamplingScheduler:
    """Runs samplers until the run is finished or `stop()` is called.

    `evaluation`: sample this evaluation only, and end with it.
    """

    database: RunDatabase
    config: Config
    resources: SamplerResources
    make_sampler: SamplerFactory
    owner: str
    evaluation: int | None = None
    _attempts: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: bool = False

    def __post_init__(self) -> None:
        sampling = self.config.sampling
        self._ledger = TaskLedger(
            self.database, self.owner, sampling.lease_seconds, sampling.max_attempts
        )
        self._records = self.resources.records
        self._finaliser = Finaliser(
            self._ledger, self._records, self.config.reward, self.config.temperature
        )

    def stop(self) -> None:
        """Hand back what is in progress and return from `run()`."""
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        """Sample until the run is finished. An error in keeping the leases ends it."""
        keeper = asyncio.create_task(self._keep_leases())
        try:
            await self._claim_until_finished(keeper)
        finally:
            keeper.cancel()
            self._records.leases.close()
            await asyncio.sleep(0)  # a task cancelled before it ever ran could not hand back
            for attempt in self._attempts.values():
                attempt.cancel()
            await asyncio.gather(*self._attempts.values(), return_exceptions=True)
            with contextlib.suppress(asyncio.CancelledError):
                await keeper

    async def _claim_until_finished(self, keeper: asyncio.Task[None]) -> None:
        outlook, looked = _Outlook(), 0.0
        while not self._stopping and not keeper.done():
            if time.monotonic() - looked >= POLL_S:
                outlook, looked = await self._look(), time.monotonic()
            if outlook.finished and not self._attempts:
                return
            asked = time.monotonic()
            claim = await self._next_claim(outlook)
            if claim is not None:
                await self._begin(claim, asked)
                continue
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), POLL_S)

    async def _look(self) -> _Outlook:
        """What may be begun now, by the run's document, the services and the bound."""
        if self.evaluation is not None:
            if await self._evaluated(self.evaluation):
                return _Outlook(finished=True)
            return _Outlook(
                evaluation=await self._evaluation_waits(), served=await self._refresh_services()
            )
        run = await runs.load_run(self.database)
        if run is None:
            return _Outlook()
        if run.status == runs.FINISHED:
            return _Outlook(finished=True)
        training = run.status == runs.TRAINING and self.config.sampling.enable_sampling
        return _Outlook(
            evaluation=await self._evaluation_waits(),
            training=training,
            new_groups=await self._admitted(run) if training else 0,
            served=await self._refresh_services(),
        )

    async def _admitted(self, run: Run) -> int:
        return admitted_groups(
            max_staleness=self.config.staleness_bound,
            rows_per_step=run.rows_per_step,
            group_size=self.config.sampling.num_generations,
            waiting=await count_waiting(self.database),
            open_groups=await open_groups(self.database, Split.TRAIN),
        )

    async def _evaluation_waits(self) -> bool:
        free_slot = {"split": Split.EVAL, "pending": {"$gt": 0}}
        return await self.database.tasks.find_one(free_slot, {"_id": 1}) is not None

    async def _evaluated(self, epoch: int) -> bool:
        unfinished = {
            "split": Split.EVAL, "epoch": epoch, "status": {"$ne": TaskStatus.COMPLETED},
        }  # fmt: skip
        return await self.database.tasks.find_one(unfinished, {"_id": 1}) is None

    async def _refresh_services(self) -> bool:
        """Tell the pool which services have published weights; whether there is one."""
        live = await services.live_services(self.database, SERVICE_TIMEOUT_S)
        urls = [service.url for service in live if service.weight_version >= 0]
        self.resources.pool.update(urls)
        return bool(urls)

    async def _next_claim(self, outlook: _Outlook) -> Claim | None:
        limit = self.config.sampling.max_concurrent_samples_per_process
        if not outlook.served or len(self._attempts) >= limit:
            return None
        if outlook.evaluation:
            claims = await self._ledger.claim(Split.EVAL, epoch=self.evaluation)
            if claims:
                return claims[0]
            outlook.evaluation = False
        if not outlook.training:
            return None
        horizon = UNBOUNDED if outlook.new_groups else None
        claims = await self._ledger.claim(Split.TRAIN, horizon=horizon)
        if not claims:
            return None
        if claims[0].task.status == TaskStatus.CREATED:
            outlook.new_groups -= 1
        return claims[0]

    async def _begin(self, claim: Claim, asked: float) -> None:
        """Store the attempt's Record and start to work on it."""
        record = Record(
            id=claim.record_id,
            task=claim.task.id,
            task_id=claim.task.task_id,
            traj=claim.traj,
            attempt=claim.attempt,
            split=claim.task.split,
            epoch=claim.task.epoch,
            owner=self.owner,
            query=claim.task.query,
            started_at=datetime.now(UTC),
        )
        await self._records.start([record], asked)
        attempt = asyncio.create_task(self._attempt(claim, record), name=record.id)
        self._attempts[record.id] = attempt

        def ended(task: asyncio.Task[None]) -> None:
            del self._attempts[record.id]
            self._records.leases.end(record.id)
            self._changed.set()
            if not task.cancelled() and task.exception() is not None:
                log.error("attempt %s", record.id, exc_info=task.exception())

        attempt.add_done_callback(ended)

    async def _attempt(self, claim: Claim, record: Record) -> None:
        """One attempt from its Record to its terminal slot."""
        sampler = self.make_sampler(claim, record, self.resources)
        try:
            finished = await self._sample(claim, sampler)
            if finished is not None:
                await self._finaliser.finalise(finished)
        except (LeaseLost, TransitionRefused) as lost:
            log.warning("%s: %s", record.id, lost)
        except asyncio.CancelledError:
            # Stopping in order: the slot goes back and costs no failure. A slot that was taken
            # from us meanwhile is somebody else's.
            with contextlib.suppress(LeaseLost, TransitionRefused):
                await self._end_failed(sampler.record, "handed back: the sampler stopped")
                await self._ledger.release(claim)
            raise

    async def _sample(self, claim: Claim, sampler: AsyncSampler) -> Task | None:
        """Sample and score; returns the Task if this was its group's last slot."""
        try:
            async with asyncio.timeout(self.config.sampling.record_timeout):
                record = await sampler.evaluate_record(await sampler.run())
        except LeaseLost:
            raise
        except Exception as error:  # whatever an agent, tool or scorer raises is that Record's
            message = _describe(error, self.config.sampling.record_timeout)
            log.warning("%s failed: %s", claim.record_id, message, exc_info=error)
            await self._end_failed(sampler.record, message)
            return await self._ledger.fail(
                claim, message, retry=self.config.sampling.resample_error_records
            )
        score = record.score
        assert score is not None, f"{record.id} was evaluated and has no score"
        await self._records.finish(record.model_copy(update={"status": RecordStatus.SCORED}))
        return await self._ledger.complete(claim, score)

    async def _end_failed(self, record: Record, error: str) -> None:
        """Store a Record as far as it came, with what ended it."""
        await self._records.finish(
            record.model_copy(update={"status": RecordStatus.FAILED, "error": error})
        )

    async def _keep_leases(self) -> None:
        """Extend our leases, take expired ones from the dead, finish what they left."""
        while True:
            await asyncio.sleep(self.config.sampling.lease_seconds / 3)
            ours = dict(self._attempts)
            asked = time.monotonic()
            held = await self._ledger.heartbeat(ours.keys())
            lost = ours.keys() - held
            self._records.leases.answered(held, lost, asked)
            for record in lost:
                ours[record].cancel()
            reaped = await self._ledger.reap()
            if reaped.returned or reaped.failed:
                log.warning("reaped %d slots, gave up %d", reaped.returned, reaped.failed)
            while (task := await self._ledger.claim_finalisation()) is not None:
                with contextlib.suppress(LeaseLost):
                    await self._finaliser.finalise(task)
            self._changed.set()


def _describe(error: Exception, timeout: float) -> str:
    """An error as the Record keeps it: one line, then where it came from."""
    if isinstance(error, TimeoutError):
        return f"TimeoutError: not finished within --record_timeout {timeout:g} s"
    where = traceback.extract_tb(error.__traceback__)
    at = f" (at {where[-1].name}, {where[-1].filename}:{where[-1].lineno})" if where else ""
    return f"{type(error).__name__}: {error}{at}"
