"""The run's MongoDB as the launcher's verbs need it: given by URL, running already, or started."""

import fcntl
import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.configs import Config, ConfigError, parse_config
from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.mongod import REPLICA_SET, EmbeddedMongod
from agentrl.launcher.deployment import read_deployment
from agentrl.launcher.run_folder import read_launch
from agentrl.launcher.run_parts import LOGS
from agentrl.launcher.run_state import launched_at


def add_place(parser: ArgumentParser) -> None:
    """The arguments of a verb that looks at a run, for `place_config`."""
    parser.add_argument("run", help="the run's name")
    parser.add_argument("--output_dir", help="the run's folder (default: output/RUN)")
    parser.add_argument("--db_connection_string", help="the run's MongoDB (default: its own)")


def place_config(arguments: Namespace, verb: str) -> Config:
    """The run that these arguments mean: its name, folder and MongoDB, which is the one that it was
    launched with if neither a flag nor `DB_URL` says another."""
    flags = ["--run_name", arguments.run]
    if arguments.output_dir is not None:
        flags += ["--output_dir", arguments.output_dir]
    config = parse_config(flags, verb)
    url = arguments.db_connection_string or read_deployment(os.environ).db_url
    if url is None and not (config.output / "mongo").is_dir():
        url = launched_at(read_launch(config.output))
    return parse_config([*flags, "--db_connection_string", url], verb) if url else config


def mongod_of(config: Config) -> EmbeddedMongod:
    """The embedded mongod of a run, not started yet."""
    return EmbeddedMongod(config.output / "mongo", LOGS / f"{config.run.run_name}_mongo.log")


def mongod_holds(data_dir: Path) -> bool:
    """Whether a mongod runs on this data folder: it keeps a `flock` on `mongod.lock`."""
    try:
        file = os.open(data_dir / "mongod.lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # one that others may have too
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(file)


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
async def run_database(config: Config, *, run_lives: bool) -> AsyncIterator[OpenDatabase]:
    """The run's database for a while: of the given URL, of a live run, or of a mongod started for
    this and stopped again.

    `run_lives`: the run may be going on; a mongod that holds its folder is then used as it is.
    """
    run = config.run
    data_dir = config.output / "mongo"
    mongod: EmbeddedMongod | None = None
    if run.db_connection_string is not None:
        url = run.db_connection_string
    elif run_lives and mongod_holds(data_dir):
        port = int(json.loads((data_dir / "port").read_text(encoding="utf-8")))
        url = f"mongodb://127.0.0.1:{port}/?replicaSet={REPLICA_SET}&directConnection=true"
    elif data_dir.is_dir():
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
