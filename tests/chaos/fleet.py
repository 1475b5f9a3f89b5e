"""A run of the demo spread over hosts of its own, joined by nothing but URLs.

    mongod-N, tools, judge, service-N, sampler-N, trainer

Each is one process on one host. They share this machine's files, as a cluster shares a storage for
tasks and weights. The database is a replica set of three. Its members also listen on Unix sockets,
which are not of the network: through them whoever looks on reads the run whatever is cut.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

from chaos_tasks import write_tasks
from network import Network
from process import HostProcess
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError

from agentrl.databases.mongod import find_mongod

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "assets" / "demo"
HERE = Path(__file__).resolve().parent
MONGO_PORT, TOOLS_PORT, JUDGE_PORT, SERVICE_PORT = 27017, 9000, 9001, 30000
GENERATIONS, ROWS_PER_STEP, MAX_STALENESS = 4, 16, 2
# What members on other hosts must show each other; by environment, which they all inherit.
_KEYS = ("INFERENCE_API_KEY", "TOOLS_TOKEN", "MCP_AUTH_TOKEN")
MONGODS = 3
ELECTION_MS = 4000  # after so long without a primary another is elected; the default is 10,000
SHORT_CONTEXT = 96  # tokens: most conversations do not fit
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
        self._environment = {key: os.environ.get(key) for key in _KEYS}
        os.environ.update(dict.fromkeys(_KEYS, secrets.token_hex(16)))
        task_file = folder / "train.jsonl"
        write_tasks(DEMO / "train.jsonl", task_file)

        addresses = [
            self._add(f"mongod-{number}", lambda address, number=number: self._mongod(number))
            for number in range(MONGODS)
        ]
        tools = self._add("tools", lambda address: [
            sys.executable, str(DEMO / "tool_server.py"), "--host", address,
            "--port", str(TOOLS_PORT),
        ])  # fmt: skip
        self.judge_mode = folder / "judge-mode"
        judge = self._add("judge", lambda address: [
            sys.executable, str(HERE / "judge.py"), "--host", address,
            "--port", str(JUDGE_PORT), "--mode", str(self.judge_mode),
        ])  # fmt: skip
        models = {"model": "judge", "base_url": f"http://{judge}:{JUDGE_PORT}/v1", "timeout": 5}
        agent_config = folder / "agent_config.json"  # which is YAML too
        agent_config.write_text(json.dumps({"scorer_agent": [models]}))
        self._database_hosts = [f"{address}:{MONGO_PORT}" for address in addresses]
        url = f"mongodb://{','.join(self._database_hosts)}/?replicaSet=rs0"
        self._flags = [
            "--run_name", self.name,
            "--output_dir", str(folder / "output"),
            "--db_connection_string", url,
            "--mcp_manager_url", f"http://{tools}:{TOOLS_PORT}/mcp",
            "--model_name_or_path", str(DEMO / "model"),
            "--train_file", str(task_file), "--inference_api_key_env", "INFERENCE_API_KEY",
            "--num_generations", str(GENERATIONS), "--max_turns", "6", "--max_tokens", "384",
            "--max_new_tokens", "48", "--tool_timeout", "5", "--record_timeout", "60",
            "--request_timeout", "30", "--lease_seconds", str(lease_s),
            "--max_concurrent_samples_per_process", "16", "--micro_batch_tokens", "4096",
            "--drop_zero_advantage", "false", "--learning_rate", "5e-4", "--save_steps", "3",
            "--per_device_train_batch_size", str(ROWS_PER_STEP),
            "--max_staleness", str(MAX_STALENESS), "--agent_config_path", str(agent_config),
            "--agent_module", str(HERE / "broken_code.py"),
            "--scorer_module", str(HERE / "broken_code.py"), *flags,
        ]  # fmt: skip
        for number in range(services):
            self._add(f"service-{number}", lambda address: [
                *_agentrl("serve"), "--model", str(DEMO / "model"), "--host", address,
                "--port", str(SERVICE_PORT), "--db_connection_string", url,
                "--run_name", self.name, "--inference_api_key_env", "INFERENCE_API_KEY",
            ])  # fmt: skip
        epochs = ["--num_train_epochs", str(_ENDLESS)]
        one_process = ["--sampler_processes", "1"]
        self._add("trainer", lambda address: self._trainer(epochs), may_end=True)
        for number in range(samplers):
            self._add(
                f"sampler-{number}",
                lambda address: [*_agentrl("sample"), *one_process, *self._flags, *epochs],
                may_end=True,
            )

    @contextmanager
    def database(self) -> Iterator[Documents]:
        """The run's database on its primary, read past the network. Raises `FleetError`."""
        with self._client(self.primary()) as client:
            yield client[self.name]

    def primary(self) -> str:
        """The member that is the replica set's primary. Raises `FleetError` if there is none."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for number in range(MONGODS):
                name = f"mongod-{number}"
                with self._client(name) as client, suppress(PyMongoError):
                    if client.admin.command("hello")["isWritablePrimary"]:
                        return name
            self.poll()
            time.sleep(0.1)
        raise FleetError(f"the replica set has no primary; logs are in {self.folder}")

    def step_down(self) -> None:
        """Have the primary give up its place to another member."""
        with self._client(self.primary()) as client, suppress(PyMongoError):
            client.admin.command("replSetStepDown", 10, secondaryCatchUpPeriodSecs=5)

    def shorten_context(self, name: str) -> None:
        """Start a service again with a shorter context than the run asks for."""
        member = self.members[name]
        member.command = [*member.command, "--context_length", str(SHORT_CONTEXT)]
        member.kill(0.2)

    def restore_context(self, name: str) -> None:
        """Start it again as it was."""
        member = self.members[name]
        member.command = member.command[:-2]
        member.kill(0.2)

    def _client(self, mongod: str) -> MongoClient[dict[str, Any]]:
        socket = quote_plus(str(self.folder / mongod / f"mongodb-{MONGO_PORT}.sock"))
        url = f"mongodb://{socket}/?directConnection=true"
        return MongoClient(url, serverSelectionTimeoutMS=500, tz_aware=True)

    def start(self) -> None:
        """Start the database, then all that is one step away from working."""
        for number in range(MONGODS):
            self.members[f"mongod-{number}"].start()
        hosts = [{"_id": n, "host": host} for n, host in enumerate(self._database_hosts)]
        config = {
            "_id": "rs0", "members": hosts, "settings": {"electionTimeoutMillis": ELECTION_MS},
        }  # fmt: skip
        self.wait(lambda: self._initiated(config), 30, "the replica set is made")
        self.primary()
        for name, member in self.members.items():
            if not name.startswith("mongod"):
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
        for key, before in self._environment.items():
            if before is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = before

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

    def _mongod(self, number: int) -> list[str]:
        data = self.folder / f"mongod-{number}"
        data.mkdir()
        return [
            str(find_mongod()), "--dbpath", str(data), "--port", str(MONGO_PORT), "--bind_ip_all",
            "--unixSocketPrefix", str(data), "--replSet", "rs0",
            "--wiredTigerCacheSizeGB", "0.25", "--oplogSize", "256",
            "--setParameter", "diagnosticDataCollectionEnabled=false",
        ]  # fmt: skip

    def _trainer(self, epochs: Sequence[str]) -> list[str]:
        return [*_agentrl("train"), *self._flags, *epochs]

    def _initiated(self, config: dict[str, Any]) -> bool:
        try:
            with self._client("mongod-0") as client:
                client.admin.command("replSetInitiate", config)
        except PyMongoError:
            return False  # a member does not listen yet
        return True


def _agentrl(verb: str) -> list[str]:
    return [sys.executable, "-m", "agentrl.cli", verb]
