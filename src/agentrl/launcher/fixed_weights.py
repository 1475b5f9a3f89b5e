"""Services that answer with fixed weights, for evaluation and for runs without a trainer.

A launch's own services begin with the weights of a policy version. Into services that the user
gave, and that have others, they are loaded from disk.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from agentrl.configs import Config
from agentrl.databases.connection import RunDatabase
from agentrl.databases.services import acknowledge, live_services, register_urls
from agentrl.inference.engines import open_engines
from agentrl.inference.protocol import FRESH_VERSION, ServiceUnreachable
from agentrl.inference.weights.disk import DiskUpdater
from agentrl.inference.weights.updates import PublishedWeights, update_services
from agentrl.launcher.deployment import Deployment

_TICK_S = 0.25


@dataclass(frozen=True)
class Loaded:
    """How many services have the weights, and the last reason why one has not."""

    services: int
    reason: str = "none is registered"


async def load_weights(database: RunDatabase, config: Config, version: int, model: Path) -> Loaded:
    """Load the weights of a model folder, as `version`, into live services that have others.

    A service that cannot load them is not used.
    """
    live = await live_services(database)
    behind = [service.url for service in live if service.weight_version != version]
    if not behind:
        return Loaded(len(live))
    async with open_engines(behind, config.sampling.inference_api_key) as engines:
        outcomes = await update_services(DiskUpdater(), engines, PublishedWeights(version, model))
    for outcome in outcomes:
        await acknowledge(database, outcome.url, version if outcome.ok else FRESH_VERSION)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    return Loaded(len(live) - len(failed), (failed[-1].error or "") if failed else "")


async def await_services(database: RunDatabase, config: Config, version: int, model: Path) -> None:
    """Wait until a service has the weights. Raises `ServiceUnreachable` after a time."""
    await register_urls(database, config.inference_urls)
    patience = config.sampling.startup_timeout
    deadline = asyncio.get_running_loop().time() + patience
    loaded = Loaded(0)
    while asyncio.get_running_loop().time() < deadline:
        loaded = await load_weights(database, config, version, model)
        if loaded.services:
            return
        await asyncio.sleep(_TICK_S)
    raise ServiceUnreachable(
        f"no inference service loaded the weights within {patience:.0f} s: {loaded.reason}"
    )


def fixed_services(config: Config, deployment: Deployment, gpus: int) -> int:
    """Number of services to start here: by NUM_SERVICES, else one, or as many as SGLang fills the
    GPUs with."""
    if config.inference_urls:
        return 0
    if deployment.num_services is not None or deployment.service_command(gpus) is None:
        return deployment.services
    return max(1, gpus // config.services.inf_tp_size)
