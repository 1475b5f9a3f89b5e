"""The figures of a run's ledger, which belong to no process: the launch reads and serves them.

They are read when Prometheus asks, and at most for a twentieth of the time. While the database does
not answer, there are none but `agentrl_ledger_up`.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from prometheus_client import Metric
from prometheus_client.registry import Collector
from pymongo.errors import PyMongoError

from agentrl.databases import outages
from agentrl.databases.attempt_tally import AttemptCounts, AttemptTally
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import InferenceService, Run
from agentrl.databases.ledger_counts import LedgerCounts, count_ledger
from agentrl.databases.outages import Outage
from agentrl.databases.quarantine import Quarantined, count_quarantined
from agentrl.databases.runs import load_run
from agentrl.databases.server_time import server_time
from agentrl.databases.services import live_services
from agentrl.metrics.figure import Gauge
from agentrl.redaction import without_passwords

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
_SHARE = 0.05  # of the time, at most, in which the ledger is read
_CLASSES = 20  # of errors that are told apart

UP = Gauge("agentrl_ledger_up", "1 if the database answered the last look, else 0.")
READ_SECONDS = Gauge("agentrl_ledger_read_seconds", "How long the last look took.")
STATUS = Gauge("agentrl_ledger_run_status", "1 for the status that the run has.", ("status",))
STEP = Gauge("agentrl_ledger_step", "Optimizer steps of the run, as the ledger has them.")
MAX_STEPS = Gauge("agentrl_ledger_max_steps", "Optimizer steps at which the run ends.")
LAST_STEP = Gauge(
    "agentrl_ledger_last_step_timestamp_seconds",
    "When the weights last changed, or the launch began.",
)
TASKS = Gauge(
    "agentrl_ledger_tasks", "Groups of rollouts by split and status.", ("split", "status")
)
SLOTS = Gauge("agentrl_ledger_slots", "Rollouts of groups in progress, by status.", ("status",))
EXPIRED = Gauge(
    "agentrl_ledger_expired_leases", "Leases that have ended and that no sampler has reaped yet."
)
RECORDS = Gauge(
    "agentrl_ledger_records",
    "Trajectories by status; ended: those that are scored, trained on or left out.",
    ("status",),
)
ROWS = Gauge("agentrl_ledger_rows", "Training rows by status; ready ones wait.", ("status",))
FAILED = Gauge(
    "agentrl_ledger_failed_attempts",
    "Attempts of this launch that failed, by the class of their error.",
    ("raised",),
)
ENDED = Gauge("agentrl_ledger_ended_attempts", "Attempts of this launch that ended.")
QUARANTINED = Gauge("agentrl_ledger_quarantined", "What waits in quarantine, by kind.", ("kind",))
OUTAGE = Gauge(
    "agentrl_ledger_outage_seconds",
    "For how long samplers have waited for a dependency.",
    ("dependency",),
)
SERVICE_VERSION = Gauge(
    "agentrl_ledger_service_weight_version", "Policy version of a live service.", ("service",)
)
SERVICE_HEARTBEAT = Gauge(
    "agentrl_ledger_service_heartbeat_age_seconds", "Age of a service's heartbeat.", ("service",)
)


@dataclass(frozen=True)
class _Look:
    run: Run | None
    counts: LedgerCounts
    attempts: AttemptCounts
    quarantined: Quarantined
    outages: list[Outage]
    services: list[InferenceService]
    now: datetime  # by the database's clock
    seconds: float


class LedgerFigures(Collector):
    """The figures of one run. `refresh` before each `collect`."""

    def __init__(self, database: RunDatabase) -> None:
        self._database = database
        self._began = time.time()
        self._tally: AttemptTally | None = None
        self._look: _Look | None = None
        self._next = 0.0
        self._looking = asyncio.Lock()

    async def refresh(self) -> None:
        """Look at the ledger, unless the last look was a moment ago."""
        async with self._looking:
            began = time.monotonic()
            if began < self._next:
                return
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    self._look = await self._read(began)
            except (PyMongoError, TimeoutError) as error:
                log.warning("the ledger's figures could not be read: %s", error)
                self._look = None
            took = time.monotonic() - began
            self._next = began + took / _SHARE

    async def _read(self, began: float) -> _Look:
        database = self._database
        run = await load_run(database)
        now = await server_time(database.client)
        if self._tally is None:
            since_launch = timedelta(seconds=time.time() - self._began)
            self._tally = AttemptTally(database, now - since_launch)
        return _Look(
            run=run,
            counts=await count_ledger(database, run.fence if run else 0),
            attempts=await self._tally.read(now),
            quarantined=await count_quarantined(database),
            outages=await outages.current(database),
            services=await live_services(database),
            now=now,
            seconds=time.monotonic() - began,
        )

    def collect(self) -> Iterator[Metric]:
        """All figures with the values of the last look."""
        look = self._look
        yield UP.of(look is not None)
        if look is None:
            return
        yield READ_SECONDS.of(look.seconds)
        run, counts = look.run, look.counts
        if run is not None:
            yield STATUS.by({run.status: 1})
            yield STEP.of(run.step)
            yield MAX_STEPS.of(run.max_steps)
        yield LAST_STEP.of(max(self._began, counts.last_step or 0.0))
        yield TASKS.by(counts.tasks)
        yield SLOTS.by(counts.slots)
        yield EXPIRED.of(counts.expired)
        yield RECORDS.by(counts.records)
        yield ROWS.by(counts.rows)
        yield FAILED.by(_by_class(look.attempts))
        yield ENDED.of(look.attempts.ended)
        quarantined = look.quarantined
        yield QUARANTINED.by(
            {
                "group": quarantined.groups,
                "record": quarantined.records,
                "row": quarantined.rows,
            }
        )
        yield OUTAGE.by(
            {
                without_passwords(each.dependency): (look.now - each.since).total_seconds()
                for each in look.outages
            }
        )
        services = {without_passwords(each.url): each for each in look.services}
        yield SERVICE_VERSION.by({url: each.weight_version for url, each in services.items()})
        yield SERVICE_HEARTBEAT.by(
            {
                url: (look.now - each.heartbeat).total_seconds()
                for url, each in services.items()
                if each.heartbeat is not None
            }
        )


def _by_class(attempts: AttemptCounts) -> dict[str, int]:
    """Failed attempts by the class of their error; rare classes together."""
    counts: Counter[str] = Counter()
    for count, error in attempts.kinds:
        counts[error.partition(":")[0][:100]] += count
    shown = dict(counts.most_common(_CLASSES))
    if others := counts.total() - sum(shown.values()):
        shown["(other)"] = others
    return shown
