"""A breaker: keeps work away from one dependency while that is out of reach. No I/O, no clock.

    closed --a probe fails; several tasks in a row met an outage--> open
    open   --pause, which grows--> a probe, or one attempt if there is none
    open   --that is answered--> closed; the pause is forgotten with the first success

One task may be what takes a dependency down, or what it cannot answer. So a failure alone keeps
nobody away from what answers a probe and others' attempts. A probe that repeats what one task asked
counts as that task: it opens nothing unless there is no connection, any success of another task
closes what it keeps open, and an attempt may try now and then.

Times are seconds of one monotonic clock. Who probes and who claims is `breakers.py`.
"""

from dataclasses import dataclass, field

from agentrl.databases.task_choice import NO_TASKS, TaskChoice
from agentrl.failures import InfrastructureFailure, Probe
from agentrl.foreign_text import text_of

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
GROWTH = 1.5  # from pause to pause: what is back is noticed after half as long again at the latest
TASKS_IN_A_ROW = 3


@dataclass(slots=True)
class Breaker:
    """What is known of one dependency.

    `needed_by`: the tasks that need it, as far as their lines tell. `error`: the last one.
    `since`: when it opened; None while it is closed.
    """

    dependency: str
    needed_by: TaskChoice = NO_TASKS
    error: str = ""
    probe: Probe | None = None
    since: float | None = None
    probe_repeats: bool = False  # as `InfrastructureFailure` says
    next_try: float = 0.0
    n_successes: int = 0  # of attempts that needed it
    _next_attempt: float = 0.0  # beside a probe that repeats what one task asked
    _pause_s: float = FIRST_PAUSE_S
    _in_a_row: set[str] = field(default_factory=set)  # tasks that met it since the last success

    @property
    def is_open(self) -> bool:
        """Whether the tasks that need it wait."""
        return self.since is not None

    def lets_try(self, now: float) -> bool:
        """Whether an attempt is to find out if it is still out of reach: nothing else can."""
        if self.probe is None:
            return self.is_open and now >= self.next_try
        return self.is_open and self.probe_repeats and now >= self._next_attempt

    def trying(self, now: float) -> None:
        """An attempt tries it."""
        self._next_attempt = now + LONGEST_PAUSE_S
        if self.probe is None:
            self.wait(now)

    def failed(
        self, failure: InfrastructureFailure, task: str, needed_by: TaskChoice, now: float
    ) -> None:
        """An attempt at `task` met an outage. What cannot be probed opens at once."""
        self.error = text_of(failure).removeprefix(f"{self.dependency} is out of reach: ")
        if failure.probe is not None:
            self.probe, self.probe_repeats = failure.probe, failure.probe_repeats
        self.needed_by |= needed_by
        self._in_a_row.add(task)
        if self.probe is None or len(self._in_a_row) >= TASKS_IN_A_ROW:
            self.open(now)

    def not_answered(self, error: Exception, now: float) -> None:
        """A probe failed."""
        self.error = text_of(error) or type(error).__name__
        for_all = not self.probe_repeats or isinstance(error, ConnectionError)
        if for_all:
            self._next_attempt = now + LONGEST_PAUSE_S  # it would fail too
        if self.is_open:
            self.wait(now)
        elif for_all or len(self._in_a_row) >= TASKS_IN_A_ROW:
            self.open(now)

    def open(self, now: float) -> None:
        """It is out of reach: the next try comes after the pause."""
        if self.since is None:
            self.since = now
            self._next_attempt = now + LONGEST_PAUSE_S
            self.wait(now)

    def wait(self, now: float) -> None:
        """A try fails or begins: the next one comes after the pause, which grows."""
        self.next_try = now + self._pause_s
        self._pause_s = min(GROWTH * self._pause_s, LONGEST_PAUSE_S)

    def answered(self) -> None:
        """A probe was answered: work may go there again. Should it fail there, the pause goes on
        growing."""
        self.since = None

    def succeeded(self) -> None:
        """An attempt that needed it ended well. It may have had what it needed before the outage:
        a probe knows better, unless it asks only what one task asked."""
        self.n_successes += 1
        if self.is_open and self.probe is not None and not self.probe_repeats:
            return
        self.since = None
        self._pause_s = FIRST_PAUSE_S
        self._in_a_row.clear()
