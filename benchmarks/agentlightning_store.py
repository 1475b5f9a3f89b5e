"""The Mongo store of Agent Lightning, doing what a record of some turns is to it.

A part of `ledger.py`, which runs it in an environment of its own: agentlightning needs other
packages than the trainer. It reads jobs from its standard input, one JSON object a line
(`{"database": "...", "workers": 32, "rollouts": 200, "turns": [...]}`), and answers each with a
line of JSON that says how many rollouts it did per second.

The operations are the store's own public ones: `dequeue_rollout`, then for each turn
`get_next_span_sequence_id` and `add_span`, then `update_attempt`. Enqueuing is not timed.
"""

import asyncio
import json
import sys
import time
from typing import Any

from agentlightning.store.mongo import MongoLightningStore
from agentlightning.types import EnqueueRolloutRequest, Span


async def rollouts_per_second(
    url: str, *, database: str, workers: int, rollouts: int, turns: list[dict[str, Any]]
) -> float:
    """`workers` tasks each work through one rollout after the other.

    `turns`: the attributes of a rollout's spans.
    """
    store = MongoLightningStore(mongo_uri=url, database_name=database)
    query = {"query": "How many bolts are in the bin?", "answer": "3"}
    await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input=query, mode="train") for _ in range(rollouts)]
    )
    finished = 0

    async def work(worker: str) -> None:
        nonlocal finished
        while (rollout := await store.dequeue_rollout(worker_id=worker)) is not None:
            attempt = rollout.attempt.attempt_id
            for turn in turns:
                place = await store.get_next_span_sequence_id(rollout.rollout_id, attempt)
                span = Span.from_attributes(
                    attributes=turn,
                    rollout_id=rollout.rollout_id,
                    attempt_id=attempt,
                    sequence_id=place,
                    name="generate",
                )
                await store.add_span(span)
            await store.update_attempt(rollout.rollout_id, attempt, status="succeeded")
            finished += 1

    began = time.perf_counter()
    await asyncio.gather(*(work(f"worker-{number}") for number in range(workers)))
    elapsed = time.perf_counter() - began
    await store.close()
    assert finished == rollouts, f"{finished} of {rollouts} rollouts finished"
    return rollouts / elapsed


def main() -> None:
    """Do jobs for the store at the URL that is our argument, until standard input ends."""
    for line in sys.stdin:
        rate = asyncio.run(rollouts_per_second(sys.argv[1], **json.loads(line)))
        print(json.dumps({"per_second": rate}), flush=True)


if __name__ == "__main__":
    main()
