"""A Record that has ended, as the spans of one trace. Pure: no I/O, no clock.

    invoke_agent AGENT        the Record, from its start to its end
      chat MODEL              each turn: what was added to the prompt, and the answer
      execute_tool NAME       each tool call, with arguments and result
      score                   its scoring, with an event for each scorer

The ids follow from the Record, so that it has the same trace whoever sends it. A text is cut after
`LONGEST_TEXT` characters; the database has it whole.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import orjson
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status
from opentelemetry.sdk.resources import Resource

from agentrl import __version__
from agentrl.databases.documents import (
    NO_SEGMENT,
    DispatchedSamplingTask,
    RecordStatus,
    ToolCall,
)
from agentrl.foreign_text import utf8_text
from agentrl.rollout.traces import names
from agentrl.rollout.traces.ended import EndedRecord, Failure
from agentrl.rollout.traces.names import OWN

LONGEST_TEXT = 20_000
_PROVIDER = "agentrl"

_Value = str | bool | int | float
_Message = Mapping[str, Any]


class Spans:
    """Makes the spans of a run's Records. `model`: the name of the model that answers.

    They are made as OTLP's own messages: spans of the SDK, and their encoding, take three times the
    CPU.
    """

    def __init__(self, run: str, model: str) -> None:
        self._run = run
        self._model = model
        # With what OTEL_RESOURCE_ATTRIBUTES adds.
        given = Resource.create({"service.name": "agentrl", f"{OWN}run": run}).attributes
        self._resource = {name: str(value) for name, value in given.items()}

    def request(self) -> ExportTraceServiceRequest:
        """A request without traces."""
        made = ExportTraceServiceRequest()
        _put(made.resource_spans.add().resource, self._resource)
        return made

    def add(self, request: ExportTraceServiceRequest, ended: EndedRecord) -> ScopeSpans:
        """Add the trace of a Record: its spans, that of the Record itself first.

        They are made in their place: a copy would take a tenth of what they take. An error leaves
        the request as it was.
        """
        traces = request.resource_spans[0].scope_spans
        made: ScopeSpans = traces.add(schema_url=names.SCHEMA)
        made.scope.name, made.scope.version = "agentrl", __version__
        try:
            _Trace(self._run, self._model, ended, made.spans).make()
        except BaseException:
            del traces[-1]
            raise
        return made


class _Trace:
    """The trace of one Record, made in the place `spans`."""

    def __init__(self, run: str, model: str, ended: EndedRecord, spans: Any) -> None:
        self._run, self._model, self._spans = run, model, spans
        self._record, self._failure = ended.record, ended.failure
        self._turns = sorted(ended.turns, key=lambda turn: turn.turn)
        began = ended.record.started_at
        # MongoDB keeps milliseconds.
        key = f"{run} {ended.record.id} {began and int(began.timestamp() * 1000)}"
        trace = blake2b(key.encode(), digest_size=16).digest()
        self._root = Span(trace_id=trace, span_id=trace[8:], kind=Span.SPAN_KIND_INTERNAL)
        of_all = {
            f"{OWN}run": run,
            names.CONVERSATION: ended.record.id,
            # On each span: receivers take the conversation for the session of a span without it.
            names.SESSION: ended.record.task,
        }
        _put(self._root, of_all)
        below = _with(self._root)
        below.parent_span_id = self._root.span_id
        scoring = {names.OPERATION: names.SCORING, names.KIND: names.EVALUATOR}
        self._scoring = _with(below, scoring, names.SCORING)
        self._call = _with(below, {names.OPERATION: names.EXECUTE_TOOL})
        self._chat_of_others = _with(
            below, {names.OPERATION: names.CHAT, names.PROVIDER: _PROVIDER}, names.CHAT
        )
        self._chat_of_others.kind = Span.SPAN_KIND_CLIENT
        self._chat = _with(self._chat_of_others, {names.MODEL: model}, f"{names.CHAT} {model}")
        self._number = int.from_bytes(self._root.span_id)

    def make(self) -> None:
        """Make all spans."""
        record = self._record
        ends = [_end_of(turn) for turn in self._turns]
        self._of_record(max(ends, default=0))
        results = _results_of_programs(self._turns)
        for turn, end in zip(self._turns, ends, strict=True):
            self._of_turn(turn, end)
            if turn.tool_calls:
                self._of_calls(turn, end, results.get(turn.turn))
        for call in record.own_calls:
            if call.started_at is not None:
                self._of_call(call, _ns(call.started_at), call.latency_s)
        if record.sampled_at is not None and record.finished_at is not None:
            self._of_scoring(record.sampled_at, record.finished_at)

    def _of_record(self, last: int) -> None:
        record = self._record
        begin = _ns(record.started_at) if record.started_at else last
        told: dict[str, _Value | None] = {
            names.OPERATION: names.INVOKE_AGENT,
            names.PROVIDER: _PROVIDER,
            names.AGENT: record.agent_name,
            names.INPUT_TEXT: _cut(record.query),
            names.INPUT: _messages([{"role": "user", "content": record.query}]),
            f"{OWN}record": record.id,
            f"{OWN}task": record.task,
            f"{OWN}task_id": record.task_id,
            f"{OWN}rollout": record.rollout,
            f"{OWN}attempt": record.attempt,
            f"{OWN}split": record.split,
            f"{OWN}epoch": record.epoch,
            f"{OWN}status": record.status,
            f"{OWN}stop_reason": record.stop_reason,
            f"{OWN}score": record.score,
            f"{OWN}turns": record.n_turns,
            f"{OWN}tool_calls": record.n_tool_calls,
            f"{OWN}tool_errors": record.n_tool_errors,
            f"{OWN}segments": record.n_segments,
            f"{OWN}tokens.prompt": record.tokens.prompt,
            f"{OWN}tokens.generated": record.tokens.generated,
            f"{OWN}tokens.observed": record.tokens.observed,
            f"{OWN}view": f"/run/{self._run}/records/{quote(record.id, safe='')}",
            names.ERROR_TYPE: self._failure,
        }
        if record.final_answer is not None:
            told[names.OUTPUT_TEXT] = text = _cut(record.final_answer)
            said = {"role": "assistant", "parts": [{"type": "text", "content": text}]}
            # The conventions require a reason of every message that was made.
            reason = self._turns[-1].finish_reason if self._turns else "stop"
            told[names.OUTPUT] = _json([{**said, "finish_reason": reason}])
        if record.versions is not None:
            told[f"{OWN}policy_version.min"] = record.versions.min
            told[f"{OWN}policy_version.max"] = record.versions.max
        span = self._spans.add()
        span.CopyFrom(self._root)
        span.name = f"{names.INVOKE_AGENT} {record.agent_name}"
        span.start_time_unix_nano = begin
        span.end_time_unix_nano = _ns(record.finished_at) if record.finished_at else last or begin
        _put(span, {name: value for name, value in told.items() if value is not None})
        if self._failure is None:
            span.status.code = Status.STATUS_CODE_OK
        elif self._failure != Failure.HANDED_BACK:  # that is neither a success nor a failure
            _fail(span, record.error)

    def _of_turn(self, turn: DispatchedSamplingTask, end: int) -> None:
        told: dict[str, _Value] = {
            names.INPUT: _messages(turn.messages),
            names.OUTPUT: _answer(turn),
            names.INPUT_TOKENS: turn.prompt_len,
            names.CACHED_TOKENS: turn.cached_tokens,
            f"{OWN}turn": turn.turn,
            f"{OWN}turn_status": turn.status,
            f"{OWN}service": turn.service,
        }
        kind = self._chat_of_others
        if turn.segment != NO_SEGMENT:
            kind, told[f"{OWN}segment"] = self._chat, turn.segment
        if turn.versions:
            told[names.OUTPUT_TOKENS] = turn.versions[-1].end
            told[f"{OWN}policy_version.min"] = turn.versions[0].version
            told[f"{OWN}policy_version.max"] = turn.versions[-1].version
        if turn.rewrite is not None:
            told[f"{OWN}rewrite"] = turn.rewrite
        if turn.drift is not None:
            told[f"{OWN}drift"] = _cut(turn.drift)
        if turn.format_error is not None:
            told[f"{OWN}format_error"] = _cut(turn.format_error)
        if turn.replayed is not None:
            told[f"{OWN}replayed"] = turn.replayed
        if turn.agent:
            told[names.AGENT] = utf8_text(turn.agent)
        if not turn.trained:
            told[f"{OWN}trained"] = False
        span = self._span(kind, _begin_of(turn, end), end, told)
        reasons = span.attributes.add(key=names.FINISH_REASONS).value.array_value.values
        reasons.add(string_value=turn.finish_reason)

    def _of_calls(self, turn: DispatchedSamplingTask, end: int, results: "_Results | None") -> None:
        """The calls of a turn that were made: by us, or, as seen from its requests, a program."""
        for place, call in enumerate(turn.tool_calls):
            if call.started_at is not None and turn.replayed is None:
                self._of_call(call, _ns(call.started_at), call.latency_s)
            elif call.result is not None and call.name:
                self._of_call(call, end, 0.0 if turn.replayed else call.latency_s)
            elif results is not None and place < len(results.texts):
                made = call.model_copy(update={"result": results.texts[place]})
                self._of_call(made, end, max(0, results.asked - end) / 1e9)

    def _of_call(self, call: ToolCall, begin: int, seconds: float) -> None:
        name = _cut(call.name)
        told: dict[str, _Value] = {
            names.TOOL: name,
            names.ARGUMENTS: _cut(_json(call.arguments)),
            names.RESULT: _cut(call.result or ""),
        }
        if call.by_agent:
            told[f"{OWN}by_agent"] = True
        if call.summarised_by is not None:
            told[f"{OWN}summarised_by"] = call.summarised_by
        if call.is_error:
            told[names.ERROR_TYPE] = "tool_error"
        end = begin + round(seconds * 1e9)
        span = self._span(self._call, begin, end, told)
        span.name = f"{names.EXECUTE_TOOL} {name}"
        if call.is_error:
            _fail(span, None)

    def _of_scoring(self, begin: datetime, end: datetime) -> None:
        record = self._record
        told: dict[str, _Value] = {} if record.score is None else {f"{OWN}score": record.score}
        span = self._span(self._scoring, _ns(begin), _ns(end), told)
        for scorer, value in record.scores.items():
            event = span.events.add(name=names.SCORED_EVENT, time_unix_nano=_ns(end))
            _put(event, {names.SCORER: utf8_text(scorer)})
            if value is not None:
                _put(event, {names.SCORE: value})
            if (explanation := record.explanations.get(scorer)) is not None:
                _put(event, {names.EXPLANATION: _cut(explanation)})
        if record.status == RecordStatus.QUARANTINED:
            _fail(span, record.error)

    def _span(self, kind: Span, begin: int, end: int, told: Mapping[str, _Value]) -> Span:
        """A span below the Record's, with what all of its kind have."""
        span: Span = self._spans.add()
        span.CopyFrom(kind)
        self._number = (self._number + 1) % 2**64
        span.span_id = self._number.to_bytes(8)
        span.start_time_unix_nano, span.end_time_unix_nano = begin, end
        _put(span, told)
        return span


def _with(
    span: Span, attributes: Mapping[str, _Value] = MappingProxyType({}), name: str = ""
) -> Span:
    """A copy with more attributes."""
    copied = Span()
    copied.CopyFrom(span)
    copied.name = name
    _put(copied, attributes)
    return copied


def _put(holder: Any, attributes: Mapping[str, _Value]) -> None:
    """Add attributes to a span, an event or a resource."""
    add = holder.attributes.add
    for key, value in attributes.items():
        given = add(key=key).value
        if isinstance(value, str):
            given.string_value = value
        elif isinstance(value, bool):
            given.bool_value = value
        elif isinstance(value, int):
            given.int_value = value
        else:
            given.double_value = value


def _fail(span: Span, error: str | None) -> None:
    span.status.code = Status.STATUS_CODE_ERROR
    span.status.message = _cut(error or "")


@dataclass(frozen=True, slots=True)
class _Results:
    """Results of a program's own tools, in order, and when it asked with them."""

    asked: int
    texts: list[str]


def _results_of_programs(turns: Sequence[DispatchedSamplingTask]) -> dict[int, _Results]:
    """By turn, the results that the next request after it brought."""
    found: dict[int, _Results] = {}
    for turn in turns:
        if turn.continues is None:
            continue
        texts = [_text(message) for message in turn.messages if message.get("role") == "tool"]
        if texts:
            begin = _begin_of(turn, _end_of(turn))
            found.setdefault(turn.continues, _Results(begin, texts))
    return found


def _end_of(turn: DispatchedSamplingTask) -> int:
    """When its answer was there. Turns of earlier versions of the program do not say."""
    if turn.answered_at is not None:
        return _ns(turn.answered_at)
    return _ns(turn.created_at) - round(turn.tools_latency_s * 1e9)


def _begin_of(turn: DispatchedSamplingTask, end: int) -> int:
    """When it was asked for. One that was read from a stored turn took no time."""
    return end - (0 if turn.replayed else round(turn.generate_latency_s * 1e9))


def _answer(turn: DispatchedSamplingTask) -> str:
    """The answer as the model wrote it, and the calls that were read in it."""
    parts: list[dict[str, Any]] = [{"type": "text", "content": _cut(turn.output_text)}]
    parts += [
        {"type": "tool_call", "name": call.name, "arguments": call.arguments}
        for call in turn.tool_calls
        if call.name and not call.by_agent
    ]
    said = {"role": "assistant", "parts": parts, "finish_reason": turn.finish_reason}
    return _json([said])


def _messages(messages: Sequence[_Message]) -> str:
    """Messages in the form of the conventions."""
    return _json(
        [{"role": message.get("role", ""), "parts": _parts(message)} for message in messages]
    )


def _parts(message: _Message) -> list[dict[str, Any]]:
    text = _cut(_text(message))
    if message.get("role") == "tool":
        response: dict[str, Any] = {"type": "tool_call_response", "response": text}
        known = message.get("tool_call_id")
        return [response if known is None else {**response, "id": known}]
    parts: list[dict[str, Any]] = [{"type": "text", "content": text}] if text else []
    for call in message.get("tool_calls") or ():
        made = call.get("function", {})
        told = {"type": "tool_call", "name": made.get("name"), "arguments": made.get("arguments")}
        parts.append(told if call.get("id") is None else {**told, "id": call["id"]})
    return parts


def _text(message: _Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else _json(content)


def _cut(text: str) -> str:
    more = len(text) - LONGEST_TEXT
    return utf8_text(text if more <= 0 else f"{text[:LONGEST_TEXT]} … [{more} more characters]")


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # half characters, and integers of more than 64 bits
        return json.dumps(value, default=str)


def _ns(time: datetime) -> int:
    return int(time.timestamp() * 1_000_000) * 1000
