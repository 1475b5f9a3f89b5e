"""The pages of a run while it is launched: their port is open, and they start when somebody looks.

`agentrl view` takes 90 MB, a second of a processor to start, and an open page some queries. Most
launches are looked at by nobody: tests, jobs of a cluster, nights. So the launcher only listens.
The first connection waits in the socket's queue until the viewer, which is started for it, accepts
it. The viewer ends with the launch; `agentrl view RUN` opens the same pages afterwards.
"""

import asyncio
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from agentrl.configs import Config

logger = logging.getLogger(__name__)

PORT = 8265  # that of `agentrl view`; another one if it is taken
SOCKET, TOKEN = "AGENTRL_VIEW_SOCKET", "AGENTRL_VIEW_TOKEN"  # what the viewer is given
_HOST = "127.0.0.1"
_QUEUE = 64  # connections that wait while the viewer starts
_SHORTEST_S = 10.0  # a viewer that ends sooner is not started for ever
_STARTS = 3
_GRACE_S = 5.0


class Pages:
    """The open port of a run's pages, and the viewer behind it. Used within an event loop."""

    def __init__(self, config: Config, log: Path) -> None:
        """Listen. `log`: where the viewer writes. Raises `OSError` where no port can be had."""
        self._config = config
        self._log = log
        self._token = secrets.token_urlsafe(16)
        self._socket = _listening()
        port, run = self._socket.getsockname()[1], config.run.run_name
        self.address = f"http://{_HOST}:{port}/run/{run}?token={self._token}"  # of the run's page
        self._viewer: subprocess.Popen[bytes] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failed = 0  # viewers in a row that ended soon
        self._await_visitor()

    async def close(self) -> None:
        """End the viewer and close the port."""
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._socket.close()
        if self._viewer is not None:
            await asyncio.to_thread(_end, self._viewer)

    def _await_visitor(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket, self._begin)

    def _begin(self) -> None:
        """Somebody connects: start the viewer, which accepts from now on."""
        asyncio.get_running_loop().remove_reader(self._socket)
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._viewer = self._start(log)
        except OSError as error:  # the run goes on without its pages
            logger.warning("the pages of the run cannot be started: %s", error)
            return
        self._watching = asyncio.create_task(self._watch(self._viewer), name="pages")

    def _start(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        config = self._config
        given = {SOCKET: str(self._socket.fileno()), TOKEN: self._token}
        if config.run.db_connection_string is not None:
            given["DB_URL"] = config.run.db_connection_string
        return subprocess.Popen(
            [sys.executable, "-m", "agentrl.cli", "view", config.run.run_name,
             "--output_dir", str(config.output)],
            stdin=subprocess.PIPE,  # closed by our end, however we end: the viewer's notice
            stdout=log,
            stderr=log,
            env={**os.environ, **given},
            start_new_session=True,
            pass_fds=[self._socket.fileno()],
        )  # fmt: skip

    async def _watch(self, viewer: subprocess.Popen[bytes]) -> None:
        """After the viewer has ended, wait for the next visitor."""
        began = time.monotonic()
        while viewer.poll() is None:
            await asyncio.sleep(1.0)
        self._failed = self._failed + 1 if time.monotonic() - began < _SHORTEST_S else 0
        if self._failed >= _STARTS:
            logger.warning("the pages of the run cannot be shown: see %s", self._log)
            self._socket.close()  # browsers are told at once
            return
        self._await_visitor()


def _listening() -> socket.socket:
    """A socket that listens on the usual port, or on a free one."""
    for port in (PORT, 0):
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((_HOST, port))
            listening.listen(_QUEUE)
        except OSError:
            listening.close()
            if port == 0:
                raise
        else:
            listening.setblocking(False)
            return listening
    raise AssertionError("a port was bound, or the last error was raised")


def _end(viewer: subprocess.Popen[bytes]) -> None:
    viewer.terminate()
    with suppress(subprocess.TimeoutExpired):
        viewer.wait(_GRACE_S)
    viewer.kill()
    viewer.wait()
