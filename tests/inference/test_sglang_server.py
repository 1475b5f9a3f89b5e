"""How the SGLang server is started, and what becomes of it: with stand-ins for the server itself.

The real one is started by the contract tests (tests/run_sglang.sh).
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from ports import free_port

from agentrl.cli import main
from agentrl.inference.sglang_server import SGLangConfig, sglang_command

ROOT = Path(__file__).resolve().parents[2]

# Answers everything with 200 and has a child, which would go on alone.
SERVER = """
import http.server, subprocess, sys
subprocess.Popen(["sleep", "600"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    do_POST = do_GET
    def log_message(self, *arguments):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_the_command_line_says_what_was_asked_for_and_no_more() -> None:
    command = sglang_command(SGLangConfig(Path("/m"), "127.0.0.1", 30000))
    assert command[:3] == ["python3", "-m", "sglang.launch_server"]
    assert command[command.index("--model-path") + 1] == "/m"
    assert command[command.index("--weight-version") + 1] == "default"
    for flag in (
        "--device", "--context-length", "--mem-fraction-static", "--enable-memory-saver",
        "--enable-fp32-lm-head",
    ):  # fmt: skip
        assert flag not in command
    command = sglang_command(
        SGLangConfig(
            Path("/m"), "127.0.0.1", 1, ("x",), device="cuda", context_length=9, tp_size=4,
            ep_size=2, memory_fraction=0.6, memory_saver=True, fp32_head=True,
        )
    )  # fmt: skip
    for flag, value in {
        "--device": "cuda", "--context-length": "9", "--tp-size": "4", "--ep-size": "2",
        "--mem-fraction-static": "0.6",
    }.items():  # fmt: skip
        assert command[command.index(flag) + 1] == value
    # Released weights come back as they were, whatever becomes of the update that follows.
    assert {"--enable-memory-saver", "--enable-weights-cpu-backup"} <= set(command)
    assert "--enable-fp32-lm-head" in command


def test_a_server_that_listens_everywhere_is_reached_here() -> None:
    everywhere = SGLangConfig(Path("/m"), "0.0.0.0", 7, api_key="k")
    assert everywhere.url == "http://127.0.0.1:7"
    assert SGLangConfig(Path("/m"), "10.0.0.1", 7, api_key="k").url == "http://10.0.0.1:7"
    assert "k" not in sglang_command(everywhere) and "'k'" not in repr(everywhere)


def test_the_container_serves_the_release_that_the_requirements_name() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "sglang" / "compose.yml").read_text())
    (required,) = re.findall(
        r"^sglang==(.+)$", (ROOT / "requirements-sglang.txt").read_text(), re.M
    )
    assert compose["services"]["sglang"]["image"] == f"lmsysorg/sglang:v{required}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine", "sglang", "--sglang_command", "no-such-program"], "no such program"),
        (["--engine", "sglang", "--inf_mem_ratio", "1.5"], "must lie between 0 and 1"),
        (["--engine", "sglang", "--inf_tp_size", "0"], "must be at least 1"),
        (["--inf_tp_size", "2"], "only --engine sglang"),
        (["--memory_saver"], "only --engine sglang"),
    ],
)
def test_flags_that_cannot_be_are_one_sentence(
    flags: list[str], message: str, folders, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", str(folders.first), *flags]) == 2
    assert message in capsys.readouterr().err


def serve(folder: Path, server: str, log: Path) -> subprocess.Popen[bytes]:
    command = f"{sys.executable} {server}"
    with log.open("wb") as output:
        return subprocess.Popen(
            [
                sys.executable, "-m", "agentrl.cli", "serve", "--engine", "sglang",
                "--model", str(folder), "--port", str(free_port()), "--sglang_command", command,
            ],
            stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def until_logged(log: Path, text: str, process: subprocess.Popen[bytes]) -> None:
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()


def test_a_server_that_ends_by_itself_may_be_started_again(folders, tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text("import sys; print('out of memory'); sys.exit(3)")
    process = serve(folders.first, str(server), tmp_path / "log")
    assert process.wait(timeout=60) == 1  # 2 would say: never again
    assert "out of memory" in (tmp_path / "log").read_text()
    assert "ended by itself with status 3" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_child_of_the_server_outlives_it(folders, tmp_path: Path, number: int) -> None:
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    process = serve(folders.first, str(server), tmp_path / "log")
    until_logged(tmp_path / "log", "SGLang serves", process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 3  # the guard, the server, its child
    process.send_signal(number)
    process.wait(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=40)
    assert not alive
