"""The sandbox server: what a session is given, keeps, and loses when it ends."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest
from mcp import MCPError
from sandbox_server import FOLDER, SERVER, TOKEN, Server, running_server

from agentrl.configs import AgentConfig
from agentrl.databases.documents import Split
from agentrl.databases.feeder import make_tasks
from agentrl.databases.task_file import TaskLine
from agentrl.rollout.tools.toolbox import open_tools

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(
        "--call_seconds", "20", "--memory_mib", "256", "--disk_mib", "16"
    ) as server:
        yield server


async def test_programs_print_and_say_how_they_ended(server: Server) -> None:
    async with server.session() as sandbox:
        assert await sandbox.python("print('ä' * 3)") == "äää\n"
        assert await sandbox.shell("true") == "[no output]"
        failed = await sandbox.call("shell", command="printf out; printf err >&2; exit 3")
        assert (failed.text, failed.is_error) == ("outerr\n[exit status 3]", False)
        assert "line 1, in <module>\n    1/0" in await sandbox.python("1/0")
        assert (await sandbox.shell("kill -SEGV $$")).endswith("[exit status 139]")


async def test_files_stay_between_calls_and_modules_among_them_can_be_imported(
    server: Server,
) -> None:
    async with server.session() as sandbox:
        await sandbox.python("open('shelf.py', 'w').write('books = 3')")
        assert await sandbox.python("import shelf; print(shelf.books)") == "3\n"
        assert await sandbox.shell("pwd; ls *.py; echo x > /tmp/a") == "/work\nshelf.py\n"
        assert await sandbox.shell("cat /tmp/a") == "x\n"


async def test_a_session_is_created_with_files_and_limits_below_the_servers(
    server: Server,
) -> None:
    async with server.session() as sandbox:
        created = await sandbox.call(
            "create_session",
            files={"data/a.csv": "x,y\n"},
            limits={"call_seconds": 1, "memory_mib": 10_000},
        )
        assert (created.text, created.is_error) == ("ready", False)
        assert await sandbox.shell("cat data/a.csv") == "x,y\n"
        stopped = await sandbox.call("shell", command="echo begun; sleep 15")
        assert stopped.is_error and stopped.text == "begun\n[stopped: it ran longer than 1 s]"
        assert "MemoryError" in await sandbox.python("bytearray(300 << 20)")
        again = await sandbox.call("create_session")
        assert again.is_error and "has a sandbox already" in again.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"files": {"../a": ""}}, "'../a' is no path below /work"),
        ({"files": {"/etc/a": ""}}, "'/etc/a' is no path below /work"),
        ({"files": {"": ""}}, "'' is no path below /work"),
        ({"files": {"a": "x" * (17 << 20 >> 3)}, "limits": {"disk_mib": 1}}, "No space left"),
        ({"limits": {"luck": 3}}, "no limit is called 'luck'; there are: call_seconds, memory_mib"),
        ({"limits": {"disk_mib": 0}}, "disk_mib must be greater than 0"),
        ({"limits": {"memory_mib": 1}}, "memory_mib must be at least 32"),
    ],
)
async def test_a_session_that_cannot_be_as_asked_for_is_refused(
    server: Server, arguments: dict[str, object], message: str
) -> None:
    async with server.session() as sandbox:
        refused = await sandbox.call("create_session", **arguments)
        assert refused.is_error and message in refused.text


async def test_nothing_is_left_of_a_session_that_has_ended(server: Server) -> None:
    before = server.descendants()
    async with server.session() as sandbox:
        await sandbox.shell("echo here")
        of_session = [process for process in server.descendants() if process not in before]
        assert of_session
    _, alive = psutil.wait_procs(of_session, timeout=10)
    assert alive == []


async def test_each_record_of_a_run_works_in_a_sandbox_as_its_task_wants_it(
    server: Server,
) -> None:
    wanted = {"create_kwargs": {"files": {"a.txt": "of this task\n"}}}
    lines = [
        TaskLine(id="one", query="?", fields={"tools_kwargs": {"python": wanted}}),
        TaskLine(id="other", query="?"),
    ]
    one, other = make_tasks(lines, Split.TRAIN, 0, 1, range(2))
    flags = AgentConfig(mcp_manager_url=server.url, mcp_auth_token=TOKEN)
    before = server.descendants()
    async with open_tools(flags, 10, None) as tools:
        names = [schema["function"]["name"] for schema in tools.schemas]
        assert sorted(names) == ["python", "shell"]
        async with tools.session(one, "r1") as first, tools.session(other, "r2") as second:
            assert (await first.call("shell", {"command": "cat *"})).text == "of this task\n"
            answer = await second.call("python", {"code": "import os; print(os.listdir())"})
            assert (answer.text, answer.is_error) == ("[]\n", False)
            of_records = [process for process in server.descendants() if process not in before]
    _, alive = await asyncio.to_thread(psutil.wait_procs, of_records, 10)
    assert of_records and alive == []


async def test_calls_of_a_session_take_turns(server: Server) -> None:
    add = "n=$(cat n 2>/dev/null || echo 0); sleep 0.05; echo $((n + 1)) > n"
    async with server.session() as sandbox:
        await asyncio.gather(*[sandbox.shell(add) for _ in range(5)])
        assert await sandbox.shell("cat n") == "5\n"


async def test_a_program_whose_caller_gives_up_is_stopped_and_the_session_goes_on(
    server: Server,
) -> None:
    async with server.session() as sandbox:
        await sandbox.shell("echo kept > file")
        with pytest.raises(MCPError, match="timed out"):
            await sandbox.call("shell", 0.3, command="sleep 15.77")
        assert await sandbox.shell("cat file") == "kept\n"
        running = [" ".join(process.cmdline()) for process in server.descendants()]
        assert not any("15.77" in command for command in running)


async def test_a_session_whose_sandbox_dies_says_so_and_is_given_no_other(server: Server) -> None:
    before = server.descendants()
    async with server.session() as sandbox:
        await sandbox.shell("echo lost > file")
        for process in server.descendants():
            if process not in before:
                process.kill()
        for _ in range(2):
            answer = await sandbox.call("shell", command="cat file")
            assert answer.is_error and "its files are gone" in answer.text
    async with server.session() as sandbox:
        assert await sandbox.shell("echo well") == "well\n"


async def test_a_client_without_the_token_is_refused(server: Server) -> None:
    async with httpx2.AsyncClient() as http:
        for headers in ({}, {"Authorization": "Bearer guessed"}):
            assert (await http.post(server.url, json={}, headers=headers)).status_code == 401


async def test_sandboxes_are_bounded_in_number_and_closed_when_idle() -> None:
    with running_server("--max_sessions", "1", "--idle_seconds", "0.5") as server:
        async with server.session() as first, server.session() as second:
            await first.shell("true")
            refused = await second.call("shell", command="true")
            assert refused.is_error and "all 1 sandboxes of this server are in use" in refused.text
            gone = await asyncio.to_thread(psutil.wait_procs, server.descendants(), 10)
            assert gone[1] == []
            answer = await first.call("shell", command="ls")
            assert answer.is_error and "closed after 0.5 s without a call" in answer.text
            assert await second.shell("echo well") == "well\n"


async def test_further_folders_are_shown_to_be_read() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        Path(folder, "data").write_text("x\n")
        with running_server("--read_only", folder) as server:
            async with server.session() as sandbox:
                assert await sandbox.shell(f"cat {folder}/data") == "x\n"
                assert "Read-only file system" in await sandbox.shell(f"touch {folder}/mine")


def test_a_sandbox_needs_no_privilege() -> None:
    """As the compose file has it: another user than root, without any capability."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
        Path(folder).chmod(0o755)
        user = ["--reuid=1234", "--regid=1234", "--clear-groups"] if os.geteuid() == 0 else []
        python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
        assert python is not None, "the sandbox needs a python3 below /usr"
        keeper = subprocess.Popen(
            ["setpriv", *user, "--no-new-privs", "--bounding-set=-all", python, "-B",
             f"{folder}/keeper.py"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
        )  # fmt: skip
        assert keeper.stdin is not None and keeper.stdout is not None
        answers = []
        for request in (
            {"limits": {}, "read_only": [], "files": {"a": "b"}},
            {"argv": ["bash", "/run/program"], "program": "cat a; id -u"},
        ):
            keeper.stdin.write(json.dumps(request) + "\n")
            keeper.stdin.flush()
            answers.append(json.loads(keeper.stdout.readline()))
        keeper.communicate()
    ready, outcome = answers
    assert (ready, outcome["output"], outcome["stopped"]) == ({}, ["b1000\n", ""], None)


def test_a_machine_that_allows_no_sandbox_is_told_what_to_allow() -> None:
    no_more = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    started = subprocess.run(
        ["unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c", no_more, "sh",
         sys.executable, str(SERVER), "--port", "1"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert started.returncode == 1
    assert "no sandbox can be made here" in started.stderr
    assert started.stderr.count("\n") == 1


def test_a_server_that_others_reach_wants_a_token() -> None:
    refused = subprocess.run(
        [sys.executable, str(SERVER), "--host", "0.0.0.0", "--port", "0"],
        capture_output=True, text=True, env={**os.environ, "SANDBOX_TOKEN": ""},
    )  # fmt: skip
    assert refused.returncode == 1 and len(refused.stderr.splitlines()) == 1
    assert "may run programs, so it needs a key: set SANDBOX_TOKEN to one" in refused.stderr
