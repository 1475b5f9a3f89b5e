"""The figures of a gateway, beside those that it has as a sampler."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from agentrl.gateway.desk import Desk
from agentrl.gateway.server import Gateway
from agentrl.metrics.figure import Counter, Gauge

SESSIONS = Gauge("agentrl_gateway_sessions", "Sessions that programs may use now.")
WAITING = Gauge("agentrl_gateway_waiting_clients", "Clients that wait for a task.")
REQUESTS = Counter(
    "agentrl_gateway_requests_total",
    "Requests of programs by route and status of the answer.",
    ("route", "status"),
)


class GatewayFigures(Collector):
    """The figures of one gateway."""

    def __init__(self, gateway: Gateway, desk: Desk) -> None:
        self._gateway = gateway
        self._desk = desk

    def collect(self) -> Iterator[Metric]:
        """All figures with their present values."""
        yield SESSIONS.of(self._gateway.n_sessions)
        yield WAITING.of(self._desk.n_waiting)
        yield REQUESTS.by(self._gateway.answered)
