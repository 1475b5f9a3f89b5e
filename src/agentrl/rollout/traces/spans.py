"""A Record that has ended, as the spans of one trace. Pure: no I/O, no clock.

    invoke_agent AGENT        the Record, from its start to its end
      chat MODEL              each turn: what was added to the prompt, and the answer
      execute_tool NAME       each tool call, with arguments and result
      score                   its scoring, with an event for each scorer

The ids follow from the Record, so that it has the same trace whoever sends it. A text is cut after
`LONGEST_TEXT` characters; the database has it whole.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from itertools import count
from typing import Any
from urllib.parse import quote

import orjson
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode
from opentelemetry.util.types import AttributeValue

from agentrl import __version__
from agentrl.databases.documents import DispatchedSamplingTask, RecordStatus, ToolCall
from agentrl.rollout.tools.results import utf8_text
from agentrl.rollout.traces import names
from agentrl.rollout.traces.ended import EndedRecord
from agentrl.rollout.traces.names import OWN

LONGEST_TEXT = 20_000
_PROVIDER = "agentrl"
_OF_OTHERS = -1  # the segment of turns that another model answered
_SCOPE = InstrumentationScope("agentrl", __version__, names.SCHEMA)

_Attributes = dict[str, AttributeValue]
_Message = Mapping[str, Any]


class Spans:
    """Makes the spans of a run's Records. `model`: the name of the model that answers."""

    def __init__(self, run: str, model: str) -> None:
        self._run = run
        self._model = model
        self._resource = Resource.create({"service.name": "agentrl", f"{OWN}run": run})

    def of(self, ended: EndedRecord) -> list[ReadableSpan]:
        """The spans of a Record, the one of the Record itself first."""
        return list(_Trace(self._run, self._model, self._resource, ended).spans())


class _Trace:
    """The trace of one Record."""

    def __init__(self, run: str, model: str, resource: Resource, ended: EndedRecord) -> None:
        self._run, self._model, self._resource = run, model, resource
        self._record, self._failure = ended.record, ended.failure
        self._turns = sorted(ended.turns, key=lambda turn: turn.turn)
        began = ended.record.started_at
        # MongoDB keeps milliseconds.
        key = f"{run} {ended.record.id} {began and int(began.timestamp() * 1000)}"
        self._trace_id = int.from_bytes(blake2b(key.encode(), digest_size=16).digest())
        self._numbers = count(self._trace_id)
        self._root = self._context()
        self._everywhere: _Attributes = {
            names.CONVERSATION: ended.record.id,
            f"{OWN}run": run,
        }

    def spans(self) -> Iterator[ReadableSpan]:
        """All spans."""
        starts = {turn.turn: _begin_of(turn) for turn in self._turns}
        results = _results_of_programs(self._turns)
        last = max(map(_end_of, self._turns), default=0)
        yield self._of_record(last)
        for turn in self._turns:
            yield self._of_turn(turn, starts[turn.turn])
            yield from self._of_calls(turn, results.get(turn.turn))
        for call in self._record.own_calls:
            if call.started_at is not None:
                yield self._of_call(call, _ns(call.started_at), call.latency_s)
        if self._record.sampled_at is not None and self._record.finished_at is not None:
            yield self._of_scoring(self._record.sampled_at, self._record.finished_at)

    def _of_record(self, last: int) -> ReadableSpan:
        record = self._record
        begin = _ns(record.started_at) if record.started_at else last
        told: dict[str, AttributeValue | None] = {
            names.OPERATION: names.INVOKE_AGENT,
            names.PROVIDER: _PROVIDER,
            names.AGENT: record.agent_name,
            names.SESSION: record.task,
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
            told[names.OUTPUT] = _messages([{"role": "assistant", "content": record.final_answer}])
        if record.versions is not None:
            told[f"{OWN}policy_version.min"] = record.versions.min
            told[f"{OWN}policy_version.max"] = record.versions.max
        status = Status(StatusCode.OK)
        if self._failure is not None:
            status = Status(StatusCode.ERROR, _cut(record.error or ""))
        return self._span(
            f"{names.INVOKE_AGENT} {record.agent_name}",
            begin,
            _ns(record.finished_at) if record.finished_at else max(begin, last),
            {name: value for name, value in told.items() if value is not None},
            status=status,
            context=self._root,
        )

    def _of_turn(self, turn: DispatchedSamplingTask, begin: int) -> ReadableSpan:
        own = turn.segment != _OF_OTHERS
        told: _Attributes = {
            names.OPERATION: names.CHAT,
            names.PROVIDER: _PROVIDER,
            names.INPUT: _messages(turn.messages),
            names.OUTPUT: _answer(turn),
            names.INPUT_TOKENS: turn.prompt_len,
            names.CACHED_TOKENS: turn.cached_tokens,
            names.FINISH_REASONS: (turn.finish_reason,),
            f"{OWN}turn": turn.turn,
            f"{OWN}turn.status": turn.status,
            f"{OWN}service": turn.service,
        }
        if own:
            told[names.MODEL] = self._model
            told[f"{OWN}segment"] = turn.segment
        if turn.versions:
            told[names.OUTPUT_TOKENS] = turn.versions[-1].end
            told[f"{OWN}policy_version.min"] = turn.versions[0].version
            told[f"{OWN}policy_version.max"] = turn.versions[-1].version
        for name in ("rewrite", "drift", "format_error", "replayed"):
            if (value := getattr(turn, name)) is not None:
                told[f"{OWN}{name}"] = value
        if turn.agent:
            told[names.AGENT] = turn.agent
        if not turn.trained:
            told[f"{OWN}trained"] = False
        name = f"{names.CHAT} {self._model}" if own else names.CHAT
        return self._span(name, begin, _end_of(turn), told, kind=SpanKind.CLIENT)

    def _of_calls(
        self, turn: DispatchedSamplingTask, results: "_Results | None"
    ) -> Iterator[ReadableSpan]:
        """The calls of a turn that were made: by us, or, as seen from its requests, a program."""
        end = _end_of(turn)
        for place, call in enumerate(turn.tool_calls):
            if call.started_at is not None and turn.replayed is None:
                yield self._of_call(call, _ns(call.started_at), call.latency_s)
            elif call.result is not None and call.name:
                yield self._of_call(call, end, 0.0 if turn.replayed else call.latency_s)
            elif results is not None and place < len(results.texts):
                made = call.model_copy(update={"result": results.texts[place]})
                yield self._of_call(made, end, max(0, results.asked - end) / 1e9)

    def _of_call(self, call: ToolCall, begin: int, seconds: float) -> ReadableSpan:
        told: _Attributes = {
            names.OPERATION: names.EXECUTE_TOOL,
            names.TOOL: call.name,
            names.ARGUMENTS: _cut(_json(call.arguments)),
            names.RESULT: _cut(call.result or ""),
        }
        if call.by_agent:
            told[f"{OWN}by_agent"] = True
        if call.summarised_by is not None:
            told[f"{OWN}summarised_by"] = call.summarised_by
        status = None
        if call.is_error:
            told[names.ERROR_TYPE] = "tool_error"
            status = Status(StatusCode.ERROR)
        name = f"{names.EXECUTE_TOOL} {call.name}"
        return self._span(name, begin, begin + int(seconds * 1e9), told, status=status)

    def _of_scoring(self, begin: datetime, end: datetime) -> ReadableSpan:
        record = self._record
        events = []
        for scorer, value in record.scores.items():
            told: _Attributes = {names.SCORER: scorer}
            if value is not None:
                told[names.SCORE] = value
            if (explanation := record.explanations.get(scorer)) is not None:
                told[names.EXPLANATION] = _cut(explanation)
            events.append(Event(names.SCORED_EVENT, told, _ns(end)))
        status, score = None, {} if record.score is None else {f"{OWN}score": record.score}
        if record.status == RecordStatus.QUARANTINED:
            status = Status(StatusCode.ERROR, _cut(record.error or ""))
        return self._span("score", _ns(begin), _ns(end), score, status=status, events=events)

    def _span(
        self,
        name: str,
        begin: int,
        end: int,
        attributes: Mapping[str, AttributeValue],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status | None = None,
        events: Sequence[Event] = (),
        context: SpanContext | None = None,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context or self._context(),
            parent=None if context is self._root else self._root,
            resource=self._resource,
            attributes={**self._everywhere, **attributes},
            events=events,
            kind=kind,
            status=status or Status(),
            start_time=begin,
            end_time=end,
            instrumentation_scope=_SCOPE,
        )

    def _context(self) -> SpanContext:
        span = next(self._numbers) % 2**64 or 1
        return SpanContext(self._trace_id, span, is_remote=False, trace_flags=TraceFlags(1))


@dataclass(frozen=True, slots=True)
class _Results:
    """Results of a program's own tools, in order, and when it asked with them."""

    asked: int
    texts: list[str]


def _results_of_programs(turns: Sequence[DispatchedSamplingTask]) -> dict[int, _Results]:
    """By turn, the results that the next request after it brought."""
    found: dict[int, _Results] = {}
    for turn in turns:
        texts = [_text(message) for message in turn.messages if message.get("role") == "tool"]
        if turn.continues is not None and texts:
            found.setdefault(turn.continues, _Results(_begin_of(turn), texts))
    return found


def _end_of(turn: DispatchedSamplingTask) -> int:
    """When its answer was there. Turns of earlier versions of the program do not say."""
    if turn.answered_at is not None:
        return _ns(turn.answered_at)
    return _ns(turn.created_at) - int(turn.tools_latency_s * 1e9)


def _begin_of(turn: DispatchedSamplingTask) -> int:
    """When it was asked for. One that was read from a stored turn took no time."""
    return _end_of(turn) - (0 if turn.replayed else int(turn.generate_latency_s * 1e9))


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
