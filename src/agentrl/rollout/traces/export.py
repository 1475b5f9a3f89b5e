"""Traces of Records to an OTLP/HTTP endpoint, in a thread of its own that nobody waits for.

    ended ──put──► queue of MOST_TURNS turns ──► thread: spans, protobuf, HTTP

Where the queue is full, or the endpoint takes nothing, traces are dropped: their Records are in the
database. The first drop is said, and at the end how many there were.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Self

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from urllib3.exceptions import MaxRetryError

from agentrl.configs import RunConfig
from agentrl.foreign_text import error_line, text_of
from agentrl.rollout.traces.ended import EndedRecord, Failure
from agentrl.rollout.traces.spans import Spans

log = logging.getLogger(__name__)

MOST_TURNS = 4096  # that wait; some 10 kB each
TURNS_SENT = 128  # in a request, or more if one Record has more
COLLECT_S = 2.0  # for further Records of a request: requests cost more than what is in them
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
        self._exporter = _Exporter(self._url)
        self._queue: queue.SimpleQueue[EndedRecord | None] = queue.SimpleQueue()
        self._counts = threading.Lock()
        self._waiting = 0  # turns in the queue
        self._given = self._sent = 0  # traces
        self._told = False  # that some are dropped
        self._closing = False
        self._soon = threading.Event()  # enough waits for a request, or the process ends
        self._thread = threading.Thread(target=self._send_all, name="traces", daemon=True)

    @classmethod
    @asynccontextmanager
    async def open(cls, config: RunConfig, spans: Spans) -> AsyncIterator[Self]:
        """Traces whose thread runs. At the end, what waits is sent within `CLOSE_S`."""
        traces = cls(config, spans)
        _LIBRARY.setLevel(logging.CRITICAL)  # it would say each try
        traces._thread.start()
        try:
            yield traces
        finally:
            await asyncio.to_thread(traces._close)

    def wants(self, record: str) -> bool:
        """Whether the Record of this id is one of `--trace_rate`: the same in every process."""
        digest = blake2b(record.encode(), digest_size=8).digest()
        return int.from_bytes(digest) < self._most

    def put(self, ended: EndedRecord) -> None:
        """Send the trace of a Record that is wanted, later. Never waits."""
        if self._failed_only and ended.failure in (None, Failure.HANDED_BACK):
            return
        size = _size(ended)
        with self._counts:
            self._given += 1
            full = self._waiting > 0 and self._waiting + size > MOST_TURNS
            if not full:
                self._waiting += size
                self._hurry()
        if full:
            self._tell(f"{MOST_TURNS} turns wait for it")
        else:
            self._queue.put(ended)

    def _send_all(self) -> None:
        closing = False
        while not closing:
            taken, closing = self._collect()
            with self._counts:
                self._waiting -= sum(map(_size, taken))
                self._hurry()
            self._send(taken)

    def _collect(self) -> tuple[list[EndedRecord], bool]:
        """The Records of the next request, and whether it is the last one."""
        taken: list[EndedRecord] = []
        ended, turns = self._queue.get(), 0
        self._soon.wait(COLLECT_S)  # and is not woken by each Record that comes
        while ended is not None:
            taken.append(ended)
            turns += _size(ended)
            if turns >= TURNS_SENT:
                return taken, False
            try:
                ended = self._queue.get_nowait()
            except queue.Empty:
                return taken, False
        return taken, True

    def _hurry(self) -> None:
        """Let the thread collect no longer if enough waits. The caller holds `_counts`."""
        if self._closing or self._waiting >= TURNS_SENT:
            self._soon.set()
        else:
            self._soon.clear()

    def _send(self, records: Sequence[EndedRecord]) -> None:
        request = self._spans.request()
        made = sum([self._add(request, ended) for ended in records])
        if not made:
            return
        if (refusal := self._exporter.send(request)) is not None:
            self._tell(refusal)
            return
        with self._counts:
            self._sent += made

    def _add(self, request: ExportTraceServiceRequest, ended: EndedRecord) -> bool:
        try:
            self._spans.add(request, ended)
        except Exception as error:  # it has what users' agents and tools said
            log.exception("%s has no trace", ended.record.id)
            self._tell(error_line(error))
            return False
        return True

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
        with self._counts:
            self._closing = True
            self._hurry()
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


def _size(ended: EndedRecord) -> int:
    return max(1, len(ended.turns))


class _Exporter(OTLPSpanExporter):
    """The library's exporter, for spans that are OTLP's messages already.

    Headers, certificates, time limit, compression and repetition are its.
    """

    def send(self, request: ExportTraceServiceRequest) -> str | None:
        """Send a request; returns why it was not taken, if it was not."""
        made = self._client.export(request.SerializeToString())
        if made.success:
            return None
        if made.status_code is not None:
            return f"{made.status_code} {made.reason}"
        if made.error is None:  # the library forgets it if the process ends between two tries
            return "it did not answer before the sampler ended"
        return f"it does not answer: {_reason(made.error)}"


def _reason(error: Exception) -> str:
    """What is wrong with a connection, without what the libraries around it add."""
    if error.args and isinstance(error.args[0], MaxRetryError):
        error = error.args[0].reason or error
    return text_of(error)
