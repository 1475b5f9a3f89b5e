"""The real SGLang server as a child process: its command line, its start, its end.

SGLang is installed in an environment of its own (requirements-sglang.txt) and reached over HTTP
only, so what is known of it here is a command line and a URL. What others are told of the service
is the caller's business (`announcement`), as with the local engine.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from agentrl.inference.client import SGLangClient
from agentrl.inference.engine import Announcement
from agentrl.inference.protocol import InferenceError

log = logging.getLogger(__name__)

_READY_POLL_S = 0.5
_ABORT_S = 10.0


class SGLangError(RuntimeError):
    """The server could not be started, or ended by itself. The message is for the user."""


@dataclass(frozen=True, slots=True)
class SGLangConfig:
    """How one SGLang server is started.

    `launch` is the command that takes SGLang's arguments, and may hold some already. None leaves
    a choice to SGLang. `memory_fraction`, of each GPU, holds weights and cache. With `memory_saver`
    the server can give that memory back while it is not used (`inference.memory`).
    """

    model_path: Path
    host: str
    port: int
    launch: tuple[str, ...] = ("python3", "-m", "sglang.launch_server")
    device: str | None = None
    dtype: str = "auto"
    context_length: int | None = None
    max_running_requests: int = 128
    weight_version: str = "default"
    seed: int = 0
    tp_size: int = 1
    ep_size: int = 1
    memory_fraction: float | None = None
    memory_saver: bool = False

    @property
    def url(self) -> str:
        """Where this machine reaches the server."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"


def sglang_command(config: SGLangConfig) -> list[str]:
    """The command line that starts the server; pure."""
    command = [
        *config.launch,
        "--model-path", str(config.model_path),
        "--host", config.host,
        "--port", str(config.port),
        "--dtype", config.dtype,
        "--max-running-requests", str(config.max_running_requests),
        "--weight-version", config.weight_version,
        "--random-seed", str(config.seed),
        "--tp-size", str(config.tp_size),
        "--ep-size", str(config.ep_size),
    ]  # fmt: skip
    if config.device is not None:
        command += ["--device", config.device]
    if config.context_length is not None:
        command += ["--context-length", str(config.context_length)]
    if config.memory_fraction is not None:
        command += ["--mem-fraction-static", str(config.memory_fraction)]
    if config.memory_saver:
        # With a copy of the weights in the host's memory: what comes back is what was given away,
        # whatever becomes of the update that is to follow.
        command += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    return command


def serve_sglang(
    config: SGLangConfig, guard: Sequence[str], announcement: Announcement | None = None
) -> None:
    """Run an SGLang server until SIGTERM or SIGINT; then running requests answer as aborted.

    `guard` is a command that runs the command given to it, and ends its whole family when its
    standard input closes or it gets SIGTERM: SGLang has children of its own, which must not
    outlive this process on a GPU, however it ends. `announcement` is entered when the server takes
    requests and left before it stops.

    Raises SGLangError when the server ends without having been asked to.
    """
    asyncio.run(_serve(config, guard, announcement))


async def _serve(
    config: SGLangConfig, guard: Sequence[str], announcement: Announcement | None
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    child = await asyncio.create_subprocess_exec(
        *guard,
        *sglang_command(config),
        stdin=asyncio.subprocess.PIPE,  # closed when we end, which the guard notices
        stdout=sys.stderr,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},  # a model is a folder: nothing to ask the hub
        start_new_session=True,  # signals of a terminal or a process group reach us alone
    )
    ended = asyncio.create_task(child.wait())
    stopping = asyncio.create_task(stop.wait())
    try:
        async with SGLangClient(config.url) as client:
            if await _ready(client, ended, stopping):
                log.info("SGLang serves %s at %s", config.model_path, config.url)
                async with announcement(config.url) if announcement else nullcontext():
                    await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done():
                    await _abort_requests(client)
    finally:
        stopping.cancel()
        if not ended.done():
            child.terminate()
        status = await ended
    if not stop.is_set():
        raise SGLangError(
            f"SGLang ended by itself with status {status}: its own messages are above; it was"
            f" started as `{' '.join(sglang_command(config))}`"
        )


async def _ready(
    client: SGLangClient, ended: asyncio.Task[int], stopping: asyncio.Task[bool]
) -> bool:
    """Wait until the server takes requests; False when it ended or is to be stopped before."""
    while not await client.ready():
        done, _ = await asyncio.wait(
            {ended, stopping}, timeout=_READY_POLL_S, return_when=asyncio.FIRST_COMPLETED
        )
        if done:
            return False
    return True


async def _abort_requests(client: SGLangClient) -> None:
    """Have all requests answer with the tokens made so far: the server's end would lose them.

    This pause returns when the last answer is sent; what comes now waits, and goes elsewhere.
    """
    try:
        await client.pause("abort", timeout_s=_ABORT_S)
    except InferenceError as error:
        log.warning("requests that run may end without an answer: %s", error)
