"""How often a step of a trajectory or a group is tried again, and how long it waits between.

`tries` are all that ended without a result, and make the pause. `failures` are those among them
that were somebody's fault, and count against the limit.
"""

from dataclasses import dataclass

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


def pause_after(tries: int) -> float:
    """Seconds until what was tried so often in vain is tried again: 1, 2, 4 ... up to a minute."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(tries - 1, 16)))


@dataclass(frozen=True, slots=True)
class FailureLimit:
    """A step may fail so often."""

    most: int

    def spent(self, failures: int) -> bool:
        """Whether it has failed as often as it may: samplers died of it, for who fails the last
        time says so himself."""
        return failures >= self.most

    def last_try(self, failures: int) -> bool:
        """Whether the next failure is the last."""
        return failures + 1 >= self.most
