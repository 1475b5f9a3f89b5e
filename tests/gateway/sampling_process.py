"""A sampler process whose agent is a program: `sampling_process.py DATABASE_URL RUN [FLAG ...]`."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))  # `scripted_run`

from scripted_run import config, scheduler

from agentrl.databases.connection import connect
from agentrl.gateway.program import ProgramSampler


async def main(url: str, run: str, *flags: str) -> None:
    database = await connect(url, run)
    async with scheduler(database, ProgramSampler, config(*flags), owner="killed") as sampler:
        await sampler.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
