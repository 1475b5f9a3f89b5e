"""The cost of write concern `majority` with three members, compared with the primary alone.

Three mongods on this machine's loopback and disk. Rounds of both sides in turn: an update of one
document, such as a claim or a heartbeat, one after the other; and bulk writes of 64 turns of 2 KB,
as group commit sends them. And reads of one document with `majority` beside `local`.

    python benchmarks/majority.py [--quick] [--save]
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pymongo import AsyncMongoClient, InsertOne
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern
from report import finish, parse_flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "databases"))

from replica_set import ReplicaSet

BULK, BYTES = 64, 2048


async def measure(url: str, rounds: int, each: int) -> dict[str, float]:
    """Milliseconds of one operation, medians over the rounds."""
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(url)
    times: dict[str, list[float]] = {}

    async def timed(name: str, operation: Callable[[int], Awaitable[object]], count: int) -> None:
        began = time.perf_counter()
        for number in range(count):
            await operation(number)
        times.setdefault(name, []).append(1000 * (time.perf_counter() - began) / count)

    for round_ in range(rounds):
        for side, concern in (("primary", WriteConcern(1)), ("majority", WriteConcern("majority"))):
            tasks = client["bench"].get_collection("tasks", write_concern=concern)
            turns = client["bench"].get_collection("turns", write_concern=concern)
            await tasks.update_one({"_id": 0}, {"$inc": {"n": 1}}, upsert=True)
            await timed(
                f"update_{side}",
                lambda _, t=tasks: t.update_one({"_id": 0}, {"$inc": {"n": 1}}),
                each,
            )

            async def bulk(number: int, turns: Any = turns, key: str = f"{round_}-{side}") -> None:
                made = [
                    InsertOne({"_id": f"{key}-{number}-{n}", "data": os.urandom(BYTES)})
                    for n in range(BULK)
                ]
                await turns.bulk_write(made, ordered=False)

            await timed(f"bulk_{side}", bulk, max(1, each // 4))
        for side in ("local", "majority"):
            read = client["bench"].get_collection("tasks", read_concern=ReadConcern(side))
            await timed(f"read_{side}", lambda _, r=read: r.find_one({"_id": 0}), each)
    await client.close()
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


def main(quick: bool, save: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, ReplicaSet(Path(folder)) as members:
        found = asyncio.run(measure(members.url, 2 if quick else 8, 40 if quick else 100))
    ratios = {
        f"{name}_ratio": round(found[f"{name}_majority"] / found[f"{name}_{other}"], 2)
        for name, other in (("update", "primary"), ("bulk", "primary"), ("read", "local"))
    }
    finish("majority", {"milliseconds": found, **ratios}, ("pymongo",), save=save)


if __name__ == "__main__":
    flags = parse_flags(__doc__ or "")
    main(flags.quick, flags.save)
