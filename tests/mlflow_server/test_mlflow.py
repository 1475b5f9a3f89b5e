"""Traces of the demo in a real MLflow server, as MLflow's own client reads them."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.databases.connection import connect
from agentrl.databases.documents import DispatchedSamplingTask, Record
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.held_port import HeldPort

sys.path.insert(0, str(Path(__file__).parents[1]))  # `demo_launch`

from demo_launch import launch_demo

CLIENT = Path(__file__).with_name("read_traces.py")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """An MLflow server with a database of its own; yields its URL."""
    with HeldPort() as port:
        number = port.number
    told = (tmp_path / "mlflow.log").open("w")
    process = subprocess.Popen(
        [os.environ["MLFLOW_PYTHON"], "-m", "mlflow", "server", "--host", "127.0.0.1", "--port",
         str(number), "--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db",
         "--artifacts-destination", str(tmp_path / "artifacts")],
        cwd=tmp_path, stdout=told, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
    )  # fmt: skip
    url = f"http://127.0.0.1:{number}"
    try:
        deadline = time.monotonic() + 120
        while not healthy(url):
            assert process.poll() is None and time.monotonic() < deadline, told.name
            time.sleep(0.3)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
        process.wait(30)
        told.close()


def healthy(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=2).status == 200
    except OSError:
        return False


def client(url: str, *given: str) -> Any:
    command = [os.environ["MLFLOW_PYTHON"], str(CLIENT), url, *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


async def stored(folder: Path) -> tuple[list[Record], list[DispatchedSamplingTask]]:
    """The run's ended Records and their turns."""
    with EmbeddedMongod(folder / "mongo", folder / "mongod-again.log") as mongod:
        database = await connect(mongod.url, "demo")
        ended = database.records.find({"finished_at": {"$ne": None}})
        records = [Record.from_mongo(document) async for document in ended]
        turns = [DispatchedSamplingTask.from_mongo(x) async for x in database.turns.find()]
        await database.close()
    return records, turns


async def test_model_turns_and_tool_calls_of_the_demo_are_readable_in_mlflow(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = client(server, "begin")
    headers = f"x-mlflow-experiment-id={place['experiment']},x-mlflow-run-id={place['run']}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    # It is slow on a laptop, and the sampler waits five seconds for it at the end.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    flags = ("--max_steps", "2", "--otlp_endpoint", server, "--trace_rate", "0.05")
    launched = launch_demo(tmp_path, *flags)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    records, turns = await stored(tmp_path / "output" / "demo")
    traces = client(server, "read", place["experiment"], place["run"])

    by_id = {record.id: record for record in records}
    assert len(traces) > 1
    for trace in traces:
        root = next(span for span in trace["spans"] if span["parent"] is None)
        told = root["attributes"]
        record = by_id.pop(told["agentrl.record"])
        assert (root["type"], told["agentrl.run"]) == ("AGENT", "demo")
        assert told["agentrl.view"] == f"/run/demo/records/{record.id}"
        assert told.get("agentrl.score") == record.score
        assert root["inputs"][0]["parts"][0]["content"] == record.query
        assert trace["metadata"]["mlflow.trace.session"] == record.task
        own = sorted((turn for turn in turns if turn.record_id == record.id), key=lambda x: x.turn)
        chats = sorted(
            (span for span in trace["spans"] if span["type"] == "CHAT_MODEL"),
            key=lambda span: span["attributes"]["agentrl.turn"],
        )
        assert len(chats) == len(own) == record.n_turns
        for span, turn in zip(chats, own, strict=True):
            assert span["outputs"][0]["parts"][0]["content"] == turn.output_text
            assert len(span["inputs"]) == len(turn.messages)
            usage = span["attributes"]["mlflow.chat.tokenUsage"]
            assert (usage["input_tokens"], usage["output_tokens"]) == (
                turn.prompt_len, len(turn.output_ids) // 4,
            )  # fmt: skip
        assert trace["usage"]["output_tokens"] == record.tokens.generated
        calls = [call for turn in own for call in turn.tool_calls if call.started_at is not None]
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
