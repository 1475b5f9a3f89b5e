"""Tools, judges and the reward service are tried before anything is launched."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from chat_completion import chat_completion
from ports import free_port

from agentrl import cli
from agentrl.configs import parse_config
from agentrl.databases.task_file import TaskKind, TaskLine
from agentrl.launcher import probes
from agentrl.launcher.deployment import REPOSITORY
from agentrl.launcher.probes import try_services
from agentrl.rollout.tools.calls import ToolServerUnreachable

Answer = Callable[[dict[str, Any]], object]  # the JSON that a request's JSON is answered with
RIGHT = "Both are 4.\nJUDGEMENT: right"
RANKED = '{"scores": [{"id": "1", "score": 0.9}, {"id": "2", "score": 0.1}]}'


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """The URL of a real HTTP server that answers every POST with status 200."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = json.dumps(answer(body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            """Tests print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def saying(**replies: str) -> Answer:
    """An OpenAI-compatible endpoint with a fixed reply of each model."""

    def answer(request: dict[str, Any]) -> object:
        return chat_completion(request["model"], replies[request["model"]])

    return answer


def models(key: str, url: str, *names: str) -> str:
    entries = "".join(f"  - {{model: {name}, base_url: {url}, retries: 0}}\n" for name in names)
    return f"{key}:\n{entries}"


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """The one sentence with which `agentrl launch` refuses tasks of a scorer; it writes nothing."""
    (tmp_path / "assets").symlink_to(REPOSITORY / "assets")
    monkeypatch.chdir(tmp_path)

    def launch(scorer: str, clients: str = "", *flags: str) -> str:
        Path("tasks.jsonl").write_text(
            json.dumps({"query": "q", "answer": "a", "scorer": scorer, "level": 3})
        )
        Path("agents.yml").write_text(clients or "{}")
        before = sorted(path.name for path in tmp_path.iterdir())
        status = cli.main(
            ["launch", "grpo", "demo", "--train_file", "tasks.jsonl", "--agent_config_path",
             "agents.yml", *flags]
        )  # fmt: skip
        said = capsys.readouterr()
        assert status == 2 and len(said.err.splitlines()) == 1, said
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        return said.err

    return launch


def test_a_judge_that_answers_in_another_form_is_refused_with_its_words(
    refused: Callable[..., str],
) -> None:
    with serving(saying(judge='{"verdict": "CORRECT"}')) as url:
        said = refused("agentcpm", models("scorer_agent", url, "judge"))
    for words in ("`scorer_agent` in agents.yml", f"judge at {url}", "JUDGEMENT: right",
                  '{"verdict": "CORRECT"}', "docs/reference/rewards.md"):  # fmt: skip
        assert words in said


def test_an_endpoint_that_is_no_chat_model_is_refused(refused: Callable[..., str]) -> None:
    with serving(lambda _: {"answer": 42}) as url:
        said = refused("agentcpm", models("scorer_agent", url, "judge"))
    assert "no chat completion of OpenAI's form" in said and '{"answer":42}' in said.replace(
        " ", ""
    )


def test_a_ranking_model_that_gives_no_scores_is_refused(refused: Callable[..., str]) -> None:
    with serving(saying(ranker="The first one is best.")) as url:
        said = refused("ruler", models("ruler_agent", url, "ranker"))
    for words in ("`ruler_agent`", "The first one is best.", '{"scores": [{"id"'):
        assert words in said


def test_a_reward_service_is_asked_as_it_will_be_and_refused_if_it_gives_no_score(
    refused: Callable[..., str],
) -> None:
    asked: list[dict[str, Any]] = []

    def reward(body: dict[str, Any]) -> object:
        asked.append(body)
        return {"reward": 1.0}

    with serving(reward) as url:
        said = refused("http", f"http_scorer: {{url: {url}}}")
    assert "`http_scorer`" in said and '{"reward": 1.0}' in said and "number or null" in said
    (body,) = asked
    assert body["record_id"] == "probe" and body["fields"] == {"level": 3}
    assert (body["question"], body["ground_truth"], body["model_answer"]) == ("q", "a", "a")
    assert [message["role"] for message in body["messages"]] == ["user", "assistant"]


def test_a_wrong_tool_url_is_refused(refused: Callable[..., str]) -> None:
    url = f"http://127.0.0.1:{free_port()}/mcp"
    said = refused("exact_match", "", "--mcp_manager_url", url, "--startup_timeout", "1")
    assert f"the tool server {url} could not be used" in said


def test_a_tool_server_that_is_slow_is_waited_for_and_a_wrong_path_of_it_is_refused() -> None:
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "assets/demo/tool_server.py"), "--port", str(port)]
    )
    told: list[str] = []
    try:
        await_port(port, server)
        server.send_signal(signal.SIGSTOP)  # it is there, and does not answer yet
        threading.Timer(2.5, server.send_signal, [signal.SIGCONT]).start()
        right = parse_config(["--mcp_manager_url", f"http://127.0.0.1:{port}/mcp"])
        try_services(right, [], told.append)
        assert len(told) == 1 and "waiting for the tools" in told[0] and "up to 10 s" in told[0]
        wrong = ["--mcp_manager_url", f"http://127.0.0.1:{port}/other", "--startup_timeout", "1"]
        with pytest.raises(ToolServerUnreachable):
            try_services(parse_config(wrong), [], told.append)
    finally:
        server.kill()
        server.wait()


LIVES = """
import asyncio
from contextlib import asynccontextmanager
from mcp.server.mcpserver import MCPServer

@asynccontextmanager
async def lifespan(server):
    await asyncio.sleep(3)
    yield {}

server = MCPServer("tools", log_level="CRITICAL", lifespan=lifespan)

@server.tool(structured_output=False)
async def add() -> int:
    return 2
"""


def test_what_a_server_of_our_process_loads_first_has_the_time_of_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probes, "_PATIENCE_S", 1.0)
    path = tmp_path / "lives.py"
    path.write_text(LIVES, encoding="utf-8")
    told: list[str] = []
    flags = ["--mcp_manager_url", f"{path}:server"]
    try_services(parse_config([*flags, "--startup_timeout", "60"]), [], told.append)
    assert len(told) == 1 and "waiting for the tools" in told[0] and "up to 60 s" in told[0]
    path.with_name("waits.py").write_text("import time; time.sleep(20)", encoding="utf-8")
    flags = ["--mcp_manager_url", f"{path.with_name('waits.py')}:server"]
    with pytest.raises(ToolServerUnreachable, match=r"not imported within 3 s; .*waits.py:1"):
        try_services(parse_config([*flags, "--startup_timeout", "3"]), [], told.append)
    assert "waits.py" in told[1]


def await_port(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("the tool server did not start")


def test_one_model_of_a_list_that_fails_is_told_and_the_others_will_do(tmp_path: Path) -> None:
    with serving(saying(good=RIGHT, bad="No idea.", ranker=RANKED, reader="It says 4.")) as url:
        clients = tmp_path / "agents.yml"
        clients.write_text(
            models("scorer_agent", url, "bad", "good") + models("ruler_agent", url, "ranker")
        )
        flags = ["--agent_config_path", str(clients)]
        task = TaskLine(id="1", query="q", answer="a", scorer="0.5*agentcpm + 0.5*ruler")
        told: list[str] = []
        try_services(parse_config(flags), [TaskKind(task)], told.append)
    (sentence,) = told
    assert "bad" in sentence and "No idea." in sentence
