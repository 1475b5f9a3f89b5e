"""The way of a program in a sandbox to the gateway.

A sandbox has a network of its own. A socket that listens in it is made by `program_start.py` there,
and comes through a Unix socket, the door, to the gateway, which then answers who connects to it. No
bytes are relayed, and nothing else of the machine's network can be reached.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from agentrl.gateway.server import Gateway

_HANDED_OVER_WITHIN_S = 10.0


@asynccontextmanager
async def door(gateway: Gateway, path: Path) -> AsyncIterator[None]:
    """Let one sandbox in through the Unix socket `path`, until the context is left."""
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.setblocking(False)
        waiting.bind(str(path))
        path.chmod(0o777)  # the program's user may be another one; the folder is ours alone
        waiting.listen(1)
        letting_in = asyncio.create_task(_let_in(gateway, waiting, path), name="sandbox's door")
        try:
            yield
        finally:
            letting_in.cancel()
            await asyncio.wait({letting_in})
    if not letting_in.cancelled():
        letting_in.result()  # raises its error


async def _let_in(gateway: Gateway, waiting: socket.socket, path: Path) -> None:
    loop = asyncio.get_running_loop()
    comer, _ = await loop.sock_accept(waiting)
    with comer:
        path.unlink()  # nobody else comes in
        comer.settimeout(_HANDED_OVER_WITHIN_S)
        _, listeners, _, _ = await asyncio.to_thread(socket.recv_fds, comer, 16, 1)
        if not listeners:
            return  # it ended before it had one
        async with AsyncExitStack() as stack:
            listener = socket.socket(fileno=listeners[0])
            await stack.enter_async_context(gateway.listening_on(listener))
            comer.setblocking(False)
            await loop.sock_sendall(comer, b"\n")
            await asyncio.Event().wait()  # until the program has ended
