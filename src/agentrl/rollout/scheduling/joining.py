"""How a sampler comes to its flags: those of the run that it joins, and a few of its own.

    DB_URL=mongodb://HOST:27017 agentrl sample --run_name RUN

Whoever starts a run keeps its flags in the database (`training/run/entry.py`). What a sampler gives
beside them is checked against them: see `configs/run_flags.py` for what it may say.
"""

import asyncio
import logging
import os
import time
from collections.abc import Sequence

from agentrl.configs import Config, ConfigError, SamplingConfig, parse_config
from agentrl.configs.parsing import given_values
from agentrl.configs.run_flags import joined_config
from agentrl.databases.connection import connect
from agentrl.databases.documents import Run
from agentrl.databases.runs import load_run

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_NOT_BEGUN = "created"


async def join(argv: Sequence[str], prog: str = "agentrl sample") -> Config:
    """The flags of a sampler: its run's, and those in `argv`.

    Waits up to `--startup_timeout` for the run. Raises `ConfigError` for flags that are wrong or
    contradict the run's, and `DatabaseUnreachable`.
    """
    given = given_values(argv, prog, os.environ)
    name, url = given.get("run_name"), given.get("db_connection_string")
    if name is None or url is None:
        missing = "--run_name" if name is None else "DB_URL or --db_connection_string"
        raise ConfigError(
            f"{missing} is needed: a sampler joins a run that is in a database (`DB_URL=mongodb://"
            f"HOST:27017 agentrl sample --run_name {name or 'RUN'}`)"
        )
    patience = given.get("startup_timeout", SamplingConfig.startup_timeout)
    run = await _await_run(url, name, patience)
    if run.flags is None:  # a run of an older version: all flags are in argv
        return parse_config(argv, prog, os.environ)
    return joined_config(name, run.flags, run.digests, given)


async def _await_run(url: str, name: str, patience_s: float) -> Run:
    """Wait until the run's flags are stored. Raises `ConfigError` after `patience_s` seconds."""
    database = await connect(url, name, patience_s, only_look=True)
    try:
        deadline = time.monotonic() + patience_s
        told = False
        while True:
            run = await load_run(database)
            if run is not None and (run.flags is not None or run.status != _NOT_BEGUN):
                return run
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"--run_name {name}: the database holds no such run, and none began in "
                    f"{patience_s:g} s; is the name right, and is it the run's database?"
                )
            if not told:
                log.info("waiting for run %s to begin", name)
                told = True
            await asyncio.sleep(_LOOK_S)
    finally:
        await database.close()
