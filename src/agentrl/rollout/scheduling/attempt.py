"""One attempt at a slot, from its Record to what becomes of the slot.

    sample -> Record scored -> slot completed -> group finalised, if it was its last slot
           -> Record failed -> slot tried again, or given up
           -> told to stop  -> slot handed back, which does not count against `max_failures`

What is sampled is the `AsyncSampler`'s business; which slot, and when to stop, the scheduler's.
"""

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from agentrl.configs import SamplingConfig
from agentrl.databases.connection import DatabaseUnreachable
from agentrl.databases.documents import HANDED_BACK, Record, RecordStatus, Task
from agentrl.databases.records import RecordLedger
from agentrl.databases.tasks import Claim, LeaseLost, TaskLedger
from agentrl.databases.transitions import TransitionRefused
from agentrl.inference.protocol import ServiceUnreachable
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.process import AgentUnavailable
from agentrl.rollout.groups.finalise import Finaliser

log = logging.getLogger(__name__)


class _HandedBack(Exception):
    """The attempt ends without a result, and that is nobody's fault. The message says why."""


@dataclass(eq=False)
class Attempt:
    """An attempt in progress.

    `make_sampler`: may take a while, where the agent is the first of its kind. `started`: the write
    of its Record, shared by a whole claim. `opens`: its end may let something be claimed: the group
    is finalised, or the slot is free again.
    """

    claim: Claim
    record: Record
    make_sampler: Callable[[Claim, Record], Awaitable[AsyncSampler]]
    started: "asyncio.Task[None]"
    ledger: TaskLedger
    records: RecordLedger
    finaliser: Finaliser
    config: SamplingConfig
    opens: bool = field(default=False, init=False)
    _sampler: AsyncSampler | None = field(default=None, init=False)
    _sampling: "asyncio.Task[Record] | None" = field(default=None, init=False)
    _stopped: Exception | None = field(default=None, init=False)

    def hand_back(self, reason: str) -> None:
        """Stop sampling and give the slot to others. An attempt that only has to store what it
        sampled does that instead."""
        self._stop(_HandedBack(reason))

    def lose(self) -> None:
        """The lease is gone: stop sampling, write nothing more."""
        self._stop(LeaseLost(f"the lease on the slot of {self.claim.record_id} is gone"))

    async def run(self) -> None:
        """Sample, and settle the slot by what came of it."""
        try:
            task = await self._settle()
            if task is not None:
                await self.finaliser.finalise(task)
                self.opens = True
        except (LeaseLost, TransitionRefused) as lost:
            # The slot is somebody else's by now, or its group is.
            log.warning("%s: %s", self.claim.record_id, lost)
            await asyncio.wait({self.started})  # a Record that is still on its way arrives first
            await self.records.disown(self.claim.record_id)

    async def _settle(self) -> Task | None:
        """Returns the Task if this was its group's last slot."""
        try:
            record = await self._sampled()
        except (LeaseLost, DatabaseUnreachable):
            raise
        except (_HandedBack, AgentUnavailable, ServiceUnreachable) as reason:
            await self._hand_back(f"{HANDED_BACK}{reason}")
            return None
        except Exception as error:  # whatever an agent, tool or scorer raises is that Record's
            message = _describe(error, self.config.record_timeout)
            log.warning("%s failed: %s", self.claim.record_id, message, exc_info=error)
            await self._end_failed(message)
            self.opens = True
            retry = self.config.resample_error_records
            return await self.ledger.fail(self.claim, message, retry=retry)
        await self.records.finish(record.model_copy(update={"status": RecordStatus.SCORED}))
        return await self.ledger.complete(self.claim, record.score)

    async def _sampled(self) -> Record:
        """The Record, scored. A task of its own, so that a stop ends the sampling and nothing of
        what has to follow it."""
        if self._stopped is None:
            self._sampling = asyncio.create_task(self._sample(), name=self.claim.record_id)
            await asyncio.wait({self._sampling})
            if not self._sampling.cancelled():
                return self._sampling.result()
        raise self._stopped or RuntimeError("the agent was cancelled, and not by the sampler")

    async def _sample(self) -> Record:
        await asyncio.shield(self.started)  # the others of the claim wait for it too
        sampler = self._sampler = await self.make_sampler(self.claim, self.record)
        try:
            async with asyncio.timeout(self.config.record_timeout):
                return await sampler.evaluate_record(await sampler.run())
        except SystemExit as left:  # it would end the process, and all its trajectories with it
            raise RuntimeError(f"the agent or its scorer called sys.exit({left.code!r})") from left

    async def _hand_back(self, reason: str) -> None:
        log.info("%s %s", self.claim.record_id, reason)
        # There may be no Record yet.
        with contextlib.suppress(TransitionRefused):
            await self._end_failed(reason)
        await self.ledger.release(self.claim)
        self.opens = True

    async def _end_failed(self, error: str) -> None:
        """Store the Record as far as it came, with what ended it."""
        record = self.record if self._sampler is None else self._sampler.record
        await self.records.finish(
            record.model_copy(update={"status": RecordStatus.FAILED, "error": error})
        )

    def _stop(self, reason: Exception) -> None:
        self._stopped = reason
        if self._sampling is not None:
            self._sampling.cancel()


def _describe(error: Exception, timeout: float) -> str:
    """An error as the Record keeps it: one line, then where it came from."""
    if isinstance(error, TimeoutError):
        return f"TimeoutError: not finished within --record_timeout {timeout:g} s"
    where = traceback.extract_tb(error.__traceback__)
    at = f" (at {where[-1].name}, {where[-1].filename}:{where[-1].lineno})" if where else ""
    return f"{type(error).__name__}: {error}{at}"
