"""Keys of a run that its processes find in the run's database.

Services that other machines ask need a key. A launch on several machines that is given none makes
one: whoever may read the run's database may do all with the run anyway. The keys of a gateway's
sessions follow from a secret, so that they are the same after its restart.
"""

import secrets

from agentrl.databases.connection import RunDatabase

_SERVICES = "inference services"
_SESSIONS = "sessions of gateways"


async def shared_key(database: RunDatabase) -> str:
    """The key of the run's services, which the first call makes."""
    return await _kept(database, _SERVICES)


async def session_secret(database: RunDatabase) -> str:
    """The secret from which keys of sessions are made. The first call makes it."""
    return await _kept(database, _SESSIONS)


async def _kept(database: RunDatabase, name: str) -> str:
    kept = await database.keys.find_one_and_update(
        {"_id": name},
        {"$setOnInsert": {"key": secrets.token_hex(32)}},
        upsert=True,
        return_document=True,
    )
    assert kept is not None, "it was inserted"
    return str(kept["key"])
