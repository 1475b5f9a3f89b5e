"""The run's MongoDB for the verbs of the launcher: given by URL, already running, or started."""

import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from agentrl.configs import Config, ConfigError
from agentrl.configs.command_line import Given
from agentrl.configs.parsing import Layer, config_of, layers_given, merged, read_flags
from agentrl.databases.connection import RunDatabase, connect, is_outage
from agentrl.databases.mongod import REPLICA_SET, EmbeddedMongod
from agentrl.databases.mongod_lock import mongod_holds
from agentrl.launcher.deployment import read_deployment
from agentrl.launcher.run_folder import read_launch, refuse_withheld
from agentrl.launcher.run_parts import LOGS
from agentrl.launcher.run_state import launched_at

# For a mongod that another process is starting or stopping, and between two looks at it.
_PATIENCE_S, _LOOK_S, _ANSWER_MS = 60.0, 0.1, 1000


def place_config(given: Given) -> Config:
    """The run of a verb: its name, folder and MongoDB.

    The MongoDB is that of the flag, else of `DB_URL`, else of the run's launch.
    """
    return run_place({**given.values, "run_name": given.own.run})


def run_place(place: Mapping[str, Any]) -> Config:
    """The same, by the flags that name it: `run_name`, and more if they are given."""
    config = config_of(place)
    url = config.run.db_connection_string or read_deployment(os.environ).db_url
    if url is None and not (config.output / "mongo").is_dir():
        launch = read_launch(config.output)
        if launch is not None:
            refuse_withheld(launch, (), ["db_connection_string"])
        url = launched_at(launch)
    return config_of({**place, "db_connection_string": url}) if url else config


def launched_config(given: Given) -> Config:
    """Merge the flags of the run's launch, files, environment and command line, which wins.

    Raises `ConfigError`.
    """
    environment = read_deployment(os.environ).layers
    layers = [
        *layers_given(given.values, given.files, environment),
        Layer("command line", {"run_name": given.own.run}),
    ]
    launch = read_launch(config_of(merged(layers)).output)
    if launch is not None:
        refuse_withheld(launch, merged(layers), ["db_connection_string"])
    recorded = [read_flags(launch.flags, "the run's launch")] if launch else []
    return config_of(merged([*recorded, *layers]))


def mongod_of(config: Config) -> EmbeddedMongod:
    """The embedded mongod of a run, not started yet."""
    return EmbeddedMongod(config.output / "mongo", LOGS / f"{config.run.run_name}_mongo.log")


def running_mongod(data_dir: Path, patience_s: float = _PATIENCE_S) -> str | None:
    """The URL of the mongod that runs on this data folder and accepts writes; None if none runs.

    One that another process is starting or stopping is waited for. Raises `ConfigError` if it does
    neither for `patience_s` seconds.
    """
    deadline = time.monotonic() + patience_s
    while mongod_holds(data_dir):
        if (data_dir / "port").exists() and _accepts_writes(url := embedded_url(data_dir)):
            return url
        if time.monotonic() > deadline:
            raise ConfigError(
                f"the mongod on {data_dir} has neither answered nor ended for {patience_s:g} s: "
                "see its log, or end it"
            )
        time.sleep(_LOOK_S)
    return None


def _accepts_writes(url: str) -> bool:
    with MongoClient[dict[str, Any]](url, serverSelectionTimeoutMS=_ANSWER_MS) as client:
        try:
            return bool(client.admin.command("hello").get("isWritablePrimary"))
        except PyMongoError as error:
            if not is_outage(error):
                raise
            return False


def embedded_port(data_dir: Path) -> int:
    """The port of the mongod that runs on this data folder."""
    return int(json.loads((data_dir / "port").read_text(encoding="utf-8")))


def embedded_url(data_dir: Path) -> str:
    """The URL of the mongod that runs on this data folder."""
    port = embedded_port(data_dir)
    return f"mongodb://127.0.0.1:{port}/?replicaSet={REPLICA_SET}&directConnection=true"


def ended(mongod: EmbeddedMongod) -> bool:
    """Whether a started mongod is gone. Its status stays for `stop()` to collect."""
    assert mongod.pid is not None
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, mongod.pid, flags) is not None


@dataclass(frozen=True)
class OpenDatabase:
    """A run's database and where it answers. `mongod`: the one that was started for it, if any."""

    database: RunDatabase
    url: str
    mongod: EmbeddedMongod | None = None


@asynccontextmanager
async def run_database(
    config: Config, *, run_lives: bool, may_begin: bool = False
) -> AsyncIterator[OpenDatabase]:
    """Open the run's database: at the given URL, of a live run, or of a mongod that is started.

    A mongod that is started here is stopped at the end. `run_lives`: whether a mongod that already
    runs on the folder may be used. `may_begin`: whether a database is made if there is none;
    else `ConfigError` is raised.
    """
    run = config.run
    data_dir = config.output / "mongo"
    mongod: EmbeddedMongod | None = None
    if run.db_connection_string is not None:
        url = run.db_connection_string
    elif run_lives and (running := running_mongod(data_dir)) is not None:
        url = running
    elif data_dir.is_dir() or may_begin:
        mongod = mongod_of(config)
        url = mongod.start()
    else:
        raise ConfigError(
            f"run {run.run_name!r} has no database in {data_dir}: is the name right? If the run "
            "used a MongoDB of its own, set DB_URL"
        )
    try:
        database = await connect(url, run.run_name, config.sampling.startup_timeout)
        try:
            yield OpenDatabase(database, url, mongod)
        finally:
            await database.close()
    finally:
        if mongod is not None:
            mongod.stop()
