"""`agentrl serve --services N`: the inference services of one node, each a process of its own.

On GPUs they are placed by `service_plan.py`. They take consecutive ports.
"""

import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.configs import ConfigError
from agentrl.configs.parsing import parse_config
from agentrl.launcher.deployment import usable_cores
from agentrl.launcher.inventory import Inventory, read_inventory
from agentrl.launcher.placement import Asked, ModelSizes, Serving
from agentrl.launcher.processes import RESTARTS, Kind, Part
from agentrl.launcher.service_part import gpu_environment, service_grace_s
from agentrl.launcher.service_plan import plan_services
from agentrl.training.model.memory_model import MemorySetup

_PORT = re.compile(r":(\d+)(?=/?$)")


@dataclass(frozen=True)
class Place:
    """Where one service runs. `devices`: its CUDA_VISIBLE_DEVICES; `flags`: what follows of it."""

    devices: str | None = None
    flags: tuple[str, ...] = ()


def places(arguments: Namespace, engine: str) -> list[Place]:
    """The services that `arguments` of `agentrl serve` ask for on this machine.

    Raises `ConfigError` if they do not fit its GPUs.
    """
    inventory = read_inventory(os.environ)
    if not inventory.gpus or arguments.device == "cpu":
        return [Place()] * (arguments.services or 1)
    # Imported here: it makes a model, and torch and transformers load slowly.
    from agentrl.launcher.model_sizes import read_sizes

    longest = arguments.context_length
    config = parse_config(
        [
            "--model_name_or_path", str(arguments.model),
            *(["--max_tokens", str(longest)] if longest else []),
            *(["--inf_tp_size", str(arguments.inf_tp_size)] if arguments.inf_tp_size else []),
        ],
        "agentrl serve",
    )  # fmt: skip
    asked = Asked(
        tokens=config.sampling.max_tokens,
        setup=MemorySetup(tokens=1),
        services=arguments.services,
        inf_tp=arguments.inf_tp_size if engine == "sglang" else 1,
        inf_mem_ratio=arguments.inf_mem_ratio,
    )
    return placed(inventory, read_sizes(config), asked, engine)


def placed(inventory: Inventory, model: ModelSizes, asked: Asked, engine: str) -> list[Place]:
    """The services on the GPUs of `inventory`, from the first one. Raises `ConfigError`."""
    plan = plan_services(inventory, model, asked, "--services", "--context_length")
    return [Place(devices, _flags(plan.serving, engine)) for devices in plan.devices]


def _flags(serving: Serving, engine: str) -> tuple[str, ...]:
    share = ("--inf_mem_ratio", str(serving.share))
    if engine == "sglang":
        return ("--inf_tp_size", str(serving.tp), *share)
    return ("--device", "cuda", *share)


def parts(
    argv: Sequence[str], arguments: Namespace, found: Sequence[Place], engine: str
) -> list[Part]:
    """The processes of the services. `argv`: the command line of `agentrl serve`.

    Raises `ConfigError` if `--public_url` has no port to count from.
    """
    threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // len(found)))}
    if "OMP_NUM_THREADS" in os.environ:
        threads = {}
    made = []
    for number, place in enumerate(found):
        port = arguments.port and arguments.port + number
        words = [*argv, "--services", "1", "--port", str(port), *place.flags]  # the last one counts
        if arguments.public_url is not None:
            words += ["--public_url", _counted(arguments.public_url, number)]
        made.append(
            Part(
                name=f"service-{number}",
                kind=Kind.SERVICE,
                command=(sys.executable, "-m", "agentrl.cli", "serve", *words),
                log=None,
                environment=(threads if place.devices is None else gpu_environment(place.devices)),
                restarts=RESTARTS,
                grace_s=service_grace_s(engine),
            )
        )
    return made


def _counted(url: str, number: int) -> str:
    """The URL of service `number`, which has the port of the first one and as many more."""
    if number and not _PORT.search(url):
        raise ConfigError(
            f"--public_url {url}: give it with a port, from which those of --services are counted"
        )
    return _PORT.sub(lambda port: f":{int(port[1]) + number}", url)
