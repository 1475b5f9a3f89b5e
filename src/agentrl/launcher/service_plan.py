"""The services of a machine on which nothing trains: as many as fit its GPUs, from the first one.

Each is on as few GPUs as leave half of their memory to the cache (`placement.py`).
"""

from dataclasses import dataclass

from agentrl.configs import ConfigError
from agentrl.launcher.inventory import GIB, Inventory
from agentrl.launcher.placement import (
    USABLE,
    Asked,
    ModelSizes,
    Serving,
    longest_record,
    place_services,
)


@dataclass(frozen=True)
class ServicePlan:
    """Services on the GPUs of a machine."""

    inventory: Inventory
    serving: Serving

    @property
    def devices(self) -> tuple[str, ...]:
        """CUDA_VISIBLE_DEVICES of each service."""
        gpus, tp = self.inventory.gpus, self.serving.tp
        return tuple(
            ",".join(gpu.device for gpu in gpus[number * tp : (number + 1) * tp])
            for number in range(self.serving.count)
        )

    @property
    def lines(self) -> list[str]:
        """The plan in words."""
        serving = self.serving
        idle = self.inventory.gpus[serving.count * serving.tp :]
        left = f" · idle: GPU {', '.join(gpu.device for gpu in idle)}" if idle else ""
        return [
            self.inventory.line,
            f"serve: GPU {', '.join(self.devices)} · services {serving.count} x tp {serving.tp} · "
            f"{serving.share * self.inventory.free / GIB:.1f} GiB each GPU "
            f"(--inf_mem_ratio {serving.share:g}){left}",
        ]


def plan_services(
    inventory: Inventory, model: ModelSizes, asked: Asked, count: str, longest: str
) -> ServicePlan:
    """Place services on GPUs. `count`, `longest`: what sets their number and the longest record.

    Raises `ConfigError` if they do not fit.
    """
    serving = place_services(inventory, model, asked)
    if serving is not None:
        return ServicePlan(inventory, serving)
    fitting = [rest for rest in inventory.freer() if place_services(rest, model, asked)]
    which = "a service" if asked.services is None else f"{count} {asked.services}"
    degree = "" if asked.inf_tp is None else f" of {asked.inf_tp} GPU(s) each"
    raise ConfigError(
        f"{inventory.line}, of which {asked.inf_mem_ratio or USABLE:.0%} can be used: "
        f"{which}{degree} for a model of {model.shape.parameters / 1e9:.1f}B parameters and "
        f"records of {longest_record(model, asked):,} tokens does not fit; "
        + "".join(f"{inventory.choosing(rest)}; " for rest in fitting[:1])
        + f"give fewer by {count}, a shorter {longest}, or more GPUs"
    )
