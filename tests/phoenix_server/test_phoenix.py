"""Traces of the demo in a real Phoenix server, as Phoenix's own client reads them."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.held_port import HeldPort

sys.path.insert(0, str(Path(__file__).parents[1]))  # `traced_demo`

from traced_demo import answer_of, launch_traced, serving

HERE = Path(__file__).parent
PROJECT = "bins"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A Phoenix server with a database of its own; yields its URL."""
    with HeldPort() as port:
        number = port.number
    folder = tmp_path / "phoenix"
    folder.mkdir()
    variables = {
        "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(number),
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_SQL_DATABASE_URL": f"sqlite:///{folder}/phoenix.db",
        "PHOENIX_TELEMETRY_ENABLED": "false", "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }  # fmt: skip
    url = f"http://127.0.0.1:{number}"
    command = [os.environ["PHOENIX_PYTHON"], str(HERE / "serve.py")]
    with serving(command, url, "/healthz", folder, variables):
        yield url


def read(url: str) -> Any:
    """All that came. Phoenix stores spans some time after it took them."""
    command = [os.environ["PHOENIX_PYTHON"], str(HERE / "read_traces.py"), url, PROJECT]
    told, before, deadline = answer_of(command), None, time.monotonic() + 60
    while told != before or not told["traces"]:
        assert time.monotonic() < deadline, "spans still come"
        time.sleep(2)
        told, before = answer_of(command), told
    return told


def messages(span: Any, of: str) -> list[Any]:
    """The messages `of` a turn, input or output: role, text and the calls in them."""
    told, found = span["attributes"], []
    while (role := told.get(f"llm.{of}_messages.{len(found)}.message.role")) is not None:
        message = f"llm.{of}_messages.{len(found)}.message"
        call = f"{message}.tool_calls.0.tool_call.function"
        arguments = json.loads(told.get(f"{call}.arguments", "null"))
        found.append(
            (role, told.get(f"{message}.content", ""), told.get(f"{call}.name"), arguments)
        )
    return found


def parameters(span: Any) -> dict[str, Any]:
    """The arguments of a tool call, each an attribute of its own."""
    begin = "tool.parameters."
    return {
        name.removeprefix(begin): value
        for name, value in span["attributes"].items()
        if name.startswith(begin)
    }


async def test_model_turns_and_tool_calls_of_the_demo_are_readable_in_phoenix(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"openinference.project.name={PROJECT}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    demo = await launch_traced(tmp_path, server)
    told = read(server)

    assert len(told["traces"]) > 1
    kinds, of_sessions = set(), {}
    for trace in told["traces"]:
        spans = trace["spans"]
        [root] = [span for span in spans if span["parent_id"] is None]
        record = demo.records.pop(root["attributes"]["agentrl.record"])
        assert root["span_kind"] == "AGENT"
        assert {span["parent_id"] for span in spans if span is not root} <= {
            root["context"]["span_id"]
        }
        for span in spans:
            own = span["attributes"]
            kinds.add(span["span_kind"])
            assert (own["session.id"], own["agentrl.run"]) == (record.task, "demo")
            assert own["gen_ai.conversation.id"] == record.id
        assert root["attributes"].get("agentrl.score") == record.score
        assert messages(root, "input") == [("user", record.query, None, None)]
        answered = [] if record.final_answer is None else [record.final_answer]
        assert [text for _, text, _, _ in messages(root, "output")] == answered
        of_sessions[trace["trace_id"]] = (record.task, record.query, record.final_answer)

        turns = demo.turns(record)
        chats = sorted(
            (span for span in spans if span["span_kind"] == "LLM"),
            key=lambda span: span["attributes"]["agentrl.turn"],
        )
        assert len(chats) == len(turns)
        for span, turn in zip(chats, turns, strict=True):
            [(role, text, called, arguments)] = messages(span, "output")
            assert (role, text) == ("assistant", turn.output_text)
            calls = [call for call in turn.tool_calls if call.name and not call.by_agent]
            assert (called, arguments) == (
                (calls[0].name, calls[0].arguments) if calls else (None, None)
            )
            assert [(role, text) for role, text, _, _ in messages(span, "input")] == [
                (message["role"], message["content"]) for message in turn.messages
            ]
            counts = [
                span["attributes"][f"llm.token_count.{which}"] for which in ("prompt", "completion")
            ]
            assert counts == [turn.prompt_len, len(turn.output_ids) // 4]
        assert trace["token_count_completion"] == demo.n_generated(record)

        tools = [span for span in spans if span["span_kind"] == "TOOL"]
        tools.sort(key=lambda span: span["start_time"])
        made = sorted(demo.calls(record), key=lambda call: call.started_at)
        for span, call in zip(tools, made, strict=True):
            assert span["attributes"]["tool.name"] == call.name
            assert parameters(span) == call.arguments
            assert str(span["attributes"]["output.value"]) == call.result
            assert span["status_code"] == ("ERROR" if call.is_error else "UNSET")
        scorings = [span for span in spans if span["span_kind"] == "EVALUATOR"]
        assert len(scorings) == (record.sampled_at is not None)  # not if it was handed back
        events = [event["attributes"] for span in scorings for event in span["events"]]
        assert {
            event["gen_ai.evaluation.name"]: event.get("gen_ai.evaluation.score.value")
            for event in events
        } == record.scores
    assert kinds == {"AGENT", "LLM", "TOOL", "EVALUATOR"}
    # The pages of sessions have the rollouts of a group beside each other.
    shown = {
        turn["trace_id"]: (
            session, turn["input"]["value"], turn.get("output", {}).get("value"),
        )
        for session, turns in told["sessions"].items()
        for turn in turns
    }  # fmt: skip
    assert shown == of_sessions
