"""Services that answer with fixed weights, for evaluation and for runs without a trainer.

A launch's own services begin with the weights of a policy version. Into services that the user
gave, and that have others, they are loaded from disk.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.configs import Config
from agentrl.configs.flags import Value
from agentrl.databases.connection import RunDatabase
from agentrl.databases.services import acknowledge, live_services, register_urls
from agentrl.inference.engines import open_engines
from agentrl.inference.protocol import FRESH_VERSION, ServiceUnreachable
from agentrl.inference.weights.disk import DiskUpdater
from agentrl.inference.weights.updates import PublishedWeights, update_services
from agentrl.launcher.deployment import Deployment
from agentrl.launcher.inventory import Inventory, read_inventory
from agentrl.launcher.placement import Asked
from agentrl.launcher.service_plan import plan_services
from agentrl.training.model.memory_model import MemorySetup

_TICK_S = 0.25


@dataclass(frozen=True)
class FixedServices:
    """Services to start on this machine.

    `devices`: CUDA_VISIBLE_DEVICES of each; None on the CPU. `gpus`: those of this machine, 0 if
    they are on the CPU. `flags`: what follows from the GPUs. `lines`: what is told of them.
    """

    devices: tuple[str | None, ...] = ()
    gpus: int = 0
    flags: Mapping[str, Value] = field(default_factory=dict)
    lines: Sequence[str] = ()


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


def fixed_services(
    config: Config, given: Mapping[str, Value], deployment: Deployment
) -> FixedServices:
    """The services to start here: none if some are given; on GPUs as many as NUM_SERVICES says, or
    as fit; else by NUM_SERVICES, or one.

    `given`: the flags of `config` that somebody has set. Raises `ConfigError` if the GPUs have too
    little room.
    """
    if config.inference_urls:
        return FixedServices()
    inventory = Inventory() if config.parallel.use_cpu else read_inventory(os.environ)
    if not inventory.gpus:
        return FixedServices((None,) * deployment.services)
    # Imported here: it makes a model, and torch and transformers load slowly.
    from agentrl.launcher.model_sizes import read_sizes

    gpus = len(inventory.gpus)
    local = deployment.service_command(gpus) is None
    degree = config.services.inf_tp_size if "inf_tp_size" in given else None
    asked = Asked(
        tokens=config.sampling.max_tokens,
        setup=MemorySetup(tokens=1),
        services=deployment.num_services,
        inf_tp=1 if local else degree,
        inf_mem_ratio=config.services.inf_mem_ratio,
    )
    plan = plan_services(inventory, read_sizes(config), asked, "NUM_SERVICES", "--max_tokens")
    flags = {"inf_tp_size": plan.serving.tp, "inf_mem_ratio": plan.serving.share}
    return FixedServices(plan.devices, gpus, flags, plan.lines)
