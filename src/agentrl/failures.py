"""The cause of a failed attempt, by the class of the exception.

InfrastructureFailure    an outage: the attempt is handed back, does not count, and is repeated
any other exception      an error in the run's code: the attempt fails
a stop reason, a score   a result of the model or the task, not an exception
"""

import math
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import ClassVar

from agentrl.foreign_text import text_of

Probe = Callable[[], Awaitable[object]]
"""Checks whether a dependency answers again. Raises any exception while it does not."""


class Need(Enum):
    """Which other attempts need the dependency that an attempt did not reach."""

    AGENT = "agent"  # all attempts of its agent
    TOOLS = "tools"  # all attempts of agents with the same tools
    SAMPLING = "sampling"  # all attempts


class Foreseen(Exception):
    """A failure whose message says all of it: it is told in one line, without a traceback."""


class InfrastructureFailure(Foreseen):
    """A dependency of the run is unreachable or does not give a valid answer.

    dependency: its name for display, always the same: "the tool server sql", "the judge"
    probe: checks whether it answers again; None if only its next use can tell
    scorer: name of the scorer that met the failure, if one did
    sampler_waits_s: how long a sampler waits for it before it ends; what it hands back is sampled
        by the next one
    probe_repeats: whether the probe repeats the attempt's request, which may itself be what the
        dependency cannot answer; such a probe raises `ConnectionError` if no request is answered

    The message is one sentence for the user. A subclass that does not call `super().__init__` has
    the defaults below.
    """

    need: ClassVar[Need] = Need.AGENT  # used unless a scorer met the failure
    probe_repeats: ClassVar[bool] = False
    sampler_waits_s: float = math.inf
    scorer: str | None = None
    dependency: str = "something without a name"
    probe: Probe | None = None

    def __init__(self, message: str, *, dependency: str, probe: Probe | None = None) -> None:
        super().__init__(message)
        # A user's own may give anything: it is a key, and is stored.
        self.dependency = dependency if isinstance(dependency, str) else text_of(dependency)
        self.probe = probe
