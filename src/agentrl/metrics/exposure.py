"""The HTTP server with which a process answers Prometheus, in the process's own event loop.

So figures are read between two steps of that loop, never during one, and need no locks. A process
whose loop stands still does not answer, which Prometheus shows as `up == 0`.
"""

import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.aiohttp import make_aiohttp_handler
from prometheus_client.registry import Collector

from agentrl.access import reached_at
from agentrl.configs import Config, ConfigError
from agentrl.metrics.targets import announced

log = logging.getLogger(__name__)

PATH = "/metrics"
_TRIED_PORTS = 100
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def exposed(
    config: Config,
    process: str,
    figures: Iterable[Collector],
    *,
    refresh: Callable[[], Awaitable[None]] | None = None,
    beside: Mapping[str, str] | None = None,
) -> AsyncIterator[str]:
    """Serve a process's figures at `--metrics_port` during the block; yields their URL.

    `process`: its name in the run. `refresh`: awaited before each answer. `beside`: HOST:PORT of
    other servers of metrics by the name of their process, for the file of targets. Raises
    `ConfigError` if no port is free or the file cannot be written.
    """
    host, first = config.run.metrics_host, config.run.metrics_port
    assert first is not None, "nothing is served without --metrics_port"
    app = web.Application()
    app.router.add_get(PATH, metrics_handler([*figures, ProcessCollector(registry=None)], refresh))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await _bind(runner, host, first)
        address = f"{reached_at(host)}:{runner.addresses[0][1]}"
        async with announced(config, {process: address, **(beside or {})}):
            log.info("metrics at http://%s%s", address, PATH)
            yield f"http://{address}{PATH}"
    finally:
        await runner.cleanup()


def metrics_handler(
    figures: Iterable[Collector], refresh: Callable[[], Awaitable[None]] | None = None
) -> _Handler:
    """The handler of `/metrics`."""
    registry = CollectorRegistry()
    for each in figures:
        registry.register(each)
    answer = make_aiohttp_handler(registry)

    async def handler(request: web.Request) -> web.StreamResponse:
        if refresh is not None:
            await refresh()
        return await answer(request)

    return handler


async def _bind(runner: web.AppRunner, host: str, first: int) -> None:
    """Listen at the first free port. Raises `ConfigError`."""
    last = min(first + _TRIED_PORTS, 65536) if first else 1
    for port in range(first, last):
        try:
            await web.TCPSite(runner, host, port).start()
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"--metrics_host {host} --metrics_port {port}: {error.strerror or error}"
                ) from None
    raise ConfigError(
        f"--metrics_port {first}: it and the {last - first - 1} ports after it are taken; give "
        "another one, or 0 for any free one"
    )
