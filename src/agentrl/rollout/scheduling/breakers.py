"""The circuit breakers of a sampler process, and the tasks that they hold back.

`breaker.py` decides when a breaker opens and closes. This module has the clock, the probes and the
report to the database, which the live view and `agentrl show` read.
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
from agentrl.foreign_text import one_line, text_of
from agentrl.rollout.scheduling.breaker import Breaker

log = logging.getLogger(__name__)

_PROBE_S = 300.0  # the longest time of a probe; most probes have their own timeout
_TICK_S = 1.0
_MOMENT_S = 1.0  # shorter outages are not reported


class WaitedLongEnough(RuntimeError):
    """The sampler ends, because a dependency is still away. The message is a sentence."""


class Breakers:
    """All breakers of one process.

    `with_the_tools_of`: returns the agents that share an agent's tools (None: the default agent).
    `freed`: called when tasks that were held back may be claimed.
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
        self._n_successes: dict[tuple[str, str, int], int] = {}  # at a rollout's last outage
        self._told: set[str] = set()  # dependencies that were logged as unreachable
        self._ended = False

    def met(self, outage: InfrastructureFailure, claim: Claim) -> bool:
        """The attempt of a claim met an outage.

        Returns whether no other attempt has succeeded since this rollout last met one.
        """
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
        """A dependency of all tasks is known to be unreachable."""
        breaker = self._breaker(outage)
        breaker.needed_by, breaker.probe, breaker.error = ALL_TASKS, outage.probe, text_of(outage)
        breaker.probe_repeats = outage.probe_repeats
        breaker.open(time.monotonic())
        self._begin_probing(breaker)

    def sampled(self, claim: Claim) -> None:
        """The attempt of a claim has sampled its trajectory."""
        agent = claim.task.agent_name
        self._succeeded(lambda needed_by: needed_by.everything or agent in needed_by.agents)
        self.forget(claim)

    def scored(self, claim: Claim) -> None:
        """The trajectory of a claim was scored."""
        scorers = parse_scorer(claim.task.scorer).keys()
        self._succeeded(lambda needed_by: bool(needed_by.scorers & scorers))
        self.forget(claim)

    def forget(self, claim: Claim) -> None:
        """A step of the claim's rollout has ended: forget its outages."""
        for name in self._breakers:
            self._n_successes.pop((name, claim.task.id, claim.rollout), None)

    def held_back(self) -> TaskChoice:
        """The tasks that must not be claimed, because they need an unreachable dependency.

        Tasks of a breaker that lets an attempt try are not held back until `claimed` is called.
        """
        now = time.monotonic()
        held = (breaker.needed_by for breaker in self.open if not breaker.lets_try(now))
        return reduce(or_, held, NO_TASKS)

    @property
    def trying(self) -> bool:
        """Whether a single attempt should try an unreachable dependency."""
        now = time.monotonic()
        return any(breaker.lets_try(now) for breaker in self.open)

    def claimed(self, claim: Claim) -> None:
        """This was claimed: it tries the dependencies that it needs and that may be tried."""
        now = time.monotonic()
        scorers = parse_scorer(claim.task.scorer).keys()
        for breaker in self.open:
            needed_by = breaker.needed_by
            if claim.to_score:  # its trajectory is there
                needed_by = TaskChoice(scorers=needed_by.scorers)
            if breaker.lets_try(now) and needed_by.includes(claim.task.agent_name, scorers):
                breaker.trying(now)

    @property
    def known(self) -> list[Breaker]:
        """The breakers of all dependencies that were unreachable at some time."""
        return list(self._breakers.values())

    @property
    def open(self) -> list[Breaker]:
        """The open breakers."""
        return [breaker for breaker in self._breakers.values() if breaker.is_open]

    async def run(self, database: RunDatabase, sampler: str) -> None:
        """Report open breakers to the database, and call `freed` when an attempt may try one.

        Runs until it is cancelled, or raises `WaitedLongEnough`.
        """
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
                    with suppress(PyMongoError):  # the next report repeats it
                        await outages.report(database, sampler, waits)
                        reported = bool(waits)
                spent = next((breaker for breaker in self.open if breaker.spent(now)), None)
                if spent is not None:
                    with suppress(PyMongoError):
                        await outages.report(database, sampler, [])  # nobody waits any more
                    raise WaitedLongEnough(_given_up(spent, now))
        finally:
            self._ended = True
            for probe in self._probes.values():
                probe.cancel()

    async def _probe(self, breaker: Breaker) -> None:
        """Probe the dependency with growing pauses, until it answers or its breaker is closed."""
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
                except Exception as error:  # a probe may raise anything
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
        """Log when an outage begins and when it ends."""
        names = {wait.dependency for wait in waits}
        for wait in waits:
            if wait.dependency not in self._told:
                log.warning("waiting for %s: %s", wait.dependency, brief(wait.error))
        for name in sorted(self._told - names):
            log.warning("%s answers again", name)
        self._told = names


def _given_up(breaker: Breaker, now: float) -> str:
    assert breaker.since is not None
    waited = f"waited {now - breaker.since:.0f} s: " if breaker.sampler_waits_s else ""
    error = breaker.error.removeprefix(f"{breaker.dependency} ")
    return f"{waited}{breaker.dependency} {one_line(error)}"
