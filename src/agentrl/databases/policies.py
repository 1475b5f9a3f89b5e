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
        """Optimizer steps in the weights of `version`. Raises KeyError if it is not known."""
        return self.steps[version]

    def age(self, version: int, step: int) -> int:
        """By how many steps weights of `step` are newer than those of `version`; never negative.

        Weights of steps that a resume has undone count by their step too: what they sampled is as
        young as their number of steps says, and importance weights tell the rest. Raises KeyError.
        """
        return max(0, step - self.step_of(version))

    def young_versions(self, step: int, max_staleness: int) -> list[int]:
        """The versions whose tokens may still be trained by weights of `step`, sorted."""
        return sorted(version for version in self.steps if self.age(version, step) <= max_staleness)

    def too_old(self, versions: Collection[int], step: int, max_staleness: int) -> bool:
        """Whether a row with tokens of `versions` must be evicted before weights of `step`.

        A version that is newer than all known ones was published meanwhile: it is no reason to
        evict. One that is not, and was never recorded, is too old.
        """
        young = self.young_versions(step, max_staleness)
        return any(version <= self.newest and version not in young for version in versions)


async def load_lineage(database: RunDatabase, known: Lineage | None = None) -> Lineage:
    """All publications. `known`: what an earlier call found; only later ones are asked for."""
    known = known or Lineage()
    later = database.policy_versions.find(
        {"version": {"$gt": known.newest}}, {"version": 1, "step": 1}
    )
    added = {document["version"]: document["step"] async for document in later}
    return Lineage({**known.steps, **added}) if added else known


async def publish(database: RunDatabase, version: int, step: int, path: str) -> None:
    """Give out `version` for the weights of optimizer step `step`, before any service has them.

    Doing it again changes nothing. Raises `DuplicateKeyError` if the number was given to others.
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
    """`version` was brought to the services: one that has an older one gets no work any more."""
    await database.policy_versions.update_one({"_id": str(version)}, {"$set": {"served": True}})


async def newest_served(database: RunDatabase) -> int:
    """The newest version that was brought to the services; 0, the first one, before that."""
    document = await database.policy_versions.find_one({"served": True}, sort=[("version", -1)])
    return PolicyVersion.from_mongo(document).version if document else 0


async def latest(database: RunDatabase) -> PolicyVersion | None:
    """The newest publication."""
    document = await database.policy_versions.find_one(sort=[("version", -1)])
    return PolicyVersion.from_mongo(document) if document else None
