"""A replica set of real mongods on loopback, whose members fail as they are told to."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ports import free_port
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from agentrl.databases.mongod import find_mongod

ELECTION_MS = 1000  # without a primary, members elect one
Client = MongoClient[dict[str, Any]]


@dataclass
class Member:
    """One mongod on one folder. `before`: words before its command, as of a namespace."""

    folder: Path
    before: Sequence[str] = ()
    options: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.folder.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *self.before, str(find_mongod()), "--dbpath", str(self.folder),
                    "--port", str(self.port), "--bind_ip", "127.0.0.1", "--replSet", "rs",
                    "--wiredTigerCacheSizeGB", "0.25", "--nounixsocket", "--oplogSize", "64",
                    "--wiredTigerEngineConfigString", "log=(prealloc=false,file_max=4MB)",
                    "--setParameter", "diagnosticDataCollectionEnabled=false", *self.options,
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def client(self) -> Client:
        """To this member, whatever it is."""
        return Client(self.host, directConnection=True, serverSelectionTimeoutMS=2000)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """As a crash."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.alive:
            assert self.process is not None
            self.signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


class ReplicaSet:
    """Members that have elected a primary, inside a `with` block."""

    def __init__(self, folder: Path, members: int = 3) -> None:
        self.members = [Member(folder / f"member-{number}") for number in range(members)]

    @property
    def url(self) -> str:
        hosts = ",".join(member.host for member in self.members)
        return f"mongodb://{hosts}/?replicaSet=rs"

    def __enter__(self) -> Self:
        for member in self.members:
            member.start()
        hosts = [{"_id": number, "host": member.host} for number, member in enumerate(self.members)]
        settings = {"electionTimeoutMillis": ELECTION_MS, "heartbeatIntervalMillis": 200}
        config = {"_id": "rs", "members": hosts, "settings": settings}
        with self.members[0].client() as client:
            _patiently(lambda: client.admin.command("replSetInitiate", config))
        self.primary()
        return self

    def __exit__(self, *error: object) -> None:
        for member in self.members:
            member.stop()

    def primary(self, patience_s: float = 60.0) -> Member:
        """The member that takes writes; waits for one."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            for member in self.members:
                if member.alive and _is_primary(member):
                    return member
            time.sleep(0.05)
        raise TimeoutError("no primary was elected")

    def step_down(self) -> Member:
        """The primary becomes a secondary; returns it."""
        member = self.primary()
        with member.client() as client:
            _patiently(lambda: client.admin.command("replSetStepDown", 3, force=True))
        return member


def _is_primary(member: Member) -> bool:
    with suppress(PyMongoError), member.client() as client:
        return bool(client.admin.command("hello")["isWritablePrimary"])
    return False


def _patiently(ask: Any, patience_s: float = 30.0) -> None:
    """Until it is answered: a member that has just started does not listen yet."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            ask()
        except PyMongoError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
