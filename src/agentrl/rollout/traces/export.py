"""Traces of Records to an OTLP/HTTP endpoint, in a thread of its own that nobody waits for.

    ended ──put──► queue of MOST_TURNS turns ──► thread: spans, protobuf, HTTP

Where the queue is full, or the endpoint takes nothing, traces are dropped: their Records are in the
database. The first drop is said, and at the end how many there were.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Self

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from agentrl.configs import RunConfig
from agentrl.foreign_text import error_line
from agentrl.rollout.traces.ended import EndedRecord, Failure
from agentrl.rollout.traces.spans import Spans

log = logging.getLogger(__name__)

MOST_TURNS = 4096  # that wait; some 10 kB each
MOST_SPANS = 512  # of a request, unless one Record has more
CLOSE_S = 5.0  # for what waits when the process ends
_ROUTE = "/v1/traces"
_LIBRARY = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")


class Traces:
    """Sends the traces of Records. `put` is for the event loop's thread only.

    `config`: the endpoint, and which Records are traced. Headers, time limit and compression come
    from OpenTelemetry's environment variables (`OTEL_EXPORTER_OTLP_HEADERS` and so on).
    """

    def __init__(self, config: RunConfig, spans: Spans) -> None:
        assert config.otlp_endpoint is not None, "traces are asked for"
        self._url = traces_url(config.otlp_endpoint)
        self._most = int(config.trace_rate * 2**64)
        self._failed_only = config.trace_failed_only
        self._spans = spans
        self._exporter = OTLPSpanExporter(self._url)
        self._queue: queue.SimpleQueue[EndedRecord | None] = queue.SimpleQueue()
        self._counts = threading.Lock()
        self._waiting = 0  # turns in the queue
        self._given = self._sent = 0  # traces
        self._told = False  # that some are dropped
        self._said = _LastWords()
        self._thread = threading.Thread(target=self._send_all, name="traces", daemon=True)

    @classmethod
    @asynccontextmanager
    async def open(cls, config: RunConfig, spans: Spans) -> AsyncIterator[Self]:
        """Traces whose thread runs. At the end, what waits is sent within `CLOSE_S`."""
        traces = cls(config, spans)
        _LIBRARY.addFilter(traces._said)
        traces._thread.start()
        try:
            yield traces
        finally:
            await asyncio.to_thread(traces._close)
            _LIBRARY.removeFilter(traces._said)

    def wants(self, record: str) -> bool:
        """Whether the Record of this id is one of `--trace_rate`: the same in every process."""
        digest = blake2b(record.encode(), digest_size=8).digest()
        return int.from_bytes(digest) < self._most

    def put(self, ended: EndedRecord) -> None:
        """Send the trace of a Record that is wanted, later. Never waits."""
        if self._failed_only and ended.failure in (None, Failure.HANDED_BACK):
            return
        size = max(1, len(ended.turns))
        with self._counts:
            self._given += 1
            full = self._waiting > 0 and self._waiting + size > MOST_TURNS
            if not full:
                self._waiting += size
        if full:
            self._tell(f"{MOST_TURNS} turns wait for it")
        else:
            self._queue.put(ended)

    def _send_all(self) -> None:
        closing = False
        while not closing:
            taken, spans = 0, list[ReadableSpan]()
            ended = self._queue.get()
            while ended is not None:
                made = self._spans_of(ended)
                taken += bool(made)
                spans += made
                if len(spans) >= MOST_SPANS or self._queue.empty():
                    break
                ended = self._queue.get()
            closing = ended is None
            if spans:
                self._send(spans, taken)

    def _spans_of(self, ended: EndedRecord) -> list[ReadableSpan]:
        with self._counts:
            self._waiting -= max(1, len(ended.turns))
        try:
            return self._spans.of(ended)
        except Exception as error:  # it has what users' agents and tools said
            log.exception("%s has no trace", ended.record.id)
            self._tell(error_line(error))
            return []

    def _send(self, spans: list[ReadableSpan], n_records: int) -> None:
        if self._exporter.export(spans) is SpanExportResult.SUCCESS:
            with self._counts:
                self._sent += n_records
        else:
            self._tell(self._said.text)

    def _tell(self, why: str) -> None:
        """Say that traces are dropped, once."""
        with self._counts:
            told, self._told = self._told, True
        if not told:
            log.warning(
                "traces are dropped, and sampling goes on: --otlp_endpoint %s: %s", self._url, why
            )

    def _close(self) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()  # ends its pauses between tries
        self._thread.join(1.0)
        with self._counts:
            sent, dropped = self._sent, self._given - self._sent
        level = logging.WARNING if dropped else logging.INFO
        log.log(level, "traces to %s: %d sent, %d dropped", self._url, sent, dropped)


def traces_url(endpoint: str) -> str:
    """The URL for traces at an endpoint, which may be that itself."""
    endpoint = endpoint.rstrip("/")
    return endpoint if endpoint.endswith(_ROUTE) else endpoint + _ROUTE


class _LastWords(logging.Filter):
    """Keeps what the library says last, and lets nothing through: it would say each try."""

    text = "it takes nothing"

    def filter(self, record: logging.LogRecord) -> bool:
        if "max retries" not in str(record.msg):  # said after the reason
            self.text = record.getMessage()
        return False
