"""Counts the attempts of a run that have ended since a given time, and groups the failures.

Counting is incremental: each read covers the attempts that ended since the last one, by an index.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.diagnosis import shown_error
from agentrl.databases.documents import HANDED_BACK, Split

_SETTLED = timedelta(seconds=60)  # largest difference of clocks between samplers and database
_SHOWN_KINDS = 3
_PLACE = " (at "  # precedes the place of origin at the end of an error


@dataclass(frozen=True)
class AttemptCounts:
    """How many attempts ended, with a trajectory or with an error; handed-back ones do not count.

    `kinds`: failures grouped by exception and place, most frequent first, as pairs (count, one of
    the errors).
    """

    ended: int = 0
    failed: int = 0
    kinds: tuple[tuple[int, str], ...] = ()

    @property
    def stored(self) -> int:
        """Attempts that ended with a trajectory."""
        return self.ended - self.failed

    @property
    def most_failed(self) -> bool:
        """Whether more attempts failed than succeeded."""
        return self.failed > self.stored

    @property
    def sentence(self) -> str | None:
        """A sentence with the number of failures and their errors; None if there are none."""
        if not self.failed:
            return None
        told = [f"{count} × {shown_error(error)}" for count, error in self.kinds[:_SHOWN_KINDS]]
        others = len(self.kinds) - len(told)
        told += [f"and {others} other kinds"] if others else []
        return f"{self.failed} of {self.ended} attempts failed: {'; '.join(told)}"


@dataclass
class _Sums:
    ended: int = 0
    failed: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(self.ended + other.ended, self.failed + other.failed)


class AttemptTally:
    """Counts the attempts that end after `since` (the database's time)."""

    def __init__(self, database: RunDatabase, since: datetime) -> None:
        self.since = since
        self._database = database
        self._settled_until = since
        self._settled = _Sums()
        self._errors: dict[tuple[str, str], str] = {}  # the first seen of each kind

    async def read(self, now: datetime) -> AttemptCounts:
        """The counts up to `now` (the database's time)."""
        until = now - _SETTLED
        if until > self._settled_until:
            came = await self._sum({"$gt": self._settled_until, "$lte": until})
            self._settled, self._settled_until = self._settled + came, until
        sums = self._settled + await self._sum({"$gt": self._settled_until})
        kinds = [(count, self._errors[kind]) for kind, count in sums.failed.most_common()]
        return AttemptCounts(sums.ended, sums.failed.total(), tuple(kinds))

    async def _sum(self, finished_at: Mapping[str, datetime]) -> _Sums:
        cursor = await self._database.records.aggregate(
            [
                {
                    "$match": {
                        "split": {"$in": list(Split)},  # all splits: the index begins with it
                        "finished_at": finished_at,
                        "error": {"$not": {"$regex": f"^{HANDED_BACK}"}},
                    }
                },
                {"$group": {"_id": _KIND, "n": {"$sum": 1}, "error": {"$first": "$error"}}},
            ]
        )
        sums = _Sums()
        async for group in cursor:
            sums.ended += group["n"]
            if group["_id"] is not None:
                kind = (group["_id"]["raised"], group["_id"]["at"])
                sums.failed[kind] += group["n"]
                self._errors.setdefault(kind, group["error"])
        return sums


# The same grouping as in `diagnosis.kinds_of`.
_KIND: dict[str, Any] = {
    "$cond": [
        {"$eq": [{"$type": "$error"}, "string"]},
        {
            "raised": {"$first": {"$split": ["$error", ":"]}},
            "at": {
                "$cond": [
                    {"$gte": [{"$indexOfCP": ["$error", _PLACE]}, 0]},
                    {"$last": {"$split": ["$error", _PLACE]}},
                    "",
                ]
            },
        },
        None,
    ]
}
