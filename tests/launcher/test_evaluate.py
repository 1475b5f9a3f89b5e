"""`agentrl eval` of any models, and of a model behind an API, through the front door."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from chat_completion import chat_completion
from demo_launch import launch_demo
from ports import free_port
from rich.console import Console

from agentrl.cli import main
from agentrl.configs import parse_config
from agentrl.launcher.comparison import compare_all, comparison_lines, print_table
from agentrl.launcher.deployment import REPOSITORY
from agentrl.launcher.evaluation import (
    EvaluationReport,
    HeldOutFile,
    TaskRollouts,
    summarise_rollouts,
)
from agentrl.launcher.evaluation_setup import making_digests, making_flags, unseen
from agentrl.launcher.model_source import find_model

DEMO = REPOSITORY / "assets" / "demo"
MODEL = str(DEMO / "model")
HOW = (
    "--mcp_manager_url", f"{DEMO / 'warehouse_tools.py'}:server", "--max_turns", "6",
    "--max_tokens", "384", "--max_new_tokens", "48", "--lease_seconds", "3",
)  # fmt: skip


def evaluated(name: str, scores: Sequence[Sequence[float]], file: HeldOutFile) -> EvaluationReport:
    rollouts = [TaskRollouts(f"t{n}", some, [1] * len(some), 0, 0) for n, some in enumerate(scores)]
    return summarise_rollouts("eval", name, 0, -1, rollouts, file)


def test_models_are_compared_task_by_task_with_the_first(tmp_path: Path) -> None:
    file = HeldOutFile(tmp_path / "held.jsonl", "abc")
    base = evaluated("base", [[1, 0], [0, 0], [0, 1], [1, 1], []], file)
    better = evaluated("better", [[1, 1], [1, 1], [0, 1], [0, 1], [1, 1]], file)
    same = evaluated("same", [[1, 0], [0, 0], [0, 1], [1, 1], []], file)
    elsewhere = evaluated("better", [[1, 1]], HeldOutFile(tmp_path / "other.jsonl", "def"))
    compared, alike = compare_all([base, better, same, elsewhere])
    assert (compared.base, compared.other, compared.tasks) == ("base", "better", 4)
    # +0.5, +1, 0, -0.5 over four tasks; the fifth has no score of the base.
    assert compared.success.mean == pytest.approx(0.25)
    assert (compared.better, compared.worse) == (2, 1)
    assert compared.changes == {"t1": 1.0, "t0": 0.5, "t3": -0.5}
    # |sums| of all signs of (0.5, 1, 0.5): 2, 1, 1, 0 and their negatives, so 6 of 8 reach 1.
    assert compared.p == pytest.approx(0.75)
    assert (alike.other, alike.success.mean, alike.p, alike.changes) == ("same", 0.0, 1.0, {})
    lines = comparison_lines([compared])
    # 0.25 +- 3.1824 * 0.6455 / 2, and no success is above 1
    assert "better against base on held.jsonl: success +0.250" in lines[0]
    assert "(95 % interval -0.777 to +1.000)" in lines[0]
    assert "+0.000 (no interval, because all differences are equal)" in comparison_lines([alike])[0]
    assert lines[1:] == ["  most better on t1 +1.00, t0 +0.50", "  most worse on t3 -0.50"]
    console = Console(width=80, record=True)
    print_table(console, [base, better, same])
    printed = console.export_text()
    assert "held.jsonl: 5 tasks" in printed and "pass@2" in printed
    assert "base: Of the 5 tasks, those with k scores count: pass@1 of 4, pass@2 of 4" in printed
    assert "better: Of" not in printed
    assert all(len(line) <= 80 for line in printed.splitlines())


def test_what_cannot_be_evaluated_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("MODEL", "EVAL_FILE", "TRAIN_FILE", "DB_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "a", "query": "?", "answer": "1", "scorer": "exact_match"}\n')

    def said(*flags: str) -> str:
        assert main(["eval", *flags]) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert "what is to be evaluated?" in said()
    assert "run 'nobody' was never launched" in said("nobody")
    assert "no tasks to evaluate on: set --tasks" in said("--model", MODEL)
    assert "no such folder" in said("--model", MODEL, "nothing", "--tasks", "tasks.jsonl")
    assert "is given twice" in said("--model", MODEL, MODEL, "--tasks", "tasks.jsonl")
    assert "give a run's name alone" in said("demo", "--model", MODEL)
    assert "--checkpoint belongs to a RUN" in said("--model", MODEL, "--checkpoint", "3")
    asked = ("--tasks", "tasks.jsonl", "--endpoint")
    assert "--endpoint_model is needed" in said(*asked, "http://127.0.0.1:1/v1")
    named = (*asked, "http://127.0.0.1:1/v1", "--endpoint_model", "big")
    assert "is not set" in said(*named, "--endpoint_key_env", "NO_SUCH_KEY")
    told = said(*named, "--new_context", "discard_all", "--max_prompt_tokens", "100")
    assert "a context is rewritten as tokens" in told
    assert "belongs to --endpoint, which is not given" in said(
        "--model", MODEL, "--endpoint_model", "big", "--tasks", "tasks.jsonl"
    )
    assert "--mcp_manager_url gone.py:server: there is no such Python file" in said(
        "--model", MODEL, "--tasks", "tasks.jsonl", "--mcp_manager_url", "gone.py:server"
    ).replace(f"{tmp_path}/", "")
    trained = tmp_path / "output" / "eval"
    trained.mkdir(parents=True)
    (trained / "launch.json").write_text('{"preset": "grpo", "flags": []}')
    assert "the folder of a run" in said("--model", MODEL, "--tasks", "tasks.jsonl")


def test_a_model_is_found_by_folder_checkpoint_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model(MODEL).name == "demo/model"
    for step in (2, 10):
        folder = tmp_path / "output" / "mine" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        state = {
            "step": step, "version": step, "run_name": "mine", "fence": 1, "processes": 1,
            "config": {"model": {"model_name_or_path": MODEL}},
        }  # fmt: skip
        (folder / "trainer_state.json").write_text(json.dumps(state))
    for given in ("mine", "output/mine", "output/mine/checkpoint-10"):
        source = find_model(given)
        assert (source.name, source.step) == ("mine/checkpoint-10", 10)
    assert find_model("output/mine/checkpoint-2").step == 2


def test_an_evaluation_with_other_tools_or_limits_is_another_one() -> None:
    usual = making_flags(parse_config([]))
    for flags in (
        ["--mcp_manager_url", "http://127.0.0.1:1/mcp"], ["--max_turns", "3"],
        ["--preferred_sampling_params", '{"temperature": 0.5}'], ["--system_prompt", "Be brief."],
        ["--agent_config_path", "judge.yml"],
    ):  # fmt: skip
        assert making_flags(parse_config(flags)) != usual
    for flags in (["--tool_timeout", "5"], ["--lease_seconds", "9"], ["--max_steps", "7"]):
        assert making_flags(parse_config(flags)) == usual


def test_an_edited_program_or_module_makes_it_another_evaluation(tmp_path: Path) -> None:
    tools, code, options = tmp_path / "tools.py", tmp_path / "code.py", tmp_path / "options.json"
    servers = tmp_path / "servers.json"
    for flag, value in {
        "mcp_manager_url": f"{tools}:server", "agent_entry": f"{code}:run",
        "agent_command": f"python -u {code} --options {options}", "agent_module": f"{code}",
        "scorer_module": f"{code}", "agent_config_path": f"{options}",
    }.items():  # fmt: skip
        config = parse_config([f"--{flag}", value])
        for file in (tools, code, options):
            file.write_text("1")
        before, named = making_digests(config), [file for file in (tools, code, options)
                                                 if str(file) in value]  # fmt: skip
        assert list(before) == [flag]
        for file in named:
            file.write_text("2")
            assert making_digests(config) != before
            file.write_text("1")
            assert making_digests(config) == before
    servers.write_text('{"mcpServers": {}}')
    assert list(making_digests(parse_config(["--mcp_manager_url", str(servers)])))


def test_what_an_evaluation_cannot_compare_is_named(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("import other")

    def said(*flags: str) -> list[str]:
        return unseen(parse_config(flags))

    assert said() == []
    assert said("--mcp_manager_url", "http://127.0.0.1:1/mcp") == [
        "behind the URL of --mcp_manager_url"
    ]
    assert said("--agent_command", f"python {code}") == ["in what code.py imports"]
    assert said("--agent_command", "python -m mine") == ["in the program `python -m mine`"]
    assert said("--mcp_manager_url", "mine.tools:server") == [
        "in the module of --mcp_manager_url mine.tools:server"
    ]


@pytest.fixture(scope="module")
def foreign_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo's model behind transformers' own server, which parses its tool calls."""
    port, log = free_port(), tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "transformers"), "serve", MODEL,
                "--device", "cpu", "--host", "127.0.0.1", "--port", str(port),
            ],
            stdout=file, stderr=file, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while "Uvicorn running" not in log.read_text():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(30)


def _eval(folder: Path, *flags: str) -> "subprocess.Popen[str]":
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli", "eval", *flags], cwd=folder, text=True,
        env={**environment, "PYTHONPATH": str(REPOSITORY / "src"), "THE_KEY": "sesame"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


class RefusingApi(BaseHTTPRequestHandler):
    """Refuses the key after `valid_for` requests, and always what it moderates."""

    protocol_version = "HTTP/1.1"
    valid_for = 4  # before the start, before the first task, and for two tasks

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = type(self)
        kind.valid_for -= 1
        if kind.valid_for < 0:
            self._send(401, {"error": {"message": "the key has expired"}})
        elif "moderated" in json.dumps(body["messages"]):
            self._send(403, {"error": {"message": "not \x1b[31mthis\n"}})
        else:
            self._send(200, chat_completion("big", "<answer>1</answer>"))

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_refused_key_ends_the_command_in_one_sentence_and_the_same_one_goes_on(
    tmp_path: Path,
) -> None:
    tasks = [
        {"id": name, "query": name, "answer": "1", "scorer": "exact_match",
         "answer_schema": "answer"}
        for name in ("a", "b", "c", "d", "moderated")
    ]  # fmt: skip
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    with ThreadingHTTPServer(("127.0.0.1", 0), RefusingApi) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        command = (
            *HOW, "--tasks", "tasks.jsonl", "--endpoint", url, "--endpoint_model", "big",
            "--eval_rollouts", "1", "--max_concurrent_samples_per_process", "1",
        )  # fmt: skip
        first = _eval(tmp_path, *command)
        printed, _ = first.communicate(timeout=100)
        assert first.returncode == 1, printed
        started, *_, told = printed.splitlines()  # the progress between, on a slow machine
        assert started == "big on 5 tasks of tasks.jsonl, 1 rollouts each"
        assert told.startswith(f"the endpoint {url} gives no answer of model big: Auth")
        assert told.endswith("the key has expired; the same command goes on from here")
        RefusingApi.valid_for = 1000
        second = _eval(tmp_path, *command)
        printed, _ = second.communicate(timeout=100)
        server.shutdown()
    assert second.returncode == 0, printed
    assert "big on 5 tasks of tasks.jsonl: goes on, 2 are done" in printed
    assert "success 1.000" in printed and "4 rollouts)" in printed
    # A foreseen failure is one line each time, whatever the API says.
    told = [line for line in printed.splitlines() if "EndpointRefused" in line]
    assert len(told) == 3 and all(line.endswith(r"403 - not \x1b[31mthis") for line in told)
    assert "Traceback" not in printed and "\x1b" not in printed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_base_model_checkpoint_and_a_foreign_servers_model_stand_in_one_table(
    tmp_path: Path, foreign_server: str
) -> None:
    done = launch_demo(tmp_path, "--max_steps", "2", "--per_device_train_batch_size", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (DEMO / "heldout.jsonl").read_text().splitlines()
    (tmp_path / "held.jsonl").write_text("\n".join(lines[:40]) + "\n")
    (tmp_path / "few.jsonl").write_text("\n".join(lines[40:44]) + "\n")
    command = (
        "--model", MODEL, "--model", "demo", "--tasks", "held.jsonl", "few.jsonl",
        "--lease_seconds", "3",
    )  # fmt: skip

    # Stopped in the first evaluation, and killed: what was sampled is not sampled again.
    slowly = "--max_concurrent_samples_per_process", "1", "--sampler_processes", "1"
    first = _eval(tmp_path, *command, *slowly)
    assert first.stdout is not None
    for line in first.stdout:
        if line.split()[1:4] == ["of", "40", "tasks"] and line.split()[0] != "0":
            break
    first.send_signal(signal.SIGKILL)
    first.communicate()
    asked = (
        "--endpoint", foreign_server, "--endpoint_model", MODEL,
        "--endpoint_key_env", "THE_KEY",
    )  # fmt: skip
    again = _eval(tmp_path, *command, *asked)
    printed, _ = again.communicate(timeout=300)
    assert again.returncode == 0, printed
    assert "with the agent, tools and limits of the launch of demo" in printed
    assert "demo/model on 40 tasks of held.jsonl: goes on, " in printed
    assert "demo/checkpoint-2 against demo/model on held.jsonl: success" in printed
    folder = tmp_path / "output" / "eval" / "eval"
    content = json.loads((folder / "comparison.json").read_text())
    reports = content["evaluations"]
    names = ["demo/model", "demo/checkpoint-2", MODEL]
    assert [report["checkpoint"] for report in reports] == [n for n in names for _ in range(2)]
    assert [report["tasks"] for report in reports] == [40, 4] * 3
    assert all(report["rollouts"] == 4 * report["tasks"] for report in reports)
    assert len(content["comparisons"]) == 4
    # The endpoint's name is a path, too.
    assert sorted(path.name.rpartition("-")[0] for path in folder.glob("model-*-held-*.json")) == [
        "model-demo_checkpoint-2-held", "model-demo_model-held", "model-demo_model-held",
    ]  # fmt: skip

    # Nothing is left to sample: the same command prints the same table at once.
    began = time.monotonic()
    third = _eval(tmp_path, *command, *asked)
    printed_again, _ = third.communicate(timeout=120)
    assert third.returncode == 0, printed_again
    assert printed_again.count("evaluated before") == 6
    assert json.loads((folder / "comparison.json").read_text()) == content
    assert time.monotonic() - began < 60

    # The API's turns: texts and calls as our own services' have them, and no tokens.
    shown = subprocess.run(
        [sys.executable, "-m", "agentrl.cli", "show", "eval", "--split", "eval"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}, capture_output=True, text=True,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "tools in the prompt: add, find, stock, sub" in shown.stdout
    listed = subprocess.run(
        [sys.executable, "-m", "agentrl.cli", "runs"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}, capture_output=True, text=True,
    )  # fmt: skip
    assert any(line.split()[:2] == ["eval", "finished"] for line in listed.stdout.splitlines())
