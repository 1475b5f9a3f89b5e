"""`agentrl serve`: an inference service, registered with a run while it serves.

The engine is the local one, or SGLang as a child process. Both have the same API.
"""

import asyncio
import logging
import os
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

from pymongo.errors import PyMongoError

from agentrl.configs import ConfigError, model_folder
from agentrl.configs.flags import FLAGS
from agentrl.configs.secret_variables import flags_in_environment, read_key
from agentrl.configs.verbs import SGLANG_COMMAND, SGLANG_FLAGS, serve_parser
from agentrl.databases import services
from agentrl.databases.connection import RunDatabase, connect, is_outage
from agentrl.databases.device_use import SERVICE, Devices, note_use
from agentrl.databases.owners import process_name
from agentrl.held_port import HeldPort
from agentrl.inference.engine import EngineConfig, serve
from agentrl.inference.protocol import version_to_wire
from agentrl.inference.sglang_server import SGLangConfig, SGLangError, serve_sglang
from agentrl.launcher import service_processes
from agentrl.launcher.deployment import (
    SGLANG_OF_SETUP,
    SGLANG_PYTHON,
    count_gpus,
    usable_cores,
)
from agentrl.launcher.processes import Kind
from agentrl.launcher.supervision import supervise
from agentrl.subreaper import SUBREAPER
from agentrl.tracebacks import log_to_stderr

HEARTBEAT_S = 5.0
SGLANG_GRACE_S = 20.0  # SGLang checks for a SIGTERM every 5 s and then takes a moment to end

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Serve a model folder until SIGTERM; returns the exit status. Raises `ConfigError`."""
    arguments = serve_parser().parse(argv).own
    arguments.model = model_folder(str(arguments.model), "--model")
    log_to_stderr("%(asctime)s %(levelname)s %(message)s")
    run = announced_to(arguments, os.environ)
    engine = arguments.engine or _usual_engine()
    if arguments.services != 1:
        found = service_processes.places(arguments, engine)
        if len(found) > 1 or found[0].devices is not None:
            started = service_processes.parts(argv, arguments, found, engine)
            for part, place in zip(started, found, strict=True):
                log.info("%s: GPUs %s", part.name, place.devices or "none")
            return asyncio.run(supervise(started, Kind.SERVICE))
    if engine == "sglang":
        reaped = (sys.executable, "-I", "-S", SUBREAPER, str(SGLANG_GRACE_S))
        config = sglang_config(arguments)
        try:
            with HeldPort(host=config.host) if config.port == 0 else nullcontext() as held:
                if held is not None:
                    config = replace(config, port=held.number)
                devices = _devices(config.tp_size, config.device, arguments)
                serve_sglang(config, reaped, lambda url: _announced(arguments, run, url, devices))
        except SGLangError as error:
            log.error("%s", error)
            return 1  # status 2 would mean that a restart does not help
    else:
        local = engine_config(arguments)
        devices = _devices(1, local.device, arguments)
        serve(local, lambda url: _announced(arguments, run, url, devices))
    return 0


def _usual_engine() -> str:
    return "sglang" if count_gpus(os.environ) else "local"


@dataclass(frozen=True)
class AnnouncedTo:
    """The run that a service registers with."""

    db_url: str
    run: str


def announced_to(arguments: Namespace, environment: Mapping[str, str]) -> AnnouncedTo | None:
    """The run to register with, by flags and environment; None if there is none.

    `--db_connection_string` suffices alone. `DB_URL` counts only with `--run_name`.
    """
    given, run = arguments.db_connection_string, arguments.run_name
    if given is not None:
        return AnnouncedTo(given, run or "run")
    url = flags_in_environment(environment).get("db_connection_string")
    return AnnouncedTo(url, run) if url and run else None


def engine_config(arguments: Namespace) -> EngineConfig:
    """The config of the local engine. Raises `ConfigError` for flags that only SGLang has."""
    on_gpu = arguments.device not in (None, "cpu")
    for flag, default in _SGLANG_ONLY.items():
        of_both = flag == "inf_mem_ratio" and on_gpu
        if getattr(arguments, flag) not in (None, default) and not of_both:
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
        memory_fraction=arguments.inf_mem_ratio,
        fp32_head=arguments.fp32_head,
        enable_metrics=arguments.enable_metrics,
        api_key=_key(arguments),
    )


def _usual_command() -> str:
    """The command of the SGLang that scripts/setup.sh installs, if it has."""
    return SGLANG_OF_SETUP if SGLANG_PYTHON.exists() else SGLANG_COMMAND


def _key(arguments: Namespace) -> str | None:
    return read_key(arguments.inference_api_key_env, "inference_api_key_env")


def sglang_config(arguments: Namespace) -> SGLangConfig:
    """The config of the SGLang server. Raises `ConfigError`."""
    for flag in SGLANG_FLAGS:
        if (value := getattr(arguments, flag)) is not None:
            FLAGS[flag].check(value)
    command = arguments.sglang_command or os.environ.get("SGLANG_COMMAND") or _usual_command()
    launch = tuple(shlex.split(command))
    if not launch or shutil.which(launch[0]) is None:
        raise ConfigError(
            f"--sglang_command {command!r} (SGLANG_COMMAND): no such program; it"
            " starts SGLang's server in the environment that requirements-sglang.txt made"
        )
    key = _key(arguments)
    if key is not None and "--config" in launch:
        raise ConfigError(
            f"--sglang_command {command!r} (SGLANG_COMMAND): SGLang takes one --config, by which it"
            " is told the key of --inference_api_key_env: give what stands in yours as arguments"
        )
    return SGLangConfig(
        model_path=arguments.model.resolve(),
        host=arguments.host,
        port=arguments.port,
        launch=launch,
        device=arguments.device,
        dtype=arguments.dtype or "auto",
        context_length=arguments.context_length,
        max_running_requests=arguments.max_running_requests,
        weight_version=version_to_wire(arguments.weight_version),
        seed=arguments.seed,
        tp_size=arguments.inf_tp_size or 1,
        ep_size=arguments.inf_ep_size,
        memory_fraction=arguments.inf_mem_ratio,
        memory_saver=arguments.memory_saver,
        fp32_head=arguments.fp32_head,
        enable_metrics=arguments.enable_metrics,
        api_key=key,
    )


def _devices(gpus: int, device: str | None, arguments: Namespace) -> Devices:
    """The devices of a service. `device`: None is a GPU, SGLang's default."""
    if device == "cpu":
        # The threads of torch, which a launch divides among its parts; "4,2" is of nested ones.
        threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        return Devices(SERVICE, 0, int(threads) if threads.isdecimal() else usable_cores())
    return Devices(SERVICE, gpus, 0, in_turns=arguments.memory_saver)


@asynccontextmanager
async def _announced(
    arguments: Namespace, run: AnnouncedTo | None, url: str, devices: Devices
) -> AsyncIterator[None]:
    """Register the service at `url` with the run, if any, for the time of the block."""
    url = arguments.public_url or url
    log.info("serving %s at %s", arguments.model, url)
    if run is None:
        yield
        return
    database = await connect(run.db_url, run.run, arguments.startup_timeout)
    await services.register(
        database,
        url,
        str(arguments.model),
        arguments.max_running_requests,
        arguments.weight_version,
    )
    process = process_name()
    await note_use(database, process, devices)
    heartbeats = asyncio.create_task(_beat(database, url, process, devices))
    try:
        yield
    finally:
        heartbeats.cancel()
        with suppress(asyncio.CancelledError):
            await heartbeats
        await services.unregister(database, url)
        await database.close()


async def _beat(database: RunDatabase, url: str, process: str, devices: Devices) -> None:
    """Send heartbeats until cancelled. An outage of the database does not end them."""
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        try:
            await services.heartbeat(database, url)
            await note_use(database, process, devices)
        except PyMongoError as error:
            if not is_outage(error):
                raise
            log.warning("the heartbeat did not reach MongoDB, the next one may: %s", error)


_SGLANG_ONLY: dict[str, object] = {
    **{flag: FLAGS[flag].default for flag in SGLANG_FLAGS},
    "memory_saver": False,
}
