"""What a run gets done under faults, against what it gets done without any in the same run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from chaos_tasks import is_good


@dataclass(frozen=True)
class Window:
    """A stretch of the run, by this machine's clock."""

    began: datetime
    ended: datetime

    @property
    def seconds(self) -> float:
        """How long it was."""
        return (self.ended - self.began).total_seconds()


def good_rollouts_per_s(records: Sequence[Mapping[str, Any]], windows: Sequence[Window]) -> float:
    """Trajectories of good tasks that got their score in the windows, per second.

    They are finished when they are scored or, where the score came later, sampled.
    """
    ended = [
        record["finished_at"]
        for record in records
        if record["finished_at"] and record["score"] is not None and is_good(record["task_id"])
    ]
    within = sum(window.began <= at < window.ended for at in ended for window in windows)
    return within / sum(window.seconds for window in windows)
