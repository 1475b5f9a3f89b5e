"""Whose fault a failure is. The class of an error says it, wherever it is raised.

InfrastructureFailure    nobody's attempt: it is handed back, at no cost, and tried again
any other exception      the run's own code: that attempt fails with its error
a stop reason, a score   the model's or the task's: a result, and no exception at all
"""

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import ClassVar

Probe = Callable[[], Awaitable[object]]
"""Asks a dependency whether it answers again. Raises, whatever it likes, while it does not."""


class Need(Enum):
    """Who needs what an attempt did not reach, beside that attempt."""

    AGENT = "agent"  # all attempts of its agent
    TOOLS = "tools"  # all attempts of agents with the same tools
    SAMPLING = "sampling"  # all attempts


class InfrastructureFailure(Exception):
    """Something that the run depends on is out of reach, or answers what is no answer.

    `dependency` names it for people, the same way every time: "the tool server sql", "the judge".
    The message is one sentence for the user. `probe`: None if only the next use of the dependency
    can tell whether it answers again. `scorer`: the name of the one that met it, if one did.
    `probe_repeats`: whether the probe asks what the attempt asked, which may be what the dependency
    cannot answer. Such a probe raises `ConnectionError` where nobody would be answered.

    A subclass whose `__init__` does not call this one has the defaults below.
    """

    need: ClassVar[Need] = Need.AGENT  # where no scorer met it
    probe_repeats: ClassVar[bool] = False
    scorer: str | None = None
    dependency: str = "something without a name"
    probe: Probe | None = None

    def __init__(self, message: str, *, dependency: str, probe: Probe | None = None) -> None:
        super().__init__(message)
        self.dependency = dependency
        self.probe = probe
