"""`agentrl serve`: an inference service, announced to a run while it lives.

The engine is the local one or SGLang, started as a child; both answer the same API.
"""

import asyncio
import logging
import os
import shlex
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import get_args

from agentrl.configs import ConfigError, model_folder
from agentrl.databases import services
from agentrl.databases.connection import OUTAGE, RunDatabase, connect
from agentrl.databases.mongod import free_port
from agentrl.inference.engine import EngineConfig, serve
from agentrl.inference.engine.config import DType
from agentrl.inference.protocol import version_to_wire
from agentrl.inference.sglang_server import SGLangConfig, SGLangError, serve_sglang
from agentrl.launcher import guard

HEARTBEAT_S = 5.0
SGLANG_GRACE_S = 20.0  # SGLang looks for a SIGTERM every 5 s and takes a moment to end
SGLANG_COMMAND = "python3 -m sglang.launch_server"

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Serve a model folder until SIGTERM."""
    arguments = _parse(argv, os.environ)
    model_folder(str(arguments.model), "--model")
    if not (arguments.model / "config.json").is_file():
        raise ConfigError(
            f"--model {arguments.model}: no Hugging Face model folder (it has no config.json)"
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if arguments.engine == "sglang":
        guarded = (sys.executable, "-I", "-S", guard.__file__, str(SGLANG_GRACE_S))
        config = sglang_config(arguments)
        try:
            serve_sglang(config, guarded, lambda url: _announced(arguments, url))
        except SGLangError as error:
            log.error("%s", error)
            return 1  # not 2, which says that to start it again would not help
    else:
        serve(engine_config(arguments), lambda url: _announced(arguments, url))
    return 0


def engine_config(arguments: Namespace) -> EngineConfig:
    """The local engine that the flags ask for. Raises ConfigError for flags of SGLang."""
    for flag, default in _SGLANG_ONLY.items():
        if getattr(arguments, flag) != default:
            raise ConfigError(f"--{flag}: only --engine sglang has it")
    return EngineConfig(
        model_path=arguments.model,
        host=arguments.host,
        port=arguments.port,
        device=arguments.device or "cpu",
        dtype=arguments.dtype or "float32",
        context_length=arguments.context_length,
        max_running_requests=arguments.max_running_requests,
        weight_version=version_to_wire(arguments.weight_version),
        seed=arguments.seed,
    )


def sglang_config(arguments: Namespace) -> SGLangConfig:
    """The SGLang server that the flags ask for. Raises ConfigError."""
    ratio = arguments.inf_mem_ratio
    if ratio is not None and not 0 < ratio < 1:
        raise ConfigError(f"--inf_mem_ratio {ratio:g}: must lie between 0 and 1")
    for flag in ("inf_tp_size", "inf_ep_size"):
        if getattr(arguments, flag) < 1:
            raise ConfigError(f"--{flag} {getattr(arguments, flag)}: must be at least 1")
    launch = tuple(shlex.split(arguments.sglang_command))
    if not launch or shutil.which(launch[0]) is None:
        raise ConfigError(
            f"--sglang_command {arguments.sglang_command!r} (SGLANG_COMMAND): no such program; it"
            " starts SGLang's server in the environment that requirements-sglang.txt made"
        )
    return SGLangConfig(
        model_path=arguments.model.resolve(),
        host=arguments.host,
        port=arguments.port or free_port(),
        launch=launch,
        device=arguments.device,
        dtype=arguments.dtype or "auto",
        context_length=arguments.context_length,
        max_running_requests=arguments.max_running_requests,
        weight_version=version_to_wire(arguments.weight_version),
        seed=arguments.seed,
        tp_size=arguments.inf_tp_size,
        ep_size=arguments.inf_ep_size,
        memory_fraction=ratio,
        memory_saver=arguments.memory_saver,
    )


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


_SGLANG_ONLY: dict[str, object] = {
    "inf_tp_size": 1, "inf_ep_size": 1, "inf_mem_ratio": None, "memory_saver": False,
}  # fmt: skip


def _parse(argv: Sequence[str], environment: Mapping[str, str]) -> Namespace:
    parser = ArgumentParser("agentrl serve", description="Answer token prompts over SGLang's API.")
    flag = parser.add_argument
    flag("--model", type=Path, required=True, help="model folder")
    flag("--engine", default="local", choices=("local", "sglang"), help="what serves it")
    flag("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    flag("--port", type=int, default=30000, help="port to listen on (0: a free one)")
    flag("--device", help="cpu or cuda (default: cpu with the local engine, else what there is)")
    flag(
        "--dtype", choices=get_args(DType),
        help="of weights and computation (default: float32, with SGLang the model's)",
    )  # fmt: skip
    flag("--context_length", type=int, help="longest prompt and output (default: the model's)")
    flag("--max_running_requests", type=int, default=128, help="requests that run at once")
    flag(
        "--weight_version", type=int, default=-1, help="policy version of these weights (-1: none)"
    )
    flag("--seed", type=int, default=0, help="seed of the sampling")
    flag("--db_connection_string", help="MongoDB of a run to announce the service to")
    flag("--run_name", default="run", help="the run's name")
    flag("--public_url", help="URL under which other machines reach it (default: host and port)")
    sglang = parser.add_argument_group("with --engine sglang").add_argument
    sglang(
        "--sglang_command", default=environment.get("SGLANG_COMMAND") or SGLANG_COMMAND,
        help="command that starts SGLang's server in its own environment, with what else it should"
        f" be told (default: SGLANG_COMMAND, else `{SGLANG_COMMAND}`)",
    )  # fmt: skip
    sglang("--inf_tp_size", type=int, default=1, help="GPUs that share each layer")
    sglang("--inf_ep_size", type=int, default=1, help="GPUs that share the experts")
    sglang(
        "--inf_mem_ratio", type=float,
        help="share of a GPU's memory for weights and cache (default: SGLang's choice)",
    )  # fmt: skip
    sglang(
        "--memory_saver", action="store_true",
        help="be able to give the GPU's memory back while the trainer computes",
    )  # fmt: skip
    return parser.parse_args(argv)
