"""Traces of the demo in a real MLflow server, as MLflow's own client reads them."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.held_port import HeldPort

sys.path.insert(0, str(Path(__file__).parents[1]))  # `traced_demo`

from traced_demo import answer_of, launch_traced, serving

CLIENT = Path(__file__).with_name("read_traces.py")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """An MLflow server with a database of its own; yields its URL."""
    with HeldPort() as port:
        number = port.number
    command = [
        os.environ["MLFLOW_PYTHON"], "-m", "mlflow", "server", "--host", "127.0.0.1", "--port",
        str(number), "--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db",
        "--artifacts-destination", str(tmp_path / "artifacts"),
    ]  # fmt: skip
    url = f"http://127.0.0.1:{number}"
    variables = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with serving(command, url, "/health", tmp_path, variables):
        yield url


def client(url: str, *given: str) -> Any:
    return answer_of([os.environ["MLFLOW_PYTHON"], str(CLIENT), url, *given])


async def test_model_turns_and_tool_calls_of_the_demo_are_readable_in_mlflow(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = client(server, "begin")
    headers = f"x-mlflow-experiment-id={place['experiment']},x-mlflow-run-id={place['run']}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    # It is slow on a laptop, and the sampler waits five seconds for it at the end.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    demo = await launch_traced(tmp_path, server)
    traces = client(server, "read", place["experiment"], place["run"])

    assert len(traces) > 1
    for trace in traces:
        root = next(span for span in trace["spans"] if span["parent"] is None)
        told = root["attributes"]
        record = demo.records.pop(told["agentrl.record"])
        assert (root["type"], told["agentrl.run"]) == ("AGENT", "demo")
        assert told["agentrl.view"] == f"/run/demo/records/{record.id}"
        assert told.get("agentrl.score") == record.score
        assert root["inputs"] == record.query
        assert trace["metadata"]["mlflow.trace.session"] == record.task
        own = demo.turns(record)
        chats = sorted(
            (span for span in trace["spans"] if span["type"] == "CHAT_MODEL"),
            key=lambda span: span["attributes"]["agentrl.turn"],
        )
        assert len(chats) == len(own)
        for span, turn in zip(chats, own, strict=True):
            assert span["outputs"][0]["parts"][0]["content"] == turn.output_text
            assert len(span["inputs"]) == len(turn.messages)
            usage = span["attributes"]["mlflow.chat.tokenUsage"]
            assert (usage["input_tokens"], usage["output_tokens"]) == (
                turn.prompt_len, len(turn.output_ids) // 4,
            )  # fmt: skip
        assert (trace["usage"] or {}).get("output_tokens", 0) == demo.n_generated(record)
        calls = demo.calls(record)
        tools = [span for span in trace["spans"] if span["type"] == "TOOL"]
        assert [(span["name"], span["status"]) for span in tools] == [
            (f"execute_tool {call.name}", "SpanStatusCode.ERROR" if call.is_error
             else "SpanStatusCode.UNSET") for call in calls
        ]  # fmt: skip
        for span, call in zip(tools, calls, strict=True):
            assert span["inputs"] == call.arguments
            assert span["attributes"]["gen_ai.tool.call.result"] == call.result
        scorings = [span for span in trace["spans"] if span["name"] == "score"]
        assert len(scorings) == (record.sampled_at is not None)  # not if it was handed back
        events = [event for span in scorings for event in span["events"]]
        assert [told["gen_ai.evaluation.name"] for _, told in events] == list(record.scores)
    assert any(span["name"] == "score" for trace in traces for span in trace["spans"])
    assert any(span["type"] == "TOOL" for trace in traces for span in trace["spans"])
