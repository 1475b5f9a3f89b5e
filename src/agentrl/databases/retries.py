"""How often a step of a trajectory or a group is tried again, and how long it waits between.

`tries` are all that ended without a result, and make the pause. `failures` are those among them
that were somebody's fault, and count against the limit.
"""

from dataclasses import dataclass

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


def pause_after(tries: int) -> float:
    """Seconds to wait after `tries` tries: 1, 2, 4 ... up to 60."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(tries - 1, 16)))


@dataclass(frozen=True, slots=True)
class FailureLimit:
    """A limit of `most` failures."""

    most: int

    def spent(self, failures: int) -> bool:
        """Whether the limit is reached.

        At the start of a try this means that samplers died: a live one quarantines at its last
        failure (`last_try`).
        """
        return failures >= self.most

    def last_try(self, failures: int) -> bool:
        """Whether the next failure reaches the limit."""
        return failures + 1 >= self.most
