"""`agentrl gateway`: a sampler process whose attempts are made by programs on other machines.

It joins a run as `agentrl sample` does, claims a slot for each client that asks for a task, and
answers the model's requests of all sessions. It may be killed at any time: started again on the
same port of the same machine, it takes over its leases and goes on with the sessions as the ledger
has them (`outside.py`, `sessions.py`).
"""

import asyncio
import logging
from collections.abc import Sequence

from agentrl.access import require_key
from agentrl.configs import Config, ConfigError
from agentrl.configs.secret_variables import read_key
from agentrl.databases.connection import connect
from agentrl.databases.service_key import session_secret
from agentrl.gateway.desk import Desk
from agentrl.gateway.outside import OutsideSampler
from agentrl.gateway.server import Gateway
from agentrl.gateway.session_keys import SessionKeys
from agentrl.gateway.tasks_api import TasksApi
from agentrl.rollout.agents import OUTSIDE
from agentrl.rollout.scheduling.joining import join
from agentrl.rollout.scheduling.process_end import ProcessEnd, run_to_its_end
from agentrl.rollout.scheduling.worker import sample, set_up_log

log = logging.getLogger(__name__)

_TELL_S = 10.0  # for which a gateway goes on to say that the run is finished, if anybody asks


def main(argv: Sequence[str]) -> int:
    """Serve programs until the run is finished or a signal stops it. Returns the exit code."""
    set_up_log()
    run_to_its_end(_serve(argv))
    return 0


async def _serve(argv: Sequence[str]) -> None:
    config = await join(argv, "agentrl gateway")
    end = ProcessEnd(asyncio.get_running_loop())
    agent, run = config.agent, config.run.run_name
    if agent.agent_name != OUTSIDE:
        raise ConfigError(
            f"run {run!r} has --agent_name {agent.agent_name}, so its samplers make the attempts: "
            f"a gateway needs a run with --agent_name {OUTSIDE}"
        )
    host, port = agent.gateway_host, agent.gateway_port
    key = read_key(agent.gateway_key_env, "gateway_key_env")
    require_key(host, key, "name the variable that holds it by --gateway_key_env")
    desk = Desk(f"gateway-{port}")
    gateway = Gateway(SessionKeys(await _secret(config)), desk.settled, lambda: desk.is_over)
    desk.kind = OutsideSampler.at(desk, gateway)
    try:
        async with gateway.running(host, port, TasksApi(gateway, desk, key).add_to):
            log.info("gateway of run %s at %s", run, gateway.url)
            try:
                await sample(config, end=end, demand=desk)
            finally:
                if desk.is_over and desk.is_in_use:
                    await asyncio.sleep(_TELL_S)
    except OSError as error:
        if gateway.url:
            raise
        raise ConfigError(
            f"--gateway_port {port}: {error.strerror or error}; give a port that is free on {host}"
        ) from None


async def _secret(config: Config) -> str:
    url = config.run.db_connection_string
    assert url is not None, "checked before"
    database = await connect(url, config.run.run_name, config.sampling.startup_timeout)
    try:
        return await session_secret(database)
    finally:
        await database.close()
