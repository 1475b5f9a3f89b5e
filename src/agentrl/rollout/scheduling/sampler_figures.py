"""The figures of a sampler process, read from its scheduler, pool, breakers and leases."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from statistics import median

from prometheus_client import Metric
from prometheus_client.registry import Collector

from agentrl.databases.records import RecordLedger
from agentrl.inference.pool import ServicePool
from agentrl.metrics.figure import Counter, Gauge
from agentrl.redaction import without_passwords
from agentrl.rollout.scheduling.attempt_counts import AttemptEvent
from agentrl.rollout.scheduling.scheduler import SamplingScheduler

ATTEMPTS = Gauge(
    "agentrl_attempts",
    "Attempts in progress, by what they were claimed for: sample or score.",
    ("step",),
)
ATTEMPT_LIMIT = Gauge(
    "agentrl_attempt_limit", "Trajectories that may be sampled at once, by the services' load."
)
ATTEMPT_AGE = Gauge(
    "agentrl_attempt_age_seconds",
    "Age of the attempts in progress: the median and the oldest.",
    ("of",),
)
LEASES = Gauge("agentrl_leases", "Records that this process holds a lease of.")
LEASE_LEFT = Gauge(
    "agentrl_lease_remaining_seconds",
    "Time until the first lease ends unless a heartbeat extends it; negative if heartbeats fail.",
)
EVENTS = Counter(
    "agentrl_attempt_events_total",
    "Ends of steps of attempts: successes, and failures by class. outage and scoring_outage: "
    "infrastructure; failed and scoring_failed: the run's code.",
    ("event",),
)
STOP_REASONS = Counter(
    "agentrl_trajectories_total", "Sampled trajectories by why they ended.", ("stop_reason",)
)
BREAKER_OPEN = Gauge(
    "agentrl_breaker_open",
    "1 while tasks that need a dependency are held back, because it is unreachable; 0 when it "
    "answers again.",
    ("dependency",),
)
BREAKER_SECONDS = Gauge(
    "agentrl_breaker_open_seconds", "For how long a breaker has been open.", ("dependency",)
)
SERVICE_UP = Gauge(
    "agentrl_service_up", "1 if this sampler reaches the inference service, else 0.", ("service",)
)
OUTSTANDING = Gauge(
    "agentrl_service_outstanding_tokens",
    "Tokens of this sampler's requests in flight: their prompts and largest outputs.",
    ("service",),
)
REQUESTS = Counter("agentrl_requests_total", "Requests that inference services have answered.")
RETRIES = Counter(
    "agentrl_request_retries_total",
    "Times that a service failed a request, which then went on at another one or was given up.",
    ("reason",),
)
TURNS = Counter("agentrl_turns_total", "Stored turns by their status.", ("status",))
REPLAYED = Counter(
    "agentrl_replayed_turns_total", "Stored turns that were answered from earlier ones."
)
GENERATED = Counter("agentrl_generated_tokens_total", "Sampled tokens of stored turns.")
PROMPTED = Counter("agentrl_prompt_tokens_total", "Prompt tokens of stored turns.")
CACHED = Counter(
    "agentrl_cached_prompt_tokens_total", "Prompt tokens that a service had in its cache."
)
GENERATE_SECONDS = Counter(
    "agentrl_generate_seconds_total", "Time that stored turns waited for their answers."
)
TOOL_CALLS = Counter(
    "agentrl_tool_calls_total",
    "Tool calls of stored turns, by tool and result: ok or error.",
    ("tool", "result"),
)
TOOL_SECONDS = Counter("agentrl_tool_seconds_total", "Time of tool calls, by tool.", ("tool",))


class SamplerFigures(Collector):
    """The figures of one process."""

    def __init__(
        self, scheduler: SamplingScheduler, pool: ServicePool, records: RecordLedger
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._records = records

    def collect(self) -> Iterator[Metric]:
        """All figures with their present values."""
        yield from self._attempts()
        yield from self._dependencies()
        yield from self._turns()

    def _attempts(self) -> Iterator[Metric]:
        now, scheduler = time.monotonic(), self._scheduler
        attempts, counts = scheduler.attempts, scheduler.counts
        to_score = sum(attempt.claim.to_score for attempt in attempts)
        yield ATTEMPTS.by({"sample": len(attempts) - to_score, "score": to_score})
        yield ATTEMPT_LIMIT.of(scheduler.limit)
        ages = [now - attempt.began for attempt in attempts] or [0.0]
        yield ATTEMPT_AGE.by({"median": median(ages), "oldest": max(ages)})
        yield LEASES.of(self._records.leases.count())
        yield LEASE_LEFT.of(self._records.leases.shortest())
        yield EVENTS.by({event: counts.events[event] for event in AttemptEvent})
        yield STOP_REASONS.by(counts.stop_reasons)

    def _dependencies(self) -> Iterator[Metric]:
        now = time.monotonic()
        breakers = {without_passwords(each.dependency): each for each in self._scheduler.breakers}
        yield BREAKER_OPEN.by({name: each.is_open for name, each in breakers.items()})
        yield BREAKER_SECONDS.by(
            {name: now - each.since for name, each in breakers.items() if each.since is not None}
        )
        up, outstanding = set(self._pool.up), self._pool.outstanding
        yield SERVICE_UP.by({url: url in up for url in outstanding})
        yield OUTSTANDING.by(outstanding)
        failures = asdict(self._pool.counts)
        yield REQUESTS.of(failures.pop("answered"))
        yield RETRIES.by(failures)

    def _turns(self) -> Iterator[Metric]:
        counts = self._records.counts
        yield TURNS.by(counts.statuses)
        yield REPLAYED.of(counts.replayed)
        yield GENERATED.of(counts.generated_tokens)
        yield PROMPTED.of(counts.prompt_tokens)
        yield CACHED.of(counts.cached_tokens)
        yield GENERATE_SECONDS.of(counts.generate_seconds)
        yield TOOL_CALLS.by(counts.tool_calls)
        yield TOOL_SECONDS.by(counts.tool_seconds)
