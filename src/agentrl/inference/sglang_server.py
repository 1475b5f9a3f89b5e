"""The SGLang server as a child process: its command line, start and end.

SGLang is installed in a separate environment (requirements-sglang.txt) and used over HTTP only. The
caller announces the service (`announcement`), as with the local engine.
"""

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from agentrl.access import require_key
from agentrl.inference.client import SGLangClient
from agentrl.inference.engine import KEY_OF_SERVICES, Announcement
from agentrl.inference.protocol import InferenceError
from agentrl.stop_signals import stop_signals

log = logging.getLogger(__name__)

_READY_POLL_S = 0.5
_ABORT_S = 10.0
_LAST_WORDS_S = 5.0
_READ_BYTES = 64 * 1024
_LONGEST_LINE = 2**20


class SGLangError(RuntimeError):
    """The server could not be started or ended by itself. The message is for the user."""


@dataclass(frozen=True, slots=True)
class SGLangConfig:
    """The configuration of an SGLang server. None leaves a choice to SGLang.

    launch: command that takes SGLang's arguments; it may contain some already
    memory_fraction: share of each GPU's memory for weights and cache
    memory_saver: whether the server can release that memory while unused (`inference.memory`)
    fp32_head: whether the head computes in float32, whatever `dtype` is
    enable_metrics: whether /metrics answers Prometheus, to everyone who reaches the port
    api_key: key that clients must show

    Raises `KeyNeeded` without a key if other machines reach `host`.
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
    fp32_head: bool = False
    enable_metrics: bool = False
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require_key(self.host, self.api_key, KEY_OF_SERVICES)

    @property
    def url(self) -> str:
        """URL of the server on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"


def sglang_command(config: SGLangConfig) -> list[str]:
    """Return the command line that starts the server."""
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
        # Without it each chunk repeats the output so far, so that the cost of an answer is its
        # length times the number of chunks.
        "--incremental-streaming-output",
    ]  # fmt: skip
    if config.device is not None:
        command += ["--device", config.device]
    if config.context_length is not None:
        command += ["--context-length", str(config.context_length)]
    if config.memory_fraction is not None:
        command += ["--mem-fraction-static", str(config.memory_fraction)]
    if config.fp32_head:
        command.append("--enable-fp32-lm-head")
    if config.enable_metrics:
        command.append("--enable-metrics")
    if config.memory_saver:
        # A copy of the weights in host memory restores them even if the next update fails.
        command += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    return command


def serve_sglang(
    config: SGLangConfig, guard: Sequence[str], announcement: Announcement | None = None
) -> None:
    """Run an SGLang server until SIGTERM or SIGINT; then running requests answer as aborted.

    `guard` is a command that runs the command given to it, and ends all its descendants when its
    standard input closes or it gets SIGTERM: SGLang's child processes must not outlive this process
    on a GPU. `announcement` is entered when the server takes requests and left before it stops.

    Raises SGLangError if the server ends by itself.
    """
    asyncio.run(_serve(config, guard, announcement))


async def _serve(
    config: SGLangConfig, guard: Sequence[str], announcement: Announcement | None
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    with _key_file(config.api_key) as key_flags:
        output = sys.stderr if config.api_key is None else asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *guard,
            *sglang_command(config),
            *key_flags,
            stdin=asyncio.subprocess.PIPE,  # the guard notices that it closes when we end
            stdout=output,
            stderr=sys.stderr if config.api_key is None else asyncio.subprocess.STDOUT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},  # a model is a folder; no hub is needed
            start_new_session=True,  # signals of a terminal or a process group reach only us
        )
        ended = asyncio.create_task(child.wait())
        relayed = asyncio.create_task(_relay(child.stdout, config.api_key))
        stopping = asyncio.create_task(stop.wait())
        try:
            async with SGLangClient(config.url, config.api_key) as client:
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
            await asyncio.wait({relayed}, timeout=_LAST_WORDS_S)
            relayed.cancel()
    if not stop.is_set():
        raise SGLangError(
            f"SGLang ended by itself with status {status}: its own messages are above; it was"
            f" started as `{' '.join(sglang_command(config))}`"
        )


@contextmanager
def _key_file(key: str | None) -> Iterator[list[str]]:
    """Return SGLang's arguments for a key; empty without one.

    The key is in a file that only its owner can read, because every user of the machine can read a
    command line.
    """
    if key is None:
        yield []
        return
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:  # made with mode 0600
        yaml.safe_dump({"api-key": key}, file)
        file.flush()
        yield ["--config", file.name]


async def _relay(output: asyncio.StreamReader | None, key: str | None) -> None:
    """Copy the server's log to ours, without the key, which SGLang logs with its arguments."""
    if output is None or key is None:
        return
    rest = b""
    while piece := await output.read(_READ_BYTES):
        lines, newline, rest = (rest + piece).rpartition(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, newline, rest = lines + newline + rest, b"", b""
        _write((lines + newline).replace(key.encode(), b"***"))
    _write(rest.replace(key.encode(), b"***"))


def _write(log_lines: bytes) -> None:
    with suppress(BrokenPipeError):  # nobody reads our log any more; the server continues
        sys.stderr.buffer.write(log_lines)
        sys.stderr.buffer.flush()


async def _ready(
    client: SGLangClient, ended: asyncio.Task[int], stopping: asyncio.Task[bool]
) -> bool:
    """Wait until the server takes requests. Returns False if it ended or was stopped before."""
    while not await client.ready():
        done, _ = await asyncio.wait(
            {ended, stopping}, timeout=_READY_POLL_S, return_when=asyncio.FIRST_COMPLETED
        )
        if done:
            return False
    return True


async def _abort_requests(client: SGLangClient) -> None:
    """Make all requests answer with their tokens so far, which the server's end would lose.

    The pause returns when the last answer is sent. Requests that arrive now wait, and the pool
    sends them to another service.
    """
    try:
        await client.pause("abort", timeout_s=_ABORT_S)
    except InferenceError as error:
        log.warning("requests that run may end without an answer: %s", error)
