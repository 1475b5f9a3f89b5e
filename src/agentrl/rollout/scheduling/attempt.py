"""One attempt at a slot: two steps, each with an end of its own.

    sample -> Record sampled: its turns and counts are stored, and it is scored
           -> Record failed, slot tried again or given up      the agent failed
           -> Record failed, slot handed back at no cost       told to stop, or infrastructure

    score  -> Record scored, slot completed, and the group finalised if it was its last slot
           -> slot put off: anyone scores the Record later     the scorer failed, or infrastructure
           -> Record and slot quarantined                      the scorer failed too often

A claim to score begins with the second step, from what is stored. Who failed is what the class of
an error says (`failures.py`). What is sampled is the `AsyncSampler`'s business; which slot, and
when to stop, the scheduler's.
"""

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from agentrl.configs import SamplingConfig
from agentrl.databases.connection import DatabaseUnreachable
from agentrl.databases.documents import HANDED_BACK, Record, RecordStatus, Task
from agentrl.databases.records import RecordLedger
from agentrl.databases.scorings import ScoringLedger
from agentrl.databases.storable import brief
from agentrl.databases.tasks import Claim, LeaseLost, TaskLedger
from agentrl.databases.transitions import TransitionRefused
from agentrl.failures import InfrastructureFailure
from agentrl.foreign_text import error_line, text_of
from agentrl.rollout.agents.agent_registry import may_score_itself
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.process import AgentUnavailable
from agentrl.rollout.contained import contained, was_cancelled
from agentrl.rollout.groups.boundary import check_sampled, check_scored
from agentrl.rollout.groups.finalise import Finaliser
from agentrl.rollout.scheduling.breakers import Breakers

log = logging.getLogger(__name__)

# A rollout may be what brings its outages about. So many are free,
FREE_OUTAGES = 10  # if others succeed between them,
MOST_OUTAGES = 100  # and at all
LET_GO_S = 5.0  # an agent that is cancelled has so long to end


class _HandedBack(Exception):
    """The attempt is told to stop, and that is nobody's fault. The message says why."""


class _OutOfTime(Exception):
    """A step took longer than `--record_timeout`."""


@dataclass(eq=False)
class Attempt:
    """An attempt in progress.

    `record`: new, or of a claim to score the one that is stored. `make_sampler`: may take a while,
    where the agent is the first of its kind. `started`: the write of a new Record, shared by a
    whole claim. `opens`: its end may let something be claimed: the group is finalised, or the slot
    is free again.
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
    opens: bool = field(default=False, init=False)
    _sampler: AsyncSampler | None = field(default=None, init=False)
    _step: "asyncio.Task[Record] | None" = field(default=None, init=False)
    _stopped: Exception | None = field(default=None, init=False)

    def hand_back(self, reason: str) -> None:
        """Stop the step in progress and leave it to others. What is sampled is stored first."""
        self._stop(_HandedBack(reason))

    def lose(self) -> None:
        """The lease is gone: stop, write nothing more."""
        self._stop(LeaseLost(f"the lease on the slot of {self.claim.record_id} is gone"))

    async def run(self) -> None:
        """Sample and score, or only score, and settle the slot by what came of it."""
        try:
            task = await self._settle()
            if task is not None:
                await self.finaliser.finalise(task)
                self.opens = True
        except (LeaseLost, TransitionRefused) as lost:
            # The slot is somebody else's by now, or its group is.
            log.warning("%s: %s", self.claim.record_id, lost)
            if self.started is not None:
                await asyncio.wait({self.started})  # a Record still on its way arrives first
            await self.records.disown(self.claim.record_id)

    async def _settle(self) -> Task | None:
        """Returns the Task if this was its group's last slot."""
        try:
            record = self.record if self.claim.to_score else await self._sampled()
        except (LeaseLost, TransitionRefused, DatabaseUnreachable):
            raise
        except (_HandedBack, AgentUnavailable) as reason:
            await self._hand_back(f"{HANDED_BACK}{reason}")
            return None
        except Exception as error:  # whatever an agent or a tool raises is that Record's
            outages = self.claim.outages
            if isinstance(error, InfrastructureFailure) and self._is_nobodys(error, outages):
                await self._hand_back(f"{HANDED_BACK}{text_of(error)}", outage=True)
                return None
            message = _describe(error)
            log.warning("%s failed: %s", self.claim.record_id, message, exc_info=error)
            await self._end_failed(message)
            self.breakers.forget(self.claim)
            self.opens = True
            retry = self.config.resample_error_records
            return await self.ledger.fail(self.claim, message, retry=retry)
        return await self._settle_scoring(record)

    # -- the first step

    async def _sampled(self) -> Record:
        """The Record, sampled and stored."""
        record = await self._unless_stopped(self._sample(), self._agent)
        assert self._sampler is not None, "what was sampled had a sampler"
        check_sampled(record, self.claim.record_id, self._sampler.context.n_turns)
        self.breakers.sampled(self.claim)
        record = record.model_copy(update={"status": RecordStatus.SAMPLED})
        await self.records.sampled(record)
        return record

    async def _sample(self) -> Record:
        assert self.started is not None, f"{self.claim.record_id} is sampled already"
        await asyncio.shield(self.started)  # the others of the claim wait for it too
        sampler = self._sampler = await self.make_sampler(self.claim, self.record)
        sampler.on_outage = self._stop  # an agent may catch every exception, and begin again
        try:
            return await self._in_time(sampler.sample(), self._agent)
        finally:
            if sampler.outage is not None:
                raise sampler.outage

    def _is_nobodys(self, outage: InfrastructureFailure, earlier: int) -> bool:
        """Whether an outage is no fault of this rollout's, which met `earlier` ones. One that takes
        a server down with every attempt would be tried for ever."""
        others_too = self.breakers.met(outage, self.claim)
        return earlier < (MOST_OUTAGES if others_too else FREE_OUTAGES)

    async def _hand_back(self, reason: str, *, outage: bool = False) -> None:
        log.info("%s %s", self.claim.record_id, reason)
        # There may be no Record yet.
        with contextlib.suppress(TransitionRefused):
            await self._end_failed(reason)
        await self.ledger.release(self.claim, outage=outage)
        self.opens = True

    async def _end_failed(self, error: str) -> None:
        """Store the Record as far as it came, with what ended it."""
        record = self.record if self._sampler is None else self._sampler.record
        await self.records.finish(
            record.model_copy(update={"status": RecordStatus.FAILED, "error": error})
        )

    # -- the second step

    async def _settle_scoring(self, record: Record) -> Task | None:
        """Score a stored Record. Returns the Task if this was its group's last slot."""
        # A Record may be ahead of its slot, if the lease was lost between the two.
        if record.status == RecordStatus.SCORED:
            return await self.ledger.complete(self.claim, record.score)
        if record.status == RecordStatus.QUARANTINED:
            return await self.scorings.quarantine(self.claim, str(record.error))
        if self.scorings.limit.spent(self.claim.scoring_failures):
            return await self._quarantine(record, str(self.claim.task.slots[0].error))
        try:
            scored = await self._unless_stopped(self._score(record), self._scorer)
        except (LeaseLost, DatabaseUnreachable):
            raise
        except _HandedBack:
            await self.scorings.hand_back(self.claim)
            return None
        except (AgentUnavailable, InfrastructureFailure) as outage:
            outages = self.claim.scorings - self.claim.scoring_failures
            if isinstance(outage, InfrastructureFailure) and not self._is_nobodys(outage, outages):
                return await self._fail_scoring(record, outage)
            reason = text_of(outage)
            log.info("%s is scored later: %s", record.id, reason)
            await self.scorings.put_off(self.claim, reason, counts=False)
            return None
        except Exception as error:  # whatever a scorer raises is the scorer's
            return await self._fail_scoring(record, error)
        self.breakers.scored(self.claim)
        await self.records.finish(scored)
        return await self.ledger.complete(self.claim, scored.score)

    async def _score(self, record: Record) -> Record:
        sampler = self._sampler or await self.make_sampler(self.claim, record)
        by_agent = may_score_itself(type(sampler))
        who = f"{self._agent}, in evaluate_record," if by_agent else self._scorer
        scored = await self._in_time(sampler.evaluate_record(record), who)
        return check_scored(scored, record.id).model_copy(update={"status": RecordStatus.SCORED})

    async def _fail_scoring(self, record: Record, error: Exception) -> Task | None:
        message = _describe(error)
        log.warning("%s cannot be scored: %s", record.id, message, exc_info=error)
        if self.scorings.limit.last_try(self.claim.scoring_failures):
            return await self._quarantine(record, message)
        await self.scorings.put_off(self.claim, message, counts=True)
        return None

    async def _quarantine(self, record: Record, error: str) -> Task | None:
        self.breakers.forget(self.claim)
        quarantined = {"status": RecordStatus.QUARANTINED, "error": error}
        await self.records.finish(record.model_copy(update=quarantined))
        return await self.scorings.quarantine(self.claim, error)

    # -- both

    @property
    def _agent(self) -> str:
        """Whose code samples, in words."""
        return f"agent {self.record.agent_name!r}"

    @property
    def _scorer(self) -> str:
        """Whose code scores, in words."""
        return f"scorer {self.claim.task.scorer!r}"

    async def _unless_stopped(self, step: Coroutine[Any, Any, Record], who: str) -> Record:
        """What a step of `who` returns. It is a task of its own, so that a stop ends the step and
        nothing of what has to follow it."""
        if self._stopped is None:
            self._step = asyncio.create_task(step, name=self.claim.record_id)
            await asyncio.wait({self._step})
            if not self._step.cancelled():
                return self._step.result()
        step.close()
        raise self._stopped or was_cancelled(who)

    async def _in_time(self, work: Awaitable[Record], who: str) -> Record:
        """What `work` of `who` returns. Work that goes on when it is cancelled is left behind."""
        working = asyncio.create_task(contained(work, who), name=self.claim.record_id)
        working.add_done_callback(lambda task: task.cancelled() or task.exception())
        late = True
        try:
            await asyncio.wait({working}, timeout=self.config.record_timeout)
            late = not working.done()
        finally:  # also where this step is stopped
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

    def _stop(self, reason: Exception) -> None:
        self._stopped = reason
        if self._step is not None:
            self._step.cancel()


def _describe(error: Exception) -> str:
    """An error as the Record keeps it: one line, then where it came from."""
    if isinstance(error, _OutOfTime):
        return f"TimeoutError: {error}"
    where = list(traceback.walk_tb(error.__traceback__))
    if not where:
        return brief(error_line(error))
    frame, line = where[-1]
    at = f"(at {frame.f_code.co_name}, {frame.f_code.co_filename}:{line})"
    return f"{brief(error_line(error))} {at}"
