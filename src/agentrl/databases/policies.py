"""Publications of weights: version numbers in the order they were given out, and their steps.

Version numbers count on when a run is resumed from a checkpoint, so a number never means two sets
of weights. The age of a token is computed from the optimizer step of its version, not from the
number, so a resume makes no token older.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pymongo.errors import DuplicateKeyError

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import PolicyVersion


@dataclass(frozen=True)
class Lineage:
    """Which optimizer step made each policy version."""

    steps: Mapping[int, int] = field(default_factory=dict)  # by version

    @property
    def newest(self) -> int:
        """The highest version number; -1 if there is none."""
        return max(self.steps, default=-1)

    def step_of(self, version: int) -> int:
        """The optimizer step of `version`. Raises KeyError if the version is unknown."""
        return self.steps[version]

    def age(self, version: int, step: int) -> int:
        """How many steps weights of `step` are newer than those of `version`; never negative.

        Versions of steps that a resume has undone count by their step too; importance weights
        correct the difference in weights. Raises KeyError if the version is unknown.
        """
        return max(0, step - self.step_of(version))

    def young_versions(self, step: int, max_staleness: int) -> list[int]:
        """The versions at most `max_staleness` steps older than weights of `step`, sorted."""
        return sorted(version for version in self.steps if self.age(version, step) <= max_staleness)

    def too_old(self, versions: Collection[int], step: int, max_staleness: int) -> bool:
        """Whether a row with tokens of `versions` is too old to be trained by weights of `step`.

        A version newer than all known ones was just published and is not too old. An older version
        that was never recorded is too old.
        """
        young = self.young_versions(step, max_staleness)
        return any(version <= self.newest and version not in young for version in versions)


async def load_lineage(database: RunDatabase, known: Lineage | None = None) -> Lineage:
    """The lineage of all publications. `known`: an earlier result; only newer ones are read."""
    known = known or Lineage()
    later = database.policy_versions.find(
        {"version": {"$gt": known.newest}}, {"version": 1, "step": 1}
    )
    added = {document["version"]: document["step"] async for document in later}
    return Lineage({**known.steps, **added}) if added else known


async def publish(database: RunDatabase, version: int, step: int, path: str) -> None:
    """Record `version` for the weights of optimizer step `step`, before any service has them.

    Idempotent. Raises `DuplicateKeyError` if the number belongs to other weights.
    """
    policy = PolicyVersion(
        id=str(version), version=version, step=step, path=path, created_at=datetime.now(UTC)
    )
    try:
        await database.policy_versions.insert_one(policy.to_mongo())
    except DuplicateKeyError:
        same = {"_id": policy.id, "step": step, "path": path}
        if await database.policy_versions.find_one(same) is None:
            raise


async def serve(database: RunDatabase, version: int) -> None:
    """Mark `version` as served. Services with older weights then get no work (`serving`)."""
    await database.policy_versions.update_one({"_id": str(version)}, {"$set": {"served": True}})


async def newest_served(database: RunDatabase) -> int:
    """The newest version that is marked as served; 0 (the first version) if there is none."""
    document = await database.policy_versions.find_one({"served": True}, sort=[("version", -1)])
    return PolicyVersion.from_mongo(document).version if document else 0


async def latest(database: RunDatabase) -> PolicyVersion | None:
    """The newest publication; None if there is none."""
    document = await database.policy_versions.find_one(sort=[("version", -1)])
    return PolicyVersion.from_mongo(document) if document else None
