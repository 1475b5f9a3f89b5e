"""The embedded mongod: what it keeps over a crash, and that it ends with its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pymongo import MongoClient

from agentrl.databases.mongod import LOCKED, EmbeddedMongod, MongodError, find_mongod

CHILD = """
import sys, time
from pathlib import Path
from agentrl.databases.mongod import EmbeddedMongod
folder = Path(sys.argv[1])
server = EmbeddedMongod(folder / "data", folder / "log")
server.start()
print(server.pid, flush=True)
time.sleep(60)
"""


def test_what_was_written_is_there_after_a_crash_at_the_same_address(tmp_path: Path) -> None:
    server = EmbeddedMongod(tmp_path / "data", tmp_path / "log")
    url = server.start()
    try:
        large = os.urandom(6 << 20)  # more than is left of the journal's file, twice
        with MongoClient[dict[str, object]](url, w=1, journal=True) as client:
            client["run"]["tasks"].insert_one({"_id": "a"})
            client["run"]["rows"].insert_many([{"_id": n, "ids": large} for n in range(3)])
        server.kill()
        assert server.start() == url
        with MongoClient[dict[str, object]](url) as client:
            assert client["run"]["tasks"].find_one() == {"_id": "a"}
            assert [row["ids"] == large for row in client["run"]["rows"].find()] == [True] * 3
            with client["run"]["tasks"].watch(max_await_time_ms=10) as stream:
                assert stream.alive  # a replica set: change streams are there
        pid = server.pid
    finally:
        server.stop()
    assert pid is not None and not psutil.pid_exists(pid)
    journal = sum(file.stat().st_blocks * 512 for file in (tmp_path / "data/journal").iterdir())
    assert journal < 20 << 20, "the journal of a run that ended takes a file, not 300 MB"


# A mongod in the first moments of its life, which are long on a busy machine: it has the lock, and
# has not yet written its process id.
STARTING = f"""#!{sys.executable}
import fcntl, sys, time
lock = open(sys.argv[sys.argv.index("--dbpath") + 1] + "/mongod.lock", "a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit({LOCKED})
print("locked", flush=True)
time.sleep(60)
"""


def test_one_of_our_own_that_is_slow_to_start_is_not_taken_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "mongod"
    program.parent.mkdir()
    program.write_text(STARTING)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    server = EmbeddedMongod(tmp_path / "data", tmp_path / "log")
    with pytest.raises(MongodError, match="mongod did not become ready: see "):
        server.start(timeout_s=2)
    other = subprocess.Popen([program, "--dbpath", tmp_path / "data"], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        with pytest.raises(MongodError, match=r"another mongod has the database in .* open"):
            server.start(timeout_s=2)
    finally:
        other.kill()
        other.communicate()


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)
    # and the next one may take its folder at once
    with EmbeddedMongod(tmp_path / "data", tmp_path / "log"):
        pass


def test_a_folder_that_cannot_be_used_is_told_with_the_log(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "storage.bson").write_text("garbage")
    with pytest.raises(MongodError, match=str(tmp_path / "log")):
        EmbeddedMongod(data, tmp_path / "log").start()


def test_the_one_on_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "mongod"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_mongod() == own
