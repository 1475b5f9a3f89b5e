"""What a sampler knows, between two looks at the ledger, of the work there is to claim. No I/O.

    UNKNOWN --looking--> POSSIBLE --trying--> NONE --opened, found--> POSSIBLE
       ^                                                                  |
       +------------------------------ changed ---------------------------+   from every state

A change that is reported during a look or a claim is not lost: it leads to another look.
`scheduler.py` looks and claims.
"""

from dataclasses import dataclass
from enum import Enum

from agentrl.databases.documents import Run
from agentrl.databases.runs import RunHopeless
from agentrl.rollout.scheduling.work_view import WorkView


class Work(Enum):
    """Whether a claim may find something."""

    UNKNOWN = "unknown"  # something may have changed since the last look
    POSSIBLE = "possible"
    NONE = "none"  # a claim found nothing, and nothing is known to have changed since


@dataclass
class ClaimState:
    """What one sampler knows of the work to claim.

    `admission_limit`: group order up to which groups may be begun; None if none may, as far as
    known.
    """

    work: Work = Work.UNKNOWN
    admission_limit: int | None = None
    _found: bool = False  # whether claims found something since the last wait for changes
    _fence: int = -1  # fencing number of the last known trainer
    _hoped: bool = False  # whether the run was not hopeless at some look

    def changed(self) -> None:
        """Something may have changed in the ledger."""
        self.work = Work.UNKNOWN

    def looking(self) -> None:
        """A look begins. It sees all changes so far."""
        self.work = Work.POSSIBLE

    def seen(self, work_view: WorkView) -> Run | None:
        """Take in the result of a look. Returns the run if a new trainer trains it.

        Raises `RunHopeless` if the run was given up since an earlier look. A run that was hopeless
        from the first look does not raise: a trainer may be about to resume it.
        """
        if work_view.hopeless is None:
            self._hoped = True
        elif self._hoped:
            raise RunHopeless(work_view.hopeless)
        run = work_view.training
        if run is None or run.fence == self._fence:
            return None
        # A resume makes trained rows ready again, so the bound must be computed anew.
        self._fence, self.admission_limit = run.fence, None
        return run

    def trying(self) -> None:
        """A claim begins. There is no work unless it finds some or `opened` is called."""
        if self.work is Work.POSSIBLE:
            self.work = Work.NONE

    def found(self) -> None:
        """The claim found something, so there may be more."""
        self._found = True
        self.opened()

    def opened(self) -> None:
        """Something may be claimed, because an attempt ended."""
        if self.work is Work.NONE:
            self.work = Work.POSSIBLE

    def admitted(self, limit: int | None) -> bool:
        """Set a newer admission limit. Returns whether it may admit further groups."""
        known, self.admission_limit = self.admission_limit, limit
        return limit is not None and limit != known

    def take_found(self) -> bool:
        """Whether claims have found something since the last call."""
        found, self._found = self._found, False
        return found
