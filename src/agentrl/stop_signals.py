"""The signals that stop a process gracefully: it finishes or saves its current work first.

SIGINT is Ctrl-C, SIGTERM the usual signal, SIGHUP a closed terminal. Slurm can send SIGUSR1 or
SIGUSR2 some time before a job is pre-empted or its time is over (`--signal=USR1@120`).
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
_SAME_S = 1.0  # repetitions within this time count once: a job's end may send a signal repeatedly


def stop_signals() -> tuple[Signals, ...]:
    """Return the signals of `STOP_SIGNALS` that this process should handle.

    Signals that the parent process has set to be ignored stay ignored: by `nohup`, or for the
    launcher's parts, which the launcher stops itself.
    """
    return tuple(number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN)


@dataclass
class StopRequest:
    """The signals so far. The first asks to stop gracefully, a repetition to stop at once.

    SIGUSR1 and SIGUSR2 are warnings: repeated, or followed by another signal, they do not ask to
    stop at once.
    """

    first: Signals | None = None
    clock: Callable[[], float] = time.monotonic
    _came: dict[Signals, float] = field(default_factory=dict)  # time of the first of each signal

    def take(self, number: int) -> bool:
        """Record a signal. Returns whether it asks to stop at once."""
        came, now = Signals(number), self.clock()
        again = came in self._came and now - self._came[came] >= _SAME_S
        self._came.setdefault(came, now)
        if self.first is None:
            self.first = came
        return again and came not in _EARLY_WARNINGS
