"""The signals that end a process in order: what it is at is finished or saved first.

SIGINT is Ctrl-C, SIGTERM everybody's, SIGHUP a terminal that closes. SIGUSR1 and SIGUSR2 are what
Slurm sends some time before a job is pre-empted or its time is over (`--signal=USR1@120`).
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from signal import Signals

STOP_SIGNALS = (
    Signals.SIGINT,
    Signals.SIGTERM,
    Signals.SIGHUP,
    Signals.SIGUSR1,
    Signals.SIGUSR2,
)
_EARLY_WARNINGS = (Signals.SIGUSR1, Signals.SIGUSR2)
_SAME_S = 1.0  # a job's end sends a signal by several ways at once


def stop_signals() -> tuple[Signals, ...]:
    """Those of `STOP_SIGNALS` that this process is to hear.

    What whoever started it has set to be ignored stays so: `nohup`, and the launcher's parts, which
    it stops itself, in order.
    """
    return tuple(number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN)


@dataclass
class StopRequest:
    """What the signals that came ask for: `first` to stop in order, the same again to stop at once.

    An early warning never asks for haste, and what follows it with another signal does not either.
    """

    first: Signals | None = None
    clock: Callable[[], float] = time.monotonic
    _came: dict[Signals, float] = field(default_factory=dict)  # when each came first

    def take(self, number: int) -> bool:
        """Note a signal that came; whether it asks to stop at once."""
        came, now = Signals(number), self.clock()
        again = came in self._came and now - self._came[came] >= _SAME_S
        self._came.setdefault(came, now)
        if self.first is None:
            self.first = came
        return again and came not in _EARLY_WARNINGS
