"""How many trajectories a sampler runs at once: adapted to what each inference service can take.

A pure state machine (additive increase, multiplicative decrease): values in, values out. Who asks
the services and how often is `scheduler.py`'s.

A service gets more while it is clear, is left as it is while its cache is nearly full, and gets
less when requests queue there or it had to retract some. Every sampler process does this by itself,
and several that share a service come to share it evenly, as senders on one line do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from agentrl.inference.protocol import ServiceLoad

FLOOR = 1  # trajectories for each service, however busy it is: others may leave it
BACK_OFF = 0.75  # what is kept of a limit when a service is pressed
GROWTH = 1.0  # trajectories more per look at a service that is clear
CATCH_UP = 1.25  # times as many instead, while the limit is under `--target_concurrency`
QUEUE_SHARE = 0.1  # of the running requests: so many may wait without a queue being called one
QUEUE_LOOKS = 2  # a queue seen so often in a row is one; seen once, it is a batch that just came
FULL_CACHE = 0.9  # of a service's token capacity: further records would retract others
RECOVERY_LOOKS = 3  # after backing off: what is in flight has to end before it can show
IN_USE = 0.9  # of the limit: with less in progress it is not the limit that holds us


class Pressure(Enum):
    """What a look at a service says."""

    CLEAR = "clear"
    FULL = "full"  # leave it as it is
    QUEUEING = "queueing"  # back off if it lasts
    RETRACTING = "retracting"  # back off


@dataclass(frozen=True, slots=True)
class ServiceLimit:
    """What is known of one service.

    `limit`: trajectories; whole ones count. `queued`: looks in a row that found a queue.
    `recovering`: looks that are not judged yet.
    """

    limit: float
    queued: int = 0
    recovering: int = 0


@dataclass(frozen=True)
class Concurrency:
    """The limits of one process.

    `ceiling`: trajectories in all, `--max_concurrent_samples_per_process`. `target`: trajectories
    for each service to begin with and to return to fast, `--target_concurrency`; 0: the ceiling,
    shared evenly, to begin with, and step by step from below.
    """

    ceiling: int
    target: int = 0
    services: Mapping[str, ServiceLimit] = field(default_factory=dict)

    @property
    def limit(self) -> int:
        """How many trajectories may be in progress now, for all services together."""
        # Shares are fractions: the sum of ten tenths must not count for less than one.
        return min(self.ceiling, max(FLOOR, int(self._total + 1e-6)))

    @property
    def _total(self) -> float:
        return sum(service.limit for service in self.services.values())

    def observe(self, loads: Mapping[str, ServiceLoad | None], in_progress: int) -> "Concurrency":
        """The limits after a look at all services in use, by URL.

        None for a service that does not tell its load: its limit stays. Services that are no longer
        named are forgotten, new ones begin at their start. `in_progress`: our trajectories now.
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
        """Shares scaled down to the ceiling, so that a back-off is felt at once."""
        scale = self.ceiling / self._total if self._total > self.ceiling else 1.0
        services = {
            url: replace(service, limit=max(FLOOR, service.limit * scale))
            for url, service in self.services.items()
        }
        return replace(self, services=services)


def read_pressure(load: ServiceLoad) -> Pressure:
    """What one look at a service says."""
    if load.retractions > 0:
        return Pressure.RETRACTING
    if load.waiting > max(1.0, QUEUE_SHARE * load.running):
        return Pressure.QUEUEING
    if load.total_tokens and load.used_tokens >= FULL_CACHE * load.total_tokens:
        return Pressure.FULL
    return Pressure.CLEAR
