"""A sampler process with a scripted agent: `sampler_process.py DATABASE_URL RUN [FLAG ...]`.

Its attempts say "waits" and wait. When they find that the process stood still for longer than a
lease, they say "woke" and write a turn. SIGTERM stops it as it stops `agentrl sample`.
"""

import asyncio
import logging
import signal
import sys
import time

from scripted_run import ScriptedAgent, config, scheduler

from agentrl.databases.connection import connect
from agentrl.databases.documents import Record


class Sleeper(ScriptedAgent):
    """Says its turn after a standstill."""

    async def run(self) -> Record:
        seen = time.monotonic()
        print("waits", flush=True)
        while time.monotonic() - seen < self.resources.config.sampling.lease_seconds:
            seen = time.monotonic()
            await asyncio.sleep(0.02)
        print("woke", flush=True)
        await self.say()
        return self.record

    @staticmethod
    def script(claim: object) -> float:
        return 1.0


async def main(url: str, run: str, *flags: str) -> None:
    database = await connect(url, run)
    async with scheduler(database, Sleeper, config(*flags), owner="stopped") as sampler:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sampler.stop)
        await sampler.run()
    await database.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main(*sys.argv[1:]))
