"""One attempt at a slot: two steps, each with an end of its own.

    sample -> Record sampled: its turns and counts are stored, and it is scored
           -> Record failed, slot tried again or given up      the agent failed
           -> Record failed, slot handed back at no cost       told to stop, or infrastructure
           -> Record failed, slot free after a loss            its client went silent

    score  -> Record scored, slot completed, and the group finalised if it was its last slot
                                     its rollout may be forked: then further slots are free
           -> slot put off: anyone scores the Record later     the scorer failed, or infrastructure
           -> Record and slot quarantined                      the scorer failed too often

A claim to score begins with the second step, from what is stored. Who failed is what the class of
an error says (`failures.py`). What is sampled is the `AsyncSampler`'s business; which slot, and
when to stop, the scheduler's.
"""

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from agentrl.configs import SamplingConfig
from agentrl.databases.connection import DatabaseUnreachable
from agentrl.databases.documents import HANDED_BACK, Record, RecordStatus, Split, Task
from agentrl.databases.records import RecordLedger
from agentrl.databases.scorings import ScoringLedger
from agentrl.databases.storable import brief
from agentrl.databases.tasks import Claim, LeaseLost, TaskLedger
from agentrl.databases.transitions import TransitionRefused
from agentrl.failures import Foreseen, InfrastructureFailure
from agentrl.foreign_text import error_line, one_line, text_of
from agentrl.rollout.agents.agent_registry import may_score_itself
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.process import AgentUnavailable
from agentrl.rollout.agents.recorded import Diverged
from agentrl.rollout.contained import contained, was_cancelled
from agentrl.rollout.groups.boundary import check_sampled, check_scored
from agentrl.rollout.groups.finalise import Finaliser
from agentrl.rollout.groups.fork_choice import fork_turns
from agentrl.rollout.scheduling.attempt_counts import AttemptCounts, AttemptEvent
from agentrl.rollout.scheduling.breakers import Breakers
from agentrl.rollout.traces.ended import EndedRecord, Failure, KeptTurns
from agentrl.rollout.traces.tracing import Tracing

log = logging.getLogger(__name__)

# A rollout may cause its outages itself, so their number is limited.
FREE_OUTAGES = 10  # outages of a rollout that do not count if others succeed meanwhile
MOST_OUTAGES = 100  # outages of a rollout that do not count otherwise
LET_GO_S = 5.0  # the time that a cancelled agent has to end


class HandedBack(Exception):
    """The attempt was told to stop, or stops itself; this is no failure. The message says why."""


class WentSilent(Exception):
    """Who was to make the attempt, on another machine, went silent. The message says how."""


class _Left(Exception):
    """The attempt is left as it is, for the process that comes in the place of this one."""


class _OutOfTime(Foreseen):
    """A step took longer than `--record_timeout`."""


@dataclass(eq=False)
class Attempt:
    """An attempt in progress.

    `record`: a new Record, or the stored one of a claim to score. `make_sampler`: may take a while
    for the first agent of its kind. `started`: the write of new Records, shared by a whole claim;
    None for a claim to score. `counts`: of the process. `began`: when it was claimed, by
    `time.monotonic`. `opens`: whether its end may allow further claims, because the group
    was finalised or the slot is free again.
    """

    claim: Claim
    record: Record
    make_sampler: Callable[[Claim, Record], Awaitable[AsyncSampler]]
    started: "asyncio.Task[None] | None"
    ledger: TaskLedger
    scorings: ScoringLedger
    records: RecordLedger
    finaliser: Finaliser
    breakers: Breakers
    config: SamplingConfig
    tracing: Tracing | None = None
    counts: AttemptCounts = field(default_factory=AttemptCounts)
    began: float = field(default_factory=time.monotonic, init=False)
    opens: bool = field(default=False, init=False)
    _sampler: AsyncSampler | None = field(default=None, init=False)
    _step: "asyncio.Task[Record] | None" = field(default=None, init=False)
    _stopped: Exception | None = field(default=None, init=False)
    _kept: KeptTurns | None = field(default=None, init=False)  # for a trace
    _ended: tuple[Record, Failure | None] | None = field(default=None, init=False)

    def hand_back(self, reason: str) -> None:
        """Stop the current step and leave it to others. A sampled trajectory stays stored."""
        self._stop(HandedBack(reason))

    def lose(self) -> None:
        """The lease is gone: stop and write nothing more."""
        self._stop(LeaseLost(f"the lease on the slot of {self.claim.record_id} is gone"))

    def leave(self) -> None:
        """Stop and write nothing: another process takes the attempt over as it is."""
        self._stop(_Left())

    async def run(self) -> None:
        """Sample and score, or only score, and settle the slot by the result."""
        try:
            task = await self._settle()
            await self._trace()
            if task is not None:
                await self.finaliser.finalise(task)
                self.opens = True
        except (LeaseLost, TransitionRefused) as lost:
            # Another process has the slot or its group by now.
            log.warning("%s: %s", self.claim.record_id, lost)
            self._count(AttemptEvent.LOST)
            if self.started is not None:
                await asyncio.wait({self.started})  # a Record that is being stored arrives first
            await self.records.disown(self.claim.record_id)
        except _Left:
            log.info("%s stays as it is", self.claim.record_id)
        finally:
            self._sampler = None  # it refers to this: a conversation would wait for the collector

    async def _settle(self) -> Task | None:
        """Returns the Task if this was its group's last slot."""
        try:
            record = self.record if self.claim.to_score else await self._sampled()
        except (LeaseLost, TransitionRefused, DatabaseUnreachable, _Left):
            raise
        except WentSilent as silent:
            log.warning("%s: %s", self.claim.record_id, silent)
            self._count(AttemptEvent.SILENT)
            await self._end_failed(str(silent), Failure.SILENT)
            self.opens = True
            return await self.ledger.lose(self.claim, str(silent))
        except (HandedBack, AgentUnavailable) as reason:
            await self._hand_back(f"{HANDED_BACK}{reason}", Failure.HANDED_BACK)
            return None
        except Exception as error:  # an agent or a tool may raise anything
            outages = self.claim.outages
            if isinstance(error, InfrastructureFailure) and self._is_nobodys(error, outages):
                await self._hand_back(f"{HANDED_BACK}{text_of(error)}", Failure.INFRASTRUCTURE)
                return None
            message = _describe(error)
            _warn(f"{self.claim.record_id} failed", message, error)
            self._count(AttemptEvent.FAILED)
            outage = isinstance(error, InfrastructureFailure)
            await self._end_failed(message, Failure.INFRASTRUCTURE if outage else Failure.CODE)
            self.breakers.forget(self.claim)
            self.opens = True
            # A fork whose agent does not do again what it did would not do so a second time.
            retry = self.config.resample_error_records and not isinstance(error, Diverged)
            return await self.ledger.fail(self.claim, message, retry=retry)
        return await self._settle_scoring(record)

    # -- the first step

    async def _sampled(self) -> Record:
        """Sample the Record and store it."""
        record = await self._unless_stopped(self._sample(), self._agent)
        assert self._sampler is not None, "what was sampled had a sampler"
        check_sampled(record, self.claim.record_id, self._sampler.n_turns)
        self.breakers.sampled(self.claim)
        record = await self.records.sampled(
            record.model_copy(update={"status": RecordStatus.SAMPLED})
        )
        self._count(AttemptEvent.SAMPLED)
        self.counts.stop_reasons[str(record.stop_reason)] += 1
        return record

    async def _sample(self) -> Record:
        assert self.started is not None, f"{self.claim.record_id} is sampled already"
        await asyncio.shield(self.started)  # shared with the other attempts of the claim
        sampler = self._sampler = await self.make_sampler(self.claim, self.record)
        sampler.on_outage = self._stop  # an agent may catch the exception and continue
        if self._is_traced:
            self._kept = KeptTurns()
            sampler.on_stored = self._kept.add
        try:
            return await self._in_time(sampler.sample(), self._agent)
        finally:
            if sampler.outage is not None:
                raise sampler.outage

    def _is_nobodys(self, outage: InfrastructureFailure, earlier: int) -> bool:
        """Whether an outage does not count as a failure of this rollout.

        `earlier`: outages that it met before. The number is limited: a rollout that takes a server
        down with every attempt would be retried forever.
        """
        others_too = self.breakers.met(outage, self.claim)
        return earlier < (MOST_OUTAGES if others_too else FREE_OUTAGES)

    async def _hand_back(self, reason: str, failure: Failure) -> None:
        log.info("%s %s", self.claim.record_id, reason)
        outage = failure == Failure.INFRASTRUCTURE
        self._count(AttemptEvent.OUTAGE if outage else AttemptEvent.HANDED_BACK)
        # The Record may not be stored yet.
        with contextlib.suppress(TransitionRefused):
            await self._end_failed(reason, failure)
        await self.ledger.release(self.claim, outage=outage)
        self.opens = True

    async def _end_failed(self, error: str, failure: Failure) -> None:
        """Store the Record so far as failed, with its error."""
        record = self.record if self._sampler is None else self._sampler.record
        failed = record.model_copy(update={"status": RecordStatus.FAILED, "error": error})
        self._ended = await self.records.finish(failed), failure

    # -- the second step

    async def _settle_scoring(self, record: Record) -> Task | None:
        """Score a stored Record. Returns the Task if this was its group's last slot."""
        # The Record may have ended without its slot, if the lease was lost in between.
        if record.status == RecordStatus.SCORED:
            return await self._complete(record)
        if record.status == RecordStatus.QUARANTINED:
            return await self.scorings.quarantine(self.claim, str(record.error))
        if self.scorings.limit.spent(self.claim.scoring_failures):
            return await self._quarantine(record, str(self.claim.task.slots[0].error))
        try:
            scored = await self._unless_stopped(self._score(record), self._scorer)
        except (LeaseLost, DatabaseUnreachable, _Left):
            raise
        except HandedBack:
            self._count(AttemptEvent.HANDED_BACK)
            await self.scorings.hand_back(self.claim)
            return None
        except (AgentUnavailable, InfrastructureFailure) as outage:
            outages = self.claim.scorings - self.claim.scoring_failures
            if isinstance(outage, InfrastructureFailure) and not self._is_nobodys(outage, outages):
                return await self._fail_scoring(record, outage)
            reason = text_of(outage)
            log.info("%s is scored later: %s", record.id, reason)
            self._count(AttemptEvent.SCORING_OUTAGE)
            await self.scorings.put_off(self.claim, reason, counts=False)
            return None
        except Exception as error:  # a scorer may raise anything
            return await self._fail_scoring(record, error)
        self.breakers.scored(self.claim)
        self._ended = await self.records.finish(scored), None
        self._count(AttemptEvent.SCORED)
        return await self._complete(scored)

    async def _complete(self, record: Record) -> Task | None:
        """Complete the slot, and fork its rollout if the flags say so (`fork_choice.py`)."""
        forks: list[int] = []
        config = self.config
        # A scorer of the whole group says what it is worth when all forks are there.
        scorers = self.finaliser.scorers
        scored = record.score is not None or bool(scorers.of_group(self.claim.task.scorer))
        lasting = any(call.lasting for call in record.own_calls)  # of no turn
        may_fork = record.split == Split.TRAIN and record.fork is None and not lasting
        if config.fork_turns and may_fork and scored:
            turns = (await self.records.turns([record.id]))[record.id]
            at = fork_turns(turns, config.fork_at, config.fork_turns)
            forks = [turn for turn in at for _ in range(config.forks)]
        self.opens = bool(forks)
        return await self.ledger.complete(self.claim, record.score, forks)

    async def _score(self, record: Record) -> Record:
        sampler = self._sampler or await self.make_sampler(self.claim, record)
        by_agent = may_score_itself(type(sampler))
        who = f"{self._agent}, in evaluate_record," if by_agent else self._scorer
        scored = await self._in_time(sampler.score(record), who)
        return check_scored(scored, record.id).model_copy(update={"status": RecordStatus.SCORED})

    async def _fail_scoring(self, record: Record, error: Exception) -> Task | None:
        message = _describe(error)
        _warn(f"{record.id} cannot be scored", message, error)
        self._count(AttemptEvent.SCORING_FAILED)
        if self.scorings.limit.last_try(self.claim.scoring_failures):
            return await self._quarantine(record, message)
        await self.scorings.put_off(self.claim, message, counts=True)
        return None

    async def _quarantine(self, record: Record, error: str) -> Task | None:
        self.breakers.forget(self.claim)
        quarantined = {"status": RecordStatus.QUARANTINED, "error": error}
        failed = await self.records.finish(record.model_copy(update=quarantined))
        self._ended = failed, Failure.SCORING
        self._count(AttemptEvent.QUARANTINED)
        return await self.scorings.quarantine(self.claim, error)

    # -- both

    @property
    def _is_traced(self) -> bool:
        return self.tracing is not None and self.tracing.wants(self.claim.record_id)

    async def _trace(self) -> None:
        """Hand the Record over to be traced, if it has ended here."""
        if self.tracing is None or self._ended is None or not self._is_traced:
            return
        record, failure = self._ended
        if self.claim.to_score:
            turns = (await self.records.turns([record.id]))[record.id]
        else:
            turns = [] if self._kept is None else self._kept.turns
        self.tracing.put(EndedRecord(record, turns, failure))

    @property
    def _agent(self) -> str:
        """The agent's name for errors."""
        return f"agent {self.record.agent_name!r}"

    @property
    def _scorer(self) -> str:
        """The scorer's name for errors."""
        return f"scorer {self.claim.task.scorer!r}"

    async def _unless_stopped(self, step: Coroutine[Any, Any, Record], who: str) -> Record:
        """Run a step of `who` in a separate task, so that a stop cancels the step but not what
        follows. Raises the reason of the stop."""
        if self._stopped is None:
            self._step = asyncio.create_task(step, name=self.claim.record_id)
            await asyncio.wait({self._step})
            if not self._step.cancelled():
                return self._step.result()
        step.close()
        raise self._stopped or was_cancelled(who)

    async def _in_time(self, work: Awaitable[Record], who: str) -> Record:
        """Run `work` of `who` for at most `--record_timeout`. Raises `_OutOfTime`.

        Work that ignores its cancellation is left running.
        """
        working = asyncio.create_task(contained(work, who), name=self.claim.record_id)
        working.add_done_callback(lambda task: task.cancelled() or task.exception())
        late = True
        try:
            await asyncio.wait({working}, timeout=self.config.record_timeout)
            late = not working.done()
        finally:  # also if this step is stopped
            if late:
                working.cancel()
                await asyncio.wait({working}, timeout=LET_GO_S)
                if not working.done():
                    log.warning(
                        "%s of %s goes on when it is cancelled: left", who, self.claim.record_id
                    )
        if late:
            limit = f"--record_timeout {self.config.record_timeout:g} s"
            raise _OutOfTime(f"not finished within {limit}")
        if working.cancelled():
            raise was_cancelled(who)
        return working.result()

    def _count(self, event: AttemptEvent) -> None:
        self.counts.events[event] += 1

    def _stop(self, reason: Exception) -> None:
        self._stopped = reason
        if self._step is not None:
            self._step.cancel()


def _warn(what: str, message: str, error: Exception) -> None:
    """Log an error in one line, and with its traceback unless it was foreseen."""
    traced = None if isinstance(error, Foreseen) else error
    log.warning("%s: %s", what, one_line(message), exc_info=traced)


def _describe(error: Exception) -> str:
    """An error as a Record stores it: exception, message and place of origin unless foreseen."""
    if isinstance(error, _OutOfTime):
        return f"TimeoutError: {error}"
    if isinstance(error, Foreseen):
        return brief(error_line(error))
    where = list(traceback.walk_tb(error.__traceback__))
    if not where:
        return brief(error_line(error))
    frame, line = where[-1]
    at = f"(at {frame.f_code.co_name}, {frame.f_code.co_filename}:{line})"
    return f"{brief(error_line(error))} {at}"
