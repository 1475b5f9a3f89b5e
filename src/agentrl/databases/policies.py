"""Publications of weights: version numbers, in the order they were given out."""

from datetime import UTC, datetime

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import PolicyVersion


async def publish(database: RunDatabase, version: int, step: int, path: str) -> None:
    """Record that the services now serve `version`, made by optimizer step `step`."""
    policy = PolicyVersion(
        id=str(version), version=version, step=step, path=path, created_at=datetime.now(UTC)
    )
    await database.policy_versions.insert_one(policy.to_mongo())


async def latest(database: RunDatabase) -> PolicyVersion | None:
    """The newest publication."""
    document = await database.policy_versions.find_one(sort=[("version", -1)])
    return PolicyVersion.from_mongo(document) if document else None
