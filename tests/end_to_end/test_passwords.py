"""A whole run with secrets: a MongoDB with passwords, tools and services with keys.

While it runs, the command line of every process of this machine is read, again and again; after it,
every file that it wrote and every document.
"""

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from ports import free_port
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from agentrl.databases.mongod import find_mongod

MARK = "sEcReT"  # in each secret, and nowhere else
PASSWORD = f"p/a#s@s%w:d{MARK}/%2F"
TOKEN, KEY = f"tool-{MARK}", f"key-{MARK}"
RUN = "secrets"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A replica set of one member that wants the password."""
    folder, port = tmp_path_factory.mktemp("mongo"), free_port()
    (folder / "keyfile").write_text(secrets.token_hex(32))
    (folder / "keyfile").chmod(0o600)
    (folder / "data").mkdir()
    with (folder / "log").open("wb") as log:
        mongod = subprocess.Popen(
            [str(find_mongod()), "--dbpath", str(folder / "data"), "--port", str(port),
             "--bind_ip", "127.0.0.1", "--replSet", "rs0", "--keyFile", str(folder / "keyfile")],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        host = f"127.0.0.1:{port}"
        with MongoClient[dict[str, Any]](host, directConnection=True) as client:
            members = [{"_id": 0, "host": host}]
            client.admin.command("replSetInitiate", {"_id": "rs0", "members": members})
            while not client.admin.command("hello")["isWritablePrimary"]:
                pass
            client.admin.command("createUser", "me", pwd=PASSWORD, roles=["root"])
        yield f"mongodb://me:{quote(PASSWORD, safe='')}@{host}/?replicaSet=rs0&authSource=admin"
    finally:
        mongod.terminate()
        mongod.wait()


class ProcessList:
    """Reads the command lines of all processes until it is left; `seen`: those with the mark."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self.programs: set[bytes] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> "ProcessList":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._ended.wait(0.02):
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    line = process.read_bytes()
                except OSError:
                    continue
                if MARK.encode() in line:
                    self.seen.add(line)
                if RUN.encode() in line:
                    self.programs.update(line.split(b"\0"))


def agentrl(
    folder: Path, environment: dict[str, str], *words: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "agentrl.cli", *words],
        cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip


def test_secrets_are_in_no_process_list_file_log_or_document(url: str, tmp_path: Path) -> None:
    environment = {
        "DB_URL": url, "TOOLS_TOKEN": TOKEN, "MCP_AUTH_TOKEN": TOKEN, "SERVICE_KEY": KEY,
    }  # fmt: skip
    with ProcessList() as processes:
        launched = agentrl(
            tmp_path, environment, "launch", "grpo", RUN, "--max_steps", "2", "--save_steps", "1",
            "--per_device_train_batch_size", "8", "--eval_steps", "0", "--num_generations", "4",
            "--report_to", "tensorboard", "--inference_api_key_env", "SERVICE_KEY",
        )  # fmt: skip
    assert launched.returncode == 0, launched.stdout + launched.stderr
    # All parts were there to be seen.
    assert {b"serve", b"sample", b"agentrl.training.trainer"} <= processes.programs
    assert not processes.seen
    assert MARK not in launched.stdout + launched.stderr

    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    names = {file.name for file in written}
    assert {"launch.json", "run.json", "trainer_state.json", "summary.json"} <= names
    assert any("tfevents" in name for name in names)
    assert [file for file in written if MARK.encode() in file.read_bytes()] == []

    with MongoClient[dict[str, Any]](url) as client:
        documents = client[RUN]
        collections = documents.list_collection_names()
        assert {"runs", "records", "inference_services"} <= set(collections)
        for name in collections:
            assert not [found for found in documents[name].find() if MARK in repr(found)]

    # What was not kept is asked for, and who gives it goes on.
    nobody = {"DB_URL": "", "SERVICE_KEY": KEY}
    refused = agentrl(tmp_path, nobody, "show", RUN, "--list")
    assert refused.returncode == 2 and "set DB_URL as for the launch" in refused.stderr
    assert "mongodb://***@127.0.0.1" in refused.stderr
    shown = agentrl(tmp_path, environment, "show", RUN, "--list")
    assert shown.returncode == 0 and shown.stdout.count("\n") > 4
    listed = agentrl(tmp_path, nobody, "runs")
    assert "***@127.0.0.1" in listed.stdout.replace("\n", "") and MARK not in listed.stdout


def test_a_wrong_password_is_one_sentence_without_it(url: str, tmp_path: Path) -> None:
    wrong = url.replace(quote(PASSWORD, safe=""), f"other{MARK}")
    with pytest.raises(PyMongoError), MongoClient[dict[str, Any]](wrong) as client:
        client.admin.command("listDatabases")
    result = agentrl(tmp_path, {"DB_URL": ""}, "doctor", "--db_connection_string", wrong)
    assert "refused" in result.stdout and MARK not in result.stdout + result.stderr
