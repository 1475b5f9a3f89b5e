"""`--max_failures_without_success`: decides when a run that gets nowhere is ended.

A run is ended if its latest attempts all fail, or most rollouts fail in the same way, or if a
number of groups in a row give nothing to train. The database is counted, so the counts cover any
number of samplers. Failures before the watch began do not count, because the cause may have been
fixed before the restart.

An outage that an agent does not recognise (`failures.py`) makes hundreds of attempts fail. So the
failures must also last for `OUTLIVED_S`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from agentrl.databases.connection import RunDatabase, retry_through_outages
from agentrl.databases.diagnosis import (
    GroupEnd,
    hopeless_attempts,
    hopeless_groups,
    never_trained,
)
from agentrl.databases.outcomes import latest_attempts, latest_groups

OUTLIVED_S = 40.0
_LOOK_EVERY_S = 1.0
_SHOWN = 256  # latest attempts and groups that `never_trained` reads
_LONGEST_GAP_S = 10.0  # between two looks; a longer gap does not count as time of failing


@dataclass
class _Streak:
    """The groups since the last one that gave rows."""

    after: datetime | None  # end of that group, or of the latest group at the first look
    since: float  # when it was seen, by the watch's clock

    def barren(self, ends: Sequence[GroupEnd], now: float) -> Sequence[GroupEnd]:
        """The groups of `ends` (newest first) after the last one with rows.

        If there is one with rows, the streak restarts after it.
        """
        for number, end in enumerate(ends):
            if end.rows != 0:
                self.after, self.since = end.at, now
                return ends[:number]
        return ends


@dataclass
class _Failing:
    """The attempts since the first look."""

    after: datetime | None  # end of the latest attempt at the first look
    since: float | None = None  # since when most attempts fail; None while they do not


class HopelessWatch:
    """Watches one run, for the process that can end it.

    `limit`: `--max_failures_without_success`; 0 turns the watch off. `reason`: why the run is to
    be ended; None so far.
    """

    def __init__(
        self, database: RunDatabase, limit: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.reason: str | None = None
        self._database = database
        self._limit = limit
        self._clock = clock
        self._attempts: _Failing | None = None
        self._groups: _Streak | None = None
        self._looked: float | None = None

    async def look(self, *, training: bool = True) -> str | None:
        """Why the run is to be ended; None if it is not.

        `training`: whether groups are expected to give rows now.
        """
        now = self._clock()
        if self._limit == 0 or self.reason is not None:
            return self.reason
        if self._looked is not None and now - self._looked < _LOOK_EVERY_S:
            return None
        gap = now - self._looked if self._looked is not None else 0.0
        self._looked = now
        if gap > _LONGEST_GAP_S:
            for streak in (self._attempts, self._groups):
                if streak is not None and streak.since is not None:
                    streak.since += gap
        self.reason = await retry_through_outages(
            lambda: self._look(now, training), "the look for failures"
        )
        return self.reason

    async def never_trained(self, epochs: int) -> str:
        """Why `epochs` epochs of tasks gave nothing to train."""

        async def ask() -> str:
            attempts = await latest_attempts(self._database, _SHOWN)
            groups = await latest_groups(self._database, _SHOWN)
            return never_trained(self._database.name, attempts, groups, epochs)

        return await retry_through_outages(ask, "the look for failures")

    async def _look(self, now: float, training: bool) -> str | None:
        reason = await self._failing(now)
        # Failing attempts also make barren groups, and their reason is more precise.
        if reason is None and training and (self._attempts is None or self._attempts.since is None):
            reason = await self._barren(now)
        return reason

    async def _failing(self, now: float) -> str | None:
        if self._attempts is None:
            newest = await latest_attempts(self._database, 1)
            self._attempts = _Failing(newest[0].at if newest else None)
            return None
        failing = self._attempts
        ends = await latest_attempts(self._database, self._limit, failing.after)
        reason = hopeless_attempts(self._database.name, ends, self._limit)
        if reason is None:
            failing.since = None
            return None
        if failing.since is None:
            failing.since = now
        return reason if now - failing.since >= OUTLIVED_S else None

    async def _barren(self, now: float) -> str | None:
        if self._groups is None:
            newest = await latest_groups(self._database, 1)
            self._groups = _Streak(newest[0].at if newest else None, now)
            return None
        streak = self._groups
        ends = await latest_groups(self._database, self._limit, streak.after)
        barren = streak.barren(ends, now)
        if now - streak.since < OUTLIVED_S:
            return None
        return hopeless_groups(self._database.name, barren, self._limit)
