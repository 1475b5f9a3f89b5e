"""A run of the demo spread over hosts of its own, joined by nothing but URLs.

    mongod, tools, service-N, sampler-N, trainer

Each is one process on one host. They share this machine's files, as a cluster shares a storage for
tasks and weights. The database also listens on a Unix socket, which is not of the network: through
it whoever looks on reads the run whatever is cut.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

from network import Network
from process import HostProcess
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError

from agentrl.databases.mongod import find_mongod

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "assets" / "demo"
MONGO_PORT, TOOLS_PORT, SERVICE_PORT = 27017, 9000, 30000
GENERATIONS, ROWS_PER_STEP, MAX_STALENESS = 4, 16, 2
_TASKS = 16  # lines of the task file: so many groups make an epoch
_ENDLESS = 10_000  # epochs

Documents = Database[dict[str, Any]]


class FleetError(RuntimeError):
    """The fleet did not come to where it should have. The message is one sentence."""


class Fleet:
    """The hosts of one run, and the process on each by name."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        *,
        samplers: int = 2,
        services: int = 2,
        lease_s: float = 4.0,
        flags: Sequence[str] = (),
    ) -> None:
        """`folder`: data, logs and output; a short path, it holds a Unix socket."""
        self.folder = folder
        self.name = "run"
        self.lease_s = lease_s
        self.members: dict[str, HostProcess] = {}
        self._network = network
        task_file = folder / "train.jsonl"
        lines = (DEMO / "train.jsonl").read_text().splitlines()
        task_file.write_text("\n".join(lines[:_TASKS]))

        database = self._add("mongod", lambda address: self._mongod())
        tools = self._add("tools", lambda address: [
            sys.executable, str(DEMO / "tool_server.py"), "--host", address,
            "--port", str(TOOLS_PORT),
        ])  # fmt: skip
        self._database_address = f"{database}:{MONGO_PORT}"
        url = f"mongodb://{self._database_address}/?replicaSet=rs0"
        self._flags = [
            "--run_name", self.name,
            "--output_dir", str(folder / "output"),
            "--db_connection_string", url,
            "--mcp_manager_url", f"http://{tools}:{TOOLS_PORT}/mcp",
            "--model_name_or_path", str(DEMO / "model"),
            "--train_file", str(task_file),
            "--num_generations", str(GENERATIONS), "--max_turns", "6", "--max_tokens", "384",
            "--max_new_tokens", "48", "--tool_timeout", "5", "--record_timeout", "60",
            "--request_timeout", "30", "--lease_seconds", str(lease_s),
            "--max_concurrent_samples_per_process", "16", "--micro_batch_tokens", "4096",
            "--drop_zero_advantage", "false", "--learning_rate", "5e-4", "--save_steps", "3",
            "--per_device_train_batch_size", str(ROWS_PER_STEP),
            "--max_staleness", str(MAX_STALENESS), *flags,
        ]  # fmt: skip
        for number in range(services):
            self._add(f"service-{number}", lambda address: [
                *_agentrl("serve"), "--model", str(DEMO / "model"), "--host", address,
                "--port", str(SERVICE_PORT), "--db_connection_string", url,
                "--run_name", self.name,
            ])  # fmt: skip
        epochs = ["--num_train_epochs", str(_ENDLESS)]
        self._add("trainer", lambda address: self._trainer(epochs), may_end=True)
        for number in range(samplers):
            self._add(
                f"sampler-{number}",
                lambda address: [*_agentrl("sample"), *self._flags, *epochs],
                may_end=True,
            )

    @contextmanager
    def database(self) -> Iterator[Documents]:
        """The run's database, read past the network."""
        socket = quote_plus(str(self.folder / f"mongodb-{MONGO_PORT}.sock"))
        url = f"mongodb://{socket}/?directConnection=true"
        with MongoClient[dict[str, Any]](url, serverSelectionTimeoutMS=5000) as client:
            yield client[self.name]

    def start(self) -> None:
        """Start the database, then all that is one step away from working."""
        self.members["mongod"].start()
        with self.database() as documents:
            admin = documents.client.admin
            config = {"_id": "rs0", "members": [{"_id": 0, "host": self._database_address}]}
            admin.command("replSetInitiate", config)
        self.wait(self._has_primary, 30, "the database takes writes")
        for name, member in self.members.items():
            if name != "mongod":
                member.start()

    def poll(self) -> None:
        """Look after all members. To be called often."""
        for member in self.members.values():
            member.poll()

    def wait(self, reached: Callable[[], object], timeout_s: float, what: str) -> None:
        """Look after the members until `reached` is true. Raises `FleetError`."""
        deadline = time.monotonic() + timeout_s
        while not reached():
            if time.monotonic() > deadline:
                raise FleetError(f"not within {timeout_s:.0f} s: {what}; logs are in {self.folder}")
            self.poll()
            time.sleep(0.05)

    def steps(self) -> int:
        """How many optimizer steps the run's metrics hold."""
        try:
            with (self.folder / "output" / "metrics.jsonl").open() as lines:
                return sum(1 for _ in lines)
        except FileNotFoundError:
            return 0

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the run's metrics."""
        with (self.folder / "output" / "metrics.jsonl").open() as lines:
            return [json.loads(line) for line in lines]

    def finish(self, timeout_s: float) -> None:
        """Let the run end with the tasks it has been fed: trainer and samplers then end by
        themselves. Raises `FleetError` if they do not."""
        trainer = self.members["trainer"]
        trainer.end()
        with self.database() as documents:
            newest = documents["tasks"].find_one({"split": "train"}, sort=[("epoch", -1)])
        epochs = newest["epoch"] + 1 if newest else 1
        trainer.command = self._trainer(["--num_train_epochs", str(epochs)])
        trainer.start()
        ending = [m for name, m in self.members.items() if name.startswith(("trainer", "sampler"))]
        self.wait(
            lambda: all(member.done for member in ending), timeout_s,
            "trainer and samplers end with the run",
        )  # fmt: skip

    def end(self) -> None:
        """End everything, the database last."""
        for member in reversed(self.members.values()):
            member.end()

    def log(self, name: str) -> Path:
        """What a member printed."""
        return self.folder / f"{name}.log"

    def _add(
        self, name: str, command: Callable[[str], Sequence[str]], *, may_end: bool = False
    ) -> str:
        """A member on a new host; returns the host's address."""
        host = self._network.host(name)
        self.members[name] = HostProcess(
            host, command(host.address), self.log(name), may_end=may_end
        )
        return host.address

    def _mongod(self) -> list[str]:
        data = self.folder / "mongo"
        data.mkdir()
        return [
            str(find_mongod()), "--dbpath", str(data), "--port", str(MONGO_PORT), "--bind_ip_all",
            "--unixSocketPrefix", str(self.folder), "--replSet", "rs0",
            "--wiredTigerCacheSizeGB", "0.25", "--oplogSize", "256",
            "--setParameter", "diagnosticDataCollectionEnabled=false",
        ]  # fmt: skip

    def _trainer(self, epochs: Sequence[str]) -> list[str]:
        return [*_agentrl("train"), *self._flags, *epochs]

    def _has_primary(self) -> bool:
        try:
            with self.database() as documents:
                return bool(documents.client.admin.command("hello")["isWritablePrimary"])
        except PyMongoError:
            return False  # still electing


def _agentrl(verb: str) -> list[str]:
    return [sys.executable, "-m", "agentrl.cli", verb]
