"""`agentrl serve`: the local engine, announced to a run while it lives."""

import asyncio
import logging
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import get_args

from agentrl.configs import ConfigError
from agentrl.databases import services
from agentrl.databases.connection import OUTAGE, RunDatabase, connect
from agentrl.inference.engine import EngineConfig, serve
from agentrl.inference.engine.config import DType

HEARTBEAT_S = 5.0

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Serve a model folder until SIGTERM."""
    arguments = _parse(argv)
    if not (arguments.model / "config.json").is_file():
        raise ConfigError(
            f"--model {arguments.model}: no Hugging Face model folder (it has no config.json)"
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = EngineConfig(
        model_path=arguments.model,
        host=arguments.host,
        port=arguments.port,
        device=arguments.device,
        dtype=arguments.dtype,
        context_length=arguments.context_length,
        max_running_requests=arguments.max_running_requests,
        weight_version="default" if arguments.weight_version < 0 else str(arguments.weight_version),
        seed=arguments.seed,
    )
    serve(config, lambda url: _announced(arguments, url))
    return 0


@asynccontextmanager
async def _announced(arguments: Namespace, url: str) -> AsyncIterator[None]:
    """Tell the run's database, if one is given, of the service at `url` as long as it serves."""
    url = arguments.public_url or url
    log.info("serving %s at %s", arguments.model, url)
    if arguments.db_connection_string is None:
        yield
        return
    database = await connect(arguments.db_connection_string, arguments.run_name)
    await services.register(
        database,
        url,
        str(arguments.model),
        arguments.max_running_requests,
        arguments.weight_version,
    )
    heartbeats = asyncio.create_task(_beat(database, url))
    try:
        yield
    finally:
        heartbeats.cancel()
        with suppress(asyncio.CancelledError):
            await heartbeats
        await services.unregister(database, url)
        await database.close()


async def _beat(database: RunDatabase, url: str) -> None:
    """Say that the service lives for as long as it does: an outage of the database is sat out."""
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        try:
            await services.heartbeat(database, url)
        except OUTAGE as error:
            log.warning("the heartbeat did not reach MongoDB, the next one may: %s", error)


def _parse(argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser("agentrl serve", description="Answer token prompts over SGLang's API.")
    flag = parser.add_argument
    flag("--model", type=Path, required=True, help="model folder")
    flag("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    flag("--port", type=int, default=30000, help="port to listen on (0: a free one)")
    flag("--device", default="cpu", help="cpu or cuda")
    flag("--dtype", default="float32", choices=get_args(DType), help="of weights and computation")
    flag("--context_length", type=int, help="longest prompt and output (default: the model's)")
    flag("--max_running_requests", type=int, default=128, help="requests that run at once")
    flag(
        "--weight_version", type=int, default=-1, help="policy version of these weights (-1: none)"
    )
    flag("--seed", type=int, default=0, help="seed of the sampling")
    flag("--db_connection_string", help="MongoDB of a run to announce the service to")
    flag("--run_name", default="run", help="the run's name")
    flag("--public_url", help="URL under which other machines reach it (default: host and port)")
    return parser.parse_args(argv)
