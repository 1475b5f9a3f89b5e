"""A sampler process that comes as far as its first scorings: `scoring_process.py DATABASE_URL RUN`.

It says which Records are sampled and waits; tests kill it there.
"""

import asyncio
import sys

from scripted_run import ScriptedAgent, config, scheduler

from agentrl.databases.connection import connect
from agentrl.databases.documents import Record


class Hanging(ScriptedAgent):
    """Its scoring never ends."""

    @staticmethod
    def script(claim: object) -> float:
        return 0.25

    async def evaluate_record(self, record: Record) -> Record:
        print(record.id, flush=True)
        await asyncio.Event().wait()
        raise AssertionError("waits for ever")


async def main(url: str, run: str, *flags: str) -> None:
    database = await connect(url, run)
    async with scheduler(database, Hanging, config(*flags), owner="killed") as sampler:
        await sampler.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
