"""The breakers of a sampler process: what it waits for, and which tasks are not claimed meanwhile.

When to let work near a dependency again is decided in `breaker.py`. Here are the clock, the probes
and the report to the database, which the live view and `agentrl show` read.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from operator import or_

from pymongo.errors import PyMongoError

from agentrl.databases import outages
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Task
from agentrl.databases.scorer_notation import parse_scorer
from agentrl.databases.storable import brief
from agentrl.databases.task_choice import ALL_TASKS, NO_TASKS, TaskChoice
from agentrl.databases.tasks import Claim
from agentrl.failures import InfrastructureFailure, Need
from agentrl.foreign_text import text_of
from agentrl.rollout.scheduling.breaker import Breaker

log = logging.getLogger(__name__)

_PROBE_S = 300.0  # the longest wait for a probe, which mostly has a time-out of its own
_TICK_S = 1.0
_MOMENT_S = 1.0  # a shorter outage is not worth a line


class Breakers:
    """All breakers of one process.

    `with_the_tools_of`: the agents that use the same tools as this one (None: the default).
    `freed`: called when tasks may be claimed that could not be.
    """

    def __init__(
        self,
        with_the_tools_of: Callable[[str | None], frozenset[str | None]],
        freed: Callable[[], None],
    ) -> None:
        self._with_the_tools_of = with_the_tools_of
        self._freed = freed
        self._breakers: dict[str, Breaker] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._n_successes: dict[tuple[str, str, int], int] = {}  # when a rollout met the outage
        self._told: set[str] = set()  # in the log, as out of reach
        self._ended = False

    def met(self, outage: InfrastructureFailure, claim: Claim) -> bool:
        """The attempt of a claim met an outage. Returns whether others have only met it too, as
        far as is known: nobody has succeeded since the rollout's last attempt met one."""
        breaker = self._breaker(outage)
        breaker.failed(outage, claim.task.id, self._needed_by(outage, claim), time.monotonic())
        self._begin_probing(breaker)
        rollout = (breaker.dependency, claim.task.id, claim.rollout)
        before = self._n_successes.get(rollout, breaker.n_successes)
        self._n_successes[rollout] = breaker.n_successes
        return before == breaker.n_successes

    def met_by_group(self, outage: InfrastructureFailure, task: Task) -> None:
        """The scorers of a whole group met an outage."""
        breaker = self._breaker(outage)
        scorers = frozenset() if outage.scorer is None else frozenset({outage.scorer})
        needed_by = TaskChoice(scorers=scorers)
        breaker.failed(outage, task.id, needed_by, time.monotonic())
        self._begin_probing(breaker)

    def out_of_reach(self, outage: InfrastructureFailure) -> None:
        """Something that all tasks need is known to be out of reach."""
        breaker = self._breaker(outage)
        breaker.needed_by, breaker.probe, breaker.error = ALL_TASKS, outage.probe, text_of(outage)
        breaker.probe_repeats = outage.probe_repeats
        breaker.open(time.monotonic())
        self._begin_probing(breaker)

    def sampled(self, claim: Claim) -> None:
        """The attempt of a claim has its trajectory."""
        agent = claim.task.agent_name
        self._succeeded(lambda needed_by: needed_by.everything or agent in needed_by.agents)
        self.forget(claim)

    def scored(self, claim: Claim) -> None:
        """The trajectory of a claim has its score."""
        scorers = parse_scorer(claim.task.scorer).keys()
        self._succeeded(lambda needed_by: bool(needed_by.scorers & scorers))
        self.forget(claim)

    def forget(self, claim: Claim) -> None:
        """A step of the claim's rollout has come to its end, well or badly."""
        for name in self._breakers:
            self._n_successes.pop((name, claim.task.id, claim.rollout), None)

    def held_back(self) -> TaskChoice:
        """The tasks that are not to be claimed: those that need what is out of reach. If that
        cannot be probed, and its pause is over, they are not held back until `claimed`."""
        now = time.monotonic()
        held = (breaker.needed_by for breaker in self.open if not breaker.lets_try(now))
        return reduce(or_, held, NO_TASKS)

    @property
    def trying(self) -> bool:
        """Whether an attempt is to try something: a single one."""
        now = time.monotonic()
        return any(breaker.lets_try(now) for breaker in self.open)

    def claimed(self) -> None:
        """Something was claimed, that tries what may be tried."""
        now = time.monotonic()
        for breaker in self.open:
            if breaker.lets_try(now):
                breaker.trying(now)

    @property
    def open(self) -> list[Breaker]:
        """Those of what is out of reach."""
        return [breaker for breaker in self._breakers.values() if breaker.is_open]

    async def run(self, database: RunDatabase, sampler: str) -> None:
        """Say in the database what is waited for, and wake the sampler when it may try what cannot
        be probed. Ends by being cancelled."""
        reported = False
        try:
            while True:
                await asyncio.sleep(_TICK_S)
                now = time.monotonic()
                if self.trying:
                    self._freed()
                waits = [
                    outages.OpenBreaker(breaker.dependency, now - breaker.since, breaker.error)
                    for breaker in self.open
                    if breaker.since is not None and now - breaker.since >= _MOMENT_S
                ]
                self._log(waits)
                if waits or reported:
                    with suppress(PyMongoError):  # the next report says it too
                        await outages.report(database, sampler, waits)
                        reported = bool(waits)
        finally:
            self._ended = True
            for probe in self._probes.values():
                probe.cancel()

    async def _probe(self, breaker: Breaker) -> None:
        """Ask whether the dependency answers, at once and then with growing pauses, until it does
        or keeps nobody waiting."""
        assert breaker.probe is not None
        try:
            await asyncio.sleep(breaker.next_try - time.monotonic() if breaker.is_open else 0)
            while True:
                try:
                    async with asyncio.timeout(_PROBE_S):
                        answer = breaker.probe()
                        if inspect.isawaitable(answer):  # a user's probe may not be async
                            await answer
                    break
                except Exception as error:  # whatever it raises, there was no answer
                    breaker.not_answered(error, time.monotonic())
                if not breaker.is_open:
                    return
                await asyncio.sleep(breaker.next_try - time.monotonic())
            breaker.answered()
            self._freed()
        finally:
            del self._probes[breaker.dependency]

    def _breaker(self, outage: InfrastructureFailure) -> Breaker:
        name = outage.dependency
        return self._breakers.setdefault(name, Breaker(name))

    def _begin_probing(self, breaker: Breaker) -> None:
        name = breaker.dependency
        if breaker.probe is not None and name not in self._probes and not self._ended:
            self._probes[name] = asyncio.create_task(self._probe(breaker), name=f"probe of {name}")

    def _needed_by(self, outage: InfrastructureFailure, claim: Claim) -> TaskChoice:
        agent = claim.task.agent_name
        if outage.scorer is not None:
            return TaskChoice(scorers=frozenset({outage.scorer}))
        if outage.need is Need.SAMPLING:
            return ALL_TASKS
        if outage.need is Need.TOOLS:
            return TaskChoice(agents=self._with_the_tools_of(agent))
        return TaskChoice(agents=frozenset({agent}))

    def _succeeded(self, for_tasks: Callable[[TaskChoice], bool]) -> None:
        for breaker in self._breakers.values():
            if for_tasks(breaker.needed_by):
                was_open = breaker.is_open
                breaker.succeeded()
                if was_open:
                    self._freed()

    def _log(self, waits: Sequence[outages.OpenBreaker]) -> None:
        """One line when an outage begins, and one when it is over."""
        names = {wait.dependency for wait in waits}
        for wait in waits:
            if wait.dependency not in self._told:
                log.warning("waiting for %s: %s", wait.dependency, brief(wait.error))
        for name in sorted(self._told - names):
            log.warning("%s answers again", name)
        self._told = names
