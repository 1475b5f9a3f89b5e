"""Traces of Records, as a receiver of OpenTelemetry's decodes them."""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Status
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.schemas import Schemas
from ports import free_port
from sampler_at_work import ECHO, add, answers_at_once, asks_once_and_answers, at_work, records_of
from scripted_run import completed, until
from stage import Stage
from trace_receiver import TraceReceiver, attributes, receiving

from agentrl.configs import ConfigError, check_traces, parse_config
from agentrl.databases.documents import Record, StopReason
from agentrl.rollout.agents import register_agent
from agentrl.rollout.scorers import register_scorer
from agentrl.rollout.traces import names
from agentrl.rollout.traces.ended import EndedRecord, Failure
from agentrl.rollout.traces.export import Traces, traces_url
from agentrl.rollout.traces.spans import LONGEST_TEXT, Spans


@pytest.fixture
def receiver() -> Iterator[TraceReceiver]:
    with receiving() as receiver:
        yield receiver


async def sampled(stage: Stage, agent: str, *flags: str, tasks: int = 1, **task: Any) -> list[Any]:
    """Sample groups of two; returns the Records when the process has ended."""
    await add(stage.database, tasks, **task)
    async with at_work(stage, agent, "--run_name", "traced", *flags):
        await until(completed(stage.database, tasks))
    return await records_of(stage.database)


async def test_a_record_is_a_trace_of_its_turns_tool_calls_and_scoring(
    stage: Stage, receiver: TraceReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret,x-experiment=7")
    stage.service.answer = asks_once_and_answers
    records = await sampled(stage, "mcp", "--otlp_endpoint", receiver.url)

    assert {path for path, _ in receiver.requests} == {"/v1/traces"}
    headers = receiver.requests[0][1]
    assert (headers["x-key"], headers["x-experiment"]) == ("secret", "7")
    [resource] = {json.dumps(resource, sort_keys=True) for resource in receiver.resources}
    assert json.loads(resource)["agentrl.run"] == "traced"

    traces = receiver.traces()
    assert len(traces) == len(records) == 2
    by_record = {attributes(spans[0])["agentrl.record"]: spans for spans in traces.values()}
    for record in records:
        spans = by_record[record.id]
        root, first, call, last, scoring = spans
        assert [span.name for span in spans] == [
            "invoke_agent mcp", "chat model", "execute_tool echo", "chat model", "score",
        ]  # fmt: skip
        assert {span.parent_span_id for span in spans[1:]} == {root.span_id}
        assert len({span.span_id for span in spans}) == 5
        for before, after in ((root, first), (first, call), (call, last), (last, scoring)):
            assert before.start_time_unix_nano <= after.start_time_unix_nano
            assert after.start_time_unix_nano <= after.end_time_unix_nano
            assert after.end_time_unix_nano <= root.end_time_unix_nano
        assert first.end_time_unix_nano <= call.start_time_unix_nano
        assert call.end_time_unix_nano <= last.start_time_unix_nano

        told = attributes(root)
        assert told["gen_ai.operation.name"] == "invoke_agent"
        assert (told["agentrl.score"], told["agentrl.stop_reason"]) == (1.0, StopReason.ANSWERED)
        assert (told["agentrl.policy_version.min"], told["agentrl.policy_version.max"]) == (2, 2)
        assert told["agentrl.tokens.generated"] == record.tokens.generated
        assert told["input.value"] == record.query
        assert told["output.value"] == record.final_answer
        [said] = json.loads(told["gen_ai.output.messages"])
        assert (
            said["parts"][0]["content"] == record.final_answer and said["finish_reason"] == "stop"
        )
        assert told["agentrl.view"] == f"/run/traced/records/{record.id}"
        assert record.query in told["gen_ai.input.messages"] and "error.type" not in told
        for span in spans:
            assert attributes(span)["gen_ai.conversation.id"] == record.id
            assert attributes(span)["session.id"] == record.task
            assert attributes(span)["agentrl.run"] == "traced"

        turns = await stage.turns(record)
        for span, turn in zip((first, last), turns, strict=True):
            told = attributes(span)
            assert told["gen_ai.usage.input_tokens"] == turn.prompt_len
            assert told["gen_ai.usage.output_tokens"] == len(turn.output_ids) // 4
            assert told["agentrl.policy_version.max"] == 2
            assert told["gen_ai.response.finish_reasons"] == ["stop"]
            assert told["agentrl.service"] == stage.service.url
            [said] = json.loads(told["gen_ai.output.messages"])
            assert said["parts"][0]["content"] == turn.output_text
        [asked] = json.loads(attributes(first)["gen_ai.input.messages"])
        assert (asked["role"], asked["parts"][0]["content"]) == ("user", record.query)
        [result] = json.loads(attributes(last)["gen_ai.input.messages"])
        assert result["parts"] == [{"type": "tool_call_response", "response": "B7"}]
        told = attributes(call)
        assert (told["gen_ai.tool.name"], told["gen_ai.tool.call.result"]) == ("echo", "B7")
        assert json.loads(told["gen_ai.tool.call.arguments"]) == {"text": "B7"}
        told = attributes(scoring)
        assert (told["gen_ai.operation.name"], told["agentrl.score"]) == ("score", 1.0)
        assert told["openinference.span.kind"] == "EVALUATOR"
        [event] = scoring.events
        assert event.name == "gen_ai.evaluation.result"
        assert attributes(event) == {
            "gen_ai.evaluation.name": "exact_match", "gen_ai.evaluation.score.value": 1.0,
        }  # fmt: skip


async def test_a_part_of_the_records_is_traced_the_same_everywhere(
    stage: Stage, receiver: TraceReceiver
) -> None:
    stage.service.answer = answers_at_once
    flags = ("--otlp_endpoint", receiver.url + "/v1/traces", "--trace_rate", "0.5")
    records = await sampled(stage, "mcp", *flags, tasks=12)
    traced = {attributes(spans[0])["agentrl.record"] for spans in receiver.traces().values()}
    config = parse_config(list(flags)).run
    wanted = {record.id for record in records if Traces(config, Spans("", "")).wants(record.id)}
    assert traced == wanted and 4 <= len(traced) <= 20
    assert {path for path, _ in receiver.requests} == {"/v1/traces"}


async def test_failed_attempts_alone_are_traced_with_the_class_of_their_failure(
    stage: Stage, receiver: TraceReceiver
) -> None:
    async def fails_at_first(task: Any, llm: Any, tools: Any) -> str:
        reply = await llm.chat(llm.task_messages(), tools.schemas)
        if not failed:
            failed.append(reply)
            raise KeyError("no such bin")
        return str(reply.content)

    failed: list[Any] = []
    register_agent("fails", fails_at_first)
    stage.service.answer = answers_at_once
    await sampled(stage, "fails", "--otlp_endpoint", receiver.url, "--trace_failed_only", "true")
    [spans] = receiver.traces().values()
    root, turn = spans
    assert attributes(root)["error.type"] == Failure.CODE
    assert root.status.code == 2 and "KeyError: 'no such bin'" in root.status.message
    assert attributes(root)["agentrl.status"] == "failed" and turn.name == "chat model"


async def test_a_trajectory_that_cannot_be_scored_is_traced_with_its_stored_turns(
    stage: Stage, receiver: TraceReceiver
) -> None:
    async def breaks(model_answer: str) -> float:
        raise ValueError("the judge is confused")

    register_scorer("breaks", breaks)
    stage.service.answer = answers_at_once
    flags = ("--otlp_endpoint", receiver.url, "--max_scoring_failures", "2")
    await add(stage.database, 1, scorer="breaks")

    async def both() -> bool:
        return len(receiver.traces()) == 2

    async with at_work(stage, "mcp", *flags):
        await until(both)
    for root, turn, scoring in receiver.traces().values():
        assert attributes(root)["error.type"] == Failure.SCORING
        assert "the judge is confused" in root.status.message
        assert turn.name == "chat model" and scoring.status.code == 2
        assert attributes(turn)["gen_ai.usage.output_tokens"] > 1


async def test_results_of_a_programs_own_tools_come_from_its_next_request(
    stage: Stage, receiver: TraceReceiver
) -> None:
    stage.lines = [ECHO, "<answer>42</answer>"]
    record = await stage.attempt("mcp")
    first, last = await stage.turns(record)
    # As the gateway stores them: the call has no result, and the next turn continues the first.
    [call] = first.tool_calls
    asked = call.model_copy(update={"result": None, "started_at": None, "latency_s": 0.0})
    turns = [
        first.model_copy(update={"tool_calls": [asked]}),
        last.model_copy(update={"continues": 0, "n_continued": 2}),
    ]
    trace = trace_of(EndedRecord(record, turns))
    [_, chat, tool, then] = trace.spans
    assert attributes(tool)["gen_ai.tool.call.result"] == "B7"
    assert tool.start_time_unix_nano == chat.end_time_unix_nano
    assert tool.end_time_unix_nano == then.start_time_unix_nano
    again = trace_of(EndedRecord(record, list(reversed(turns))))
    assert again == trace


async def test_an_endpoint_that_takes_nothing_holds_nobody_up_and_is_said_once(
    stage: Stage, receiver: TraceReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 400
    stage.service.answer = answers_at_once
    with caplog.at_level(logging.INFO):
        await sampled(stage, "mcp", "--otlp_endpoint", receiver.url, tasks=6)
    said = [entry.getMessage() for entry in caplog.records if "trace" in entry.getMessage()]
    [dropped, at_the_end] = said
    assert f"--otlp_endpoint {receiver.url}/v1/traces: 400 Bad Request" in dropped
    assert "0 sent, 12 dropped" in at_the_end


def test_a_full_queue_drops_and_never_waits(
    receiver: TraceReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def put_all() -> float:
        config = parse_config(["--otlp_endpoint", receiver.url]).run
        async with Traces.open(config, Spans("run", "model")) as traces:
            began = time.monotonic()
            for number in range(40):
                traces.put(EndedRecord(_record(number), []))
                await asyncio.sleep(0.001)
            took = time.monotonic() - began
            receiver.gate.set()
        return took

    monkeypatch.setattr("agentrl.rollout.traces.export.MOST_TURNS", 10)
    receiver.gate.clear()
    with caplog.at_level(logging.INFO):
        took = asyncio.run(put_all())
    assert took < 2 and len(receiver.traces()) < 30
    assert "10 turns wait for it" in caplog.text
    assert f"{len(receiver.traces())} sent, {40 - len(receiver.traces())} dropped" in caplog.text


def test_what_ends_while_others_are_collected_is_sent_as_soon_as_there_is_enough(
    receiver: TraceReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put_all() -> None:
        config = parse_config(["--otlp_endpoint", receiver.url]).run
        async with Traces.open(config, Spans("run", "model")) as traces:
            for number in range(60):
                traces.put(EndedRecord(_record(number), []))
                while number % 20 == 19 and len(receiver.traces()) <= number:
                    await asyncio.sleep(0.01)

    monkeypatch.setattr("agentrl.rollout.traces.export.COLLECT_S", 3600.0)
    monkeypatch.setattr("agentrl.rollout.traces.export.TURNS_SENT", 20)
    asyncio.run(put_all())
    assert len(receiver.traces()) == 60


def test_long_and_broken_texts_become_spans() -> None:
    record = _record(0).model_copy(
        update={"final_answer": "x" * (LONGEST_TEXT + 5), "query": "half \ud800", "score": 0.5}
    )
    [root] = trace_of(EndedRecord(record, [])).spans
    assert "[5 more characters]" in attributes(root)["gen_ai.output.messages"]
    assert "half ?" in attributes(root)["gen_ai.input.messages"]


def test_a_record_that_cannot_be_a_trace_leaves_the_others_in_their_request() -> None:
    spans = Spans("run", "model")
    request = spans.request()
    spans.add(request, EndedRecord(_record(0), []))
    with pytest.raises(TypeError):
        spans.add(request, EndedRecord(_record(1).model_copy(update={"n_turns": object()}), []))
    spans.add(request, EndedRecord(_record(2), []))
    roots = [trace.spans[0] for trace in request.resource_spans[0].scope_spans]
    assert [attributes(root)["agentrl.record"] for root in roots] == ["r0", "r2"]


def test_an_attempt_that_was_handed_back_is_neither_a_success_nor_an_error() -> None:
    codes = [
        trace_of(EndedRecord(_record(0), [], failure)).spans[0].status.code
        for failure in (None, Failure.CODE, Failure.HANDED_BACK)
    ]
    assert codes == [Status.STATUS_CODE_OK, Status.STATUS_CODE_ERROR, Status.STATUS_CODE_UNSET]


@pytest.mark.parametrize(
    ("patience", "said"), [("1", "it does not answer: "), ("60", "before the sampler ended")]
)
def test_a_receiver_that_is_away_is_said_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, patience: str, said: str
) -> None:
    """The library gives up after the patience, or as the process ends."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", patience)
    monkeypatch.setattr("agentrl.rollout.traces.export.CLOSE_S", 2.0)

    async def put_one() -> None:
        config = parse_config(["--otlp_endpoint", f"http://127.0.0.1:{free_port()}"]).run
        async with Traces.open(config, Spans("run", "model")) as traces:
            traces.put(EndedRecord(_record(0), []))

    with caplog.at_level(logging.INFO):
        asyncio.run(put_one())
    dropped, at_the_end = [entry.getMessage() for entry in caplog.records if "trace" in entry.msg]
    assert said in dropped and "None" not in dropped
    assert patience == "60" or "Connection refused" in dropped
    assert "0 sent, 1 dropped" in at_the_end


def test_the_pinned_names_are_those_of_the_conventions() -> None:
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    known |= {"error.type", "session.id", names.SCORED_EVENT}
    pinned = {
        value
        for name, value in vars(names).items()
        if name.isupper() and isinstance(value, str) and "." in value
    } - {names.SCHEMA, names.OWN}
    of_openinference = {names.KIND, names.INPUT_TEXT, names.OUTPUT_TEXT}
    assert len(pinned) > 15 and pinned - of_openinference <= known
    assert Schemas.V1_44_0.value == names.SCHEMA
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    assert {names.CHAT, names.EXECUTE_TOOL, names.INVOKE_AGENT} <= operations


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--otlp_endpoint", "localhost:4318"), "must begin with http://"),
        (("--otlp_endpoint", "http://me:secret@here"), "OTEL_EXPORTER_OTLP_HEADERS"),
        (("--otlp_endpoint", "http://"), "must name a host"),
        (("--otlp_endpoint", "http://here:99999"), "must have a port from 0 to 65535"),
        (("--otlp_endpoint", "http://[here"), "Invalid IPv6 URL"),
        (("--trace_rate", "0.5"), "has no effect without --otlp_endpoint"),
        (("--otlp_endpoint", "http://here", "--trace_rate", "0"), "must be above 0"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_config(list(flags))


def test_a_missing_package_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.configs.config._TRACES", "opentelemetry-not-here")
    check_traces(parse_config([]).run)
    with pytest.raises(ConfigError, match="install -r requirements-traces"):
        check_traces(parse_config(["--otlp_endpoint", "http://here"]).run)


def test_an_endpoint_may_be_the_url_for_traces_itself() -> None:
    assert traces_url("http://here:4318/") == "http://here:4318/v1/traces"
    assert traces_url("http://here/otlp/v1/traces") == "http://here/otlp/v1/traces"


def trace_of(ended: EndedRecord) -> ScopeSpans:
    spans = Spans("run", "model")
    return spans.add(spans.request(), ended)


def _record(number: int) -> Record:
    return Record(
        _id=f"r{number}", task="t", task_id="t", rollout=0, attempt=0, split="train", epoch=0,
        owner="o", query="q",
    )  # fmt: skip
