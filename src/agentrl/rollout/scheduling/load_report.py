"""What a sampler saw of its services' load and of its own, stored now and then for people."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from pymongo.errors import PyMongoError

from agentrl.databases.connection import RunDatabase, is_outage
from agentrl.databases.loads import STORE_S, OwnLoad, store_loads
from agentrl.inference.protocol import ServiceLoad

log = logging.getLogger(__name__)


@dataclass
class LoadReport:
    """Collects looks at the services, and stores the last one."""

    _services: dict[str, ServiceLoad] = field(default_factory=dict)
    _late_s: float = 0.0

    def looked(self, services: Mapping[str, ServiceLoad], late_s: float) -> None:
        """The loads of a look, by URL, which began `late_s` seconds later than it should."""
        self._services = dict(services)
        self._late_s = max(self._late_s, late_s)

    async def run(
        self, database: RunDatabase, sampler: str, occupied: Callable[[], tuple[int, int]]
    ) -> None:
        """Store what was seen every `STORE_S` seconds until cancelled.

        `occupied`: our trajectories now, and how many there may be. An outage of the database does
        not end it.
        """
        while True:
            began, cpu = time.monotonic(), time.process_time()
            await asyncio.sleep(STORE_S)
            sampling, limit = occupied()
            used = (time.process_time() - cpu) / (time.monotonic() - began)
            own = OwnLoad(sampling, limit, self._late_s, used)
            seen, self._services, self._late_s = self._services, {}, 0.0
            try:
                await store_loads(
                    database, sampler, own, {url: asdict(load) for url, load in seen.items()}
                )
            except PyMongoError as error:
                if not is_outage(error):
                    raise
                log.debug("the loads did not reach MongoDB, the next ones may: %s", error)
