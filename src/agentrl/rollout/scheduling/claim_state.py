"""What a sampler knows, between two looks at the ledger, of the work there is to claim. No I/O.

    UNKNOWN --looking--> POSSIBLE --trying--> NONE --opened, found--> POSSIBLE
       ^                                                                  |
       +------------------------------ changed ---------------------------+   from every state

A change that is told while the sampler looks, or tries to claim, is never forgotten: it leads to
another look. Who looks and claims is `scheduler.py`.
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
    """The state of one sampler.

    `admission_limit`: this group, and all before it in the group order, may be begun; None if none
    may, as far as is known.
    """

    work: Work = Work.UNKNOWN
    admission_limit: int | None = None
    _found: bool = False  # by a claim, since the last wait for changes
    _fence: int = -1  # of the trainer known so far
    _hoped: bool = False  # at some look the run was not given up

    def changed(self) -> None:
        """Something may have changed in the ledger."""
        self.work = Work.UNKNOWN

    def looking(self) -> None:
        """A look begins: it sees all that has changed so far."""
        self.work = Work.POSSIBLE

    def seen(self, work_view: WorkView) -> Run | None:
        """What a look saw. Returns the run if it is trained, and not by the trainer known so far.

        Raises `RunHopeless` if the run was given up meanwhile; not if it never was otherwise: a
        trainer that takes it up again may be on its way.
        """
        if work_view.hopeless is None:
            self._hoped = True
        elif self._hoped:
            raise RunHopeless(work_view.hopeless)
        run = work_view.training
        if run is None or run.fence == self._fence:
            return None
        # A trainer that resumes makes trained rows ready again, which the bound has to count.
        self._fence, self.admission_limit = run.fence, None
        return run

    def trying(self) -> None:
        """A claim begins: there is nothing, unless it finds something or `opened` is told."""
        if self.work is Work.POSSIBLE:
            self.work = Work.NONE

    def found(self) -> None:
        """The claim found something, so there may be more."""
        self._found = True
        self.opened()

    def opened(self) -> None:
        """An attempt ended so that something may be claimed."""
        if self.work is Work.NONE:
            self.work = Work.POSSIBLE

    def admitted(self, limit: int | None) -> bool:
        """A newer admission limit. Returns whether it may admit what the one before did not."""
        known, self.admission_limit = self.admission_limit, limit
        return limit is not None and limit != known

    def take_found(self) -> bool:
        """Whether claims have found something since this was asked last."""
        found, self._found = self._found, False
        return found
