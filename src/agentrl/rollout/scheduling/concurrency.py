"""The number of concurrent trajectories of a sampler, adapted to the inference services' load.

A pure state machine with additive increase and multiplicative decrease. `scheduler.py` queries the
services.

The limit of a service grows while it is clear, stays while its cache is nearly full, and shrinks if
requests queue or were retracted. Every sampler process adapts alone. Processes that share a service
converge to equal shares, as in TCP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from agentrl.inference.protocol import ServiceLoad

FLOOR = 1  # least trajectories per service
BACK_OFF = 0.75  # factor of the limit when a service is overloaded
GROWTH = 1.0  # trajectories added per look at a service that is clear
CATCH_UP = 1.25  # factor of the limit instead, while it is below `--target_concurrency`
QUEUE_SHARE = 0.1  # waiting requests that are no queue yet, as a share of the running ones
QUEUE_LOOKS = 2  # looks in a row with a queue before backing off: one may be a batch's arrival
FULL_CACHE = 0.9  # share of a service's token capacity above which records retract others
RECOVERY_LOOKS = 3  # looks to skip after backing off, until requests in flight have ended
IN_USE = 0.9  # share of the limit in progress from which the limit counts as binding


class Pressure(Enum):
    """The load of a service at one look."""

    CLEAR = "clear"  # grow
    FULL = "full"  # keep the limit
    QUEUEING = "queueing"  # back off if it lasts
    RETRACTING = "retracting"  # back off


@dataclass(frozen=True, slots=True)
class ServiceLimit:
    """The limit of one service.

    `limit`: trajectories, rounded down in use. `queued`: looks in a row that found a queue.
    `recovering`: further looks to skip.
    """

    limit: float
    queued: int = 0
    recovering: int = 0


@dataclass(frozen=True)
class Concurrency:
    """The limits of one process.

    `ceiling`: trajectories in total, `--max_concurrent_samples_per_process`. `target`: trajectories
    per service, `--target_concurrency`: limits begin there and grow fast below it. 0: limits begin
    at equal shares of the ceiling and always grow step by step.
    """

    ceiling: int
    target: int = 0
    services: Mapping[str, ServiceLimit] = field(default_factory=dict)

    @property
    def limit(self) -> int:
        """The number of trajectories that may be in progress, for all services together."""
        # The small addend corrects rounding errors: ten tenths must sum up to one.
        return min(self.ceiling, max(FLOOR, int(self._total + 1e-6)))

    @property
    def _total(self) -> float:
        return sum(service.limit for service in self.services.values())

    def observe(self, loads: Mapping[str, ServiceLoad | None], in_progress: int) -> "Concurrency":
        """The limits after a look at all services in use.

        `loads`: by URL; None if unknown, then the limit stays. Limits of other services are
        dropped. `in_progress`: our trajectories now.
        """
        start = self._start(len(loads))
        known = {url: self.services.get(url, ServiceLimit(start)) for url in loads}
        before = replace(self, services=known)
        binding = in_progress >= IN_USE * before.limit
        may_grow = binding and before._total < self.ceiling
        services = {
            url: service if load is None else self._judge(service, load, may_grow)
            for (url, service), load in zip(known.items(), loads.values(), strict=True)
        }
        return replace(self, services=services)._within_ceiling()

    def _start(self, n_services: int) -> float:
        share = self.ceiling / max(1, n_services)
        return max(FLOOR, min(self.target, share) if self.target else share)

    def _judge(self, service: ServiceLimit, load: ServiceLoad, may_grow: bool) -> ServiceLimit:
        if service.recovering:
            return replace(service, recovering=service.recovering - 1)
        pressure = read_pressure(load)
        queued = service.queued + 1 if pressure is Pressure.QUEUEING else 0
        seen = replace(service, queued=queued)
        if pressure is Pressure.RETRACTING or queued >= QUEUE_LOOKS:
            less = max(FLOOR, service.limit * BACK_OFF)
            return replace(seen, limit=less, queued=0, recovering=RECOVERY_LOOKS)
        if pressure is Pressure.CLEAR and may_grow:
            more = service.limit + GROWTH
            if service.limit < self.target:
                more = min(self.target, max(more, service.limit * CATCH_UP))
            return replace(seen, limit=more)
        return seen

    def _within_ceiling(self) -> "Concurrency":
        """Scale limits down to the ceiling, so that a back-off takes effect at once."""
        scale = self.ceiling / self._total if self._total > self.ceiling else 1.0
        services = {
            url: replace(service, limit=max(FLOOR, service.limit * scale))
            for url, service in self.services.items()
        }
        return replace(self, services=services)


def read_pressure(load: ServiceLoad) -> Pressure:
    """The pressure of a service with this load."""
    if load.retractions > 0:
        return Pressure.RETRACTING
    if load.waiting > max(1.0, QUEUE_SHARE * load.running):
        return Pressure.QUEUEING
    if load.total_tokens and load.used_tokens >= FULL_CACHE * load.total_tokens:
        return Pressure.FULL
    return Pressure.CLEAR
