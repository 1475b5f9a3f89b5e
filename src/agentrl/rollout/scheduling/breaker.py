"""A circuit breaker: holds back work while a dependency is unreachable. No I/O, no clock.

    closed --a probe fails; several tasks in a row met an outage--> open
    open   --growing pause--> a probe, or one attempt if there is no probe
    open   --success--> closed; the first successful attempt resets the pause

A single task may cause the outage, or ask something that the dependency cannot answer. So one
failure does not open the breaker of a dependency that answers probes. A probe that repeats one
task's request counts as that task: it opens the breaker only if there is no connection, the success
of another task closes it, and an attempt may try from time to time.

Times are seconds of a monotonic clock. `breakers.py` runs probes and decides about claims.
"""

import math
from dataclasses import dataclass, field

from agentrl.databases.task_choice import NO_TASKS, TaskChoice
from agentrl.failures import InfrastructureFailure, Probe
from agentrl.foreign_text import text_of

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
GROWTH = 1.5  # factor from pause to pause: recovery is noticed within half the outage's length
TASKS_IN_A_ROW = 3


@dataclass(slots=True)
class Breaker:
    """The breaker of one dependency.

    `needed_by`: the tasks that need it, as far as known. `error`: the last error. `since`: when it
    opened; None while it is closed. `sampler_waits_s`: see `InfrastructureFailure`.
    """

    dependency: str
    needed_by: TaskChoice = NO_TASKS
    error: str = ""
    probe: Probe | None = None
    since: float | None = None
    probe_repeats: bool = False  # see `InfrastructureFailure`
    sampler_waits_s: float = math.inf
    next_try: float = 0.0
    n_successes: int = 0  # of attempts that needed it
    _next_attempt: float = 0.0  # earliest attempt beside a probe that repeats one task's request
    _pause_s: float = FIRST_PAUSE_S
    _in_a_row: set[str] = field(default_factory=set)  # tasks that failed since the last success

    @property
    def is_open(self) -> bool:
        """Whether tasks that need it are held back."""
        return self.since is not None

    def spent(self, now: float) -> bool:
        """Whether it was waited for long enough."""
        return self.since is not None and now - self.since >= self.sampler_waits_s

    def lets_try(self, now: float) -> bool:
        """Whether one attempt may try the dependency, because no probe can tell its state."""
        if self.probe is None:
            return self.is_open and now >= self.next_try
        return self.is_open and self.probe_repeats and now >= self._next_attempt

    def trying(self, now: float) -> None:
        """An attempt tries the dependency."""
        self._next_attempt = now + LONGEST_PAUSE_S
        if self.probe is None:
            self.wait(now)

    def failed(
        self, failure: InfrastructureFailure, task: str, needed_by: TaskChoice, now: float
    ) -> None:
        """An attempt at `task` met an outage. Without a probe the breaker opens at once."""
        self.error = text_of(failure).removeprefix(f"{self.dependency} is out of reach: ")
        if failure.probe is not None:
            self.probe, self.probe_repeats = failure.probe, failure.probe_repeats
        self.needed_by |= needed_by
        self.sampler_waits_s = failure.sampler_waits_s
        self._in_a_row.add(task)
        if self.probe is None or len(self._in_a_row) >= TASKS_IN_A_ROW:
            self.open(now)

    def not_answered(self, error: Exception, now: float) -> None:
        """A probe failed."""
        self.error = text_of(error) or type(error).__name__
        for_all = not self.probe_repeats or isinstance(error, ConnectionError)
        if for_all:
            self._next_attempt = now + LONGEST_PAUSE_S  # an attempt would fail too
        if self.is_open:
            self.wait(now)
        elif for_all or len(self._in_a_row) >= TASKS_IN_A_ROW:
            self.open(now)

    def open(self, now: float) -> None:
        """Open the breaker: the next try comes after the pause."""
        if self.since is None:
            self.since = now
            self._next_attempt = now + LONGEST_PAUSE_S
            self.wait(now)

    def wait(self, now: float) -> None:
        """A try began or failed: set the next one after the pause, and increase the pause."""
        self.next_try = now + self._pause_s
        self._pause_s = min(GROWTH * self._pause_s, LONGEST_PAUSE_S)

    def answered(self) -> None:
        """A probe was answered: close the breaker. The pause keeps its length."""
        self.since = None

    def succeeded(self) -> None:
        """An attempt that needed the dependency succeeded.

        This does not close a breaker whose probe speaks for all tasks: the attempt may have used
        the dependency before the outage.
        """
        self.n_successes += 1
        if self.is_open and self.probe is not None and not self.probe_repeats:
            return
        self.since = None
        self._pause_s = FIRST_PAUSE_S
        self._in_a_row.clear()
