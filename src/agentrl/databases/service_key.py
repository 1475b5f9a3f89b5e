"""The key of a run's inference services, which its machines find in the run's database.

Services that other machines ask need a key. A launch on several machines that is given none makes
one: whoever may read the run's database may do all with the run anyway.
"""

import secrets

from agentrl.databases.connection import RunDatabase

_ID = "inference services"


async def shared_key(database: RunDatabase) -> str:
    """The run's key, which the first call makes."""
    kept = await database.keys.find_one_and_update(
        {"_id": _ID},
        {"$setOnInsert": {"key": secrets.token_hex(32)}},
        upsert=True,
        return_document=True,
    )
    assert kept is not None, "it was inserted"
    return str(kept["key"])
