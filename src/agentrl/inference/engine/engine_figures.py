"""The figures of the local engine, under SGLang's names, so that one dashboard shows both."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from agentrl.inference.engine.engine import LocalEngine
from agentrl.metrics.figure import Counter, Gauge

_OF_MODEL = ("model_name",)
RUNNING = Gauge("sglang:num_running_reqs", "Requests that generate.", _OF_MODEL)
QUEUED = Gauge("sglang:num_queue_reqs", "Requests that wait.", _OF_MODEL)
USED = Gauge("sglang:num_used_tokens", "Cached tokens of the running requests.", _OF_MODEL)
USAGE = Gauge("sglang:token_usage", "Share of the cache that running requests use.", _OF_MODEL)
THROUGHPUT = Gauge("sglang:gen_throughput", "Generated tokens per second now.", _OF_MODEL)
HIT_RATE = Gauge(
    "sglang:cache_hit_rate", "Share of the prompt tokens that were in the cache.", _OF_MODEL
)
REQUESTS = Counter("sglang:num_requests_total", "Requests that have ended.", _OF_MODEL)
PROMPTED = Counter("sglang:prompt_tokens_total", "Prompt tokens.", _OF_MODEL)
GENERATED = Counter("sglang:generation_tokens_total", "Generated tokens.", _OF_MODEL)
CACHED = Counter("sglang:cached_tokens_total", "Prompt tokens from the cache.", _OF_MODEL)


class EngineFigures(Collector):
    """The figures of one engine."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """All figures with their present values."""
        engine, scheduler = self._engine, self._engine.scheduler
        counters, model = scheduler.counters, str(engine.config.model_path)
        for figure, value in (
            (RUNNING, scheduler.running),
            (QUEUED, scheduler.waiting),
            (USED, scheduler.running_tokens),
            (USAGE, scheduler.running_tokens / engine.runner.total_tokens),
            (THROUGHPUT, engine.tokens_per_second if scheduler.has_work else 0.0),
            (HIT_RATE, counters.cached_tokens / max(1, counters.prompt_tokens)),
            (REQUESTS, counters.requests),
            (PROMPTED, counters.prompt_tokens),
            (GENERATED, counters.generated_tokens),
            (CACHED, counters.cached_tokens),
        ):
            yield figure.by({model: value})
