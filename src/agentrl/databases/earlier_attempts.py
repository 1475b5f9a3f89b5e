"""What earlier attempts at a rollout leave to the next one: turns that need not be sampled again.

These are left aside:

* what came before an attempt that had nothing but turns of the ledger and failed: the same turns
  would end in the same error
* attempts with tokens of weights so old that a row with them would be evicted
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    HANDED_BACK,
    DispatchedSamplingTask,
    Record,
    RecordStatus,
    Split,
)
from agentrl.databases.policies import load_lineage
from agentrl.databases.tasks import Claim, record_id

Turns = list[DispatchedSamplingTask]


async def earlier_turns(
    database: RunDatabase,
    claim: Claim,
    read_turns: Callable[[Sequence[str]], Awaitable[Mapping[str, Turns]]],
    max_age: int,
) -> list[Turns]:
    """The turns of earlier attempts at the claim's rollout, of the newest attempt first.

    `max_age`: the most optimizer steps by which a trained token's weights may be old.
    """
    ids = [record_id(claim.task.id, claim.rollout, n) for n in reversed(range(claim.attempt))]
    found = {
        document["_id"]: Record.from_mongo(document)
        async for document in database.records.find({"_id": {"$in": ids}})
    }
    usable: list[str] = []
    for name in ids:
        if name not in found:
            continue  # its sampler was gone before it was stored
        if _failed_with_replayed_turns(found[name]):
            break
        usable.append(name)
    turns = await read_turns(usable) if usable else {}
    made = [turns[name] for name in usable if turns[name]]
    if claim.task.split != Split.TRAIN or not made:
        return made
    lineage = await load_lineage(database)
    if not lineage.steps:
        return made
    step = lineage.step_of(lineage.newest)
    return [
        attempt
        for attempt in made
        if not lineage.too_old(
            {span.version for turn in attempt for span in turn.versions}, step, max_age
        )
    ]


def _failed_with_replayed_turns(record: Record) -> bool:
    """Whether an attempt failed, by itself, after turns none of which was sampled in it."""
    return (
        record.status == RecordStatus.FAILED
        and not str(record.error).startswith(HANDED_BACK)
        and record.replay is not None
        and 0 < record.n_turns <= record.replay.turns
    )
