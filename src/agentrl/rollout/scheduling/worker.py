"""`agentrl sample`: one sampler process, from flags to exit."""

import asyncio
import logging
import signal
from collections.abc import Sequence

import uvloop

from agentrl.configs import Config
from agentrl.databases.connection import connect
from agentrl.databases.owners import process_name
from agentrl.databases.records import RecordLedger
from agentrl.databases.services import register_urls
from agentrl.inference.pool import ServicePool
from agentrl.rollout.agents import find_agent, load_agents
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.process import Agents
from agentrl.rollout.groups.advantages import find_estimator
from agentrl.rollout.scheduling.joining import join
from agentrl.rollout.scheduling.scheduler import SamplingScheduler
from agentrl.rollout.scheduling.tracebacks import OneTraceback

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Sample for a run until it is finished. SIGTERM stops it in order."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(OneTraceback())
    for chatty in ("httpx2", "mcp"):  # they have a line for every tool call, or session
        logging.getLogger(chatty).setLevel(logging.WARNING)
    uvloop.run(_join_and_sample(argv))
    return 0


async def _join_and_sample(argv: Sequence[str]) -> None:
    await sample(await join(argv))


async def sample(config: Config, evaluation: int | None = None) -> None:
    """Sample for the run of `config`, or only its evaluation number `evaluation`."""
    load_agents(config)
    find_estimator(config.reward.estimator)
    url = config.run.db_connection_string
    assert url is not None, "checked before"
    database = await connect(url, config.run.run_name, config.sampling.startup_timeout)
    try:
        await register_urls(database, config.inference_urls)
        pool = ServicePool(
            request_timeout_s=config.sampling.request_timeout,
            patience_s=config.sampling.startup_timeout,
        )
        records = RecordLedger(database, config.sampling.lease_seconds)
        async with (
            pool,
            AsyncSampler.open_resources(config, pool, records) as shared,
            Agents(shared, find_agent(config.agent.agent_name)) as agents,
        ):
            scheduler = SamplingScheduler(database, config, agents, process_name(), evaluation)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, scheduler.stop)
            log.info("sampler %s of run %s", scheduler.owner, database.name)
            await scheduler.run()
    finally:
        await database.close()
