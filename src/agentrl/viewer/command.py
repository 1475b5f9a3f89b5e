"""`agentrl view`: serves the pages about runs until Ctrl-C, and prints their address."""

import asyncio
import math
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.access import is_loopback, reached_at
from agentrl.configs import ConfigError
from agentrl.configs.parsing import config_of
from agentrl.configs.verbs import view_parser
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.deployment import read_deployment
from agentrl.launcher.pages import SOCKET, TOKEN
from agentrl.launcher.report import print_lines
from agentrl.stop_signals import stop_signals
from agentrl.viewer.places import Places
from agentrl.viewer.server import Viewer

PASSWORD = "AGENTRL_VIEW_PASSWORD"
_SHORTEST = 8  # characters of a password
PRICE = "AGENTRL_GPU_HOUR_PRICE"  # a variable, because a launch starts its pages by itself


def main(argv: Sequence[str]) -> int:
    """Run `agentrl view [RUN]`; returns the exit status.

    Raises `ConfigError` if the run is not there or the port is taken.
    """
    given = view_parser().parse(argv)
    arguments = given.own
    run = config_of(given.values).run
    url = run.db_connection_string or read_deployment(os.environ).db_url
    if run.output_dir is not None and arguments.run is None:
        raise ConfigError("--output_dir: name the run whose folder it is: agentrl view RUN")
    elsewhere = {arguments.run: Path(run.output_dir)} if run.output_dir is not None else None
    password = os.environ.get(PASSWORD)
    if not is_loopback(arguments.host) and password is None:
        raise ConfigError(
            f"--host {arguments.host}: who can reach it could read all runs; set {PASSWORD}, which "
            "visitors are then asked for"
        )
    if password is not None and len(password) < _SHORTEST:
        raise ConfigError(f"{PASSWORD}: it needs {_SHORTEST} characters or more")
    price = _price()
    root = Path(arguments.output_root)
    if SOCKET in os.environ:
        listening = socket.socket(fileno=int(os.environ[SOCKET]))
        places = Places(root, url, elsewhere)
        asyncio.run(_serve_launch(places, listening, os.environ[TOKEN], price))
        return 0
    secret = password or secrets.token_urlsafe(16)

    async def serve() -> None:
        async with Places(root, url, elsewhere) as places:
            if arguments.run is not None:
                async with places.run(arguments.run):
                    pass  # said now, if it is not there
            viewer = Viewer(places, secret, "token" if password is None else "password", price)
            try:
                async with viewer.running(arguments.host, arguments.port) as port:
                    page = f"/run/{arguments.run}" if arguments.run is not None else "/"
                    shown = "" if password is not None else f"?token={secret}"
                    address = f"http://{reached_at(arguments.host)}:{port}{page}{shown}"
                    print_lines(TerminalConsole(), [f"open {address}", "until Ctrl-C"])
                    await _until_signal()
            except OSError as error:
                raise ConfigError(
                    f"--port {arguments.port}: {error.strerror or error} (`agentrl view` may be "
                    "open already; --port 0 takes a free one)"
                ) from None

    asyncio.run(serve())
    return 0


def _price() -> float | None:
    """What an hour of a GPU costs, in whatever money. Raises `ConfigError`."""
    given = os.environ.get(PRICE)
    if not given:
        return None
    try:
        price = float(given)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise ConfigError(f"{PRICE}={given}: it takes a number, what an hour of a GPU costs")
    return price


async def _serve_launch(
    places: Places, listening: socket.socket, secret: str, price: float | None
) -> None:
    """Serve on the socket of a launch until it ends: then its end of standard input is closed."""
    viewer = Viewer(places, secret, gpu_hour_price=price)
    async with places, viewer.running_on(listening):
        await _until_signal(launcher=sys.stdin.fileno())


async def _until_signal(launcher: int | None = None) -> None:
    """Wait for a signal, or for the end of the file that a launcher holds open."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    if launcher is not None:
        loop.add_reader(launcher, asked.set)
    for number in stop_signals():
        loop.add_signal_handler(number, asked.set)
    await asyncio.shield(asked.wait())
    if launcher is not None:
        loop.remove_reader(launcher)
